"""How tensors differ from our parameters: transposed, fused, rotary pairs side by side.

Every function here moves entries and computes nothing, so each way back is exact. Linear layers
are [out, in] and their biases [out]; letters in shapes: H heads, d head width, D = H d.
"""

from collections.abc import Sequence

import numpy as np

from convert.layouts import Row

_ROTATED = ("layers.attention.query.", "layers.attention.key.")


def split(row: Row, tensor: np.ndarray, num_heads: int) -> list[np.ndarray]:
    """A tensor's parameters, one for each of `row.parameters`, as views where that is possible.

    Args:
      row: how the tensor is arranged.
      tensor: one layer's tensor.
      num_heads: of the attention, for tensors that hold query, key and value of each head.
    """
    if row.transposed:
        tensor = tensor.T
    if row.fusion is None:
        return [tensor]
    if row.fusion == "blocks":
        return np.split(tensor, 3)
    rest = tensor.shape[1:]
    heads_Hx3xd = tensor.reshape(num_heads, 3, -1, *rest)
    return [heads_Hx3xd[:, i].reshape(-1, *rest) for i in range(3)]


def join(row: Row, parameters: Sequence[np.ndarray], num_heads: int) -> np.ndarray:
    """The tensor that `split` takes apart."""
    if row.fusion is None:
        (tensor,) = parameters
    elif row.fusion == "blocks":
        tensor = np.concatenate(parameters)
    else:
        rest = parameters[0].shape[1:]
        heads = [p.reshape(num_heads, 1, -1, *rest) for p in parameters]
        tensor = np.concatenate(heads, axis=1).reshape(-1, *rest)
    return tensor.T if row.transposed else tensor


def joined_shape(row: Row, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor whose parameters have this shape each."""
    whole = (len(row.parameters) * shape[0], *shape[1:])
    return whole[::-1] if row.transposed else whole


def is_rotated(parameter: str) -> bool:
    """Whether rotary positions turn what this parameter gives."""
    return parameter.startswith(_ROTATED)


def halves_of_pairs(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [D, ...] that turn 2i with 2i + 1 in each head, put so that i turns with i + d/2.

    Scores are sums over a head's dimensions, so the same order in query and key changes nothing.
    """
    rest = array.shape[1:]
    pairs = array.reshape(num_heads, -1, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(array.shape)


def pairs_of_halves(array: np.ndarray, num_heads: int) -> np.ndarray:
    """The way back of `halves_of_pairs`."""
    rest = array.shape[1:]
    halves = array.reshape(num_heads, 2, -1, *rest)
    return halves.swapaxes(1, 2).reshape(array.shape)
