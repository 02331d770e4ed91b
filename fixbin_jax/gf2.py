"""Linear algebra over GF(2), the field of 0 and 1 in which addition is xor.

A vector is a Python int, bit j its entry j; a matrix is a sequence of such ints, one per row, so
`matrix[i] >> j & 1` is entry [i, j]. The number of columns is not part of a matrix: where an
answer depends on it, it is an argument.
"""

from collections.abc import Sequence

import numpy as np

from fixbin_jax.errors import UserError


def rank(matrix: Sequence[int]) -> int:
    """Number of linearly independent rows, which is also that of independent columns."""
    basis: list[int] = []
    for row in matrix:
        for pivot in basis:
            row = min(row, row ^ pivot)  # clears the leading bit of pivot where row has it
        if row:
            basis.append(row)
    return len(basis)


def inverse(matrix: Sequence[int]) -> tuple[int, ...]:
    """The n x n matrix whose product with `matrix` (n rows, n columns) is the identity.

    Gauss-Jordan elimination of [matrix | identity]. Raises UserError where there is no inverse.
    """
    n = len(matrix)
    if any(not 0 <= row < 1 << n for row in matrix):
        raise UserError(f"matrix: a row has entries beyond column {n - 1}, expected {n} x {n}")
    rows = [row | 1 << (n + i) for i, row in enumerate(matrix)]
    for j in range(n):
        pivot = next((i for i in range(j, n) if rows[i] >> j & 1), None)
        if pivot is None:
            raise UserError(f"matrix: rank {rank(matrix)}, expected {n}: it has no inverse")
        rows[j], rows[pivot] = rows[pivot], rows[j]
        rows = [row ^ rows[j] if i != j and row >> j & 1 else row for i, row in enumerate(rows)]
    return tuple(row >> n for row in rows)


def multiply(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    """The product `left @ right`; columns of `left` beyond the rows of `right` must be zero."""
    product = []
    for row in left:
        total = 0
        for j, right_row in enumerate(right):
            if row >> j & 1:
                total ^= right_row
        product.append(total)
    return tuple(product)


def transpose(matrix: Sequence[int], num_columns: int) -> tuple[int, ...]:
    """The matrix whose row j is column j of `matrix`, for the first `num_columns` columns."""
    return tuple(
        sum((row >> j & 1) << i for i, row in enumerate(matrix)) for j in range(num_columns)
    )


def to_array(matrix: Sequence[int], num_columns: int) -> np.ndarray:
    """The matrix as uint8[rows, num_columns] of zeros and ones."""
    entries = [[row >> j & 1 for j in range(num_columns)] for row in matrix]
    return np.array(entries, np.uint8).reshape(len(matrix), num_columns)


def from_array(array: np.ndarray) -> tuple[int, ...]:
    """The matrix of a [rows, columns] array of zeros and ones of any dtype.

    Raises UserError where the array is not two-dimensional or an entry is neither 0 nor 1.
    """
    array = np.asarray(array)
    if array.ndim != 2 or not np.all((array == 0) | (array == 1)):
        raise UserError(
            f"matrix: found {array.dtype}{list(array.shape)}, expected rows of zeros and ones"
        )
    return tuple(sum(1 << j for j in np.flatnonzero(row).tolist()) for row in array)


def random_vector(source: np.random.PCG64, length: int) -> int:
    """A uniform vector, from the next ceil(length / 64) words of `source`.

    Only `random_raw` is used: NumPy fixes the words a seeded bit generator yields for all time
    and all machines, while the methods of `Generator` may change with a version (NEP 19).
    """
    vector = 0
    for word in source.random_raw(-(-length // 64)).tolist():
        vector = vector << 64 | word
    return vector & ((1 << length) - 1)


def random_full_rank(source: np.random.PCG64, num_rows: int, num_columns: int) -> tuple[int, ...]:
    """A uniform matrix among those of full column rank; a square one is invertible.

    Drawn until it has that rank, which takes 3.5 draws on average at worst (the square case).
    Raises UserError where there are fewer rows than columns.
    """
    if num_rows < num_columns:
        raise UserError(
            f"matrix: {num_rows} rows, expected at least {num_columns}, the number of columns"
        )
    while True:
        matrix = tuple(random_vector(source, num_columns) for _ in range(num_rows))
        if rank(matrix) == num_columns:
            return matrix


def walsh_hadamard(values: np.ndarray) -> np.ndarray:
    """out[w] = sum over t of values[t] * (-1)^(w . t), for 2^K values in their own dtype.

    w . t is the inner product of the bits of w and t over GF(2).
    """
    for _ in range((len(values) - 1).bit_length()):
        # The lowest bit of t leaves the index and its place in w enters at the top; after K
        # rounds every bit is back where it was.
        even, odd = values[0::2], values[1::2]
        values = np.concatenate([even + odd, even - odd])
    return values
