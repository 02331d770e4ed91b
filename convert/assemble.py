"""Our parameters from a checkpoint's tensors, and back, by a layout."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from convert.arrange import halves_of_pairs, is_rotated, joined_shape, split
from convert.layouts import Layout, Row, setting
from convert.weights import WeightFiles
from fixbin_jax import gf2
from fixbin_jax.codes import NoCode, recover
from fixbin_jax.config import ComputeConfig, InputConfig, ModelConfig
from fixbin_jax.errors import UserError
from fixbin_jax.model import Params, Structure
from fixbin_jax.sharding import single_device

_LAYER = "{layer}"


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor's row in the layout and the layer it belongs to (None outside the layers)."""

    row: Row
    layer: int | None


def read_model(
    files: WeightFiles, layout: Layout, config: Mapping[str, Any]
) -> tuple[ModelConfig, Params]:
    """A checkpoint's model: its config and its parameters, float32 numpy arrays.

    Tensors are read one at a time, straight into their parameter where they are arranged alike.

    Args:
      files: the tensors.
      layout: their names and conventions.
      config: the parsed config.json.

    Raises:
      UserError: a setting that config.json lacks, or tensors missing, extra or misshapen, all of
        them listed.
    """
    model = read_config(files, layout, config)
    shapes = parameter_shapes(model)
    _check(files, layout, shapes, model)
    places = match(files.names, layout)
    flat = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    for name, place in places.items():
        _fill(files, name, place, flat, layout, model)
    if "input.table" in flat:
        files.read(layout.input.tensors[0], flat["input.table"])
    return model, _nested(flat)


