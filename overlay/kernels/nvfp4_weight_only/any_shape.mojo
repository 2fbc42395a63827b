# SPDX-License-Identifier: Apache-2.0
"""Any shape, on any GPU: a warp a row of the weight, on the plain cores."""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.primitives import warp
from std.utils.static_tuple import StaticTuple

from .codes import block_to_float, scale_to_float

comptime WARPS = 8
comptime TOKENS = 4
"""Rows of activations of a block: a weight is decoded once for all of them."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(WARPS * 32))
)
def any_shape(
    y: Pointer[BFloat16, MutUnsafeAnyOrigin],
    x: Pointer[BFloat16, ImmUnsafeAnyOrigin],
    w: Pointer[UInt8, ImmUnsafeAnyOrigin],
    s: Pointer[UInt8, ImmUnsafeAnyOrigin],
    ws2: Pointer[Float32, ImmUnsafeAnyOrigin],
    m32: Int32,
    n32: Int32,
    k32: Int32,
):
    """Multiplies.

    Args:
        y: Out, [m, n].
        x: [m, k]; block_idx.y has `TOKENS` rows of it.
        w: [n, k / 2], two codes a byte, the first in the low half.
        s: [n, k / 16].
        ws2: [1], the tensor's scale.
        m32: Rows of activations.
        n32: Rows of the weight; block_idx.x has `WARPS` of them.
        k32: Columns, a multiple of 16.
    """
    var m = Int(m32)
    var n = Int(n32)
    var k = Int(k32)
    var lane = Int(thread_idx.x) & 31
    var row = Int(block_idx.x) * WARPS + (Int(thread_idx.x) >> 5)
    var m0 = Int(block_idx.y) * TOKENS
    if row >= n:
        return
    var codes = w.unsafe_offset(row * (k // 2))
    var scales = s.unsafe_offset(row * (k // 16))
    var sums = Array[Float32, TOKENS](fill=0)
    for block in range(lane, k // 16, 32):
        var scale = scale_to_float(scales[unsafe_offset=block])
        var values = block_to_float(
            codes.unsafe_load[width=8, alignment=8](block * 8)
        )
        comptime for i in range(TOKENS):
            var at = min(m0 + i, m - 1) * k + block * 16
            var products = values * x.unsafe_load[width=16, alignment=16](
                at
            ).cast[DType.float32]()
            sums[i] = scale.fma(products.reduce_add(), sums[i])
    comptime for i in range(TOKENS):
        var total = warp.sum(sums[i])
        if lane == 0 and m0 + i < m:
            y[unsafe_offset=(m0 + i) * n + row] = (
                total * ws2[unsafe_offset=0]
            ).cast[DType.bfloat16]()
