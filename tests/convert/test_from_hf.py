import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from convert import from_hf
from fixbin_jax import checkpoint
from fixbin_jax.errors import UserError
from fixbin_jax.model import Structure
from tests import tiny
from tests.convert.foreign import needs_foreign, write_foreign

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = needs_foreign

SMALL = {"vocab": 300, "width": 72, "layers": 2, "heads": 2, "context": 16}
CHOICES = {
    "names": ("bvv", "gpt2", "neox"),
    "input": ("learned", "codebook", "affine"),
    "lift": ("tile", "interleave"),
    "bits": ("lsb", "msb"),
    "rope": ("half", "interleaved"),
    "gelu": ("erf", "tanh"),
    "bias": (1, 0),
}


def combinations() -> list[dict[str, object]]:
    """Every combination that the tool makes distinct; the other options rotate among them."""
    found = []
    for values in itertools.product(*CHOICES.values()):
        options = dict(zip(CHOICES, values, strict=True))
        # A table has neither a lift nor an order of bits.
        if options["input"] == "learned" and (options["lift"], options["bits"]) != ("tile", "lsb"):
            continue
        i = len(found)
        options |= {"pad": int(i % 3 > 0), "norm_bias": int(i % 5 > 0), "head_bias": i % 2}
        options |= {"buffers": int(i % 7 == 0), "prefix": ("", "", "_orig_mod.", "module.")[i % 4]}
        options |= {"shards": 1 + i % 3, "dtype": ("float32", "bfloat16")[i % 6 == 5], "seed": i}
        found.append(options)
    return found


ALL = combinations()
SAMPLE = [ALL[i] for i in np.random.default_rng(20261207).choice(len(ALL), 20, replace=False)]


def name_of(options: dict[str, object]) -> str:
    return "-".join(str(options[key]) for key in CHOICES)


def logits(run: Path, ids: np.ndarray) -> np.ndarray:
    (folder,) = checkpoint.step_folders(run)
    config = checkpoint.read_record(folder).config
    structure = Structure(config.model, config.compute, tiny.placement())
    return np.asarray(structure.decoder(checkpoint.read_params(folder, structure.shapes))(ids))


def check_import(tmp_path: Path, options: dict[str, object]) -> None:
    source = write_foreign(tmp_path / "source", **SMALL, **options)
    from_hf.bring_in(source, tmp_path / "run", "auto", trust_remote_code=True)
    expected = np.load(source / "expected.npz")
    assert np.abs(expected["logits"]).max() > 1
    assert np.abs(logits(tmp_path / "run", expected["ids"]) - expected["logits"]).max() < 1e-4
    # The layout file that was written needs no proof again, and gives the same parameters.
    layout = str(tmp_path / "run" / "layout.json")
    from_hf.bring_in(source, tmp_path / "again", layout, trust_remote_code=False)
    assert np.array_equal(
        logits(tmp_path / "run", expected["ids"]), logits(tmp_path / "again", expected["ids"])
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", SAMPLE, ids=name_of)
def test_auto_brings_a_sample_of_foreign_checkpoints_in(tmp_path, options):
    check_import(tmp_path, options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ALL, ids=name_of)
def test_auto_brings_every_foreign_checkpoint_in(tmp_path, options):
    check_import(tmp_path, options)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_foreign(tmp_path_factory.mktemp("foreign") / "source", **SMALL)


def test_open_conventions_are_not_guessed_without_leave_to_run_code(tmp_path, source):
    with pytest.raises(UserError, match=r"lift, GELU, rotary pairs; with --trust_remote_code"):
        from_hf.bring_in(source, tmp_path / "run", "auto", trust_remote_code=False)
    assert not any(tmp_path.iterdir())


def test_a_model_that_no_combination_gives_is_refused(tmp_path, source):
    folder = tmp_path / "other"
    folder.mkdir()
    for file in source.iterdir():
        text = file.read_bytes()
        if file.name == "modeling_foreign.py":
            text = text.replace(b"1e-5)", b"1e-1)")
        (folder / file.name).write_bytes(text)
    with pytest.raises(UserError, match=r"none of 8 combinations gives the model's own logits"):
        from_hf.bring_in(folder, tmp_path / "run", "auto", trust_remote_code=True)
    assert not (tmp_path / "run").exists()


def test_every_missing_extra_and_misshapen_tensor_is_listed(tmp_path, source):
    from safetensors.numpy import load_file, save_file

    from_hf.bring_in(source, tmp_path / "run", "auto", trust_remote_code=True)
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors["transformer_layers.1.ln2.bias"]
    tensors["stray"] = np.zeros(3, np.float32)
    tensors["transformer_layers.0.ln1.weight"] = np.zeros(5, np.float32)
    save_file(tensors, folder / "model.safetensors")
    layout = str(tmp_path / "run" / "layout.json")
    with pytest.raises(UserError) as caught:
        from_hf.bring_in(folder, tmp_path / "again", layout, trust_remote_code=False)
    assert str(caught.value) == (
        "tensors missing: transformer_layers.1.ln2.bias; extra: stray; misshapen: "
        "transformer_layers.0.ln1.weight (found [5], expected [72])"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope": "sideways"}, "layout.rope: 'sideways' is not one of half, interleaved"),
        ({"ropes": "half"}, "layout.ropes: no such key"),
        ({"settings": {}}, "layout.settings: found"),
        ({"tensors": 3}, "layout.tensors: found int, expected a list"),
    ],
)
def test_a_wrong_layout_file_is_told_by_its_key(tmp_path, source, change, message):
    from_hf.bring_in(source, tmp_path / "run", "auto", trust_remote_code=True)
    path = tmp_path / "run" / "layout.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as caught:
        from_hf.bring_in(source, tmp_path / "again", str(path), trust_remote_code=False)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_paths_may_be_relative(tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").symlink_to(source)
    from_hf.bring_in(Path("in"), Path("runs/run"), "auto", trust_remote_code=True)
    assert [folder.name for folder in checkpoint.step_folders(tmp_path / "runs" / "run")] == ["0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "runs"]


def test_an_output_that_exists_is_refused(tmp_path, source):
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=r"--output: .* exists"):
        from_hf.bring_in(source, tmp_path / "run", "auto", trust_remote_code=True)
