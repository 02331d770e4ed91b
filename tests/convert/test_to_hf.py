import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from convert import from_hf, to_hf
from fixbin_jax import checkpoint
from fixbin_jax.codes import code_table
from fixbin_jax.config import Config, InputConfig
from fixbin_jax.data.tokenizers import Tokenizer, unicode_tokenizer
from fixbin_jax.errors import UserError
from fixbin_jax.generate import Sampling, load_generator
from fixbin_jax.model import Structure
from tests import tiny
from tests.convert.runs import make_run, run_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# transformers 4.56 renamed the argument.
DTYPE = "dtype" if hasattr(transformers.PretrainedConfig(), "dtype") else "torch_dtype"
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
        folder, trust_remote_code=True, **{DTYPE: torch.float32}
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
@pytest.mark.parametrize("name", MODELS)
def test_an_export_comes_back_bit_for_bit(tmp_path, tokenizer, name, format):
    run = make_run(tmp_path / "run", tokenizer, **MODELS[name])
    out = export(run, tmp_path / "out", format, max_shard_bytes=40_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    from_hf.bring_in(out, tmp_path / "back", "auto", trust_remote_code=False)
    (old,), (new,) = (checkpoint.step_folders(folder) for folder in (run, tmp_path / "back"))
    before, after = (checkpoint.read_record(folder).config.model for folder in (old, new))
    # How weights were once drawn is no property of a checkpoint.
    same_but = {"input": before.input, "init_std": before.init_std}
    assert dataclasses.replace(after, **same_but) == before
    assert after.code == before.code
    shapes = Structure(before, Config().compute, tiny.placement()).shapes
    same = zip(
        tiny.leaves(checkpoint.read_params(old, shapes)).items(),
        tiny.leaves(checkpoint.read_params(new, shapes)).items(),
        strict=True,
    )
    for (name_a, a), (name_b, b) in same:
        assert name_a == name_b and np.array_equal(np.asarray(a), np.asarray(b)), name_a


def test_biases_trained_since_the_export_are_kept(tmp_path, tokenizer):
    from safetensors.numpy import load_file, save_file

    run = make_run(tmp_path / "run", tokenizer, **MODELS["bare"])
    out = export(run, tmp_path / "out", "gpt_neox")
    tensors = load_file(out / "model.safetensors")
    tensors["gpt_neox.final_layer_norm.bias"][3] = 0.5
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    from_hf.bring_in(out, tmp_path / "back", "gpt_neox", trust_remote_code=False)
    (folder,) = checkpoint.step_folders(tmp_path / "back")
    model = checkpoint.read_record(folder).config.model
    assert (model.norm_bias, model.linear_bias) == (True, False)
    assert checkpoint.read_parameter(folder, "norm.bias")[3] == 0.5


def test_what_gpt_neox_cannot_express_is_refused_with_the_reason(tmp_path, tokenizer):
    run = make_run(tmp_path / "run", tokenizer, head_bias=True)
    with pytest.raises(UserError, match=r"--format=gpt_neox: .*head_bias.*--format=fixbin has"):
        export(run, tmp_path / "out", "gpt_neox")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("format", to_hf.FORMATS)
def test_a_bfloat16_export_is_our_weights_rounded_and_its_codes_exact(tmp_path, tokenizer, format):
    run = make_run(tmp_path / "run", tokenizer, **MODELS["binary"])
    out = export(run, tmp_path / "out", format, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=True, **{DTYPE: "auto"}
    )
    assert model.dtype == torch.bfloat16
    code = MODELS["binary"]["input"].code(tiny.MODEL.vocab_size)
    table = model.get_input_embeddings().weight.detach().float().numpy()
    assert np.array_equal(table, code_table(code, np.arange(len(table)), table.shape[1]))
    (folder,) = checkpoint.step_folders(run)
    head = torch.from_numpy(checkpoint.read_parameter(folder, "head.weight"))
    assert torch.equal(model.get_output_embeddings().weight, head.bfloat16())


@pytest.mark.parametrize("format", to_hf.FORMATS)
@pytest.mark.parametrize("name", ["learned", "binary", "affine"])
def test_greedy_generations_are_the_same_64_ids(tmp_path, tokenizer, name, format):
    options = MODELS[name] | {"context_length": 96}
    run = make_run(tmp_path / "run", tokenizer, **options)
    model = load(export(run, tmp_path / f"out_{name}_{format}_long", format))
    generator, _ = load_generator(run)
    prompts = [row[:length] for row, length in zip(IDS, (2, 7, 12), strict=True)]
    made = list(generator(prompts, 64, Sampling(temperature=0)))
    for i, prompt in enumerate(prompts):
        ours = np.concatenate([parts[i] for parts in made])
        ids = torch.from_numpy(prompt[None]).long()
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
        )[0, len(prompt) :].numpy()
        assert np.array_equal(ours, theirs[: len(ours)])
        assert len(ours) == len(theirs)