def match(names: tuple[str, ...], layout: Layout) -> dict[str, Place]:
    """Each tensor that a row of the layout names, with that row and its layer."""
    rows = [(_pattern(row.name), row) for row in layout.tensors]
    found = {}
    for name in names:
        for pattern, row in rows:
            if hit := pattern.fullmatch(name):
                found[name] = Place(row, int(hit[1]) if hit.groups() else None)
                break
    return found


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(re.escape(_LAYER), r"(0|[1-9]\d*)"))


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each of our parameters, by its dotted name."""
    shapes = _flat(Structure(model, ComputeConfig(), single_device()).shapes)
    return {name: shape.shape for name, shape in shapes.items()}


def read_config(files: WeightFiles, layout: Layout, config: Mapping[str, Any]) -> ModelConfig:
    """The model that a checkpoint's shapes, its input interface and its config.json make.

    Raises:
      UserError: see `read_model`; other tensors than those of the sizes are not looked at.
    """
    places = match(files.names, layout)

    def shape_of(parameter: str) -> tuple[int, ...]:
        for name, place in places.items():
            if place.row.parameters == (parameter,):
                shape = files.shape(name)
                return shape[::-1] if place.row.transposed else shape
        rows = [row.name for row in layout.tensors if row.parameters == (parameter,)]
        raise UserError(f"tensor {' or '.join(rows) or parameter}: not there, needed for the sizes")

    def has_bias(*parts: str) -> bool:
        ends = tuple(f"{part}.bias" for part in parts)
        return any(p.row.parameters[0].endswith(ends) for p in places.values())

    vocab_size, width = _matrix(shape_of("head.weight"), "head.weight")
    hidden, _ = _matrix(shape_of("layers.mlp.up.weight"), "layers.mlp.up.weight")
    settings: dict[str, Any] = {}
    for key, source in layout.settings.items():
        value = setting(config, source) if isinstance(source, str) else source
        if value is None:
            raise UserError(f"config.json: no {source}, which the layout takes for {key}")
        settings[key] = float(value) if key in ("norm_eps", "rope_theta") else int(value)
    return ModelConfig(
        vocab_size=vocab_size,
        width=width,
        num_layers=1 + max((p.layer for p in places.values() if p.layer is not None), default=0),
        mlp_width=None if hidden == 4 * width else hidden,
        input=read_input(files, layout, config, vocab_size, width),
        gelu=layout.gelu,
        linear_bias=has_bias("query", "out", "up", "down"),
        norm_bias=has_bias("norm"),
        head_bias=has_bias("head"),
        **settings,
    )


def _matrix(shape: tuple[int, ...], parameter: str) -> tuple[int, int]:
    if len(shape) != 2:
        raise UserError(f"{parameter}: found shape {list(shape)}, expected a matrix")
    return shape[0], shape[1]


def read_input(
    files: WeightFiles, layout: Layout, config: Mapping[str, Any], vocab_size: int, width: int
) -> InputConfig:
    """The input interface that the weights are, whatever the checkpoint calls it.

    Raises:
      UserError: a codebook that is no code, naming the first row at fault; a matrix that is not
        of bits or not of full rank; a shape that does not fit.
    """
    source = layout.input
    if missing := [name for name in source.tensors if name not in files.names]:
        raise UserError(f"tensors {', '.join(missing)}: not there, expected as the input interface")
    if source.kind == "affine":
        return _affine_input(files, layout, config, vocab_size)
    (name,) = source.tensors
    table = files.read(name)
    if source.kind == "table" and not ((table[0] == 0) | (table[0] == 1)).all():
        return InputConfig(interface="learned")
    found = recover(table)
    if isinstance(found, NoCode):
        if source.kind == "table":
            return InputConfig(interface="learned")
        raise UserError(f"tensor {name}: no code of the ids: {found.reason}")
    lift = found.lift if table.shape[1] == width else source.lift
    if found.bit_order == "lsb" and found.code_width == (vocab_size - 1).bit_length():
        return InputConfig(interface="binary", lift=lift, zero_ids=found.zero_ids)
    return InputConfig(
        interface="affine",
        lift=lift,
        row_masks=found.row_masks,
        shift=found.shift,
        zero_ids=found.zero_ids,
    )


def _affine_input(
    files: WeightFiles, layout: Layout, config: Mapping[str, Any], vocab_size: int
) -> InputConfig:
    source = layout.input
    matrix_name, shift_name = source.tensors
    matrix, shift = (_bits(files, name) for name in source.tensors)
    if matrix.ndim != 2 or shift.ndim != 1:
        raise UserError(
            f"tensors {matrix_name}, {shift_name}: found shapes {list(matrix.shape)} and "
            f"{list(shift.shape)}, expected a matrix and a vector"
        )
    if source.transposed:
        matrix = matrix.T
    if source.bits == "msb":
        matrix = matrix[:, ::-1]
    if len(matrix) != len(shift):
        raise UserError(
            f"tensor {shift_name}: found {len(shift)} bits, expected {len(matrix)} like the rows "
            f"of {matrix_name}"
        )
    zero_ids = setting(config, source.zero_ids) if source.zero_ids else None
    if isinstance(zero_ids, int):
        zero_ids = [zero_ids]
    made = InputConfig(
        interface="affine",
        lift=source.lift,
        row_masks=gf2.from_array(matrix),
        shift=gf2.from_array(shift[None])[0],
        zero_ids=tuple(zero_ids or ()),
    )
    try:
        made.code(vocab_size)
    except UserError as error:
        raise UserError(f"tensors {matrix_name}, {shift_name}: {error}") from error
    return made


def _bits(files: WeightFiles, name: str) -> np.ndarray:
    values = files.raw(name) if files.dtype(name) == "uint8" else files.read(name)
    if not ((values == 0) | (values == 1)).all():
        raise UserError(f"tensor {name}: found values that are neither 0 nor 1")
    return values.astype(np.uint8)


def _check(
    files: WeightFiles,
    layout: Layout,
    shapes: Mapping[str, tuple[int, ...]],
    model: ModelConfig,
) -> None:
    """Lists every tensor that is missing, extra or misshapen."""
    expected = dict(expected_tensors(layout, shapes, model))
    missing = sorted(expected.keys() - set(files.names))
    known = expected.keys() | set(layout.input.tensors)
    extra = [name for name in files.names if name not in known and not layout.ignores(name)]
    misshapen = [
        f"{name} (found {list(files.shape(name))}, expected {list(expected[name])})"
        for name in sorted(expected.keys() & set(files.names))
        if files.shape(name) != expected[name]
    ]
    faults = {"missing": missing, "extra": extra, "misshapen": misshapen}
    if any(faults.values()):
        listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in faults.items() if names)
        raise UserError(f"tensors {listed}")


def expected_tensors(
    layout: Layout, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor that a model of these parameter shapes has in a layout.

    The input interface's tensors are not among them.

    Raises:
      UserError: parameters that no row of the layout holds.
    """
    placed = {"input.table"}
    for row in layout.tensors:
        if not all(parameter in shapes for parameter in row.parameters):
            continue
        placed.update(row.parameters)
        shape = shapes[row.parameters[0]]
        if _LAYER not in row.name:
            yield row.name, joined_shape(row, shape)
            continue
        for layer in range(model.num_layers):
            yield row.name.replace(_LAYER, str(layer)), joined_shape(row, shape[1:])
    if unplaced := sorted(shapes.keys() - placed):
        raise UserError(f"layout: no tensor for {', '.join(unplaced)}")


