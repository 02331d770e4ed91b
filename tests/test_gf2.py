"""Linear algebra over GF(2) against integer arithmetic modulo 2."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixbin_jax import gf2
from fixbin_jax.errors import UserError

SIZES = st.integers(1, 9)


@st.composite
def arrays(draw, num_rows=None, num_columns=None):
    rows = num_rows or draw(SIZES)
    columns = num_columns or draw(SIZES)
    bits = draw(st.lists(st.integers(0, 1), min_size=rows * columns, max_size=rows * columns))
    return np.array(bits, np.uint8).reshape(rows, columns)


@st.composite
def chains(draw):
    """Two arrays that can be multiplied."""
    left = draw(arrays())
    return left, draw(arrays(num_rows=left.shape[1]))


@st.composite
def squares(draw):
    n = draw(SIZES)
    return draw(arrays(n, n))


def identity(n):
    return tuple(1 << i for i in range(n))


def span_size(array):
    """How many different sums the rows have, by trying every choice of rows."""
    choices = itertools.product((0, 1), repeat=len(array))
    return len({tuple((np.array(c) @ array % 2).tolist()) for c in choices})


@given(arrays())
def test_from_array_undoes_to_array(array):
    matrix = gf2.from_array(array)
    assert all(matrix[i] >> j & 1 == array[i, j] for i, j in np.ndindex(*array.shape))
    restored = gf2.to_array(matrix, array.shape[1])
    assert restored.dtype == np.uint8
    np.testing.assert_array_equal(restored, array)


@given(arrays())
def test_a_matrix_is_the_same_from_any_dtype(array):
    assert gf2.from_array(array.astype(np.float32)) == gf2.from_array(array.astype(bool))


@pytest.mark.parametrize("array", [np.array([[0.0, 0.5]]), np.array([[0, 2]]), np.array([0, 1])])
def test_an_array_that_is_no_bit_matrix_is_refused(array):
    with pytest.raises(UserError, match=r"matrix: .* expected rows of zeros and ones"):
        gf2.from_array(array)


@given(chains())
def test_multiply_is_the_integer_product_modulo_2(pair):
    left, right = pair
    product = gf2.multiply(gf2.from_array(left), gf2.from_array(right))
    np.testing.assert_array_equal(
        gf2.to_array(product, right.shape[1]), left.astype(int) @ right.astype(int) % 2
    )


@given(arrays())
def test_transpose_swaps_rows_and_columns(array):
    assert gf2.transpose(gf2.from_array(array), array.shape[1]) == gf2.from_array(array.T)


@given(arrays())
def test_rank_counts_the_sums_of_rows(array):
    assert 2 ** gf2.rank(gf2.from_array(array)) == span_size(array)


@given(arrays())
def test_rank_of_rows_is_rank_of_columns(array):
    assert gf2.rank(gf2.from_array(array)) == gf2.rank(gf2.from_array(array.T))


@given(squares())
def test_inverse_multiplies_to_the_identity_or_the_rank_is_short(array):
    matrix = gf2.from_array(array)
    n = len(matrix)
    if gf2.rank(matrix) < n:
        with pytest.raises(UserError, match=f"rank {gf2.rank(matrix)}, expected {n}"):
            gf2.inverse(matrix)
    else:
        assert gf2.multiply(gf2.inverse(matrix), matrix) == identity(n)
        assert gf2.multiply(matrix, gf2.inverse(matrix)) == identity(n)


def test_inverse_of_a_matrix_that_is_not_square_is_refused():
    with pytest.raises(UserError, match="expected 2 x 2"):
        gf2.inverse((0b001, 0b110))


@given(st.integers(0, 2**64), SIZES, st.integers(0, 60))
def test_a_random_matrix_has_full_column_rank(seed, columns, extra):
    matrix = gf2.random_full_rank(np.random.PCG64(seed), columns + extra, columns)
    assert len(matrix) == columns + extra
    assert max(matrix) < 2**columns
    assert gf2.rank(matrix) == columns


@given(st.integers(0, 2**64), st.integers(1, 31))
def test_a_random_square_matrix_is_invertible(seed, n):
    matrix = gf2.random_full_rank(np.random.PCG64(seed), n, n)
    assert gf2.multiply(matrix, gf2.inverse(matrix)) == identity(n)


def test_random_square_matrices_reach_every_invertible_one():
    drawn = {gf2.random_full_rank(np.random.PCG64(seed), 2, 2) for seed in range(200)}
    assert drawn == {m for m in itertools.product(range(4), repeat=2) if gf2.rank(m) == 2}


def test_fewer_rows_than_columns_are_refused():
    with pytest.raises(UserError, match="2 rows, expected at least 3"):
        gf2.random_full_rank(np.random.PCG64(0), 2, 3)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_every_bit_of_a_random_vector_takes_both_values(length):
    source = np.random.PCG64(7)
    vectors = [gf2.random_vector(source, length) for _ in range(64)]
    ones, zeros = 0, 0
    for vector in vectors:
        ones |= vector
        zeros |= ~vector
    assert ones == (1 << length) - 1
    assert zeros & ((1 << length) - 1) == (1 << length) - 1


@given(
    st.integers(0, 6).flatmap(lambda k: st.lists(st.integers(-9, 9), min_size=2**k, max_size=2**k))
)
def test_walsh_hadamard_is_the_sum_of_its_definition(values):
    expected = [
        sum(v * (-1) ** (w & t).bit_count() for t, v in enumerate(values))
        for w in range(len(values))
    ]
    np.testing.assert_array_equal(gf2.walsh_hadamard(np.array(values)), expected)
