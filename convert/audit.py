"""Says what a model's input interface is, proved from its weights.

python -m convert.audit --path=DIR [--json]

DIR is a Hugging Face folder or a checkpoint of ours. Exit status 1: the weights are not what the
folder says they are.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from convert.discover import propose
from convert.identify import NAMED, read_settings
from convert.layouts import InputTensors, Layout, named_layout, read_layout, setting
from convert.weights import WeightFiles
from fixbin_jax import checkpoint, cli, gf2
from fixbin_jax.codes import Code, binary_code, code_table, id_bits, mismatches, recover
from fixbin_jax.config import ModelConfig
from fixbin_jax.errors import UserError

# Of the ids at fault, the table names this many.
_SHOWN = 8


@dataclass(frozen=True)
class Audit:
    """What the weights prove. Keys of --json, in this order.

    Attributes:
      interface: "learned", "binary", "affine", or "other": bits that no code of the ids gives.
      claim: the interface that the folder says it has; None where it says nothing.
      claim_holds: whether the weights are that.
      shape: of the stored tensor (A, for an affine code without a table); None where nothing is
        stored at the input.
      trained: number of trained parameters at the input.
      binary_values: whether every stored value is 0 or 1; None where nothing is stored.
      injective: whether no two ids have the same vector.
      mismatches: ids whose row is not the code found; where none fits, not the nearest one.
      row_masks: A, an integer a row, bit j of row i being A[i, j]; None where there is no code.
      shift: b, bit i being b_i.
      zero_ids: ids whose code is all zero though A and b give another.
      lift: how the code fills the width.
      reason: in one line, what decides.
    """

    interface: str
    claim: str | None
    claim_holds: bool
    shape: tuple[int, ...] | None
    trained: int
    binary_values: bool | None
    injective: bool
    mismatches: tuple[int, ...]
    row_masks: tuple[int, ...] | None
    shift: int | None
    zero_ids: tuple[int, ...]
    lift: str | None
    reason: str


def audit(path: Path, layout: str = "auto") -> Audit:
    """Audits a Hugging Face folder, a run folder or a step folder.

    Args:
      path: the folder.
      layout: for a Hugging Face folder: auto, fixbin, gpt_neox, or a layout file.

    Raises:
      UserError: no such folder, or none of the input interface's tensors can be told.
    """
    if not path.is_dir():
        raise UserError(f"--path: {path}: no such folder")
    if not (path / "config.json").is_file() or checkpoint.step_folders(path):
        return _audit_checkpoint(path)
    return _audit_folder(path, layout)


def _audit_checkpoint(path: Path) -> Audit:
    def read(folder: Path) -> Audit:
        model = checkpoint.read_record(folder).config.model
        claim = model.input.interface
        if claim == "learned":
            rows = checkpoint.read_parameter(folder, "input.table")
            return _of_table(rows, InputTensors("table", ("input.table",)), claim, None)
        return _of_code(model, claim)

    found = checkpoint.open_newest(path, read)
    if found is None:
        raise UserError(f"--path: {path} holds neither a config.json with weights nor a step")
    return found[1]


def _of_code(model: ModelConfig, claim: str) -> Audit:
    """A checkpoint of ours whose input is computed: its config is all there is to it."""
    code = model.code
    assert code is not None
    return Audit(
        interface=claim,
        claim=claim,
        claim_holds=True,
        shape=None,
        trained=0,
        binary_values=None,
        injective=_is_injective(code),
        mismatches=(),
        row_masks=code.row_masks,
        shift=code.shift,
        zero_ids=code.zero_ids,
        lift=code.lift,
        reason="nothing is stored at the input; the code is computed from the id",
    )


def _audit_folder(path: Path, layout_name: str) -> Audit:
    files, settings = WeightFiles.open(path), read_settings(path)
    layout = _layout(layout_name, files, settings)
    source = layout.input
    if missing := [name for name in source.tensors if name not in files.names]:
        raise UserError(f"{path}: no tensor {', '.join(missing)}, expected as the input interface")
    claim = settings.get("input_interface")
    if claim is None and source.kind == "codebook":
        claim = "binary"
    if claim is None and source.kind == "affine":
        claim = "affine"
    if source.kind != "affine":
        return _of_table(files.read(source.tensors[0]), source, claim, settings)
    return _of_affine(files, layout, settings, claim)


def _layout(name: str, files: WeightFiles, settings: Mapping[str, Any]) -> Layout:
    if name in NAMED:
        return named_layout(name, settings)
    if name != "auto":
        return read_layout(Path(name).expanduser())
    if settings.get("model_type") in NAMED:
        return named_layout(settings["model_type"], settings)
    return propose(files, settings).layout


def _of_table(
    table: np.ndarray,
    source: InputTensors,
    claim: str | None,
    settings: Mapping[str, Any] | None,
) -> Audit:
    """A stored table [V, D] or [V, K]."""
    (name,) = source.tensors
    if table.ndim != 2:
        raise UserError(f"tensor {name}: found shape {list(table.shape)}, expected two dimensions")
    bits_V = ((table == 0) | (table == 1)).all(axis=1)
    found = recover(table)
    code = found if isinstance(found, Code) else found.nearest
    if isinstance(found, Code):
        interface = _name_of(found)
        wrong: tuple[int, ...] = ()
        reason = f"all {len(table):,} rows are the code of their id"
    else:
        # A trained table has no row of zeros and ones but by chance; a damaged code mostly such.
        interface = "other" if source.kind == "codebook" or bits_V.mean() > 0.5 else "learned"
        if interface == "other" and code is None:
            code = _nearest_binary(table, bits_V)
        wrong = () if code is None else tuple(mismatches(code, table).tolist())
        reason = found.reason
    fits = claim is None or claim == interface
    if fits and settings is not None and interface != "learned":
        fits, reason = _as_told(code, settings, reason)
    return Audit(
        interface=interface,
        claim=claim,
        claim_holds=fits,
        shape=table.shape,
        trained=table.size if interface == "learned" else 0,
        binary_values=bool(bits_V.all()),
        injective=len({row.tobytes() for row in table + 0.0}) == len(table),
        mismatches=wrong,
        row_masks=code.row_masks if code else None,
        shift=code.shift if code else None,
        zero_ids=code.zero_ids if code else (),
        lift=_lift(code, table, source, interface),
        reason=reason,
    )


def _lift(code: Code | None, table: np.ndarray, source: InputTensors, interface: str) -> str | None:
    if code is None or interface == "learned":
        return None
    # A table that is not lifted says nothing about the lift: the layout or the config does.
    return code.lift if table.shape[1] > code.code_width else source.lift


def _nearest_binary(table: np.ndarray, bits_V: np.ndarray) -> Code | None:
    """The plain code, where it gives most rows."""
    vocab_size, width = table.shape
    if width < id_bits(vocab_size):
        return None
    zero_ids = tuple(np.flatnonzero(bits_V & ~table.any(axis=1)).tolist())
    code = binary_code(vocab_size, zero_ids=tuple(i for i in zero_ids if i))
    return code if len(mismatches(code, table)) < vocab_size / 2 else None


def _as_told(code: Code | None, settings: Mapping[str, Any], reason: str) -> tuple[bool, str]:
    """Whether the zero ids and the width of a code are those that config.json names."""
    if code is None:
        return True, reason
    told = settings.get("zero_ids")
    if isinstance(told, list) and sorted(told) != list(code.zero_ids):
        return False, f"config.json, zero_ids: {told}, the weights have {list(code.zero_ids)}"
    width = settings.get("code_width")
    if isinstance(width, int) and width != code.code_width:
        return False, f"config.json, code_width: {width}, the weights have {code.code_width}"
    return True, reason


def _of_affine(
    files: WeightFiles, layout: Layout, settings: Mapping[str, Any], claim: str | None
) -> Audit:
    """A and b, with no array of V rows."""
    source = layout.input
    matrix, shift = (
        files.raw(name) if files.dtype(name) == "uint8" else files.read(name)
        for name in source.tensors
    )
    shape = matrix.shape
    if matrix.ndim != 2 or shift.ndim != 1:
        raise UserError(
            f"tensors {', '.join(source.tensors)}: found shapes {list(matrix.shape)} and "
            f"{list(shift.shape)}, expected a matrix and a vector"
        )
    bits = all(bool(((values == 0) | (values == 1)).all()) for values in (matrix, shift))
    known = Audit(
        interface="other",
        claim=claim,
        claim_holds=claim in (None, "other"),
        shape=shape,
        trained=0,
        binary_values=bits,
        injective=False,
        mismatches=(),
        row_masks=None,
        shift=None,
        zero_ids=(),
        lift=source.lift,
        reason="values that are neither 0 nor 1",
    )
    if not bits:
        return known
    matrix = matrix.T if source.transposed else matrix
    matrix = matrix[:, ::-1] if source.bits == "msb" else matrix
    row_masks = gf2.from_array(matrix.astype(np.uint8))
    shift_bits = gf2.from_array(shift[None].astype(np.uint8))[0]
    zero = setting(settings, source.zero_ids) if source.zero_ids else None
    zero_ids = tuple([zero] if isinstance(zero, int) else zero or ())
    known = dataclasses.replace(known, row_masks=row_masks, shift=shift_bits, zero_ids=zero_ids)
    if len(shift) != len(matrix):
        return dataclasses.replace(
            known, reason=f"b has {len(shift)} bits, expected {len(matrix)} like the rows of A"
        )
    vocab_size = _vocab_size(files, layout, settings, matrix.shape[1])
    try:
        code = Code(vocab_size, row_masks, shift_bits, zero_ids, source.lift)
    except UserError as error:
        return dataclasses.replace(known, reason=str(error))
    return dataclasses.replace(
        known,
        interface="affine",
        claim_holds=claim in (None, "affine"),
        injective=_is_injective(code),
        reason=f"A has full column rank, {matrix.shape[1]}",
    )


def _vocab_size(
    files: WeightFiles, layout: Layout, settings: Mapping[str, Any], columns: int
) -> int:
    for row in layout.tensors:
        if row.parameters == ("head.weight",) and row.name in files.names:
            return files.shape(row.name)[1 if row.transposed else 0]
    told = settings.get("vocab_size")
    return told if isinstance(told, int) else 1 << columns


def _name_of(code: Code) -> str:
    is_plain = code.bit_order == "lsb" and code.code_width == id_bits(code.vocab_size)
    return "binary" if is_plain else "affine"


def _is_injective(code: Code) -> bool:
    """Whether at most one id has the code of all zeros: only zero ids share one."""
    if not code.zero_ids:
        return True
    step, zeros = 2**20, 0
    for start in range(0, code.vocab_size, step):
        ids = np.arange(start, min(start + step, code.vocab_size))
        zeros += int((~code_table(code, ids, code.code_width).any(axis=1)).sum())
    return zeros < 2


def table(found: Audit) -> str:
    """The audit for people, a line a fact."""
    lines = []
    for key, value in dataclasses.asdict(found).items():
        if key == "row_masks" and value is not None:
            value = f"{len(value)} rows: {', '.join(map(str, value))}"
        elif isinstance(value, tuple):
            told = ", ".join(map(str, value[:_SHOWN])) + (", ..." if len(value) > _SHOWN else "")
            is_shape = key == "shape"
            value = f"[{told}]" if is_shape else f"{len(value):,}" + (f": {told}" if told else "")
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, int):
            value = f"{value:,}"
        lines.append(f"{key.replace('_', ' '):<15}{'-' if value is None else value}")
    return "\n".join(lines)


def define_flags(fv: flags.FlagValues) -> None:
    """Registers the command's flags."""
    flags.DEFINE_string(
        "path",
        None,
        "Hugging Face folder, run folder or step folder.",
        required=True,
        flag_values=fv,
    )
    flags.DEFINE_string(
        "layout", "auto", "auto, fixbin, gpt_neox, or a layout file.", flag_values=fv
    )
    flags.DEFINE_boolean("json", False, "Print one JSON object.", flag_values=fv)


def main(fv: flags.FlagValues) -> int:
    """Runs the command."""
    found = audit(Path(fv.path).expanduser(), fv.layout)
    print(json.dumps(dataclasses.asdict(found)) if fv.json else table(found))
    return 0 if found.claim_holds else 1


if __name__ == "__main__":
    cli.run(main, define_flags)
