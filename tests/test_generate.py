import contextlib
import dataclasses
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as hf
from hypothesis import assume, given
from hypothesis import strategies as st

from fixbin_jax import cli, generate
from fixbin_jax.checkpoint import Checkpoints
from fixbin_jax.config import ComputeConfig, Config
from fixbin_jax.data.tokenizers import HuggingFaceTokenizer, Tokenizer, unicode_tokenizer
from fixbin_jax.data.train_tokenizer import train_sentencepiece
from fixbin_jax.errors import UserError
from fixbin_jax.generate import Generator, Sampling, TextStream, encode_prompt, sample
from fixbin_jax.model import Params, Structure
from fixbin_jax.step import State
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
MODEL = dataclasses.replace(tiny.MODEL, context_length=64, init_std=0.5)
# An id greedy decoding does not come to here.
NO_END = MODEL.vocab_size - 1
GREEDY = Sampling(temperature=0)


@functools.cache
def structure(interface: str, **compute: object) -> Structure:
    model = dataclasses.replace(MODEL, input=tiny.INPUTS[interface])
    return Structure(model, ComputeConfig(**compute), tiny.placement())


@functools.cache
def params(interface: str) -> Params:
    return tiny.randomised(structure(interface).init(0))


@functools.cache
def generator(interface: str, end_id: int = NO_END, **compute: object) -> Generator:
    s = structure(interface, **compute)
    return Generator(s, params(interface), MODEL.vocab_size, end_id)


def prompts(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, MODEL.vocab_size, length) for length in lengths]


def rows(
    made: Generator, prompts: Sequence[np.ndarray], sampling: Sampling = GREEDY, count: int = 20
) -> list[list[int]]:
    """All new ids of each row."""
    parts = list(made(prompts, count, sampling))
    return [[int(i) for part in parts for i in part[row]] for row in range(len(prompts))]


@functools.cache
def forward(s: Structure) -> Callable[..., jax.Array]:
    return jax.jit(lambda weights, ids: s.decoder(weights)(ids))


def logits(s: Structure, weights: Params, ids: Sequence[int]) -> np.ndarray:
    """Logits of what follows a sequence, from the full forward pass over it."""
    # Later ids do not reach earlier positions: sequences of any length, one shape.
    filled = np.zeros((1, s.config.context_length), np.int32)
    filled[0, : len(ids)] = ids
    return np.asarray(forward(s)(weights, filled))[0, len(ids) - 1]


def greedy(
    s: Structure, weights: Params, prompt: np.ndarray, count: int, size: int = MODEL.vocab_size
) -> list[int]:
    """The likeliest next id below a size, again and again, each from the full forward pass."""
    ids = prompt.tolist()
    for _ in range(count):
        ids.append(int(logits(s, weights, ids)[:size].argmax()))
    return ids[len(prompt) :]


