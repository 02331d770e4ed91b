"""Conversions of 16-bit floats against torch, on every bit pattern, and float32 by hypothesis."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.dtypes import BLOCK, STORAGE, flat_blocks, narrow, widen

PATTERNS = np.arange(2**16, dtype=np.uint16)
HALVES = ("bfloat16", "float16")
WIDE_BITS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50)


def widened(dtype):
    out = np.empty(2**16, np.float32)
    widen(PATTERNS.view(STORAGE[dtype]), dtype, out)
    return out


def torch_widened(dtype):
    torch = pytest.importorskip("torch")
    bits = torch.from_numpy(PATTERNS.view(np.int16).copy())
    return bits.view(getattr(torch, dtype)).float().numpy()


@pytest.mark.parametrize("dtype", HALVES)
def test_every_pattern_widens_to_the_value_that_torch_gives(dtype):
    ours, theirs = widened(dtype), torch_widened(dtype)
    number = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), ~number)
    np.testing.assert_array_equal(ours[number].view(np.uint32), theirs[number].view(np.uint32))


@pytest.mark.parametrize(("dtype", "mantissa_bits"), [("bfloat16", 7), ("float16", 10)])
def test_a_widened_nan_keeps_sign_and_payload(dtype, mantissa_bits):
    bits = widened(dtype).view(np.uint32)
    nan = np.isnan(widened(dtype))
    payload = PATTERNS & (2**mantissa_bits - 1)
    assert nan.sum() == 2 * (2**mantissa_bits - 1)
    np.testing.assert_array_equal(bits[nan] >> 31, PATTERNS[nan] >> 15)
    np.testing.assert_array_equal(
        bits[nan] & 0x7FFFFF, payload[nan].astype(np.uint32) << (23 - mantissa_bits)
    )


@pytest.mark.parametrize("dtype", HALVES)
def test_narrowing_undoes_widening_on_every_pattern(dtype):
    np.testing.assert_array_equal(narrow(widened(dtype), dtype).view(np.uint16), PATTERNS)


@pytest.mark.parametrize("dtype", HALVES)
@given(bits=WIDE_BITS)
def test_narrowing_rounds_as_torch_does(dtype, bits):
    torch = pytest.importorskip("torch")
    values = np.array(bits, np.uint32).view(np.float32)
    theirs = torch.from_numpy(values).to(getattr(torch, dtype))
    if dtype == "float16":
        fits = ~(np.isinf(theirs.numpy()) & np.isfinite(values))
        values, theirs = values[fits], theirs[torch.from_numpy(fits)]
    number = ~np.isnan(values)
    ours = narrow(values, dtype).view(np.uint16)
    expected = theirs.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(ours[number], expected[number])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_a_narrowed_nan_stays_a_nan_of_its_sign(dtype, bits):
    stored = narrow(np.array([bits], np.uint32).view(np.float32), dtype)
    out = np.empty(1, np.float32)
    widen(stored, dtype, out)
    assert np.isnan(out[0])
    assert np.signbit(out[0]) == (bits >> 31)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1 + 2**-8, 0x3F80),  # halfway, to the even one below
        (1 + 3 * 2**-8, 0x3F82),  # halfway, to the even one above
        (1 + 2**-7, 0x3F81),
        (-0.0, 0x8000),
        (2.0**-133, 0x0001),
        (2.0**-134, 0x0000),
        (np.finfo(np.float32).max, 0x7F80),
    ],
)
def test_bfloat16_by_hand(value, bits):
    assert narrow(np.array([value], np.float32), "bfloat16")[0] == bits


@pytest.mark.parametrize(("value", "fits"), [(65504, True), (65519, True), (65520, False)])
def test_float16_holds_what_rounds_to_65504_or_less(value, fits):
    values = np.array([value, np.inf], np.float32)
    if fits:
        assert narrow(values, "float16").tolist() == [65504, np.inf]
    else:
        with pytest.raises(FloatingPointError):
            narrow(values, "float16")


@pytest.mark.parametrize(
    "array",
    [
        np.array(3.0),
        np.empty((4, 0)),
        np.arange(2 * BLOCK + 5),
        np.arange(700 * 800).reshape(700, 800).T,
        np.arange(6 * BLOCK).reshape(-1, 3).T,
        np.arange(2 * 700 * 800).reshape(2, 700, 800).transpose(0, 2, 1),
        np.arange(40).reshape(5, 8)[::2, ::-1],
    ],
    ids=["scalar", "empty", "flat", "transposed", "long rows", "stack", "strided"],
)
def test_the_blocks_of_an_array_are_its_elements_in_order(array):
    blocks = list(flat_blocks(array))
    assert all(block.flags.c_contiguous and 0 < block.size <= BLOCK for block in blocks)
    np.testing.assert_array_equal(
        np.concatenate([np.empty(0, array.dtype), *blocks]), array.ravel()
    )
