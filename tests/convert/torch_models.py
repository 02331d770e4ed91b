"""Small models of the modelling file that travels with exports, beside ours."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers

from convert.hf.modeling_fixbin import FixbinConfig, FixbinForCausalLM
from fixbin_jax import codes
from fixbin_jax.config import ComputeConfig, InputConfig, ModelConfig
from fixbin_jax.model import Structure
from tests import tiny

MODEL = ModelConfig(
    vocab_size=300, width=32, num_layers=2, num_heads=2, context_length=16, init_std=0.3
)
INPUTS = {
    "learned": InputConfig("learned"),
    "binary": InputConfig("binary", zero_ids=(7,)),
    "affine": InputConfig("affine", code_width=11, zero_ids=(7, 290)),
}
CODED = ("binary", "affine")
PAD = 7
IDS = np.random.default_rng(0).integers(0, 300, (3, 16), np.int32)
PROMPT = torch.from_numpy(IDS[:2, :6]).long()


def hf_config(config: ModelConfig, **options: Any) -> FixbinConfig:
    return FixbinConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.hidden_width,
        max_position_embeddings=config.context_length,
        layer_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        hidden_act={"erf": "gelu", "tanh": "gelu_pytorch_tanh"}[config.gelu],
        linear_bias=config.linear_bias,
        norm_bias=config.norm_bias,
        head_bias=config.head_bias,
        initializer_range=config.init_std,
        input_interface=config.input.interface,
        code_width=config.code.code_width if config.code else None,
        lift=config.input.lift,
        zero_ids=config.input.zero_ids,
        pad_token_id=PAD,
        **options,
    )


def state_dict(config: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Our parameters by the modelling file's names, one array a layer."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in tiny.leaves(params).items():
        if name == "input.table":
            arrays["input.embedding.weight"] = np.asarray(value)
        elif name.startswith("layers."):
            for i, layer in enumerate(np.asarray(value)):
                arrays[name.replace("layers.", f"layers.{i}.")] = layer
        else:
            arrays[name] = np.asarray(value)
    code = config.code
    if config.input.interface == "binary":
        ids = np.arange(config.vocab_size)
        table = codes.code_table(code, ids, code.code_width)
        arrays["input.embedding.weight"] = table.astype(np.float32)
    elif code is not None:
        columns = codes.id_bits(config.vocab_size)
        masks = np.array(code.row_masks)[:, None]
        arrays["input.matrix"] = (masks >> np.arange(columns) & 1).astype(np.uint8)
        arrays["input.shift"] = (code.shift >> np.arange(code.code_width) & 1).astype(np.uint8)
    return {name: torch.tensor(array) for name, array in arrays.items()}


def make(interface: str = "binary", **changes: Any) -> tuple[Any, np.ndarray]:
    """The model with weights big enough that errors show, and our logits of IDS."""
    config = dataclasses.replace(MODEL, **({"input": INPUTS[interface]} | changes))
    structure = Structure(config, ComputeConfig(), tiny.placement())
    params = tiny.randomised(structure.init(0))
    expected = jax.jit(lambda p, ids: structure.decoder(p)(ids))(params, IDS)
    model = FixbinForCausalLM(hf_config(config))
    model.load_state_dict(state_dict(config, params))
    return model.eval(), np.asarray(expected)


def logits(model: Any, ids: Any = IDS, **options: Any) -> Any:
    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(ids)).long(), **options).logits


def greedy(model: Any, ids: Any = PROMPT, **options: Any) -> Any:
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)} | (
        options
    )
    return model.generate(ids, **options)


def load(folder: Path, **options: Any) -> Any:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, trust_remote_code=True, **options).eval()
