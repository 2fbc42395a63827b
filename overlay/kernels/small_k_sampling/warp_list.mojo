# SPDX-License-Identifier: Apache-2.0
"""The 32 best tokens of a set, held by a warp, the best first.

A list has one key a lane. A key orders tokens by logit, then by the lower
token id, so lists hold the same tokens whatever the order of their merging.

The functions take keys of any width: width 1 is one lane of a GPU's warp,
width 32 a whole list in one vector. So a CPU can run the same network.

Sorting networks: K. E. Batcher, "Sorting networks and their applications",
AFIPS 1968, https://doi.org/10.1145/1468075.1468121
"""

from std.math import iota
from std.memory import bitcast
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple

from max.gpu import lane_id
from max.gpu.primitives import warp

comptime LIST = 32
"""Tokens in a list."""

comptime NO_TOKEN = UInt64(0)
"""The key of an empty place, below every other key."""

comptime _SIGN = UInt32(1 << 31)


@always_inline
def key_of(logit: Float32, token: UInt32) -> UInt64:
    """Returns the key of a token: greater is better.

    A token whose logit is NaN or minus infinity cannot be drawn and gets the
    key of no token.
    """
    # The two zeros are equal, their bits are not.
    var bits = bitcast[DType.uint32](logit.eq(0).select(Float32(0), logit))
    var order = (bits & _SIGN).eq(0).select(bits | _SIGN, ~bits)
    var key = order.cast[DType.uint64]() << 32
    key |= (~token).cast[DType.uint64]()
    return logit.gt(neg_inf[DType.float32]()).select(key, NO_TOKEN)


@always_inline
def logit_of(key: UInt64) -> Float32:
    """Returns the logit in a key, minus infinity for no token."""
    var order = (key >> 32).cast[DType.uint32]()
    var bits = (order & _SIGN).eq(0).select(~order, order & ~_SIGN)
    return key.eq(NO_TOKEN).select(
        neg_inf[DType.float32](), bitcast[DType.float32](bits)
    )


@always_inline
def token_of(key: UInt64) -> UInt32:
    """Returns the token id in a key."""
    return ~key.cast[DType.uint32]()


@always_inline
def greatest(key: UInt64) -> UInt64:
    """Returns the greatest of a warp's keys, in every lane."""
    var result = key
    comptime for log_stride in range(5):
        result = max(result, _across[1 << log_stride](result))
    return result


@always_inline
def sort_lists[
    width: SIMDLength, count: Int
](mut lists: StaticTuple[SIMD[DType.uint64, width], count]):
    """Sorts each of some lists in descending order."""
    comptime for log_run in range(1, 6):
        comptime for log_stride in reversed(range(log_run)):
            # The lists side by side: an exchange takes long, but many fit.
            comptime for i in range(count):
                lists[i] = _exchange[1 << log_stride, 1 << log_run](lists[i])


@always_inline
def merged[
    width: SIMDLength
](a: SIMD[DType.uint64, width], b: type_of(a)) -> type_of(a):
    """Returns the 32 best keys of two sorted lists, sorted."""
    # The greater of a list's and the other's mirror image are the best 32,
    # and ascend at most once, so one pass of exchanges sorts them.
    var result = max(a, _across[LIST - 1](b))
    comptime for log_stride in reversed(range(5)):
        result = _exchange[1 << log_stride, LIST](result)
    return result


@always_inline
def _exchange[
    stride: Int, run: Int, width: SIMDLength
](keys: SIMD[DType.uint64, width]) -> type_of(keys):
    """Orders each pair of lanes `stride` apart, in runs of alternating order.
    """
    var other = _across[stride](keys)
    var lane = _lanes[width]()
    var first = (lane & UInt32(stride)).eq(0)
    var descending = (lane & UInt32(run)).eq(0)
    return first.eq(descending).select(max(keys, other), min(keys, other))


@always_inline
def _across[
    mask: Int, width: SIMDLength
](keys: SIMD[DType.uint64, width]) -> type_of(keys):
    """Returns, in each lane, the key of lane `lane ^ mask`."""
    comptime if width == 1:
        return warp.shuffle_xor(keys, UInt32(mask))
    else:
        var result = keys
        comptime for lane in range(width):
            result[lane] = keys[lane ^ mask]
        return result


@always_inline
def _lanes[width: SIMDLength]() -> SIMD[DType.uint32, width]:
    comptime if width == 1:
        return SIMD[DType.uint32, width](lane_id())
    else:
        return iota[DType.uint32, width]()