@contextlib.contextmanager
def compilations(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The names of what was compiled in the context, there when it is left."""
    names: list[str] = []
    caplog.clear()
    with jax.log_compiles():
        yield names
    names += re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text)


# Decoding.


@pytest.mark.parametrize(
    ("interface", "compute"), [("learned", {}), ("binary", {}), ("affine", {"scan_layers": False})]
)
def test_each_id_is_the_likeliest_of_the_full_forward_pass(
    interface: str, compute: dict[str, object]
) -> None:
    # The last prompt and 20 ids fill the context.
    given = prompts(2, 7, 12, 44)
    made = rows(generator(interface, **compute), given)
    s = structure(interface, **compute)
    assert made == [greedy(s, params(interface), prompt, 20) for prompt in given]
    assert len({i for row in made for i in row}) > 10


def test_prompts_in_one_batch_equal_each_alone() -> None:
    # Alone the first three are padded to 16 ids, in the batch to 64.
    given = prompts(2, 7, 12, 44)
    batch = rows(generator("binary"), given)
    assert [rows(generator("binary"), [prompt])[0] for prompt in given[:3]] == batch[:3]
    assert rows(generator("binary"), given[::-1]) == batch[::-1]


def test_bfloat16_batches_have_no_nan_and_choose_as_the_full_forward_pass() -> None:
    given = prompts(2, 7, 12, 20)
    with jax.debug_nans(True):
        made = rows(generator("binary", dtype="bfloat16"), given)
    s = structure("binary", dtype="bfloat16")
    for prompt, row in zip(given, made, strict=True):
        ids = prompt.tolist()
        for i in row:
            found = logits(s, params("binary"), ids)
            # Two computations of one logit in bfloat16 differ.
            assert found[i] > found.max() - 0.15 and found.std() > 1
            ids.append(i)


@pytest.mark.parametrize("count", [1, 3])
def test_a_mesh_makes_the_ids_of_one_device_from_one_compilation(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    place = tiny.placement(data=2, fsdp=2, tensor=2)
    s = Structure(structure("binary").config, ComputeConfig(), place)
    shardings = jax.tree.map(lambda shape: shape.sharding, s.shapes)
    made = Generator(s, jax.device_put(params("binary"), shardings), MODEL.vocab_size, NO_END)
    given = prompts(2, 7, 12, 44)
    with compilations(caplog) as compiled:
        found = rows(made, given[:count])
    assert compiled == ["_start", "_continue"]
    assert found == rows(generator("binary"), given)[:count]


def test_prefill_and_decoding_are_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    made = Generator(structure("binary"), params("binary"), MODEL.vocab_size, NO_END)
    with compilations(caplog) as compiled:
        rows(made, prompts(5, 12), Sampling(0.7, 5, 0.9, seed=1), 40)
    assert compiled == ["_start", "_continue"]
    with compilations(caplog) as compiled:
        rows(made, prompts(16, 3, seed=1), Sampling(0.7, 5, 0.9, seed=2), 40)
    assert compiled == []


# Ends.


def test_a_row_that_ends_is_frozen_and_its_neighbours_are_unchanged() -> None:
    given = prompts(2, 7, 12, 44)
    free = rows(generator("binary"), given)
    others = free[0] + free[2] + free[3]
    end = next(i for i in free[1][3:] if i not in others + free[1][:3])
    stop = free[1].index(end) + 1
    made = generator("binary", end_id=end)
    assert rows(made, given) == [free[0], free[1][:stop], *free[2:]]
    assert rows(made, given[1:2]) == [free[1][:stop]]
    assert len(list(made(given[1:2], 20, GREEDY))) == stop < 20


def test_an_end_id_inside_the_prompt_is_not_an_end() -> None:
    (prompt,) = prompts(8)
    end = int(prompt[-1])
    prompt[[0, 3]] = end
    (free,) = rows(generator("binary"), [prompt])
    assert end not in free
    assert rows(generator("binary", end_id=end), [prompt]) == [free]


def test_a_single_id_is_the_first_of_more() -> None:
    (more,) = rows(generator("binary"), prompts(2))
    assert rows(generator("binary"), prompts(2), count=1) == [more[:1]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=MODEL.vocab_size, top_p=0.99)])
def test_surplus_ids_are_never_chosen(sampling: Sampling) -> None:
    size = 200
    s = Structure(dataclasses.replace(MODEL, head_bias=True), ComputeConfig(), tiny.placement())
    weights = s.init(0)
    surplus = np.arange(MODEL.vocab_size) >= size
    weights["head"]["bias"] = jnp.asarray(np.where(surplus, 1e3, 0), jnp.float32)
    given = prompts(2, 7, 12)
    found = rows(Generator(s, weights, size, NO_END), given, sampling)
    assert all(0 <= i < size for row in found for i in row)
    if sampling == GREEDY:
        assert found == [greedy(s, weights, prompt, 20, size) for prompt in given]


# Sampling.


DRAWS = 20_000


def drawn(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """How often each id is drawn."""
    logits_BxV = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, len(logits)))
    ids = sample(logits_BxV, jax.random.split(jax.random.key(0), DRAWS), sampling)
    assert ids.dtype == jnp.int32
    return np.bincount(ids, minlength=len(logits))


P = np.array([0.5, 0.3, 0.15, 0.05])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), [0, 1, 2, 3]),
        (Sampling(top_p=1), [0, 1, 2, 3]),
        (Sampling(top_p=0.97), [0, 1, 2, 3]),
        (Sampling(top_p=0.9), [0, 1, 2]),
        (Sampling(top_p=0.6), [0, 1]),
        (Sampling(top_p=0.45), [0]),
        (Sampling(top_p=0), [0]),
        (Sampling(top_k=1), [0]),
        (Sampling(top_k=3), [0, 1, 2]),
        (Sampling(top_k=4), [0, 1, 2, 3]),
        (Sampling(top_k=1000), [0, 1, 2, 3]),
        # What top_k leaves of the first is 0.5 / 0.8.
        (Sampling(top_k=2, top_p=0.6), [0]),
        (Sampling(top_k=2, top_p=0.7), [0, 1]),
        # Square roots, hence 0.37, 0.29, 0.20, 0.12.
        (Sampling(temperature=2, top_p=0.6), [0, 1]),
        (Sampling(temperature=2, top_p=0.35), [0]),
        (Sampling(temperature=2), [0, 1, 2, 3]),
        (Sampling(temperature=0.5), [0, 1, 2, 3]),
        (Sampling(temperature=0), [0]),
        (Sampling(temperature=1e-38), [0]),
    ],
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_ids_are_drawn_by_their_share_of_what_is_kept(
    sampling: Sampling, kept: list[int], order: list[int]
) -> None:
    p = P[order]
    counts = drawn(np.log(p) + 7, sampling)
    chosen = np.isin(order, kept)
    np.testing.assert_array_equal(counts > 0, chosen)
    weights = p[chosen] ** (1 / sampling.temperature) if len(kept) > 1 else np.ones(1)
    expected = DRAWS * weights / weights.sum()
    # Chi-square of at most 3 degrees of freedom: above 25 once in 60,000 tests.
    assert ((counts[chosen] - expected) ** 2 / expected).sum() < 25


def test_of_equal_ids_the_first_are_kept() -> None:
    equal = np.zeros(4)
    np.testing.assert_array_equal(drawn(equal, Sampling(top_p=0.5)) > 0, [1, 1, 0, 0])
    np.testing.assert_array_equal(drawn(equal, Sampling(top_k=3)) > 0, [1, 1, 1, 0])
    for sampling in (Sampling(top_k=1), Sampling(top_p=0), Sampling(temperature=0)):
        assert drawn(np.array([1.0, 2.0, 2.0, 0.0]), sampling)[1] == DRAWS


@given(
    st.lists(st.integers(-30, 30), min_size=4, max_size=4),
    st.integers(0, 5),
    st.floats(0, 0.999),
)
def test_top_k_and_top_p_keep_what_their_definition_keeps(
    tenths: list[int], top_k: int, top_p: float
) -> None:
    logits = np.array(tenths) / 10
    ranked = np.argsort(-logits, kind="stable")[: top_k or None]
    p = np.exp(logits[ranked]) / np.exp(logits[ranked]).sum()
    before = np.concatenate([[0], np.cumsum(p)[:-1]])
    assume(np.abs(before - top_p)[1:].min(initial=1) > 1e-5)
    kept = ranked[(before < top_p) | (np.arange(len(ranked)) == 0)]
    counts = drawn(logits, Sampling(top_k=top_k, top_p=top_p))
    assert set(np.nonzero(counts)[0]) <= set(kept)
    share = np.exp(logits[kept]) / np.exp(logits[kept]).sum()
    assert (counts[kept[share > 0.05]] > 0).all()


def test_a_seed_gives_the_same_ids_again_and_another_seed_others() -> None:
    one, again, other = (
        rows(generator("binary"), prompts(2), Sampling(2.0, seed=seed)) for seed in (1, 1, 2)
    )
    assert one == again != other


def test_a_row_s_chance_is_its_own() -> None:
    short, long = prompts(2, 30)
    hot = Sampling(2.0, seed=1)
    first, second, _ = rows(generator("binary"), [short, short, long], hot)
    assert rows(generator("binary"), [short], hot) == [first] != [second]


# Refusals.


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_a_sampling_that_is_none_is_refused(flag: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"^--{flag}: {re.escape(str(value))}, expected"):
        Sampling(**{flag: value})


@pytest.mark.parametrize(
    ("ids", "count", "message"),
    [
        ([], 1, "--prompt: no ids, expected at least one"),
        ([5, 304], 1, "--prompt: ids 5 to 304, the model has 0 to 303"),
        ([-1], 1, "--prompt: ids -1 to -1, the model has 0 to 303"),
        ([5] * 64, 1, "--prompt: 64 ids, expected fewer than the model's context of 64"),
        ([5], 0, "--max_new_tokens: 0, expected 1 or more"),
        (
            [5] * 60,
            5,
            "--max_new_tokens: 5 after a prompt of 60 ids is more than the model's context of 64",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused_at_once(
    ids: list[int], count: int, message: str
) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        generator("binary")([np.array([1, 2]), np.array(ids, int)], count, GREEDY)


# Text.


@functools.cache
def byte_level() -> Tokenizer:
    """A vocabulary of bytes, as GPT-2 has below its merges, and one special."""
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    tokenizer = hf.Tokenizer(hf.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return HuggingFaceTokenizer(tokenizer.to_str().encode(), None, "bytes")


@functools.cache
def pieces() -> Tokenizer:
    """A SentencePiece vocabulary, smaller than the tiny model's."""
    source = Path(generate.__file__).read_text()
    return train_sentencepiece(re.split("[^a-z ]+", source), 300)


TOKENIZERS = {"unicode": functools.cache(unicode_tokenizer), "bytes": byte_level, "pieces": pieces}


def shown(tokenizer: Tokenizer, prompt: np.ndarray, parts: Sequence[np.ndarray]) -> list[str]:
    """What a stream shows after each part, and at the end."""
    stream = TextStream(tokenizer, prompt)
    return [stream.add(part) for part in parts] + [stream.add(np.array([], int), last=True)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_parts_of_text_are_the_text_of_all_ids_however_ids_are_split(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]()
    # Whole characters, among them a genuine U+FFFD; bytes of characters; any id at all.
    texts = st.sampled_from(["a", " ", "é", "日", "🙂", "\ufffd", "\n", "\ue000"])
    whole = texts.map(lambda text: tokenizer.encode(text).tolist())
    cut = st.tuples(texts, st.integers(0, 3)).map(
        lambda cut: tokenizer.encode(cut[0])[cut[1] :][:2].tolist()
    )
    byte = st.sampled_from([0x41, 0x80, 0xC3, 0xA9, 0xF0, 0xFF]).map(lambda b: [byte_id(name, b)])
    anything = st.integers(0, tokenizer.vocab_size - 1).map(lambda i: [i])
    runs = data.draw(st.lists(st.one_of(whole, cut, byte, anything), max_size=12))
    ids = np.array([i for run in runs for i in run], int)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6).map(sorted))
    prompt, *parts = np.split(ids, cuts) if cuts else (ids[:0], ids)
    text = tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]
    assert "".join(shown(tokenizer, prompt, parts)) == text
    one_by_one = np.split(np.concatenate(parts), np.arange(1, len(ids) - len(prompt)))
    assert "".join(shown(tokenizer, prompt, one_by_one)) == text


