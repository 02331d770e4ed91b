import json
import math

import numpy as np
import pytest
from absl import flags

from convert import compare, to_hf
from fixbin_jax.config import InputConfig
from fixbin_jax.errors import UserError
from tests.convert.runs import make_run, run_tokenizer


def test_differences_agreement_and_perplexity_by_hand():
    ids = np.array([[0, 1, 0]], np.int32)
    # Both ids are as likely at first; then the first is e^2 times as likely, 0.5 apart in theirs.
    ours = np.array([[[0, 0], [2, 0], [0, 1]]], np.float32)
    theirs = np.array([[[0, 0], [2, 0.5], [1, 0]]], np.float32)
    found = compare.compare(lambda _: theirs, lambda _: ours, ids)
    assert found.max_abs_diff_per_position == (0, 0.5, 1)
    assert (found.max_abs_diff, found.mean_abs_diff) == (1, 2.5 / 6)
    assert found.top1_agreement == 2 / 3
    expected = math.exp((math.log(2) + math.log(1 + math.exp(-2))) / 2)
    assert found.perplexity == pytest.approx(expected, rel=1e-12)
    expected = math.exp((math.log(2) + math.log(1 + math.exp(-1.5))) / 2)
    assert found.perplexity_hf == pytest.approx(expected, rel=1e-12)


def test_other_vocabularies_are_refused():
    with pytest.raises(UserError, match=r"\[2, 5\] and \[2, 6\]; the vocabularies differ"):
        compare.compare(
            lambda _: np.zeros((1, 2, 5), np.float32),
            lambda _: np.zeros((1, 2, 6), np.float32),
            np.zeros((1, 2), np.int32),
        )


def command(*args: str) -> None:
    fv = flags.FlagValues()
    compare.define_flags(fv)
    fv(["compare", *args])
    compare.main(fv)


@pytest.mark.parametrize("format", to_hf.FORMATS)
def test_an_export_and_its_checkpoint_agree_on_ids_and_on_text(tmp_path, capsys, format):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    run = make_run(tmp_path / "run", run_tokenizer(), input=InputConfig("affine"))
    out = tmp_path / f"out_{format}"
    to_hf.export(str(run), out, format=format, dtype="float32", max_shard_bytes=10**9)
    text = tmp_path / "text"
    text.write_text("abcde fghab " * 20)
    arguments = [f"--hf={out}", f"--checkpoint={run}", "--sequences=3", "--json"]
    if format == "fixbin":
        with pytest.raises(UserError, match=r"--trust_remote_code lets it run"):
            command(*arguments)
        arguments.append("--trust_remote_code")
    for more in ([], [f"--text={text}"]):
        command(*arguments, *more)
        found = json.loads(capsys.readouterr().out)
        assert 0 < found["max_abs_diff"] < 1e-4
        assert (found["top1_agreement"], found["sequences"], found["tokens"]) == (1, 3, 48)
        assert len(found["max_abs_diff_per_position"]) == 16
        assert found["perplexity"] == pytest.approx(found["perplexity_hf"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hf=nowhere"], "--hf: nowhere: no such folder"),
        (["--length=17"], "--length: 17, expected 2 to the context, 16"),
        (["--text=nowhere"], "--text: nowhere: No such file"),
    ],
)
def test_mistakes_are_told_by_their_flag(tmp_path, arguments, message):
    run = make_run(tmp_path / "run", run_tokenizer())
    with pytest.raises(UserError, match=message):
        command(f"--hf={tmp_path}", f"--checkpoint={run}", *arguments)