@pytest.mark.parametrize("interface", ["learned", "binary"])
def test_the_published_audits_hold_on_an_export_at_full_vocabulary(tmp_path, interface):
    """What the two model cards that the idea comes from tell their readers to run."""
    options = {"vocab_size": 65_536, "num_layers": 1, "mlp_width": 32}
    source = InputConfig(interface, zero_ids=(57_344,) if interface == "binary" else ())
    width = 1024 if interface == "learned" else 32
    run = make_run(tmp_path / "run", unicode_tokenizer(), input=source, width=width, **options)
    model = load(export(run, tmp_path / f"out_full_{interface}", "fixbin"))
    embedding = model.get_input_embeddings()
    weight = embedding.weight.detach()
    if interface == "learned":
        assert tuple(weight.shape) == (65536, 1024)
        assert embedding.weight.requires_grad is True
        assert not torch.all((weight == 0) | (weight == 1))
        return
    vocab_size, code_bits = weight.shape
    ids = torch.arange(vocab_size, dtype=torch.long)
    positions = torch.arange(code_bits, dtype=torch.long)
    expected = ((ids[:, None] >> positions[None, :]) & 1).float()
    expected[model.config.pad_token_id].zero_()
    assert tuple(weight.shape) == (65536, 16)
    assert embedding.weight.requires_grad is False
    assert torch.unique(weight).tolist() == [0.0, 1.0]
    assert torch.equal(weight, expected)


def test_an_export_needs_no_network_nor_a_folder_it_may_write_to(tmp_path, tokenizer):
    run = make_run(tmp_path / "run", tokenizer, **MODELS["affine"])
    out = export(run, tmp_path / "first", "fixbin")
    moved = out.rename(tmp_path / "second")
    for path in [*moved.iterdir(), moved]:
        path.chmod(path.stat().st_mode & ~0o222)
    script = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "folder = sys.argv[1]\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)\n"
        "model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)\n"
        "inputs = tokenizer('abcde', return_tensors='pt', return_token_type_ids=False)\n"
        "out = model.generate(**inputs, max_new_tokens=8, do_sample=False)\n"
        "assert not {'fixbin_jax', 'convert'} & set(sys.modules)\n"
        "print(repr(tokenizer.decode(out[0])))\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", script, str(moved)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("'abcde")


@pytest.mark.parametrize("format", to_hf.FORMATS)
def test_a_disk_that_fills_up_leaves_nothing(tmp_path, tokenizer, monkeypatch, format):
    run = make_run(tmp_path / "run", tokenizer, **MODELS["binary"])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(to_hf.tokenizer_files, "write", full)
    with pytest.raises(OSError, match="No space left"):
        export(run, tmp_path / "out", format)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_output_that_exists_is_refused(tmp_path, tokenizer):
    run = make_run(tmp_path / "run", tokenizer)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"--output: .*out exists"):
        export(run, tmp_path / "out", "fixbin")
    assert not any((tmp_path / "out").iterdir())
