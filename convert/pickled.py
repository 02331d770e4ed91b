"""Tensors of a file that torch has pickled: `.bin`, `.pt`, `.pth`."""

import logging
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from convert import dtypes
from convert.safetensors_file import TensorSpec
from fixbin_jax.errors import UserError

# Under these keys training programs keep the tensors, beside the optimizer's state.
_WRAPPERS = ("model", "state_dict", "model_state_dict")

# Pages of a mapped file once read count as memory in use until the file is mapped anew, which is
# done each time this part of the tensors has been read.
_PARTS = 8

_log = logging.getLogger("fixbin_jax.convert")


class PickledFile:
    """A pickled dictionary of tensors, mapped into memory where torch can map it.

    Only data are unpickled: a file that names a function to call is refused before the call.
    Entries that are no dense tensor are left out with a warning.

    Attributes:
      path: the file.
      specs: its tensors by name.
      nbytes: the bytes of each tensor by name.

    Raises UserError where torch is absent, or, naming the file, where it is damaged, refused, or
    no dictionary of tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Files of torch before 1.6 are no archives and cannot be mapped.
        self._mapped = zipfile.is_zipfile(path)
        self._tensors, others = _tensors(path, self._mapped)
        if others:
            _log.warning("%s: left out, being no dense tensors: %s", path, ", ".join(others))
        self.specs = {
            name: TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        self.nbytes = {name: tensor.nbytes for name, tensor in self._tensors.items()}
        self._bytes_read = 0

    def fill(self, name: str, start: int, out: np.ndarray) -> None:
        """Copies the stored elements from `start` on into `out` [N], of the tensor's storage."""
        import torch

        if self._mapped and self._bytes_read * _PARTS > sum(self.nbytes.values()):
            self._tensors, _ = _tensors(self.path, self._mapped)
            self._bytes_read = 0
        self._bytes_read += out.nbytes
        tensor = self._tensors[name].reshape(-1)[start : start + len(out)]
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.int16)
        out[:] = tensor.numpy().view(dtypes.STORAGE[self.specs[name].dtype])


def _tensors(path: Path, mapped: bool) -> tuple[dict[str, Any], list[str]]:
    """The dense tensors of a file by name, and the names of all else beside them."""
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"{path}: a pickled file is read by torch, which is not installed: "
            "pip install 'fixbin-jax[hf]'"
        ) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        called = re.search(r"GLOBAL (\S+)", str(error))
        found = f"calls {called[1]}" if called else "is damaged or holds objects of unknown kinds"
        raise UserError(
            f"{path}: refused: the pickle {found}, expected a dictionary of tensors"
        ) from error
    # A damaged file makes torch raise anything: struct.error, AssertionError, AttributeError.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: cannot be read as a pickle of torch: {reason}") from error

    while isinstance(state, dict):
        inner = [state[key] for key in _WRAPPERS if isinstance(state.get(key), dict)]
        if not inner:
            break
        state = inner[0]
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise UserError(f"{path}: found a {type(state).__name__}, expected a dictionary of tensors")
    tensors = {
        name: value.detach().contiguous()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    }
    if not tensors:
        raise UserError(f"{path}: found {sorted(state)[:8]}, expected a dictionary of tensors")
    return tensors, sorted(state.keys() - tensors)
