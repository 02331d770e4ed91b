"""Number formats of stored tensors, and the exact way between them and float32.

numpy has no bfloat16: its bits are held as uint16. A bfloat16 is the upper half of a float32. All
conversions work on bits where numpy's own would change a NaN, so that widening and then narrowing
gives back every one of the 65,536 patterns of either 16-bit format.
"""

from collections.abc import Iterator

import numpy as np

# The name of a format, as torch and numpy have it, and what holds its bits.
STORAGE = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "uint16": np.dtype(np.uint16),
    "int16": np.dtype(np.int16),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "int32": np.dtype(np.int32),
    "float32": np.dtype(np.float32),
    "uint64": np.dtype(np.uint64),
    "int64": np.dtype(np.int64),
    "float64": np.dtype(np.float64),
}

# Formats whose values float32 holds exactly, and which `widen` and `narrow` know.
FLOATS = ("float32", "bfloat16", "float16")

# Elements converted at a time: the buffers of a block stay in a core's cache.
BLOCK = 2**18


def widen(stored: np.ndarray, dtype: str, out: np.ndarray) -> None:
    """Writes the values of `stored` [N], the bits of 16-bit floats, to `out`, float32[N].

    Exact for every pattern: subnormals, -0, infinities, and NaN with sign and payload.
    """
    out_bits = out.view(np.uint32)
    if dtype == "bfloat16":
        out_bits[:] = stored
        out_bits <<= 16
        return
    out[:] = stored
    # Processors set the quiet bit of a NaN as they convert it.
    if (nan := np.isnan(out)).any():
        bits = stored.view(np.uint16)[nan].astype(np.uint32)
        out_bits[nan] = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13


def narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of float32 `values` [N] rounded to the nearest 16-bit float, ties to even.

    A NaN keeps its sign and the upper bits of its payload, and becomes a quiet one where those
    are all zero, since they would stand for infinity. Returns uint16[N] for bfloat16, float16[N]
    for float16. Raises FloatingPointError where a finite value is beyond the largest float16;
    one beyond the largest bfloat16, within half a step of float32's largest, becomes infinite.
    """
    bits = values.view(np.uint32)
    if dtype == "bfloat16":
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        stored = rounded.astype(np.uint16)
        dropped, infinity, payload, quiet = 16, 0x7F80, 0x7F, 0x40
    else:
        with np.errstate(over="raise", under="ignore", invalid="ignore"):
            stored = values.astype(np.float16)
        dropped, infinity, payload, quiet = 13, 0x7C00, 0x3FF, 0x200
    if (nan := np.isnan(values)).any():
        kept = bits[nan] >> dropped & payload
        kept[kept == 0] = quiet
        stored.view(np.uint16)[nan] = bits[nan] >> 16 & 0x8000 | infinity | kept
    return stored


def flat_blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """The elements of `array` [...], last axis fastest, as contiguous arrays [up to BLOCK].

    A contiguous array gives views; of another, such as a transposed one, a block at a time is
    copied, never the whole.
    """
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            yield flat[start : start + BLOCK]
    elif array[0].size > BLOCK:
        for part in array:
            yield from flat_blocks(part)
    else:
        rows = BLOCK // array[0].size
        for start in range(0, len(array), rows):
            yield array[start : start + rows].ravel()
