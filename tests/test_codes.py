"""Codes against the formula c(t) = A t xor b, written with strings and integer matrix products."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fixbin_jax import gf2
from fixbin_jax.codes import (
    LIFTS,
    Code,
    NoCode,
    affine_code,
    binary_code,
    code_table,
    encode,
    id_bits,
    mismatches,
    recover,
)
from fixbin_jax.errors import UserError

V = 65_536
PAD = 57_344
SMALL = st.integers(2, 150)
jit_encode = jax.jit(encode, static_argnames=("code", "width", "dtype"))


@functools.cache
def bits_lsb_first(vocab_size):
    """[V, ceil(log2 V)] bits of every id, read off Python's binary notation."""
    digits = len(format(vocab_size - 1, "b"))
    text = "".join(format(t, f"0{digits}b")[::-1] for t in range(vocab_size))
    return (np.frombuffer(text.encode(), np.uint8) - ord("0")).reshape(vocab_size, digits)


def formula(code):
    """[V, code width] of A t + b modulo 2, zero in the rows of zero_ids."""
    digits = bits_lsb_first(code.vocab_size).shape[1]
    a = np.array([[int(c) for c in format(m, f"0{digits}b")[::-1]] for m in code.row_masks])
    b = np.array([int(c) for c in format(code.shift, f"0{len(a)}b")[::-1]])
    table = (bits_lsb_first(code.vocab_size).astype(int) @ a.T + b) % 2
    table[list(code.zero_ids)] = 0
    return table