def with_zero_biases(
    shapes: Mapping[str, tuple[int, ...]], layout: Layout, model: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Parameter shapes with every bias but the head's that a layout has and the model lacks."""
    every = dataclasses.replace(model, linear_bias=True, norm_bias=True)
    placed = {name for row in layout.tensors for name in row.parameters}
    return {n: s for n, s in parameter_shapes(every).items() if n in placed or n in shapes}


def without_zero_biases(layout: Layout, files: WeightFiles, config: Mapping[str, Any]) -> Layout:
    """The layout without the biases that config.json says the model lacks, where all are zero.

    `with_zero_biases` is how they came there. Where one is not zero, the model has been trained
    since and has them.
    """
    places = match(files.names, layout)
    dropped: set[Row] = set()
    for key, is_norm in (("linear_bias", False), ("norm_bias", True)):
        rows = {
            row
            for row in layout.tensors
            if row.parameters[0].endswith(".bias")
            and row.parameters[0] != "head.bias"
            and row.parameters[0].endswith("norm.bias") == is_norm
        }
        names = [name for name, place in places.items() if place.row in rows]
        if config.get(key) is False and not any(files.read(name).any() for name in names):
            dropped |= rows
    return dataclasses.replace(
        layout,
        tensors=tuple(row for row in layout.tensors if row not in dropped),
        ignored=(*layout.ignored, *sorted(row.name.replace(_LAYER, "*") for row in dropped)),
    )


def layers_of(
    row: Row, arrays: list[np.ndarray], num_layers: int
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each tensor's name and its parts of our parameters, which hold all layers."""
    if _LAYER not in row.name:
        yield row.name, arrays
        return
    for layer in range(num_layers):
        yield row.name.replace(_LAYER, str(layer)), [array[layer] for array in arrays]


def _fill(
    files: WeightFiles,
    name: str,
    place: Place,
    flat: Mapping[str, np.ndarray],
    layout: Layout,
    model: ModelConfig,
) -> None:
    row = place.row
    targets = [flat[p] if place.layer is None else flat[p][place.layer] for p in row.parameters]
    turned = layout.rope == "interleaved" and any(map(is_rotated, row.parameters))
    if not row.transforms and not turned:
        files.read(name, targets[0])
        return
    parts = split(row, files.read(name), model.num_heads)
    for parameter, part, target in zip(row.parameters, parts, targets, strict=True):
        if layout.rope == "interleaved" and is_rotated(parameter):
            part = halves_of_pairs(part, model.num_heads)
        target[...] = part


def _flat(params: Params, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in params.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def _nested(flat: Mapping[str, Any]) -> Params:
    params: Params = {}
    for name, value in flat.items():
        *groups, leaf = name.split(".")
        holder = params
        for group in groups:
            holder = holder.setdefault(group, {})
        holder[leaf] = value
    return params
