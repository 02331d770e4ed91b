"""The layout of a checkpoint nobody has described: what names and shapes say of it.

`propose` finds which tensor is what, and lists the conventions that no shape can tell. What they
are is settled by `convert.settle`.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from convert.layouts import BIT_ORDERS, ROPES, InputTensors, Layout, Row, setting
from convert.weights import WeightFiles
from fixbin_jax.codes import LIFTS, id_bits
from fixbin_jax.config import GELUS
from fixbin_jax.errors import UserError

# What the field calls these in config.json; the first that is there is taken.
_KEYS = {
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads"),
    "context_length": (
        "max_position_embeddings",
        "block_size",
        "n_positions",
        "n_ctx",
        "context_length",
        "max_seq_len",
        "max_sequence_length",
        "seq_len",
    ),
    "norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "rope_theta": ("rope_theta", "rope_base", "rotary_base"),
}
# Where config.json is silent: the value of the paper's models, and of nearly all others.
_UNSAID = {"norm_eps": 1e-5, "rope_theta": 10_000.0}

_BUFFERS = r"inv_freq|rotary|rope|cos_cached|sin_cached|masked_bias|causal_mask|position_ids"

# Words that tell modules of one shape apart; the first pattern that fits decides.
_HEAD_WORDS = r"head|embed_out|unembed|output"
_QKV_WORDS = {
    "out": r"(^|[._])(o|wo|w_o|out|output|dense|proj|c_proj)(_proj|$|[._])|out_proj",
    "query": r"(^|[._])(q|wq|w_q|query)(_proj|_lin|$|[._])",
    "key": r"(^|[._])(k|wk|w_k|key)(_proj|_lin|$|[._])",
    "value": r"(^|[._])(v|wv|w_v|value)(_proj|_lin|$|[._])",
}
_SECOND_NORM_WORDS = r"2|post|mlp|ffn|ff_|feed"
_DOWN_WORDS = r"down|c_proj|4h_to_h|fc2|fc_out|w2|out|proj"


@dataclass(frozen=True)
class Convention:
    """Something that names and shapes leave open.

    Attributes:
      name: what it is, for people.
      options: each way it may be: its name, and the layout changed to it.
    """

    name: str
    options: Mapping[str, "Change"]


@dataclass(frozen=True)
class Change:
    """Fields of a layout that an option sets, those of its input apart."""

    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    input: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fusion: str | None = None

    def apply(self, layout: Layout) -> Layout:
        """The layout with this option."""
        if self.fusion is not None:
            rows = tuple(
                dataclasses.replace(
                    row,
                    transforms=(*(t for t in row.transforms if t == "transpose"), self.fusion),
                )
                if len(row.parameters) == 3
                else row
                for row in layout.tensors
            )
            layout = dataclasses.replace(layout, tensors=rows)
        source = dataclasses.replace(layout.input, **self.input)
        return dataclasses.replace(layout, input=source, **self.layout)


@dataclass(frozen=True)
class Proposal:
    """A layout as far as names and shapes tell it, and what they do not.

    Attributes:
      layout: with the first option of each open convention.
      open: the conventions that are left.
      facts: what was found, a line each, for people.
    """

    layout: Layout
    open: tuple[Convention, ...]
    facts: tuple[str, ...]

    def candidates(self) -> Iterator[tuple[dict[str, str], Layout]]:
        """Every combination of options: convention -> option, and the layout it makes."""
        for names in itertools.product(*(convention.options for convention in self.open)):
            layout = self.layout
            for convention, name in zip(self.open, names, strict=True):
                layout = convention.options[name].apply(layout)
            yield {c.name: n for c, n in zip(self.open, names, strict=True)}, layout


def propose(files: WeightFiles, config: Mapping[str, Any]) -> Proposal:
    """Works out which tensor holds what.

    Args:
      files: the checkpoint's tensors.
      config: its parsed config.json.

    Raises:
      UserError: the structure is not that of our decoder, or names and shapes do not tell which
        tensor is which; a layout file then says it.
    """
    prefix, num_layers, suffixes = _layers(files)
    ignored = tuple(sorted(n for n in files.names if re.search(_BUFFERS, n.rpartition(".")[2])))
    inside = {
        suffix: files.shape(f"{prefix}0.{suffix}")
        for suffix in suffixes
        if f"{prefix}0.{suffix}" not in ignored
    }
    outside = {
        name: files.shape(name)
        for name in files.names
        if not _is_of_layer(name, prefix) and name not in ignored
    }
    width = _width(inside)
    rows, fused = _layer_rows(prefix, inside, width)
    outer_rows, source, vocab_size = _outer_rows(outside, width)
    layout = Layout(
        (*rows, *outer_rows),
        source,
        settings={key: _setting_source(key, config) for key in _KEYS},
        ignored=tuple(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in ignored})),
    )
    open_conventions = _open(layout, fused, files, vocab_size, width, config)
    facts = (
        f"{num_layers} layers {prefix}N, width {width}, vocabulary {vocab_size}",
        f"input: {source.kind}, {', '.join(source.tensors)}",
    )
    return Proposal(layout, tuple(open_conventions), facts)


def _layers(files: WeightFiles) -> tuple[str, int, list[str]]:
    """What stands before a layer's number, how many layers, and what follows the number."""
    groups: dict[str, dict[int, list[str]]] = {}
    for name in files.names:
        if hit := re.match(r"(.*?\.|)(\d+)\.(.+)", name):
            groups.setdefault(hit[1], {}).setdefault(int(hit[2]), []).append(hit[3])
    if not groups:
        raise UserError("tensors: none is numbered by its layer; a layout file must name them")
    prefix, layers = max(groups.items(), key=lambda item: sum(map(len, item[1].values())))
    if sorted(layers) != list(range(len(layers))):
        raise UserError(f"tensors {prefix}N: found layers {sorted(layers)}, expected 0, 1, 2, ...")
    for layer, suffixes in layers.items():
        if odd := set(suffixes) ^ set(layers[0]):
            raise UserError(
                f"tensors {prefix}{layer}: {', '.join(sorted(odd))} is in this layer or in layer "
                "0, expected in both"
            )
    return prefix, len(layers), sorted(layers[0])


