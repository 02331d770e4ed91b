"""The modelling file of an export: its function, its files, its sizes."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixbin_jax import gf2

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from convert.hf.modeling_fixbin import (  # noqa: E402
    FixbinConfig,
    FixbinForCausalLM,
    InputInterface,
)
from tests.convert.torch_models import CODED, IDS, INPUTS, load, logits, make  # noqa: E402


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gelu": "tanh"},
        {"head_bias": True},
        {"linear_bias": False, "norm_bias": False},
        {"rope_theta": 500.0},
    ],
    ids=str,
)
def test_logits_are_ours_at_every_position(interface: str, changes: dict[str, Any]) -> None:
    model, expected = make(interface, **changes)
    assert np.abs(expected).max() > 3
    assert np.abs(logits(model).numpy() - expected).max() < 1e-4


@pytest.mark.parametrize("name", CODED)
def test_logits_are_ours_with_interleaved_codes(name: str) -> None:
    tiled, _ = make(name)
    model, expected = make(name, input=dataclasses.replace(INPUTS[name], lift="interleave"))
    assert np.abs(logits(model).numpy() - expected).max() < 1e-4
    assert np.abs(logits(tiled).numpy() - expected).max() > 1


@given(seed=st.integers(0, 2**16), extra=st.integers(0, 4), data=st.data())
def test_affine_codes_are_the_matrix_product_over_gf2(
    seed: int, extra: int, data: st.DataObject
) -> None:
    vocab_size = data.draw(st.sampled_from([2, 3, 255, 256, 257, 65_536, 2**20 + 1]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    columns = (vocab_size - 1).bit_length()
    rows = gf2.random_full_rank(np.random.PCG64(seed), columns + extra, columns)
    matrix = (np.array(rows)[:, None] >> np.arange(columns)) & 1
    shift = np.random.default_rng(seed).integers(0, 2, columns + extra)
    zero = vocab_size // 2
    config = FixbinConfig(
        vocab_size, 32, 1, 2, 8, input_interface="affine", code_width=len(rows), zero_ids=[zero]
    )
    module = InputInterface(config)
    module.load_state_dict({"matrix": torch.tensor(matrix), "shift": torch.tensor(shift)})
    drawn = np.random.default_rng(seed).integers(0, vocab_size, 50)
    ids = np.array([0, 1, zero, vocab_size - 1, *drawn])
    expected = (((ids[:, None] >> np.arange(columns)) & 1) @ matrix.T + shift) % 2
    expected[ids == zero] = 0
    found = module.to(dtype)(torch.from_numpy(ids)[None], dtype)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found[0].float().numpy(), expected[:, np.arange(32) % len(rows)])


def test_the_papers_audit_of_the_codebook_holds_at_its_vocabulary(tmp_path: Path) -> None:
    config = FixbinConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=8,
        zero_ids=[57_344], pad_token_id=57_344,
    )  # fmt: skip
    FixbinForCausalLM(config).save_pretrained(tmp_path / "audit_binary")
    model = load(tmp_path / "audit_binary")
    weight = model.get_input_embeddings().weight
    expected = ((torch.arange(65_536)[:, None] >> torch.arange(16)[None]) & 1).float()
    expected[model.config.pad_token_id].zero_()
    assert tuple(weight.shape) == (65_536, 16) and not weight.requires_grad
    assert torch.equal(weight, expected)


def test_the_papers_counts_of_input_parameters() -> None:
    trained = {}
    for name in INPUTS:
        with torch.device("meta"):
            model = FixbinForCausalLM(FixbinConfig(input_interface=name, num_hidden_layers=1))
        trained[name] = sum(p.numel() for p in model.input.parameters() if p.requires_grad)
        if name == "affine":
            assert sum(tensor.numel() for tensor in model.input.buffers()) == 16 * 16 + 16
    assert trained == {"learned": 67_108_864, "binary": 0, "affine": 0}


def test_a_saved_folder_stands_alone_read_only_and_saves_again(
    made: Any, interface: str, tmp_path: Path
) -> None:
    model, expected = made
    first, second = tmp_path / f"first_{interface}", tmp_path / f"second_{interface}"
    model.save_pretrained(first)
    loaded = load(first)
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(second)
    shutil.rmtree(first)
    for path in (*second.iterdir(), second):
        path.chmod(0o555 if path.is_dir() else 0o444)
    again = load(second)
    second.chmod(0o755)
    assert torch.equal(logits(again), logits(model))
    assert np.abs(logits(again).numpy() - expected).max() < 1e-4
    stored = json.loads((second / "config.json").read_text())
    assert stored["auto_map"] == {
        "AutoConfig": "modeling_fixbin.FixbinConfig",
        "AutoModelForCausalLM": "modeling_fixbin.FixbinForCausalLM",
    }
    assert stored["rope_parameters"]["rope_theta"] == 10_000 and not stored["tie_word_embeddings"]
    assert {n for n, p in again.named_parameters() if not p.requires_grad} == (
        {"input.embedding.weight"} if interface == "binary" else set()
    )


@pytest.mark.parametrize("written", ["rope_theta", "rope_parameters"])
def test_rope_theta_is_read_as_either_major_version_writes_it(tmp_path: Path, written: str) -> None:
    model, expected = make("binary", rope_theta=500.0)
    folder = tmp_path / f"rope_{written}"
    model.save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    for name in {"rope_theta", "rope_parameters"} - {written}:
        stored.pop(name, None)
    assert written in stored
    (folder / "config.json").write_text(json.dumps(stored))
    assert np.abs(logits(load(folder)).numpy() - expected).max() < 1e-4


def test_bfloat16_keeps_codes_exact(made: Any, interface: str, tmp_path: Path) -> None:
    folder = tmp_path / f"bfloat16_{interface}"
    made[0].save_pretrained(folder)
    model = load(folder, torch_dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    if interface != "learned":
        ids = torch.arange(300)[None]
        exact = made[0].input(ids, torch.float32)
        assert torch.equal(model.input(ids, torch.bfloat16).float(), exact)


def test_what_a_checkpoint_lacks_is_named(made: Any, interface: str, tmp_path: Path) -> None:
    weights = made[0].state_dict()
    gone = {"head.weight", "layers.1.mlp.up.bias"} | {n for n in weights if n.startswith("input.")}
    for name in gone:
        folder = tmp_path / f"lacks_{interface}_{name.replace('.', '_')}"
        kept = {n: tensor for n, tensor in weights.items() if n != name}
        made[0].save_pretrained(folder, state_dict=kept)
        with pytest.raises(ValueError, match=f"the checkpoint lacks {name}"):
            load(folder)


def test_a_learned_table_is_resized_with_its_head() -> None:
    model, _ = make("learned")
    before = logits(model, IDS[:1] % 290)
    model.resize_token_embeddings(310)
    assert model.get_input_embeddings().weight.shape == (310, 32)
    torch.testing.assert_close(logits(model, IDS[:1] % 290)[..., :300], before)
    model.set_input_embeddings(torch.nn.Embedding(310, 32))
    assert logits(model, [[309]]).shape == (1, 1, 310)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("size", [512, 301, 200, 100])
def test_resizing_a_coded_model_keeps_the_function_of_the_ids_it_had(
    name: str, size: int, tmp_path: Path
) -> None:
    model, _ = make(name)
    ids = IDS % min(size, 300)
    before = logits(model, ids)[..., : min(size, 300)]
    model.resize_token_embeddings(size)
    after = logits(model, ids)
    assert after.shape[-1] == size == model.config.vocab_size
    torch.testing.assert_close(after[..., : min(size, 300)], before, atol=1e-4, rtol=0)
    assert all(p.requires_grad == (n != "input.embedding.weight")
               for n, p in model.named_parameters())  # fmt: skip
    model.save_pretrained(tmp_path / f"resized_{name}_{size}")
    assert torch.equal(logits(load(tmp_path / f"resized_{name}_{size}"), ids), after)


@pytest.mark.parametrize("name", CODED)
def test_a_coded_input_grows_no_further_than_its_codes(name: str) -> None:
    model, _ = make(name)
    before = {n: tensor.clone() for n, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"513, but codes tell 512 apart"):
        model.resize_token_embeddings(513)
    model.resize_token_embeddings()
    assert all(torch.equal(before[n], tensor) for n, tensor in model.state_dict().items())
    model.resize_token_embeddings(300, pad_to_multiple_of=64)
    assert model.config.vocab_size == len(model.head.weight) == 320
    with pytest.raises(ValueError, match="the input is a function of the id"):
        model.set_input_embeddings(torch.nn.Embedding(300, 32))


def test_a_new_affine_model_codes_an_id_by_its_own_bits() -> None:
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = torch.arange(300)[None]
    binary, affine = (
        FixbinForCausalLM(FixbinConfig(**sizes, input_interface=name)) for name in CODED
    )
    assert torch.equal(binary.input(ids, torch.float32), affine.input(ids, torch.float32))
    assert affine.get_input_embeddings() is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tie_word_embeddings", True, "tie_word_embeddings"),
        ("hidden_act", "relu", "hidden_act: 'relu'"),
        ("input_interface", "hash", "input_interface: 'hash'"),
        ("lift", "spread", "lift: 'spread'"),
        ("code_width", 8, r"code_width: 8, expected 9 \(for 300 ids\) to 1024"),
        ("code_width", 1025, "code_width: 1025"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FixbinConfig(**({"vocab_size": 300} | {key: value}))
