# SPDX-License-Identifier: Apache-2.0
"""On a CPU: bands of rows to all cores, a run of columns in registers."""

from std.math import ceildiv
from std.sys.info import simd_width_of
from std.utils.static_tuple import StaticTuple

from max.gpu.host import DeviceContext

comptime ROWS = 4
"""Rows that share what is read of `a`."""

comptime WIDTH = 2 * simd_width_of[DType.float32]()
"""Columns of a run."""

comptime TASK = 1 << 16
"""Weights in a task, or one band of rows if that is more."""


def rebuild_on_cpu[
    dtype: DType, //
](
    rebuilt: Pointer[Scalar[dtype], MutUnsafeAnyOrigin],
    w0: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    b: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    a: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    rows: Int,
    row: Int,
    rank: Int,
    ctx: DeviceContext,
) raises:
    """Rebuilds w0 + b a.

    Args:
        rebuilt: Out, [rows, row].
        w0: [rows, row].
        b: [rows, rank].
        a: [rank, row].
        rows: Number of rows.
        row: Weights in a row.
        rank: Columns of b, and rows of a.
        ctx: The device.

    Raises:
        Error: If the tasks cannot be started.
    """
    var share = max(1, TASK // (ROWS * row)) * ROWS

    @always_inline
    def task(index: Int) {imm}:
        var n = index * share
        var last = min(n + share, rows)
        while n + ROWS <= last:
            _band[ROWS](rebuilt, w0, b, a, n, row, rank)
            n += ROWS
        while n < last:
            _band[1](rebuilt, w0, b, a, n, row, rank)
            n += 1

    # Not `std.algorithm.sync_parallelize`, which would flush subnormal numbers
    # to zero.
    ctx.enqueue_cpu_range(task, ceildiv(rows, share))
    ctx.synchronize()


@always_inline
def _band[
    dtype: DType, //, rows: Int
](
    rebuilt: Pointer[Scalar[dtype], MutUnsafeAnyOrigin],
    w0: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    b: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    a: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    first: Int,
    row: Int,
    rank: Int,
):
    """Rebuilds the `rows` rows from `first` on."""
    var k = 0
    while k + WIDTH <= row:
        _run[rows, WIDTH](rebuilt, w0, b, a, first, k, row, rank)
        k += WIDTH
    while k < row:
        _run[rows, 1](rebuilt, w0, b, a, first, k, row, rank)
        k += 1


@always_inline
def _run[
    dtype: DType, //, rows: Int, width: Int
](
    rebuilt: Pointer[Scalar[dtype], MutUnsafeAnyOrigin],
    w0: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    b: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    a: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    first: Int,
    k: Int,
    row: Int,
    rank: Int,
):
    """Rebuilds `width` columns from k on, of `rows` rows from `first` on."""
    var sums = StaticTuple[SIMD[DType.float32, width], rows](
        fill=SIMD[DType.float32, width](0)
    )
    for r in range(rank):
        var of_a = a.unsafe_load[width=width](r * row + k).cast[
            DType.float32
        ]()
        comptime for i in range(rows):
            var of_b = b[unsafe_offset=(first + i) * rank + r].cast[
                DType.float32
            ]()
            sums[i] = of_a.fma(of_b, sums[i])
    comptime for i in range(rows):
        var place = (first + i) * row + k
        var weights = w0.unsafe_load[width=width](place).cast[DType.float32]()
        rebuilt.unsafe_store(place, (weights + sums[i]).cast[dtype]())
