# SPDX-License-Identifier: Apache-2.0
"""NVFP4's numbers, moved into wider types bit by bit.

A code is e2m1 (OCP Microscaling Formats 1.0, 5.3.3): a sign, two bits of
exponent with bias 1, a bit of mantissa. The scale of a block of 16 is e4m3
(5.3.1), which ModelOpt writes without its sign. Moved to the lowest bits of a
wider type's exponent and the highest of its mantissa, a number, subnormal or
not, is worth a fixed power of two of what it was.
"""

from std.memory import bitcast

comptime CODES_UP = Float32(2.0) ** 126
"""What values of `codes_to_bf16` and `byte_to_bf16` lack as a factor."""

comptime SCALES_UP = Float32(2.0) ** 8
"""What values of `scales_to_float` lack as a factor."""

comptime LIFT = SCALES_UP * Float32(2.0) ** 63
comptime DROP = CODES_UP / Float32(2.0) ** 63
"""What products of codes and `factor` lack."""


@always_inline
def codes_to_bf16[i: Int](word: UInt32) -> UInt32:
    """Returns codes i and i + 4 of eight as two bfloat16, times 2^-126.

    Parameters:
        i: 0 to 3.

    Args:
        word: Eight codes, the first in the lowest bits.
    """
    return _nibbles_to_bf16((word >> UInt32(4 * i)) & 0x000F000F)


@always_inline
def byte_to_bf16[i: Int](word: UInt32) -> SIMD[DType.bfloat16, 2]:
    """Returns the two codes of a byte, times 2^-126, the low one first.

    Parameters:
        i: The byte's number, 0 to 3.

    Args:
        word: Four bytes.
    """
    var byte = (word >> UInt32(8 * i)) & 0xFF
    return bitcast[DType.bfloat16, 2](
        _nibbles_to_bf16((byte * 0x1001) & 0x000F000F)
    )


@always_inline
def _nibbles_to_bf16(nibbles: UInt32) -> UInt32:
    """Returns the lowest four bits of both halves as bfloat16."""
    # One product makes two shifts, by 12 for the sign and by 6 for the rest,
    # in the pipe that has less to do than the one for shifts.
    return (nibbles * 0x1040) & 0x81C081C0


@always_inline
def scales_to_float(word: UInt32) -> SIMD[DType.float32, 2]:
    """Returns bytes 0 and 2, e4m3 without a sign, times 2^-8."""
    return bitcast[DType.float16, 2]((word & 0x007F007F) << 7).cast[
        DType.float32
    ]()


@always_inline
def factor(word: UInt32) -> SIMD[DType.bfloat16, 2]:
    """Returns the scale in byte 0 twice, for two codes, times 2^63.

    So no product of codes and scales is subnormal; `DROP` takes it back.
    """
    return SIMD[DType.bfloat16, 2](
        (scales_to_float(word)[0] * LIFT).cast[DType.bfloat16]()
    )


@always_inline
def scale_to_float(byte: UInt8) -> Float32:
    """Returns the value of an e4m3, with its sign."""
    var half = UInt16(byte & 0x7F) << 7 | UInt16(byte & 0x80) << 8
    return bitcast[DType.float16, 1](half).cast[DType.float32]() * SCALES_UP


@always_inline
def block_to_float(codes: SIMD[DType.uint8, 8]) -> SIMD[DType.float32, 16]:
    """Returns a block's 16 values, without its scale."""
    var nibbles = (codes & 0xF).interleave(codes >> 4).cast[DType.uint16]()
    var halves = (nibbles & 7) << 9 | (nibbles & 8) << 12
    return bitcast[DType.float16, 16](halves).cast[DType.float32]() * 16384