def byte_id(name: str, byte: int) -> int:
    """The id that stands for one byte."""
    if name == "unicode":
        return 0xD800 + byte
    if name == "pieces":
        return 3 + byte
    # GPT-2's table: printable Latin-1 stands for itself, the others follow from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    character = chr(byte if byte in printable else 256 + others.index(byte))
    return sorted(hf.pre_tokenizers.ByteLevel.alphabet()).index(character)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("unicode", "ab é\ufffdc", ["a", "b", " ", "é", "", "\ufffdc", ""]),
        ("unicode", "a🙂b", ["a", "", "", "", "", "🙂b", ""]),
        ("unicode", "🙂🙂", [*[""] * 8, "🙂🙂"]),
        ("bytes", "aéb", ["a", "", "é", "b", ""]),
        ("bytes", "a🙂", ["a", "", "", "", "🙂", ""]),
        ("bytes", "\ufffd", ["", "", "", "\ufffd"]),
        ("pieces", "🙂🙂", ["", "", "", "🙂", "", "", "", "🙂", ""]),
    ],
)
def test_text_is_shown_as_soon_as_later_ids_cannot_change_it(
    name: str, text: str, expected: list[str]
) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text)
    assert shown(tokenizer, ids[:0], np.split(ids, np.arange(1, len(ids)))) == expected


