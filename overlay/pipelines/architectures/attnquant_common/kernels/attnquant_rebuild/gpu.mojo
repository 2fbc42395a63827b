# SPDX-License-Identifier: Apache-2.0
"""On a GPU: a tile a block, and in a thread some columns of some rows.

A weight is read once and written once. What else is read is small, or near:
a column's part of `a` serves the rows of a thread from registers, and those of
a block from the cache; b's part comes through shared memory, as float32.
"""

from std.math import ceildiv
from std.memory import bitcast, unsafe_stack_allocation
from std.sys.info import size_of
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.sync import barrier

comptime ALIGNMENT = 16
"""Bytes of the widest load."""

comptime LANES = 32
"""Threads side by side in a row."""

comptime BANDS = 8
"""Groups of LANES threads, one above the other."""

comptime ROWS = 8
"""Rows of a thread."""

comptime TILE_ROWS = BANDS * ROWS
"""Rows of a tile."""

comptime CHUNK = LANES
"""Columns of b in shared memory at once: one a lane brings there."""

comptime UNROLLED = 4
"""Columns of b without a branch in between, so that loads overlap."""

comptime BLOCKS_TOGETHER = 2
"""Blocks that a multiprocessor holds at least, so that one computes while the
other waits for memory."""

comptime BLOCKS = 2048
"""Blocks that keep any GPU busy; beyond, a block does several tiles, one below
the other, for which it finds `a` in its cache."""


def rebuild_on_gpu[
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
    """Enqueues the rebuilding of w0 + b a.

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
        Error: If the launch fails.
    """

    @always_inline
    def enqueue[width: Int]() raises {imm}:
        var across = ceildiv(row, LANES * width)
        var down = min(ceildiv(rows, TILE_ROWS), max(1, BLOCKS // across))
        ctx.enqueue_function[_rebuild[dtype, width]](
            rebuilt,
            w0,
            b,
            a,
            Int32(rows),
            Int32(row),
            Int32(rank),
            grid_dim=(across, down),
            block_dim=LANES * BANDS,
        )

    comptime width = ALIGNMENT // size_of[dtype]()
    var addresses = Int(rebuilt) | Int(w0) | Int(a)
    if row % width == 0 and addresses % ALIGNMENT == 0:
        enqueue[width]()
    else:
        enqueue[1]()


@always_inline
def _as_float32[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width]) -> SIMD[DType.float32, width]:
    """Casts to float32, a pair of bfloat16 by two instructions, not three."""
    comptime if dtype == DType.bfloat16 and width > 1:
        var pairs = bitcast[DType.uint32, Int(width) // 2](values)
        var even = bitcast[DType.float32](pairs << 16)
        var odd = bitcast[DType.float32](pairs & 0xFFFF0000)
        return rebind[SIMD[DType.float32, width]](even.interleave(odd))
    else:
        return values.cast[DType.float32]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(LANES * BANDS)),
    `nvvm.minctasm`=SIMDLength(BLOCKS_TOGETHER),
)
def _rebuild[
    dtype: DType, width: Int
](
    rebuilt: Pointer[Scalar[dtype], MutUnsafeAnyOrigin],
    w0: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    b: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    a: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    rows: Int32,
    row: Int32,
    rank: Int32,
):
    """Rebuilds the tiles below each other that are the block's.

    What is read beyond an edge is read at the edge instead, so that no load
    waits for a branch.

    Parameters:
        dtype: Of the weights.
        width: Columns of a thread; it divides `row`.

    Args:
        rebuilt: Out, [rows, row].
        w0: [rows, row].
        b: [rows, rank].
        a: [rank, row].
        rows: Number of rows.
        row: Weights in a row.
        rank: Columns of b, and rows of a.
    """
    comptime alignment = width * size_of[dtype]()
    var factors = unsafe_stack_allocation[
        BANDS * CHUNK * ROWS,
        Float32,
        alignment=ALIGNMENT,
        address_space=AddressSpace.SHARED,
    ]()
    var lane = Int(thread_idx.x) % LANES
    var band = Int(thread_idx.x) // LANES
    var mine = factors.unsafe_offset(band * CHUNK * ROWS)
    var column = (Int(block_idx.x) * LANES + lane) * width
    var is_inside = column < Int(row)
    column = min(column, Int(row) - width)

    for tile in range(
        Int(block_idx.y), ceildiv(Int(rows), TILE_ROWS), Int(grid_dim.y)
    ):
        var first = tile * TILE_ROWS + band * ROWS
        var sums = StaticTuple[SIMD[DType.float32, width], ROWS]()
        comptime for i in range(ROWS):
            var n = min(first + i, Int(rows) - 1)
            sums[i] = _as_float32(
                w0.unsafe_load[width=width, alignment=alignment](
                    n * Int(row) + column
                )
            )

        @always_inline
        def add(r: Int, place: Int) {mut sums, imm}:
            """Adds b[:, r] a[r, :], of which b's part is at a place."""
            var of_a = _as_float32(
                a.unsafe_load[width=width, alignment=alignment](
                    r * Int(row) + column
                )
            )
            var of_b = mine.unsafe_load[width=ROWS, alignment=ALIGNMENT](
                place * ROWS
            )
            comptime for i in range(ROWS):
                sums[i] = of_a.fma(of_b[i], sums[i])

        for chunk in range(0, Int(rank), CHUNK):
            var brought = SIMD[DType.float32, ROWS](0)
            comptime for i in range(ROWS):
                var n = min(first + i, Int(rows) - 1)
                var r = min(chunk + lane, Int(rank) - 1)
                brought[i] = b[unsafe_offset=n * Int(rank) + r].cast[
                    DType.float32
                ]()
            barrier()
            mine.unsafe_store[alignment=ALIGNMENT](lane * ROWS, brought)
            barrier()
            var count = min(CHUNK, Int(rank) - chunk)
            var c = 0
            while c + UNROLLED <= count:
                comptime for u in range(UNROLLED):
                    add(chunk + c + u, c + u)
                c += UNROLLED
            while c < count:
                add(chunk + c, c)
                c += 1

        comptime for i in range(ROWS):
            if is_inside and first + i < Int(rows):
                rebuilt.unsafe_store[alignment=alignment](
                    (first + i) * Int(row) + column, sums[i].cast[dtype]()
                )
