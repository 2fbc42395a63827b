# SPDX-License-Identifier: Apache-2.0
"""Tensors of types that numpy lacks."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from attnquant_common.tensor import STORED_AS, Tensor, from_float32
from hypothesis import example, given
from hypothesis import strategies as st

FLOATS = st.floats(width=32, allow_nan=False)


def as_float(bits: int) -> float:
    """The value of a bfloat16: the upper half of a float32."""
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


@given(FLOATS)
@example(0.0)
@example(-0.0)
@example(3.4028235e38)
@example(float("inf"))
@example(1.00390625)  # a tie: to even, down
@example(1.01171875)  # a tie: to even, up
def test_bfloat16_is_the_nearest_ties_to_even(value: float) -> None:
    """No other bfloat16 is nearer, and of two as near the even one is taken."""
    tensor = from_float32(np.array([value], np.float32), "BF16")
    bits = int(tensor.data[0])
    assert (bits >> 15) == (np.signbit(np.float32(value)))
    magnitude, size = bits & 0x7FFF, abs(value)
    # The next bfloat16 after the largest would be 2**128.
    values = [
        2.0**128 if b == 0x7F80 else as_float(b)
        for b in (max(magnitude - 1, 0), magnitude, min(magnitude + 1, 0x7F80))
    ]
    if np.isinf(value):
        assert magnitude == 0x7F80
        return
    below, found, above = (abs(v - size) for v in values)
    if values[1] != values[0]:
        assert found < below or (found == below and magnitude % 2 == 0)
    if values[1] != values[2]:
        assert found < above or (found == above and magnitude % 2 == 0)


def test_nan_stays_nan() -> None:
    """No NaN rounds to infinity, whatever its bits."""
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    tensor = from_float32(bits.view(np.float32), "BF16")
    assert np.isnan(tensor.float32()).all()


def test_every_bfloat16_survives_the_way_there_and_back() -> None:
    """Widening is exact, and what is a bfloat16 stays it, bit for bit."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[(bits & 0x7F80) != 0x7F80].reshape(-1, 2)
    wide = Tensor(finite, "BF16").float32()
    assert wide[1, 0] == as_float(int(finite[1, 0]))
    np.testing.assert_array_equal(from_float32(wide, "BF16").data, finite)


def test_chunks_meet() -> None:
    """A large array in strides of another order rounds as a small one does."""
    array = np.random.default_rng(0).standard_normal((1 << 11, 1500), "f4").T
    whole = from_float32(array, "BF16").data
    assert whole.shape == array.shape
    for row in (0, 700, 1499):
        part = from_float32(array[row], "BF16").data
        np.testing.assert_array_equal(whole[row], part)


def test_float32_and_float16_are_numpys() -> None:
    """F32 is the array itself; F16 rounds and overflows as numpy has it."""
    array = np.array([1.0, 1e30, 1e-30], np.float32)
    assert from_float32(array, "F32").float32() is array
    half = from_float32(array, "F16")
    assert half.data.tolist() == [1.0, float("inf"), 0.0]
    assert half.float32().dtype == np.float32


@pytest.mark.parametrize("dtype", sorted(STORED_AS))
def test_the_array_holds_the_type(dtype: str) -> None:
    """Each type is held by the numpy type of its width, and by no other."""
    tensor = Tensor(np.zeros((2, 3), STORED_AS[dtype]), dtype)
    assert (tensor.shape, tensor.nbytes) == ((2, 3), tensor.data.nbytes)
    with pytest.raises(ValueError, match=f"{dtype} is held as"):
        Tensor(np.zeros(2, np.complex128), dtype)


def test_other_types_are_errors() -> None:
    """What cannot be told in float32 is refused, and so is the unknown."""
    with pytest.raises(ValueError, match="not I8"):
        Tensor(np.zeros(2, np.int8), "I8").float32()
    with pytest.raises(ValueError, match="not U8"):
        from_float32(np.zeros(2, np.float32), "U8")
    with pytest.raises(ValueError, match="found float64"):
        from_float32(np.zeros(2), "BF16")
    with pytest.raises(ValueError, match="unknown tensor type 'F4'"):
        Tensor(np.zeros(2, np.uint8), "F4")