def test_specials_show_nothing() -> None:
    for tokenizer in (make() for make in TOKENIZERS.values()):
        prompt = encode_prompt(tokenizer, "")
        assert prompt.tolist() == [tokenizer.end_of_text_id]
        end = np.array([tokenizer.end_of_text_id])
        parts = [tokenizer.encode("a"), end, tokenizer.encode("b"), end]
        assert "".join(shown(tokenizer, prompt, parts)) == "ab"


# The command.


def outcome(capsys: pytest.CaptureFixture, *args: str) -> tuple[object, str, str]:
    """Exit status, standard output, standard error of the command."""
    with pytest.raises(SystemExit) as exit_info:
        cli.run(generate.main, generate.define_flags, ["generate.py", *args])
    captured = capsys.readouterr()
    return exit_info.value.code, captured.out, captured.err


def refusal(capsys: pytest.CaptureFixture, *args: str) -> str:
    """The one line that a refused command prints."""
    status, out, err = outcome(capsys, *args)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err.removeprefix("error: ").rstrip("\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of steps 1 and 2, whose parameters differ."""
    workdir = tmp_path_factory.mktemp("runs") / "a run"
    with Checkpoints(workdir, keep=3) as checkpoints:
        for step in (1, 2):
            state = State(jnp.int32(step), structure("binary").init(step), None)
            checkpoints.save(state, None, Config(model=MODEL), pieces())
    return workdir


def expected(step: int, prompt: str, count: int) -> str:
    """A prompt and its greedy continuation, from the full forward pass."""
    ids = encode_prompt(pieces(), prompt)
    assert ids.max() < pieces().vocab_size < MODEL.vocab_size
    made = greedy(
        structure("binary"), structure("binary").init(step), ids, count, pieces().vocab_size
    )
    if pieces().end_of_text_id in made:
        made = made[: list(made).index(pieces().end_of_text_id)]
    return prompt + pieces().decode([*ids, *made])[len(pieces().decode(ids)) :]


def test_the_command_prints_the_prompt_and_its_continuation(
    capsys: pytest.CaptureFixture, run: Path
) -> None:
    args = [f"--checkpoint={run}", "--prompt=def test", "--max_new_tokens=20", "--temperature=0"]
    assert outcome(capsys, *args) == (0, expected(2, "def test", 20) + "\n", "")


def test_the_module_prints_each_of_several_prompts(run: Path) -> None:
    texts = ["def", "a prompt that is longer than the others", ""]
    command = [sys.executable, "-m", "fixbin_jax.generate", "--checkpoint", str(run)]
    command += [f"--prompt={text}" for text in texts] + ["--max_new_tokens=9", "--temperature=0"]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    printed = "".join(expected(2, text, 9) + "\n\n" for text in texts)
    assert (done.stdout.decode(), done.stderr.decode()) == (printed, "")


def test_a_prompt_the_locale_could_not_decode_is_read_as_utf8(
    capsys: pytest.CaptureFixture, run: Path
) -> None:
    escaped = "é def".encode().decode("ascii", "surrogateescape")
    args = [f"--checkpoint={run}", "--max_new_tokens=3", "--temperature=0"]
    assert outcome(capsys, f"--prompt={escaped}", *args) == (0, expected(2, "é def", 3) + "\n", "")
    for wrong in ("\udcff", "\ud800"):
        assert refusal(capsys, f"--prompt={wrong}", *args).startswith("--prompt: ")


def test_text_appears_as_it_is_made(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = unicode_tokenizer()

    def made(*_: object) -> Iterator[list[np.ndarray]]:
        assert capsys.readouterr().out == "Once"
        for character in " upon":
            yield [tokenizer.encode(character)]
            assert capsys.readouterr().out == character

    monkeypatch.setattr(generate, "load_generator", lambda _: (made, tokenizer))
    assert outcome(capsys, "--checkpoint=a", "--prompt=Once") == (0, "\n", "")


ONE_ID = ("--prompt=the", "--max_new_tokens=1", "--temperature=0")


def test_a_run_folder_stands_for_its_newest_step(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv("HOME", str(run.parent))
    newest, older = ((0, expected(step, "the", 1) + "\n", "") for step in (2, 1))
    assert newest != older
    for path in ("a run/", "~/a run", run / "checkpoints" / "2"):
        assert outcome(capsys, f"--checkpoint={path}", *ONE_ID) == newest
    assert outcome(capsys, "--checkpoint=a run/checkpoints/1", *ONE_ID) == older


def test_a_broken_step_is_named_and_the_one_before_it_used(
    capsys: pytest.CaptureFixture, run: Path, tmp_path: Path
) -> None:
    workdir = shutil.copytree(run, tmp_path / "run")
    newest = workdir / "checkpoints" / "2"
    shutil.rmtree(newest / "params")
    status, out, err = outcome(capsys, f"--checkpoint={workdir}", *ONE_ID)
    assert (status, out) == (0, expected(1, "the", 1) + "\n")
    assert err.startswith(f"warning: {newest}: ") and err.count("\n") == 1
    assert refusal(capsys, f"--checkpoint={newest}").startswith(f"{newest}: ")


def test_a_folder_without_a_step_is_refused(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert str(tmp_path / "none") in refusal(capsys, f"--checkpoint={tmp_path / 'none'}")
    assert str(tmp_path) in refusal(capsys, f"--checkpoint={tmp_path}")
    (tmp_path / "checkpoints").mkdir()
    assert str(tmp_path) in refusal(capsys, f"--checkpoint={tmp_path}")
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refusal(capsys, f"--checkpoint={tmp_path / 'file'}")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--max_new_tokens=a", "--max_new_tokens=a: expected an integer"),
        ("--max_new_tokens=0", "--max_new_tokens: 0, expected 1 or more"),
        (
            "--max_new_tokens=64",
            "--max_new_tokens: 64 after a prompt of 1 ids is more than the model's context of 64",
        ),
        ("--temperature=-1", "--temperature: -1.0, expected 0 or more"),
        ("--temperature=nan", "--temperature: nan, expected 0 or more"),
        ("--top_k=-1", "--top_k: -1, expected 0 (all) or more"),
        ("--top_p=2", "--top_p: 2.0, expected 0 to 1"),
        ("--seed=-1", "--seed: -1, expected 0 to 4294967295"),
        ("--prompt=\udcff", "--prompt: "),
        ("--prompts=a", "--prompts: no such flag; did you mean --prompt?"),
        ("a", "'a': unexpected; arguments are written --name=value"),
    ],
)
def test_a_wrong_flag_is_one_line(
    capsys: pytest.CaptureFixture, run: Path, flag: str, message: str
) -> None:
    assert refusal(capsys, f"--checkpoint={run}", flag).startswith(message)


def test_the_checkpoint_is_required(capsys: pytest.CaptureFixture) -> None:
    assert refusal(capsys, "--prompt=a") == "--checkpoint: required, but not given"
