# SPDX-License-Identifier: Apache-2.0
"""On a CPU: the weight's rows are shared out, and each is decoded once."""

from max.algorithm import sync_parallelize
from std.math import ceildiv
from std.sys.info import num_physical_cores, simd_width_of

from .codes import block_to_float, scale_to_float

comptime ROWS = 4
"""Rows of the weight that are decoded together."""

comptime TOKENS = 2
"""Rows of activations that meet them together: their sums fit registers."""

comptime TASKS_A_CORE = 4
comptime WIDTH = min(16, simd_width_of[DType.float32]())


def cpu[
    dtype: DType
](
    y: Pointer[Scalar[dtype], MutUnsafeAnyOrigin],
    x: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    w: Pointer[UInt8, ImmUnsafeAnyOrigin],
    s: Pointer[UInt8, ImmUnsafeAnyOrigin],
    ws2: Float32,
    m: Int,
    n: Int,
    k: Int,
) raises:
    """Multiplies, with sums in float32.

    Args:
        y: Out, [m, n].
        x: [m, k].
        w: [n, k / 2], two codes a byte, the first in the low half.
        s: [n, k / 16].
        ws2: The tensor's scale.
        m: Rows of activations.
        n: Rows of the weight, at least 1.
        k: Columns, a multiple of 16.
    """
    var groups = ceildiv(n, ROWS)
    var share = ceildiv(groups, min(groups, TASKS_A_CORE * num_physical_cores()))

    def some_rows(task: Int) {imm}:
        var decoded = List[Float32](length=ROWS * k, fill=0)
        var values = decoded.unsafe_ptr()
        for group in range(task * share, min(groups, (task + 1) * share)):
            var first = group * ROWS
            var rows = min(ROWS, n - first)
            for row in range(rows):
                var codes = w.unsafe_offset((first + row) * (k // 2))
                var scales = s.unsafe_offset((first + row) * (k // 16))
                for block in range(k // 16):
                    values.unsafe_store(
                        row * k + block * 16,
                        block_to_float(codes.unsafe_load[width=8](block * 8))
                        * scale_to_float(scales[unsafe_offset=block]),
                    )
            for token in range(0, m, TOKENS):
                var sums = Array[SIMD[DType.float32, WIDTH], ROWS * TOKENS](
                    fill=0
                )
                for at in range(0, k, WIDTH):
                    var some = Array[SIMD[DType.float32, WIDTH], TOKENS](
                        fill=0
                    )
                    comptime for i in range(TOKENS):
                        some[i] = x.unsafe_load[width=WIDTH](
                            min(token + i, m - 1) * k + at
                        ).cast[DType.float32]()
                    comptime for row in range(ROWS):
                        var weights = values.unsafe_load[width=WIDTH](
                            row * k + at
                        )
                        comptime for i in range(TOKENS):
                            sums[row * TOKENS + i] = weights.fma(
                                some[i], sums[row * TOKENS + i]
                            )
                comptime for row in range(ROWS):
                    comptime for i in range(TOKENS):
                        if row < rows and token + i < m:
                            y[unsafe_offset=(token + i) * n + first + row] = (
                                sums[row * TOKENS + i].reduce_add() * ws2
                            ).cast[dtype]()

    sync_parallelize(some_rows, ceildiv(groups, share))
