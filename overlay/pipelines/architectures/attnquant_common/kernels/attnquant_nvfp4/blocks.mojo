# SPDX-License-Identifier: Apache-2.0
"""How blocks of 16 weights are quantized, one block a lane.

The arithmetic is ModelOpt's, step by step in float32, so that the bytes are
its bytes. Sums of squares are of float32 values in float64, where a square is
exact: so it makes no difference whether a compiler fuses it with the addition,
and every device finds the same sum.

Source: `NVFP4QTensor` in
https://github.com/NVIDIA/Model-Optimizer/blob/main/modelopt/torch/quantization/qtensor/nvfp4_tensor.py
"""

from std.memory import bitcast
from std.utils.static_tuple import StaticTuple

from .minifloat import e2m1, e4m3, e4m3_value
from .quotient import Divisor

comptime BLOCK = 16
"""Weights that share a scale."""

comptime FIRST_NEIGHBOUR = -2
comptime LAST_NEIGHBOUR = 7
"""The ten scales of a sweep, counted in codes from round-to-nearest's.

On Gaussian, Student's t and Laplace weights no block gained from a wider sweep.
"""

comptime _INFINITE = UInt32(0x7F800000)
comptime _MAGNITUDE = UInt32(0x7FFFFFFF)
comptime _GREATEST_SCALE = UInt32(126)
comptime _NOT_A_SCALE = UInt32(127)

comptime Weights[width: SIMDLength] = StaticTuple[
    SIMD[DType.float32, width], BLOCK
]
"""Blocks of weights: element i of the block in each lane."""


@fieldwise_init
struct Quantized[width: SIMDLength](TrivialRegisterPassable):
    """Quantized blocks."""

    var low: SIMD[DType.uint32, Self.width]
    """Codes 0 to 7, the first in the lowest bits."""
    var high: SIMD[DType.uint32, Self.width]
    """Codes 8 to 15."""
    var scale: SIMD[DType.uint32, Self.width]
    """The code of the scale in e4m3; NaN's for a block that is not finite."""


@always_inline
def has_reciprocals(scale_2: Float32) -> Bool:
    """Says whether all scales are in the range of division by reciprocals."""
    # A block's scale is from 2^-9 to 448 < 2^9 times this.
    return scale_2 >= Float32(2.0**-50) and scale_2 <= Float32(2.0**50)


@always_inline
def quantized[
    sweep: Bool, by_reciprocal: Bool, width: SIMDLength
](weights: Weights[width], scale_2: Float32) -> Quantized[width]:
    """Quantizes blocks.

    Parameters:
        sweep: Whether to try the neighbouring scales too.
        by_reciprocal: Whether to divide by reciprocals: the same bytes, sooner,
            where `has_reciprocals(scale_2)`.
        width: The number of blocks.

    Args:
        weights: The blocks.
        scale_2: The scale of scales, a normal number above 0.
    """
    var greatest = SIMD[DType.uint32, width](0)
    comptime for i in range(BLOCK):
        greatest = max(
            greatest, bitcast[DType.uint32](weights[i]) & _MAGNITUDE
        )
    var ideal = bitcast[DType.float32](greatest) / (6 * scale_2)
    ideal = ideal.eq(0).select(SIMD[DType.float32, width](1), ideal)
    var scale = e4m3(min(max(ideal, Float32(1.0 / 512)), Float32(448)))
    var best = _with_scale[with_error=sweep](
        weights, Divisor[width, by_reciprocal](scale.value * scale_2)
    )

    comptime if sweep:
        # By more than the rounding of errors, so that none gets worse.
        best.error *= Float64(1 - 1.0 / (1 << 20))
        var best_scale = scale.code
        for step in range(FIRST_NEIGHBOUR, LAST_NEIGHBOUR + 1):
            if step == 0:
                continue
            # A step below the least scale wraps around to a great number.
            var code = scale.code + UInt32(step)
            var is_scale = code.ge(1) & code.le(_GREATEST_SCALE)
            code = is_scale.select(code, scale.code)
            var other = _with_scale[with_error=True](
                weights,
                Divisor[width, by_reciprocal](e4m3_value(code) * scale_2),
            )
            var better = other.error.lt(best.error)
            best.low = better.select(other.low, best.low)
            best.high = better.select(other.high, best.high)
            best.error = better.select(other.error, best.error)
            best_scale = better.select(code, best_scale)
        scale.code = best_scale

    var finite = greatest.lt(_INFINITE)
    return {
        low = best.low,
        high = best.high,
        scale = finite.select(scale.code, _NOT_A_SCALE),
    }


@fieldwise_init
struct _Candidate[width: SIMDLength](TrivialRegisterPassable):
    var low: SIMD[DType.uint32, Self.width]
    var high: SIMD[DType.uint32, Self.width]
    var error: SIMD[DType.float64, Self.width]


@always_inline
def _with_scale[
    with_error: Bool, width: SIMDLength, by_reciprocal: Bool
](
    weights: Weights[width], scale: Divisor[width, by_reciprocal]
) -> _Candidate[width]:
    """Quantizes blocks with given scales, and sums the squared errors."""
    var result = _Candidate[width](0, 0, 0)
    # Quotients up to 7 round to the greatest code, 6, and others must not
    # leave the range of numbers.
    var most = scale.value * Float32(6.5)
    comptime for i in range(BLOCK):
        var magnitude = abs(weights[i])
        var quotient = scale.divide(min(magnitude, most))
        var rounded = e2m1(quotient)
        # No sign, as without one in the quotient, where that is zero.
        var is_negative = weights[i].lt(0) & quotient.gt(0)
        var code = is_negative.select(rounded.code | 8, rounded.code)
        comptime if i < BLOCK // 2:
            result.low |= code << UInt32(4 * i)
        else:
            result.high |= code << UInt32(4 * i - 32)
        comptime if with_error:
            var error = (-rounded.value).fma(scale.value, magnitude)
            var wide = error.cast[DType.float64]()
            result.error += wide * wide
    return result