def lifted(table, width, lift):
    """The code repeated and cut, or its bits repeated in proportion, position by position."""
    k = table.shape[1]
    if lift == "tile":
        return np.concatenate([table] * (width // k + 1), axis=1)[:, :width]
    copies = [sum(i * width <= d * k < (i + 1) * width for d in range(width)) for i in range(k)]
    return np.repeat(table, copies, axis=1)


def msb_code(vocab_size, **fields):
    code = binary_code(vocab_size, **fields)
    return dataclasses.replace(code, row_masks=code.row_masks[::-1])


def maps_by_position(code, width):
    """What tells two codes apart at a width: the row of A and the bit of b at each position."""
    rows = np.array([[m, code.shift >> i & 1] for i, m in enumerate(code.row_masks)])
    return lifted(rows.T, width, code.lift)


@st.composite
def codes(draw, vocab_sizes=SMALL, max_zero_ids=3):
    vocab_size = draw(vocab_sizes)
    zero_ids = draw(st.sets(st.integers(0, vocab_size - 1), max_size=max_zero_ids))
    fields = {"zero_ids": tuple(sorted(zero_ids)), "lift": draw(st.sampled_from(LIFTS))}
    kind = draw(st.sampled_from(["binary", "msb", "affine"]))
    if kind == "binary":
        return binary_code(vocab_size, **fields)
    if kind == "msb":
        return msb_code(vocab_size, **fields)
    code_width = id_bits(vocab_size) + draw(st.integers(0, 4))
    return affine_code(
        vocab_size, seed=draw(st.integers(0, 2**32)), code_width=code_width, **fields
    )


@st.composite
def codes_and_widths(draw, **limits):
    code = draw(codes(**limits))
    return code, draw(st.integers(code.code_width, 4 * code.code_width + 3))


@pytest.mark.parametrize("lift", LIFTS)
@pytest.mark.parametrize("width", [16, 64, 50])
def test_all_binary_codes_equal_the_formula(lift, width):
    code = binary_code(V, zero_ids=(PAD,), lift=lift)
    expected = lifted(formula(code), width, lift)
    result = jit_encode(code, jnp.arange(V), width, jnp.uint8)
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(code_table(code, np.arange(V), width), expected)


@pytest.mark.parametrize("seed", range(20))
def test_all_affine_codes_equal_the_formula(seed):
    lift = LIFTS[seed % 2]
    code = affine_code(V, seed=seed, lift=lift)
    for width in (16, 64, 50):
        expected = lifted(formula(code), width, lift)
        result = jit_encode(code, jnp.arange(V), width, jnp.uint8)
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(code_table(code, np.arange(V), width), expected)


@given(codes_and_widths())
@settings(max_examples=25)
def test_any_code_equals_the_formula(case):
    code, width = case
    expected = lifted(formula(code), width, code.lift)
    ids = np.arange(code.vocab_size)
    np.testing.assert_array_equal(encode(code, ids, width, jnp.float32), expected)
    np.testing.assert_array_equal(code_table(code, ids, width), expected)


def test_at_the_reference_width_tile_is_repeat_and_interleave_is_repeat_interleave():
    ids = np.array([0, 1, 5, 40_000, PAD, V - 1])
    raw = bits_lsb_first(V)[ids]
    raw[4] = 0
    for lift, expected in [("tile", np.tile(raw, 64)), ("interleave", np.repeat(raw, 64, axis=1))]:
        code = binary_code(V, zero_ids=(PAD,), lift=lift)
        np.testing.assert_array_equal(jit_encode(code, ids, 1024, jnp.float32), expected)


def test_the_padding_id_shares_the_all_zero_code_of_id_0():
    code = binary_code(V, zero_ids=(PAD,))
    assert not jit_encode(code, np.array([PAD, 0]), 1024, jnp.float32).any()
    assert jit_encode(binary_code(V), np.array([PAD]), 1024, jnp.float32).sum() == 3 * 64


@given(codes_and_widths(vocab_sizes=st.integers(2, 70_000), max_zero_ids=0))
@settings(max_examples=40)
def test_no_two_ids_share_a_lifted_code(case):
    code, width = case
    table = code_table(code, np.arange(code.vocab_size), width)
    packed = np.packbits(table, axis=1)
    assert len(np.unique(packed.view(f"V{packed.shape[1]}"))) == code.vocab_size


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_codes_are_exact_zeros_and_ones_of_the_dtype_asked_for(dtype):
    code, ids = affine_code(V, seed=4), jnp.array([[3, 12_345], [V - 1, 0]])
    result = jit_encode(code, ids, 32, dtype)
    assert result.shape == (2, 2, 32)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.astype(int), np.tile(formula(code)[ids], 2))


@pytest.mark.parametrize("id_dtype", [np.int32, np.uint32, np.uint16])
def test_the_largest_ids_of_any_integer_dtype_have_their_code(id_dtype):
    top = min(np.iinfo(id_dtype).max, 2**31 - 1)
    code = binary_code(top + 1)
    assert encode(code, np.array(top, id_dtype), code.code_width, jnp.int32).all()
    assert code_table(code, np.array(top, id_dtype), code.code_width).all()


@pytest.mark.parametrize("code", [binary_code(V, zero_ids=(PAD,)), affine_code(V, seed=0)])
def test_nothing_of_vocabulary_size_is_compiled(code):
    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    lowered = jit_encode.lower(code, ids, 1024, jnp.float32)
    before = re.findall(r"tensor<([\dx]+)x\w+>", lowered.as_text())
    after = re.findall(r"\w\d+\[([\d,]+)\]", lowered.compile().as_text())
    sizes = [np.prod([int(n) for n in re.split("[x,]", shape)]) for shape in before + after]
    assert max(sizes) == 3 * 1024


def test_a_seed_gives_the_same_code_forever():
    masks = (332, 176, 496, 287, 377, 422, 270, 302, 56, 241)
    assert affine_code(300, seed=0, code_width=10) == Code(300, masks, shift=780)


def test_seeds_give_different_codes():
    assert len({affine_code(V, seed=seed) for seed in range(50)}) == 50


def test_bit_order_names_the_end_that_stands_first():
    assert binary_code(300).bit_order == "lsb"
    assert msb_code(300).bit_order == "msb"
    assert Code(3, (1, 2, 0)).bit_order == "lsb"
    assert Code(3, (0, 2, 1)).bit_order == "msb"
    assert Code(3, (1, 2), shift=1).bit_order is None
    assert Code(3, (1, 3)).bit_order is None


BAD_FIELDS = [
    ("vocab_size", lambda: binary_code(1)),
    ("vocab_size", lambda: binary_code(2**31 + 1)),
    ("vocab_size", lambda: affine_code(300.0, seed=0)),
    ("row_masks", lambda: Code(4, [1, 2])),
    ("row_masks", lambda: Code(4, (1, 4))),
    ("row_masks", lambda: Code(4, (1, -2))),
    ("row_masks", lambda: Code(4, (1, "2"))),
    ("row_masks", lambda: Code(4, (1,))),
    ("row_masks", lambda: Code(8, (1, 2, 3, 3))),
    ("shift", lambda: Code(4, (1, 2), shift=4)),
    ("shift", lambda: Code(4, (1, 2), shift=-1)),
    ("shift", lambda: Code(4, (1, 2), shift=None)),
    ("zero_ids", lambda: binary_code(300, zero_ids=(300,))),
    ("zero_ids", lambda: binary_code(300, zero_ids=(-1,))),
    ("zero_ids", lambda: binary_code(300, zero_ids=(5, 5))),
    ("zero_ids", lambda: binary_code(300, zero_ids=(6, 5))),
    ("zero_ids", lambda: binary_code(300, zero_ids=[5])),
    ("lift", lambda: binary_code(300, lift="repeat")),
    ("code_width", lambda: affine_code(300, seed=0, code_width=8)),
    ("code_width", lambda: affine_code(300, seed=0, code_width=9.5)),
    ("seed", lambda: affine_code(300, seed=-1)),
    ("seed", lambda: affine_code(300, seed=None)),
    ("width", lambda: encode(binary_code(300), np.arange(3), 8, jnp.float32)),
    ("width", lambda: code_table(binary_code(300), np.arange(3), 8)),
    ("ids", lambda: encode(binary_code(300), np.array([1.0]), 9, jnp.float32)),
    ("ids", lambda: code_table(binary_code(300), np.array([1.0]), 9)),
    ("table", lambda: mismatches(binary_code(300), np.zeros((299, 9)))),
    ("width", lambda: mismatches(binary_code(300), np.zeros((300, 8)))),
    ("width", lambda: mismatches(binary_code(300), np.zeros((300, 0)))),
    ("table", lambda: recover(np.zeros(8))),
    ("table", lambda: recover(np.zeros((1, 8)))),
    ("table", lambda: recover(np.zeros((8, 0)))),
]


@pytest.mark.parametrize(("field", "make"), BAD_FIELDS)
def test_a_bad_field_is_named_in_one_line(field, make):
    with pytest.raises(UserError, match=f"^{field}: [^\n]+$"):
        make()


def test_the_published_codebook_is_the_binary_code_with_a_zero_padding_row():
    ids, positions = np.arange(V), np.arange(16)
    table = (ids[:, None] >> positions & 1).astype(np.float32)
    table[PAD] = 0
    code = binary_code(V, zero_ids=(PAD,))
    np.testing.assert_array_equal(code_table(code, ids, 16), table)
    assert mismatches(code, table).size == 0
    assert recover(table) == code
    assert recover(table).bit_order == "lsb"
    assert mismatches(binary_code(V), table).tolist() == [PAD]


@pytest.mark.parametrize("lift", LIFTS)
@pytest.mark.parametrize("width", [1024, 1000])
@pytest.mark.parametrize("make", [binary_code, msb_code, functools.partial(affine_code, seed=9)])
def test_a_lifted_table_of_reference_size_gives_its_code_back(make, width, lift):
    code = make(V, zero_ids=(PAD,), lift=lift)
    raw = formula(code).astype(np.uint8)
    assert recover(lifted(raw, width, lift)) == code


@given(codes_and_widths(), st.sampled_from([np.float32, bool, np.int64, ml_dtypes.bfloat16]))
def test_a_table_gives_back_the_map_at_every_position_and_the_zero_ids(case, dtype):
    code, width = case
    table = lifted(formula(code), width, code.lift).astype(dtype)
    nonzero = np.flatnonzero(table.any(axis=1)).tolist()
    assume(gf2.rank([t << 1 | 1 for t in nonzero]) == id_bits(code.vocab_size) + 1)
    found = recover(table)
    assert isinstance(found, Code)
    np.testing.assert_array_equal(maps_by_position(found, width), maps_by_position(code, width))
    plain = formula(dataclasses.replace(code, zero_ids=()))
    assert found.zero_ids == tuple(t for t in code.zero_ids if plain[t].any())
    assert found.code_width <= code.code_width
    assert found.bit_order == code.bit_order or code.bit_order is None


@pytest.mark.parametrize("make", [binary_code, msb_code])
def test_a_binary_code_is_found_whatever_its_size_and_padding_id(make):
    for vocab_size in [*range(3, 18), 33, 65]:
        for pad in range(vocab_size):
            found = recover(formula(make(vocab_size, zero_ids=(pad,))))
            assert found == make(vocab_size, zero_ids=(pad,) if pad else ())


@given(st.integers(1, 3), st.lists(st.integers(0, 7), min_size=2, max_size=8))
@settings(max_examples=300)
def test_small_tables_agree_with_trying_every_affine_map(width, rows):
    table = gf2.to_array(rows, width)
    vocab_size = len(rows)
    k = id_bits(vocab_size)
    nonzero = np.flatnonzero(table.any(axis=1))
    bits = bits_lsb_first(vocab_size)[nonzero].astype(int)
    fitting = [
        [
            (mask, b)
            for *mask, b in itertools.product((0, 1), repeat=k + 1)
            if np.array_equal((bits @ np.array(mask) + b) % 2, column)
        ]
        for column in table[nonzero].T
    ]
    ranks = [
        gf2.rank(gf2.from_array(np.array([mask for mask, _ in choice])))
        for choice in itertools.product(*fitting)
    ]
    found = recover(table)
    if isinstance(found, Code):
        np.testing.assert_array_equal(lifted(formula(found), width, found.lift), table)
        for maps in fitting:
            assert len(maps) == 1 or [sum(mask) == 1 and not b for mask, b in maps].count(True) == 1
    elif "too few" in found.reason:
        assert width < k
    elif "no affine map" in found.reason:
        assert ranks == []
    elif "more than one" in found.reason:
        assert len(ranks) > 1
    else:
        assert "rank" in found.reason
        assert len(ranks) == 1
        assert ranks[0] < k


@given(codes(vocab_sizes=st.sampled_from([32, 64, 128, 256])), st.data())
def test_a_few_bad_rows_are_listed_against_the_code_they_spoil(code, data):
    table = lifted(formula(code), 40, code.lift)
    bad = data.draw(st.sets(st.integers(0, code.vocab_size - 1), min_size=1, max_size=3))
    for row in bad:
        places = data.draw(st.sets(st.integers(0, 39), min_size=1, max_size=40))
        table[row, list(places)] ^= 1
        assume(table[row].any())
    found = recover(table.astype(np.float32))
    assert isinstance(found, NoCode)
    assert re.fullmatch(r"no affine map gives column \d+: the nearest misses \d .*", found.reason)
    assert set(found.ids) == bad
    near = found.nearest
    np.testing.assert_array_equal(maps_by_position(near, 40), maps_by_position(code, 40))


def test_bad_rows_among_65536_are_found():
    table = np.tile(formula(binary_code(V, zero_ids=(PAD,))).astype(np.uint8), 64)
    table[4, 7] ^= 1
    table[9] = table[10]
    table[33_000] = 1
    found = recover(table)
    assert found.nearest == binary_code(V, zero_ids=(PAD,))
    assert found.ids == (4, 9, 33_000)


def test_a_table_of_reals_has_no_code():
    table = np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32)
    assert recover(table) == NoCode(f"entry [0, 0] is {table[0, 0]!s}, neither 0 nor 1", (0,))


