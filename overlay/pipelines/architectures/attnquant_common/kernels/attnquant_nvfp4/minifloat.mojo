# SPDX-License-Identifier: Apache-2.0
"""Small floating-point formats, in the arithmetic of float32."""

from std.memory import bitcast

comptime _EXPONENT = UInt32(0x7F800000)
comptime _BIAS = 127
comptime _FRACTION = 23


@fieldwise_init
struct Rounded[width: SIMDLength](TrivialRegisterPassable):
    """A number of a small format: its code and, exactly, its value."""

    var code: SIMD[DType.uint32, Self.width]
    var value: SIMD[DType.float32, Self.width]


@always_inline
def rounded[
    fraction: Int, least: Int, width: SIMDLength
](value: SIMD[DType.float32, width]) -> Rounded[width]:
    """Rounds to the nearest number of a format, ties to the even code.

    Adding a power of two whose last place is the format's makes float32 do the
    rounding; what it added to the power's bits counts last places.

    Parameters:
        fraction: The format's bits of fraction.
        least: The exponent of its least normal number.
        width: The number of lanes.

    Args:
        value: From 0 to the format's greatest number.
    """
    comptime floor = Float32(
        bitcast[DType.float32](UInt32((_BIAS + least) << _FRACTION))
    )
    var exponent = bitcast[DType.uint32](max(value, floor)) & _EXPONENT
    var power = exponent + UInt32((_FRACTION - fraction) << _FRACTION)
    var power_value = bitcast[DType.float32](power)
    var sum = value + power_value
    var places = bitcast[DType.uint32](sum) - power
    var binade = (exponent >> UInt32(_FRACTION - fraction)) - UInt32(
        (_BIAS + least) << fraction
    )
    return {code = places + binade, value = sum - power_value}


@always_inline
def e2m1[
    width: SIMDLength
](value: SIMD[DType.float32, width]) -> Rounded[width]:
    """Rounds numbers from 0 to below 7 to e2m1, that is to 6 at most."""
    return rounded[fraction=1, least=0](value)


@always_inline
def e4m3[
    width: SIMDLength
](value: SIMD[DType.float32, width]) -> Rounded[width]:
    """Rounds numbers from 0 to 448 to e4m3."""
    return rounded[fraction=3, least=-6](value)


@always_inline
def e4m3_value[
    width: SIMDLength
](code: SIMD[DType.uint32, width]) -> SIMD[DType.float32, width]:
    """Returns the value of e4m3 codes from 0 to 126."""
    var normal = bitcast[DType.float32](
        (code << UInt32(_FRACTION - 3)) + UInt32((_BIAS - 7) << _FRACTION)
    )
    var subnormal = code.cast[DType.float32]() * Float32(1.0 / 512)
    return code.lt(8).select(subnormal, normal)