def _is_of_layer(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name[len(prefix) :].partition(".")[0].isdigit()


def _modules(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Tensors by module: {"ln1": {"weight": [D], "bias": [D]}, ...}."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in tensors.items():
        module, _, end = name.rpartition(".")
        modules.setdefault(module, {})[end] = shape
    return modules


def _width(inside: Mapping[str, tuple[int, ...]]) -> int:
    sizes = {shape[0] for name, shape in inside.items() if len(shape) == 1 and "weight" in name}
    if len(sizes) != 1:
        raise UserError(
            f"tensors of layer 0: norm weights of sizes {sorted(sizes)}, expected one, the width"
        )
    return sizes.pop()


def _rows(module: str, parts: Mapping[str, Any], *ours: str, transforms: tuple[str, ...] = ()):  # type: ignore[no-untyped-def]
    for end in parts:
        of_end = transforms if end == "weight" else tuple(t for t in transforms if t != "transpose")
        yield Row(f"{module}.{end}", tuple(f"{name}.{end}" for name in ours), of_end)


def _layer_rows(
    prefix: str, inside: Mapping[str, tuple[int, ...]], width: int
) -> tuple[list[Row], bool]:
    """The rows of a layer's tensors, and whether query, key and value are one tensor."""
    modules = _modules(inside)
    norms = [m for m, parts in modules.items() if len(parts.get("weight", ())) == 1]
    linear = {m: parts for m, parts in modules.items() if len(parts.get("weight", ())) == 2}
    if unknown := sorted(modules.keys() - set(norms) - linear.keys()):
        raise UserError(f"tensors {prefix}0.{unknown[0]}: neither a norm nor a linear layer")
    if len(norms) != 2:
        raise UserError(
            f"tensors of layer 0: {len(norms)} norms ({', '.join(norms)}), expected 2, before the "
            "attention and before the MLP"
        )
    shapes = {m: parts["weight"] for m, parts in linear.items()}
    square = [m for m, shape in shapes.items() if shape == (width, width)]
    fused = [m for m, shape in shapes.items() if sorted(shape) == [width, 3 * width]]
    mlp = [m for m in shapes if m not in square and m not in fused]
    if len(mlp) != 2 or (len(square), len(fused)) not in ((4, 0), (1, 1)):
        found = ", ".join(f"{m} {list(shape)}" for m, shape in shapes.items())
        raise UserError(
            f"tensors of layer 0: linear layers {found}; expected query, key, value and output of "
            "the attention and two of the MLP"
        )
    up, down = _up_and_down(mlp, linear, width)
    transposed = shapes[up][0] == width
    if fused and (shapes[fused[0]][0] == width) != transposed:
        raise UserError(
            f"tensors {prefix}0.{fused[0]}, {prefix}0.{up}: one is [out, in], the other [in, out]"
        )
    transforms = ("transpose",) if transposed else ()

    def rows(module: str, *ours: str, fusion: tuple[str, ...] = ()) -> Iterator[Row]:
        is_norm = ours[0].endswith("norm")
        return _rows(
            f"{prefix}{{layer}}.{module}",
            modules[module],
            *(f"layers.{name}" for name in ours),
            transforms=() if is_norm else (*transforms, *fusion),
        )

    first, second = _first_and_second(norms)
    found_rows = [*rows(first, "attention_norm"), *rows(second, "mlp_norm")]
    if fused:
        qkv = (f"attention.{part}" for part in ("query", "key", "value"))
        found_rows += [
            *rows(fused[0], *qkv, fusion=("blocks",)),
            *rows(square[0], "attention.out"),
        ]
    else:
        for part, module in _attention_parts(square).items():
            found_rows += rows(module, f"attention.{part}")
    found_rows += [*rows(up, "mlp.up"), *rows(down, "mlp.down")]
    return found_rows, bool(fused)


def _up_and_down(
    mlp: list[str], linear: Mapping[str, Mapping[str, tuple[int, ...]]], width: int
) -> tuple[str, str]:
    a, b = mlp
    biases = {m: linear[m]["bias"][0] for m in mlp if "bias" in linear[m]}
    if len(biases) == 2 and sorted(biases.values())[0] == width:
        return (a, b) if biases[b] == width else (b, a)
    down = [m for m in mlp if re.search(_DOWN_WORDS, m.rpartition(".")[2])]
    if len(down) == 1:
        return (a, b) if down == [b] else (b, a)
    # PyTorch's own [out, in] is the rule where nothing is said.
    return (a, b) if linear[a]["weight"][1] == width else (b, a)


def _first_and_second(norms: list[str]) -> tuple[str, str]:
    second = [m for m in norms if re.search(_SECOND_NORM_WORDS, m)]
    if len(second) != 1:
        raise UserError(
            f"tensors {', '.join(norms)}: which norm stands before the attention is not in their "
            "names; a layout file must say it"
        )
    (first,) = set(norms) - set(second)
    return first, second[0]


def _attention_parts(square: list[str]) -> dict[str, str]:
    parts = {}
    rest = list(square)
    for part in ("query", "key", "value", "out"):
        # Only the last words: "self_attn.out_proj" and "attention.output.dense" are both outputs.
        hits = [m for m in rest if re.search(_QKV_WORDS[part], m)]
        if part == "out" and len(rest) == 1:
            hits = rest
        if len(hits) != 1:
            raise UserError(
                f"tensors {', '.join(square)}: which is the {part} is not in their names; a layout "
                "file must say it"
            )
        parts[part] = hits[0]
        rest.remove(hits[0])
    return parts


def _outer_rows(
    outside: Mapping[str, tuple[int, ...]], width: int
) -> tuple[list[Row], InputTensors, int]:
    """Rows of the final norm and the head, the input interface, and the vocabulary's size."""
    modules = _modules(outside)
    norms = [m for m, parts in modules.items() if parts.get("weight") == (width,)]
    if len(norms) != 1:
        raise UserError(f"tensors: {len(norms)} norms after the layers ({norms}), expected 1")
    wide = [
        m
        for m, parts in modules.items()
        if len(parts.get("weight", ())) == 2 and parts["weight"][1] == width
    ]
    heads = [m for m in wide if re.search(_HEAD_WORDS, m)] if len(wide) > 1 else wide
    if len(heads) != 1:
        raise UserError(
            f"tensors {', '.join(wide) or 'outside the layers'}: {len(heads)} may be the head, "
            "expected 1; a layout file must say it"
        )
    (head,) = heads
    vocab_size = modules[head]["weight"][0]
    used = {f"{m}.{end}" for m in (norms[0], head) for end in modules[m]}
    rows = [*_rows(norms[0], modules[norms[0]], "norm"), *_rows(head, modules[head], "head")]
    return rows, _input(outside, used, vocab_size, width), vocab_size


def _input(
    outside: Mapping[str, tuple[int, ...]], used: set[str], vocab_size: int, width: int
) -> InputTensors:
    rest = {name: shape for name, shape in outside.items() if name not in used}
    listed = ", ".join(f"{name} {list(shape)}" for name, shape in rest.items()) or "nothing"
    matrices = [name for name, shape in rest.items() if len(shape) == 2]
    vectors = [name for name, shape in rest.items() if len(shape) == 1]
    if len(matrices) == 1:
        (matrix,) = matrices
        rows, columns = rest[matrix]
        if not vectors and rows == vocab_size:
            return InputTensors("table" if columns == width else "codebook", (matrix,))
        bits = id_bits(vocab_size)
        if len(vectors) == 1 and bits in (rows, columns) and rows != vocab_size:
            transposed = columns != bits
            return InputTensors("affine", (matrix, vectors[0]), transposed=transposed)
    raise UserError(
        f"tensors: beside layers, norm and head there is {listed}; expected an input table "
        f"[{vocab_size}, {width}], a codebook [{vocab_size}, bits] or A and b of an affine code"
    )


def _setting_source(key: str, config: Mapping[str, Any]) -> str | float:
    for name in _KEYS[key]:
        if setting(config, name) is not None:
            return name
    if key in _UNSAID:
        return _UNSAID[key]
    raise UserError(f"config.json: no {key} under any of {', '.join(_KEYS[key])}")


def _open(
    layout: Layout,
    fused: bool,
    files: WeightFiles,
    vocab_size: int,
    width: int,
    config: Mapping[str, Any],
) -> Iterator[Convention]:
    if fused:
        orders = {name: Change(fusion=name) for name in ("blocks", "heads")}
        yield Convention("order of query, key and value", orders)
    source = layout.input
    if source.kind != "table":
        yield Convention("lift", {name: Change(input={"lift": name}) for name in LIFTS})
    if source.kind == "affine":
        yield Convention("bit order", {name: Change(input={"bits": name}) for name in BIT_ORDERS})
        rows, columns = files.shape(source.tensors[0])
        if rows == columns:
            ways = {"A": False, "its transpose": True}
            yield Convention(
                "matrix", {name: Change(input={"transposed": way}) for name, way in ways.items()}
            )
        if setting(config, "pad_token_id") is not None:
            keys = {"as any id": "", "all zero": "pad_token_id"}
            yield Convention(
                "padding's code",
                {name: Change(input={"zero_ids": key}) for name, key in keys.items()},
            )
    yield Convention("GELU", {name: Change(layout={"gelu": name}) for name in GELUS})
    yield Convention("rotary pairs", {name: Change(layout={"rope": name}) for name in ROPES})
