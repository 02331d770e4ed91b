"""The safetensors format, read straight into given arrays and written from arrays in any order.

A file is the length of its header (8 bytes, little endian), the header in JSON, and the tensors
one after another, each C-contiguous (https://huggingface.co/docs/safetensors). The safetensors
library maps a file into memory, so that the pages read count beside the arrays they are copied
to; here no byte of a tensor is in memory twice, apart from one block.
"""

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from convert import dtypes
from fixbin_jax.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPE_OF_CODE = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a file says of a tensor; `dtype` is a key of `dtypes.STORAGE` or a format unknown here.

    `nbytes` and `storage` are for known formats only.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def storage(self) -> np.dtype:
        """The numpy type that holds the stored bits."""
        return dtypes.STORAGE[self.dtype]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        return self.size * self.storage.itemsize


class SafetensorsFile:
    """A file whose header is read and found to describe the file exactly.

    Attributes:
      path: the file.
      specs: its tensors by name.
      nbytes: the stored bytes of each tensor by name.

    Raises UserError, naming the file and the tensor, where the header is not as the format has
    it, where tensors overlap or leave a gap, or where the file does not end with the last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                file_bytes = file.seek(0, 2)
                file.seek(0)
                header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if file_bytes < _LENGTH_BYTES or header_bytes > file_bytes - _LENGTH_BYTES:
                    raise UserError(
                        f"{path}: {file_bytes} bytes are too few for a header of {header_bytes}: "
                        "truncated, or no safetensors file"
                    )
                text = file.read(header_bytes)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: the header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise UserError(f"{path}: the header is no JSON object of tensors")
        header.pop("__metadata__", None)

        self._data_start = _LENGTH_BYTES + header_bytes
        self._begins: dict[str, int] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.nbytes: dict[str, int] = {}
        for name, entry in header.items():
            self._add(name, entry)
        self._check_layout(file_bytes - self._data_start)

    def _add(self, name: str, entry: Any) -> None:
        match entry:
            case {"dtype": str(code), "shape": [*shape], "data_offsets": [begin, end]} if all(
                type(number) is int and number >= 0 for number in (*shape, begin, end)
            ):
                spec = TensorSpec(name, _DTYPE_OF_CODE.get(code, code), tuple(shape))
            case _:
                raise UserError(
                    f"{self.path}: tensor {name}: found {entry!r}, expected an object with dtype, "
                    "shape and two data_offsets"
                )
        if spec.dtype in dtypes.STORAGE and end - begin != spec.nbytes:
            raise UserError(
                f"{self.path}: tensor {name}: data_offsets span {end - begin} bytes, expected "
                f"{spec.nbytes} for {code} of shape {shape}"
            )
        self.specs[name] = spec
        self._begins[name] = begin
        self.nbytes[name] = end - begin

    def _check_layout(self, data_bytes: int) -> None:
        expected = 0
        for name in sorted(self.specs, key=lambda name: (self._begins[name], self.nbytes[name])):
            if self._begins[name] != expected:
                raise UserError(
                    f"{self.path}: tensor {name}: begins at byte {self._begins[name]}, expected "
                    f"{expected}, where the tensor before it ends"
                )
            expected += self.nbytes[name]
            if expected > data_bytes:
                raise UserError(
                    f"{self.path}: tensor {name}: ends at byte {expected}, but the file has "
                    f"{data_bytes} bytes of tensors: truncated"
                )
        if expected != data_bytes:
            raise UserError(
                f"{self.path}: {data_bytes} bytes of tensors, expected {expected} by the header"
            )

    def fill(self, name: str, start: int, out: np.ndarray) -> None:
        """Reads the stored elements from `start` on into `out` [N], of the tensor's storage type.

        Raises UserError where the file has been cut since it was opened.
        """
        view = out.view(np.uint8).data
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._data_start + self._begins[name] + start * out.itemsize)
            # One read of the operating system may give less than asked for.
            while view:
                if not (count := file.readinto(view)):
                    raise UserError(f"{self.path}: tensor {name}: the file ends early: truncated")
                view = view[count:]


@dataclass(frozen=True, slots=True)
class _Place:
    spec: TensorSpec
    path: Path
    offset: int


class SafetensorsWriter:
    """A context that writes the files of a model into an existing folder, tensors in any order.

    One file `model.safetensors` where one shard of `max_shard_bytes` is enough; otherwise numbered
    shards, filled in the order of `specs`, none larger unless it holds but one tensor, and their
    index. On entry the files get their headers and full lengths, each `write` fills one tensor in
    place, and the index is written last. After an exception what was written stays behind: the
    folder is for the caller to remove.

    Raises ValueError where a name or a format cannot be written, or where the context is left
    with tensors not written, naming all of them; OSError, with the file's name, as from a full
    disk.
    """

    def __init__(self, folder: Path, specs: Sequence[TensorSpec], max_shard_bytes: int) -> None:
        names = [spec.name for spec in specs]
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"tensors named more than once: {', '.join(repeated)}")
        for spec in specs:
            if spec.dtype not in dtypes.STORAGE:
                raise ValueError(f"tensor {spec.name}: format {spec.dtype} cannot be written")
        self._folder = folder
        self._shards = _shards(specs, max_shard_bytes)
        self._places: dict[str, _Place] = {}
        self._unwritten = dict.fromkeys(names)

    def __enter__(self) -> Self:
        for file_name, specs in self._shards.items():
            path = self._folder / file_name
            header, begins = _header(specs)
            with _named_failure(path), path.open("xb") as file:
                file.write(header)
                file.truncate(len(header) + sum(spec.nbytes for spec in specs))
            for spec in specs:
                self._places[spec.name] = _Place(spec, path, len(header) + begins[spec.name])
        return self

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes `array`, of the tensor's shape, float32 for a float tensor of any format.

        A float is rounded to the nearest, ties to even, see `dtypes.narrow`; another format takes
        an array of its own type. The array need not be contiguous.

        Raises:
          ValueError: if the tensor is not in `specs` or written already, or the array does not fit.
          UserError: if a value is beyond the largest of float16.
        """
        if name not in self._unwritten:
            reason = "is written already" if name in self._places else "is not among the specs"
            raise ValueError(f"tensor {name}: {reason}")
        place = self._places[name]
        dtype = place.spec.dtype
        taken = np.dtype(np.float32) if dtype in dtypes.FLOATS else place.spec.storage
        if array.shape != place.spec.shape or array.dtype != taken:
            raise ValueError(
                f"tensor {name}: found {array.dtype} of shape {list(array.shape)}, expected "
                f"{taken} of shape {list(place.spec.shape)}"
            )
        try:
            with _named_failure(place.path), place.path.open("r+b") as file:
                file.seek(place.offset)
                for block in dtypes.flat_blocks(array):
                    narrowed = dtype in dtypes.FLOATS and dtype != "float32"
                    file.write((dtypes.narrow(block, dtype) if narrowed else block).data)
        except FloatingPointError as error:
            raise UserError(
                f"tensor {name}: a value is beyond {np.finfo(np.float16).max}, the largest of "
                "float16, expected bfloat16 or float32 to be asked for"
            ) from error
        del self._unwritten[name]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            return
        if self._unwritten:
            raise ValueError(f"tensors not written: {', '.join(self._unwritten)}")
        if list(self._shards) != [SINGLE_NAME]:
            specs = [spec for shard in self._shards.values() for spec in shard]
            index = {
                "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
                "weight_map": {spec.name: self._places[spec.name].path.name for spec in specs},
            }
            text = json.dumps(index, indent=2) + "\n"
            path = self._folder / INDEX_NAME
            with _named_failure(path):
                path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _named_failure(path: Path) -> Iterator[None]:
    """Names the file in what a full disk raises: a write that fails knows of none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> dict[str, list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    count = len(shards)
    return {
        f"model-{number:05}-of-{count:05}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def _header(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """A file's first bytes, up to the tensors, and where among those each tensor begins."""
    begins: dict[str, int] = {}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Wide elements first: readers map the file and want every tensor aligned to its elements.
    for spec in sorted(specs, key=lambda spec: -spec.storage.itemsize):
        begins[spec.name] = end
        end += spec.nbytes
        entries[spec.name] = {
            "dtype": _CODE_OF_DTYPE[spec.dtype],
            "shape": spec.shape,
            "data_offsets": [begins[spec.name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, begins
