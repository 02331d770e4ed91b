from pathlib import Path

import numpy as np
import pytest

from convert import from_hf, to_hf
from fixbin_jax import checkpoint
from fixbin_jax.config import Config, InputConfig
from fixbin_jax.data.tokenizers import Tokenizer
from fixbin_jax.model import Structure
from tests import tiny
from tests.convert.runs import make_run, run_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = np.random.default_rng(0).integers(0, tiny.MODEL.vocab_size, (3, 12), np.int32)
MODELS = {
    "learned": {"input": InputConfig("learned")},
    "binary": {"input": InputConfig("binary", zero_ids=(7,))},
    "affine": {"input": InputConfig("affine", code_width=11, lift="interleave", zero_ids=(7,))},
    "tanh": {"input": InputConfig("binary", lift="interleave"), "gelu": "tanh"},
    "bare": {"input": InputConfig("learned"), "linear_bias": False, "norm_bias": False},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return run_tokenizer()


def jax_logits(run: Path, ids: np.ndarray) -> np.ndarray:
    (folder,) = checkpoint.step_folders(run)
    config = checkpoint.read_record(folder).config
    structure = Structure(config.model, config.compute, tiny.placement())
    return np.asarray(structure.decoder(checkpoint.read_params(folder, structure.shapes))(ids))


def export(run: Path, output: Path, format: str, **options) -> Path:
    options = {"dtype": "float32", "max_shard_bytes": 10**9} | options
    to_hf.export(str(run), output, format=format, **options)
    return output


def load(folder: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    )
    return model.eval()


def torch_logits(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).logits.numpy()


@pytest.mark.parametrize("format", to_hf.FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_the_export_gives_our_logits_at_every_position(tmp_path, tokenizer, name, format):
    run = make_run(tmp_path / "run", tokenizer, **MODELS[name])
    model = load(export(run, tmp_path / f"out_{name}_{format}", format))
    expected = jax_logits(run, IDS)
    assert np.abs(expected).max() > 1
    assert np.abs(torch_logits(model, IDS) - expected).max() < 1e-4
    native = type(model).__module__.startswith("transformers.models.gpt_neox")
    assert native == (format == "gpt_neox")


@pytest.mark.parametrize("format", to_hf.FORMATS)
@pytest.mark.parametrize("name", ["learned", "binary", "affine", "tanh"])
def test_an_export_comes_back_bit_for_bit(tmp_path, tokenizer, name, format):
    run = make_run(tmp_path / "run", tokenizer, **MODELS[name])
    out = export(run, tmp_path / "out", format, max_shard_bytes=40_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    from_hf.bring_in(out, tmp_path / "back", "auto", trust_remote_code=False)
    (old,), (new,) = (checkpoint.step_folders(folder) for folder in (run, tmp_path / "back"))
    before, after = (checkpoint.read_record(folder).config.model for folder in (old, new))
    assert after.code == before.code
    shapes = Structure(before, Config().compute, tiny.placement()).shapes
    same = zip(
        tiny.leaves(checkpoint.read_params(old, shapes)).items(),
        tiny.leaves(checkpoint.read_params(new, shapes)).items(),
        strict=True,
    )
    for (name_a, a), (name_b, b) in same:
        assert name_a == name_b and np.array_equal(np.asarray(a), np.asarray(b)), name_a