@pytest.mark.parametrize("entry", [0.0132, -1.0, np.nan, np.inf, 2.0])
def test_the_first_entry_that_is_no_bit_is_named(entry):
    table = np.zeros((V, 64), np.float32)
    table[60_000, 63] = table[60_001, 0] = entry
    assert recover(table) == NoCode(f"entry [60000, 63] is {entry}, neither 0 nor 1", (60_000,))


def test_a_duplicated_row_has_no_code():
    table = formula(binary_code(16))
    table[9] = table[5]
    assert recover(table) == NoCode(
        "no affine map gives column 2: the nearest misses 1 of the 15 rows that are not zero",
        (9,),
        binary_code(16),
    )


def test_a_singular_map_is_shown_by_two_equal_rows():
    a = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0]])
    table = (bits_lsb_first(8).astype(int) @ a.T + [1, 0, 0]) % 2
    reason = "the affine map that fits has rank 2, expected 3"
    assert recover(table) == NoCode(f"{reason}: rows 0 and 4 are equal but not zero", (0, 4))


def test_too_few_bits_have_no_code():
    assert recover(np.eye(5, 2)) == NoCode("2 bits are too few for 5 ids, which take 3")


AMBIGUOUS = [
    (0, np.zeros((8, 3))),
    (1, np.array([[0, 0], [1, 1], [0, 0]])),
    # Nothing but the sum of two bits of the id is open, in the last column.
    (4, gf2.to_array([0, 0, 0b100, 0b010, 0b001, 0b111, 0, 0], 3)),
]


@pytest.mark.parametrize(("evidence", "table"), AMBIGUOUS)
def test_too_few_rows_have_no_code(evidence, table):
    reason = f"the {evidence} rows that are not zero fit more than one affine map"
    assert recover(table) == NoCode(reason)


@given(codes_and_widths(), st.data())
def test_mismatches_are_the_rows_that_differ(case, data):
    code, width = case
    table = lifted(formula(code), width, code.lift).astype(np.float32)
    rows = data.draw(st.sets(st.integers(0, code.vocab_size - 1)))
    for row in rows:
        table[row, data.draw(st.integers(0, width - 1))] += data.draw(st.sampled_from([0.5, 2]))
    assert mismatches(code, table).tolist() == sorted(rows)
