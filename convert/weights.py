"""The weights of a Hugging Face folder, one tensor at a time.

A folder holds one file or shards with an index, as safetensors or pickled by torch; the first
found is read of model.safetensors.index.json, model.safetensors, pytorch_model.bin.index.json and
pytorch_model.bin. Programs that wrap a model put `_orig_mod.` (torch.compile) or `module.`
(DataParallel) before the names of its tensors; here the names go without.
"""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import numpy as np

from convert import dtypes
from convert.pickled import PickledFile
from convert.safetensors_file import INDEX_NAME, SINGLE_NAME, SafetensorsFile, TensorSpec
from fixbin_jax.errors import UserError

# An index and the single file that stands in its place, in the order of preference.
_FOLDER_FILES = (
    (INDEX_NAME, SINGLE_NAME),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth")

_WRAPPER_PREFIX = re.compile(r"(?:_orig_mod\.|module\.)*")

_log = logging.getLogger("fixbin_jax.convert")

TensorFile = SafetensorsFile | PickledFile


class WeightFiles:
    """The tensors of a folder or of one file; `open` makes it.

    Attributes:
      names: the tensors without the wrappers' prefixes, sorted.
      prefix: what was stripped from all names, "" where nothing or not the same from each.
      nbytes: the bytes of all these tensors as stored.
    """

    def __init__(self, path: Path, file_of: dict[str, TensorFile]) -> None:
        """Of the tensors under their stored names, each in its file; `path` is for messages."""
        self._path = path
        stored_names = _strip_wrappers(path, file_of)
        self._places = {name: (file_of[stored], stored) for name, stored in stored_names.items()}
        self.names = tuple(sorted(stored_names))
        prefixes = {stored.removesuffix(name) for name, stored in stored_names.items()}
        self.prefix = prefixes.pop() if len(prefixes) == 1 else ""
        self.nbytes = sum(file.nbytes[stored] for file, stored in self._places.values())

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens a folder, or one `.safetensors`, `.bin`, `.pt` or `.pth` file; reads no tensor.

        Raises:
          UserError: if there are no weights, if a file or an index is damaged, if index and shards
            disagree, or if names are equal without their wrappers' prefixes.
        """
        if path.is_dir():
            for index_name, single_name in _FOLDER_FILES:
                index, single = path / index_name, path / single_name
                if index.exists():
                    return cls(path, _follow_index(index, single))
                if single.exists():
                    return cls.open(single)
            looked_for = ", ".join(name for pair in _FOLDER_FILES for name in pair)
            raise UserError(f"{path}: no weights, looked for {looked_for}")
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        file = _open_file(path)
        return cls(path, dict.fromkeys(file.specs, file))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises UserError where there is none of that name."""
        return self._spec(name).shape

    def dtype(self, name: str) -> str:
        """The format of a tensor, such as `bfloat16`. Raises UserError as `shape` does."""
        return self._spec(name).dtype

    def raw(self, name: str) -> np.ndarray:
        """The stored bits, in numpy's type of that format; bfloat16 as uint16.

        Raises UserError where there is no such tensor, or its format is not one numpy can hold.
        """
        spec = self._spec(name)
        if spec.dtype not in dtypes.STORAGE:
            self._refuse_dtype(name, dtypes.STORAGE)
        out = np.empty(spec.shape, spec.storage)
        self._fill(name, 0, out.reshape(-1))
        return out

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        """The exact values of a float tensor as float32, in `out` where it is given.

        Args:
          name: a tensor of format float32, bfloat16 or float16.
          out: C-contiguous float32 of the tensor's shape, such as one layer of a stacked array.

        Raises:
          UserError: if there is no such tensor, or it has another format.
          ValueError: if `out` is not as described.
        """
        spec = self._spec(name)
        if spec.dtype not in dtypes.FLOATS:
            self._refuse_dtype(name, dtypes.FLOATS)
        if out is None:
            out = np.empty(spec.shape, np.float32)
        if out.shape != spec.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(
                f"out for tensor {name}: found {out.dtype} of shape {list(out.shape)}, expected "
                f"C-contiguous float32 of shape {list(spec.shape)}"
            )
        flat = out.reshape(-1)
        if spec.dtype == "float32":
            self._fill(name, 0, flat)
            return out
        buffer = np.empty(min(flat.size, dtypes.BLOCK), spec.storage)
        for start in range(0, flat.size, dtypes.BLOCK):
            block = flat[start : start + dtypes.BLOCK]
            stored = buffer[: len(block)]
            self._fill(name, start, stored)
            dtypes.widen(stored, spec.dtype, block)
        return out

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._places:
            raise UserError(f"{self._path}: no tensor {name}")
        file, stored = self._places[name]
        return file.specs[stored]

    def _fill(self, name: str, start: int, out: np.ndarray) -> None:
        file, stored = self._places[name]
        file.fill(stored, start, out)

    def _refuse_dtype(self, name: str, expected: Iterable[str]) -> None:
        raise UserError(
            f"{self._places[name][0].path}: tensor {name}: found format {self.dtype(name)}, "
            f"expected one of {', '.join(expected)}"
        )


def _open_file(path: Path) -> TensorFile:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in _PICKLED_SUFFIXES:
        return PickledFile(path)
    expected = ", ".join((".safetensors", *_PICKLED_SUFFIXES))
    raise UserError(f"{path}: found the ending {path.suffix!r}, expected one of {expected}")


def _follow_index(index: Path, single: Path) -> dict[str, TensorFile]:
    """The tensors of an index, each with the shard that holds it."""
    shard_of = _read_index(index)
    shard_names = sorted(set(shard_of.values()))
    if missing := [name for name in shard_names if not (index.parent / name).is_file()]:
        raise UserError(f"{index}: shards named but missing: {', '.join(missing)}")
    if single.exists() and single.name not in shard_names:
        _log.warning("%s: not read, since %s names other files", single, index.name)

    files = {name: _open_file(index.parent / name) for name in shard_names}
    holders = defaultdict(list)
    for shard_name, file in files.items():
        for name in file.specs:
            holders[name].append(shard_name)
    if doubled := [f"{name} ({' and '.join(held)})" for name, held in holders.items() if held[1:]]:
        raise UserError(f"{index}: tensors in more than one shard: {', '.join(sorted(doubled))}")
    if absent := [
        f"{name} ({shard}, found in {', '.join(holders.get(name, ['no shard']))})"
        for name, shard in sorted(shard_of.items())
        if name not in files[shard].specs
    ]:
        raise UserError(f"{index}: tensors absent from the shard named: {', '.join(absent)}")
    if unlisted := sorted(holders.keys() - shard_of):
        _log.warning("%s: not read, since the index lacks them: %s", index, ", ".join(unlisted))
    return {name: files[shard] for name, shard in shard_of.items()}


def _read_index(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes())
    except OSError as error:
        raise UserError(f"{index}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{index}: not JSON: {error}") from error
    shard_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise UserError(f"{index}: expected an object whose weight_map gives each tensor's file")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise UserError(
                f"{index}: tensor {name}: found {shard!r}, expected the name of a file beside it"
            )
    return shard_of


def _strip_wrappers(path: Path, stored_names: Iterable[str]) -> dict[str, str]:
    """From the name without wrappers' prefixes to the stored one."""
    found: dict[str, list[str]] = defaultdict(list)
    for stored in sorted(stored_names):
        found[_WRAPPER_PREFIX.sub("", stored, count=1)].append(stored)
    if collisions := [" = ".join(names) for names in found.values() if len(names) > 1]:
        raise UserError(
            f"{path}: names equal without the wrappers' prefixes: {', '.join(collisions)}"
        )
    return {name: stored for name, (stored,) in found.items()}
