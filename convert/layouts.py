"""What a checkpoint calls its tensors and how it arranges them: one table for both directions.

A layout says which of its tensors hold which of our parameters, and what turns one into the other.
It comes by name (`fixbin`, `gpt_neox`), from a JSON file, or from `convert.discover`.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fixbin_jax.codes import LIFTS
from fixbin_jax.config import GELUS
from fixbin_jax.config_dict import from_mapping
from fixbin_jax.errors import UserError

INPUT_KINDS = ("table", "codebook", "affine")
BIT_ORDERS = ("lsb", "msb")
ROPES = ("half", "interleaved")
TRANSFORMS = ("transpose", "blocks", "heads")
# Keys of ModelConfig that no tensor's shape tells.
SETTINGS = ("num_heads", "context_length", "norm_eps", "rope_theta")

_QKV = ("query", "key", "value")


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"layout.{key}: {value!r} is not one of {', '.join(allowed)}")


@dataclass(frozen=True)
class Row:
    """Which parameters a tensor, or one in each layer, holds.

    Attributes:
      name: the tensor's name, {layer} standing for the layer's number.
      parameters: dotted names of ours; query, key and value where one tensor holds all three.
      transforms: how the tensor differs from our [out, in], outermost first: "transpose" ([in,
        out], as GPT-2 has it), then for three parameters "blocks" ([Q | K | V]) or "heads" (each
        head's query, key and value together, as GPT-NeoX has it).
    """

    name: str
    parameters: tuple[str, ...]
    transforms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for transform in self.transforms:
            _one_of(f"tensors, {self.name}", transform, TRANSFORMS)
        if len(self.parameters) not in (1, 3) or (len(self.parameters) == 3) != bool(self.fusion):
            raise UserError(
                f"layout.tensors, {self.name}: {len(self.parameters)} parameters with transforms "
                f"{list(self.transforms)}, expected 1, or 3 with blocks or heads"
            )

    @property
    def fusion(self) -> str | None:
        """How three parameters lie in one tensor."""
        return next((t for t in self.transforms if t != "transpose"), None)

    @property
    def transposed(self) -> bool:
        """Whether the tensor is [in, out]."""
        return "transpose" in self.transforms


@dataclass(frozen=True)
class InputTensors:
    """Where the input interface lies.

    Attributes:
      kind: "table" ([V, D], trained, or codes already lifted), "codebook" ([V, K], codes) or
        "affine" (A, then b; no array of V rows).
      tensors: their names: one, or for affine two.
      lift: how a codebook's or an affine code fills the width.
      bits: affine: the end of the id whose bit meets the first column of A.
      transposed: affine: whether A is stored as its transpose.
      zero_ids: affine: ids whose code is all zero, a list or one id; a key of config.json.
    """

    kind: str
    tensors: tuple[str, ...]
    lift: str = "tile"
    bits: str = "lsb"
    transposed: bool = False
    zero_ids: str = ""

    def __post_init__(self) -> None:
        _one_of("input.kind", self.kind, INPUT_KINDS)
        _one_of("input.lift", self.lift, LIFTS)
        _one_of("input.bits", self.bits, BIT_ORDERS)
        if len(self.tensors) != 1 + (self.kind == "affine"):
            raise UserError(
                f"layout.input.tensors: found {list(self.tensors)}, expected "
                f"{'A and b' if self.kind == 'affine' else 'one name'}"
            )


@dataclass(frozen=True)
class Layout:
    """A checkpoint's conventions.

    Attributes:
      tensors: all but the input interface's.
      input: the input interface.
      rope: rotary positions turn dimension i with i + d/2 ("half") or 2i with 2i + 1
        ("interleaved"), d being the head width.
      gelu: see ModelConfig.
      settings: each of SETTINGS as a number, or as the key of config.json that has it (dots lead
        into groups).
      ignored: patterns, `*` standing for anything, of tensors that hold nothing trained.
    """

    tensors: tuple[Row, ...]
    input: InputTensors
    rope: str = "half"
    gelu: str = "erf"
    settings: Mapping[str, str | float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _one_of("rope", self.rope, ROPES)
        _one_of("gelu", self.gelu, GELUS)
        if sorted(self.settings) != sorted(SETTINGS):
            raise UserError(
                f"layout.settings: found {sorted(self.settings)}, expected {sorted(SETTINGS)}"
            )

    def ignores(self, name: str) -> bool:
        """Whether the tensor of this name holds nothing trained."""
        patterns = (re.escape(pattern).replace(r"\*", ".*") for pattern in self.ignored)
        return any(re.fullmatch(pattern, name) for pattern in patterns)


def _linear(theirs: str, ours: str) -> tuple[Row, ...]:
    return tuple(Row(f"{theirs}.{end}", (f"{ours}.{end}",)) for end in ("weight", "bias"))


def _fused(theirs: str, fusion: str) -> tuple[Row, ...]:
    return tuple(
        Row(f"{theirs}.{end}", tuple(f"layers.attention.{part}.{end}" for part in _QKV), (fusion,))
        for end in ("weight", "bias")
    )


_FIXBIN = (
    *_linear("layers.{layer}.attention_norm", "layers.attention_norm"),
    *(
        row
        for part in (*_QKV, "out")
        for row in _linear(f"layers.{{layer}}.attention.{part}", f"layers.attention.{part}")
    ),
    *_linear("layers.{layer}.mlp_norm", "layers.mlp_norm"),
    *_linear("layers.{layer}.mlp.up", "layers.mlp.up"),
    *_linear("layers.{layer}.mlp.down", "layers.mlp.down"),
    *_linear("norm", "norm"),
    *_linear("head", "head"),
)

_GPT_NEOX = (
    *_linear("gpt_neox.layers.{layer}.input_layernorm", "layers.attention_norm"),
    *_fused("gpt_neox.layers.{layer}.attention.query_key_value", "heads"),
    *_linear("gpt_neox.layers.{layer}.attention.dense", "layers.attention.out"),
    *_linear("gpt_neox.layers.{layer}.post_attention_layernorm", "layers.mlp_norm"),
    *_linear("gpt_neox.layers.{layer}.mlp.dense_h_to_4h", "layers.mlp.up"),
    *_linear("gpt_neox.layers.{layer}.mlp.dense_4h_to_h", "layers.mlp.down"),
    *_linear("gpt_neox.final_layer_norm", "norm"),
    *_linear("embed_out", "head"),
)

# transformers' names of the two formulas.
HIDDEN_ACTS = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_fast": "tanh",
}


def fixbin(interface: str, gelu: str) -> Layout:
    """The layout of `convert.to_hf --format=fixbin`."""
    if interface == "affine":
        names = ("input.matrix", "input.shift")
        source = InputTensors("affine", names, zero_ids="zero_ids")
    else:
        kind = "table" if interface == "learned" else "codebook"
        source = InputTensors(kind, ("input.embedding.weight",))
    return Layout(_FIXBIN, source, gelu=gelu, settings=_transformers_settings("layer_norm_eps"))


def gpt_neox(gelu: str) -> Layout:
    """The layout of transformers' GPTNeoXForCausalLM."""
    return Layout(
        _GPT_NEOX,
        InputTensors("table", ("gpt_neox.embed_in.weight",)),
        gelu=gelu,
        settings=_transformers_settings("layer_norm_eps"),
        ignored=(
            "*.rotary_emb.inv_freq",
            "gpt_neox.layers.*.attention.bias",
            "gpt_neox.layers.*.attention.masked_bias",
        ),
    )


def _transformers_settings(norm_eps: str) -> dict[str, str | float]:
    return {
        "num_heads": "num_attention_heads",
        "context_length": "max_position_embeddings",
        "norm_eps": norm_eps,
        "rope_theta": "rope_theta",
    }


def named_layout(name: str, config: Mapping[str, Any]) -> Layout:
    """The layout of this name, `fixbin` or `gpt_neox`, for a parsed config.json.

    Raises:
      UserError: config.json asks for what our decoder does not compute.
    """
    act = config.get("hidden_act", "gelu")
    if act not in HIDDEN_ACTS:
        raise UserError(
            f"config.json, hidden_act: {act!r}, expected one of {', '.join(HIDDEN_ACTS)}"
        )
    gelu = HIDDEN_ACTS[act]
    if config.get("tie_word_embeddings"):
        raise UserError(
            "config.json, tie_word_embeddings: true, expected false: our head is its own"
        )
    if name == "fixbin":
        interface = config.get("input_interface", "learned")
        layout = fixbin(interface, gelu)
        lift = config.get("lift", "tile")
        return dataclasses.replace(layout, input=dataclasses.replace(layout.input, lift=lift))
    if config.get("use_parallel_residual", True):
        raise UserError(
            "config.json, use_parallel_residual: true, expected false: our MLP reads what the "
            "attention wrote"
        )
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    if share != 1:
        raise UserError(
            f"config.json, rotary_pct: {share}, expected 1: our rotary positions turn whole heads"
        )
    return gpt_neox(gelu)


def setting(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key of a parsed config.json; None where there is none.

    `rope_theta` is found under every name that transformers gives it.
    """
    keys: tuple[str, ...] = (key,)
    if key == "rope_theta":
        keys = ("rope_parameters.rope_theta", "rope_theta", "rotary_emb_base")
    for dotted in keys:
        value: Any = config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def read_layout(path: Path) -> Layout:
    """The layout of a JSON file that `write_layout` or a person wrote.

    Raises:
      UserError: no such file, not JSON, or a key that is none, naming it.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--layout: {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--layout: {path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"--layout: {path}: found {type(found).__name__}, expected an object")
    try:
        return _parsed(found)
    except (UserError, TypeError) as error:
        raise UserError(f"--layout: {path}: {error}") from error


def _parsed(found: dict[str, Any]) -> Layout:
    known = {f.name for f in dataclasses.fields(Layout)}
    if unknown := sorted(found.keys() - known):
        raise UserError(f"layout.{unknown[0]}: no such key, expected {', '.join(sorted(known))}")
    values = dict(found)
    rows = values.get("tensors")
    if not isinstance(rows, list):
        raise UserError(f"layout.tensors: found {type(rows).__name__}, expected a list")
    values["tensors"] = tuple(
        from_mapping(Row, row, f"layout.tensors[{i}]") for i, row in enumerate(rows)
    )
    values["input"] = from_mapping(InputTensors, values.get("input"), "layout.input")
    values["ignored"] = tuple(values.get("ignored", ()))
    return Layout(**values)


def write_layout(layout: Layout, path: Path) -> None:
    """Writes a layout as JSON, by rename."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(layout), indent=2) + "\n")
    os.replace(temporary, path)
