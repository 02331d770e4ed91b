"""From a token id to its code, from the code to the model's width, and from a table back to both.

The code of id t is c(t) = A t xor b over GF(2), where t stands for the vector of its bits, least
significant first. A = identity and b = 0 is the `binary` interface, anything else the `affine`
one. Nothing here holds an array of vocabulary size except where a table is given or asked for.

Letters in shapes: V vocabulary, D width, K code bits.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from fixbin_jax import gf2
from fixbin_jax.errors import UserError

LIFTS = ("tile", "interleave")

# Ids are int32, so none is larger than 2^31 - 1.
_MAX_VOCAB_SIZE = 2**31

# Tables are read in blocks of rows with about this many entries.
_BLOCK_ENTRIES = 2**20


@dataclass(frozen=True)
class Code:
    """One code per id: hashable, hence static under jit. Raises UserError naming a bad field.

    Attributes:
      vocab_size: V, from 2 to 2^31.
      row_masks: A, one int per code bit: bit j of row_masks[i] is A[i, j]. Its ceil(log2 V)
        columns are linearly independent, so that no two ids share a code.
      shift: b, bit i of it being b_i.
      zero_ids: ids whose code is all zero instead, in rising order; each may share the code of
        the one id that A and b send to zero.
      lift: how the code fills the width, see `lift_index`.
    """

    vocab_size: int
    row_masks: tuple[int, ...]
    shift: int = 0
    zero_ids: tuple[int, ...] = ()
    lift: str = "tile"

    def __post_init__(self) -> None:
        columns = id_bits(self.vocab_size)
        _check_ints("row_masks", self.row_masks, 1 << columns)
        if (rank := gf2.rank(self.row_masks)) < columns:
            raise UserError(
                f"row_masks: {len(self.row_masks)} rows of rank {rank}, expected rank {columns} "
                f"for {self.vocab_size} ids to have one code each"
            )
        if not isinstance(self.shift, int) or not 0 <= self.shift < 1 << self.code_width:
            raise UserError(
                f"shift: found {self.shift!r}, expected an integer of {self.code_width} bits"
            )
        _check_ints("zero_ids", self.zero_ids, self.vocab_size)
        if list(self.zero_ids) != sorted(set(self.zero_ids)):
            raise UserError(f"zero_ids: found {self.zero_ids}, expected rising order, none twice")
        if self.lift not in LIFTS:
            raise UserError(f"lift: found {self.lift!r}, expected one of {', '.join(LIFTS)}")

    @property
    def code_width(self) -> int:
        """Number of code bits, before the lift."""
        return len(self.row_masks)

    @property
    def bit_order(self) -> str | None:
        """'lsb' or 'msb', the end of the id that stands first, where the code is the id's bits.

        None where it is not. A code wider than the id has zeros above the most significant bit.
        """
        lsb_first = _bit_masks(self.vocab_size, self.code_width)
        if self.shift == 0 and self.row_masks == lsb_first:
            return "lsb"
        if self.shift == 0 and self.row_masks == lsb_first[::-1]:
            return "msb"
        return None


def _check_ints(field: str, values: tuple[int, ...], bound: int) -> None:
    if not isinstance(values, tuple):
        raise UserError(f"{field}: found a {type(values).__name__}, expected a tuple of integers")
    for value in values:
        if not isinstance(value, int) or not 0 <= value < bound:
            raise UserError(f"{field}: found {value!r}, expected integers from 0 to {bound - 1}")


def _bit_masks(vocab_size: int, code_width: int) -> tuple[int, ...]:
    columns = id_bits(vocab_size)
    return tuple(1 << i if i < columns else 0 for i in range(code_width))


def id_bits(vocab_size: int) -> int:
    """ceil(log2 V), the fewest bits that tell the ids apart. Raises UserError on a bad size."""
    if not isinstance(vocab_size, int) or not 2 <= vocab_size <= _MAX_VOCAB_SIZE:
        raise UserError(
            f"vocab_size: found {vocab_size!r}, expected an integer from 2 to {_MAX_VOCAB_SIZE}"
        )
    return (vocab_size - 1).bit_length()


def binary_code(vocab_size: int, *, zero_ids: tuple[int, ...] = (), lift: str = "tile") -> Code:
    """The bits of the id, least significant first: c_j(t) = (t >> j) & 1."""
    row_masks = _bit_masks(vocab_size, id_bits(vocab_size))
    return Code(vocab_size, row_masks, zero_ids=zero_ids, lift=lift)


def affine_code(
    vocab_size: int,
    *,
    seed: int,
    code_width: int | None = None,
    zero_ids: tuple[int, ...] = (),
    lift: str = "tile",
) -> Code:
    """A code of `code_width` bits (default ceil(log2 V)) with A and b drawn from `seed`.

    A is uniform among the matrices of full column rank, b among all vectors; the same seed gives
    the same code on every machine (see `gf2.random_vector`). Raises UserError naming a bad field.
    """
    columns = id_bits(vocab_size)
    if code_width is None:
        code_width = columns
    if not isinstance(code_width, int) or code_width < columns:
        raise UserError(f"code_width: found {code_width!r}, expected an integer >= {columns}")
    if not isinstance(seed, int) or seed < 0:
        raise UserError(f"seed: found {seed!r}, expected an integer >= 0")
    source = np.random.PCG64(seed)
    row_masks = gf2.random_full_rank(source, code_width, columns)
    shift = gf2.random_vector(source, code_width)
    return Code(vocab_size, row_masks, shift, zero_ids, lift)


def lift_index(code_width: int, width: int, lift: str) -> np.ndarray:
    """int64[D]: which code bit stands at each position of the width.

    `tile` repeats the whole code and cuts its last copy where the width ends. `interleave` puts
    the copies of a bit side by side, bit floor(d * K / D) at position d: where K divides D this
    is torch's repeat_interleave, and where it does not some bits get one copy more than others
    but every bit gets one, so that the lifted codes still tell all ids apart. At D = K both
    leave the code as it is. Raises UserError where the width is less than the code's.
    """
    if width < code_width:
        raise UserError(f"width: found {width}, expected at least the code's {code_width} bits")
    positions = np.arange(width)
    return positions % code_width if lift == "tile" else positions * code_width // width


def encode(code: Code, ids: ArrayLike, width: int, dtype: DTypeLike) -> jax.Array:
    """The codes of integer `ids` [...], lifted: zeros and ones as `dtype`[..., D].

    Bit operations only, and no constant longer than the width or zero_ids; under jit code, width
    and dtype are static. A width of `code.code_width` gives the codes without a lift. Whether an
    id lies in the vocabulary is not checked. Raises UserError where ids are not integers or the
    width is less than the code's.
    """
    return _lifted_bits(jnp, code, jnp.asarray(ids), width).astype(dtype)


def code_table(code: Code, ids: ArrayLike, width: int) -> np.ndarray:
    """What `encode` computes, in numpy, as uint8[..., D]: for files and proofs about them."""
    return _lifted_bits(np, code, np.asarray(ids), width).astype(np.uint8)


def _lifted_bits(xp: Any, code: Code, ids: Any, width: int) -> Any:
    """uint32[..., D] in the array module `xp`: the one place where codes are computed."""
    if not xp.issubdtype(ids.dtype, np.integer):
        raise UserError(f"ids: found {ids.dtype}, expected integers")
    index_D = lift_index(code.code_width, width, code.lift)
    ids = ids.astype(np.uint32)[..., None]
    if all(mask.bit_count() == 1 for mask in code.row_masks):
        places_K = [mask.bit_length() - 1 for mask in code.row_masks]
        bits = ids >> np.array(places_K, np.uint32)[index_D]
    else:
        masks_K = np.array(code.row_masks, np.uint32)
        bits = xp.bitwise_count(ids & masks_K[index_D]).astype(np.uint32)
    shift_K = gf2.to_array([code.shift], code.code_width)[0].astype(np.uint32)
    bits = (bits ^ shift_K[index_D]) & np.uint32(1)

    # The code of every zero id, such as the padding id 57,344 of the reference, is made zero here.
    if code.zero_ids:
        zeroed = xp.isin(ids, np.array(code.zero_ids, np.uint32))
        bits = xp.where(zeroed, np.uint32(0), bits)
    return bits


def mismatches(code: Code, table: np.ndarray) -> np.ndarray:
    """int64[n]: the ids, rising, whose row of `table` [V, D] is not their code lifted to D.

    The table, of any real dtype, is read in blocks of rows. Raises UserError where its rows are
    not as many as the vocabulary or narrower than the code.
    """
    if table.ndim != 2 or len(table) != code.vocab_size:
        raise UserError(
            f"table: found shape {list(table.shape)}, expected {code.vocab_size} rows of codes"
        )
    differs_V = np.empty(code.vocab_size, bool)
    for rows in _row_blocks(table):
        expected = code_table(code, np.arange(rows.start, rows.stop), table.shape[1])
        differs_V[rows] = (table[rows] != expected).any(axis=1)
    return np.flatnonzero(differs_V)


def _row_blocks(table: np.ndarray) -> Iterator[slice]:
    num_rows, width = table.shape
    step = max(1, _BLOCK_ENTRIES // max(1, width))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


@dataclass(frozen=True)
class NoCode:
    """The finding that no code has produced a table.

    Attributes:
      reason: the contradiction, in one line.
      ids: the rows at fault: that of the first entry which is no bit, or two equal rows, or all
        rows that `nearest` does not give.
      nearest: the code made of the affine map nearest to each column, where that is a code.
    """

    reason: str
    ids: tuple[int, ...] = ()
    nearest: Code | None = None


def recover(table: np.ndarray) -> Code | NoCode:
    """The code that gives exactly `table` [V, D], of any real dtype, or why there is none.

    Each column is scored against every affine map of the id: if the nearest misses a row, none
    fits, and if only a few rows are bad, the nearest is as a rule still the true one. Rows that
    are all zero are no evidence, since any id may be a zero id: the other rows fix A and b, and
    the zero rows that A and b contradict become zero_ids. Where the other rows leave a choice, a
    column that can be one bit of the id is taken for that bit; any other choice is refused. Of
    the lifts that give the table, the one with the shortest code is found, and `tile` before
    `interleave`, so that a table that is not lifted counts as tiled.

    Raises UserError where the table's shape is not that of 2 or more rows of 1 or more bits.
    """
    if table.ndim != 2 or len(table) < 2 or not table.shape[1]:
        raise UserError(f"table: found shape {list(table.shape)}, expected [ids >= 2, bits >= 1]")
    vocab_size, width = table.shape
    columns_DxV = np.empty((width, vocab_size), bool)
    for rows in _row_blocks(table):
        ones = table[rows] == 1
        wrong = ~(ones | (table[rows] == 0))
        if wrong.any():
            row, column = np.argwhere(wrong)[0].tolist()
            row += rows.start
            entry = f"entry [{row}, {column}] is {table[row, column]!s}"
            return NoCode(f"{entry}, neither 0 nor 1", (row,))
        columns_DxV[:, rows] = ones.T

    columns = id_bits(vocab_size)
    if width < columns:
        return NoCode(f"{width} bits are too few for {vocab_size} ids, which take {columns}")

    nonzero_V = np.logical_or.reduce(columns_DxV, axis=0)
    evidence = f"the {nonzero_V.sum()} rows that are not zero"
    fit_of: dict[bytes, _Fit] = {}  # a lifted table has few distinct columns
    fits = []
    for column_V in columns_DxV:
        key = column_V.tobytes()
        if key not in fit_of:
            fit_of[key] = _nearest_map(column_V, nonzero_V)
        fits.append(fit_of[key])

    rank = gf2.rank([fit.mask for fit in fits])
    code = _code_of_fits(fits, nonzero_V) if rank == columns else None
    worst = max(range(width), key=lambda d: fits[d].misses)
    if misses := fits[worst].misses:
        reason = f"no affine map gives column {worst}: the nearest misses {misses} of {evidence}"
        ids = () if code is None else tuple(mismatches(code, table).tolist())
        return NoCode(reason, ids, code)
    if code is not None and all(fit.settled for fit in fits):
        return code
    if not all(fit.unique for fit in fits):
        return NoCode(f"{evidence} fit more than one affine map")
    reason = f"the affine map that fits has rank {rank}, expected {columns}"
    if ids := _equal_rows(columns_DxV, nonzero_V):
        reason += f": rows {ids[0]} and {ids[1]} are equal but not zero"
    return NoCode(reason, ids)


@dataclass(frozen=True)
class _Fit:
    """The affine map t -> parity(t & mask) xor shift nearest to one column of a table.

    `misses` counts the non-zero rows that it does not give. `unique` says that no other map is
    as near, `settled` that none is or that this is the only one which is a bit of the id.
    """

    mask: int
    shift: int
    misses: int
    unique: bool
    settled: bool


def _nearest_map(column_V: np.ndarray, nonzero_V: np.ndarray) -> _Fit:
    """The affine map that gives most of a column's entries, counted over the non-zero rows.

    With +1 for a 0 and -1 for a 1, coefficient w of the Walsh-Hadamard transform is the number
    of rows that parity(t & w) gives less the number that it misses; with xor 1 they swap.
    """
    signs = np.zeros(1 << id_bits(len(column_V)), np.int32)
    signs[: len(column_V)] = np.where(nonzero_V, np.where(column_V, -1, 1), 0)
    lead = gf2.walsh_hadamard(signs)
    nearest = np.flatnonzero(np.abs(lead) == np.abs(lead).max())
    single_bit = nearest[(np.bitwise_count(nearest) == 1) & (lead[nearest] > 0)]
    chosen = single_bit if len(single_bit) == 1 else nearest
    mask = int(chosen[0])
    return _Fit(
        mask=mask,
        shift=int(lead[mask] < 0),
        misses=(int(nonzero_V.sum()) - abs(int(lead[mask]))) // 2,
        unique=len(nearest) == 1,
        settled=len(chosen) == 1,
    )


def _code_of_fits(fits: list[_Fit], nonzero_V: np.ndarray) -> Code:
    """The shortest code that a lift spreads into these maps, one for each position of the width."""
    vocab_size, width = len(nonzero_V), len(fits)
    maps_D = np.array([fit.mask << 1 | fit.shift for fit in fits])
    for code_width, lift in itertools.product(range(id_bits(vocab_size), width + 1), LIFTS):
        index_D = lift_index(code_width, width, lift)
        maps_K = np.empty(code_width, maps_D.dtype)
        maps_K[index_D] = maps_D
        if (maps_K[index_D] == maps_D).all():
            break
    row_masks = tuple((maps_K >> 1).tolist())
    shift = gf2.from_array(maps_K[None] & 1)[0]
    code = Code(vocab_size, row_masks, shift, lift=lift)
    zero_rows = np.flatnonzero(~nonzero_V)
    contradicted = code_table(code, zero_rows, code.code_width).any(axis=1)
    return dataclasses.replace(code, zero_ids=tuple(zero_rows[contradicted].tolist()))


def _equal_rows(columns_DxV: np.ndarray, nonzero_V: np.ndarray) -> tuple[int, ...]:
    """The first two non-zero rows that are equal, or nothing."""
    rows_V = np.packbits(columns_DxV, axis=0).T
    first_of: dict[bytes, int] = {}
    for row in np.flatnonzero(nonzero_V).tolist():
        first = first_of.setdefault(rows_V[row].tobytes(), row)
        if first != row:
            return first, row
    return ()
