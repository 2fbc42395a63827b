# SPDX-License-Identifier: Apache-2.0
"""Some rows of activations: a matrix product on the tensor cores.

As for one row, blocks share the weight's rows out evenly. A block takes 64 of
them at a time and goes through the columns, 512 a stage: a warp multiplies 16
rows by 128 columns, four warps share a row and add up at the end. A code times
its scale is exact in bfloat16 (2 and 4 significant bits), so A is the weight
itself, but for the tensor's scale.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA
from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.compute.mma import mma
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives import warp
from max.gpu.primitives.grid_controls import launch_dependent_grids
from max.gpu.primitives.grid_controls import wait_on_dependent_grids
from max.gpu.sync import syncwarp
from std.math import ceildiv
from std.memory import bitcast
from std.utils.static_tuple import StaticTuple

from . import copies
from .copies import Bytes
from .codes import DROP, codes_to_bf16, factor

comptime TILES = 4
comptime CHUNKS = 4
comptime ROWS = 16 * TILES
comptime THREADS = TILES * CHUNKS * 32
comptime PRODUCERS = 4
"""Warps that start copies: one would not start them as fast as they end."""
comptime CODE_PITCH = CHUNKS * 64 + 32
"""Four rows' 32 bytes, which half a warp reads, are in different banks."""
comptime SCALE_PITCH = CHUNKS * 8 + 16
comptime X_PITCH = CHUNKS * 256 + 16
comptime STAGE_COUNT = 4
comptime FULL = 0
comptime EMPTY = FULL + 8 * STAGE_COUNT
comptime STAGES = 128
comptime SCALES_AT = ROWS * CODE_PITCH
comptime X_AT = SCALES_AT + ROWS * SCALE_PITCH


def stage_bytes[NT: Int]() -> Int:
    return X_AT + NT * 8 * X_PITCH


def shared_bytes[NT: Int]() -> Int:
    """Bytes of shared memory that a block takes."""
    return STAGES + STAGE_COUNT * stage_bytes[NT]() + NT * 8 * ROWS * 4


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS + PRODUCERS * 32))
)
def few_rows[
    NT: Int
](
    y: Pointer[BFloat16, MutUnsafeAnyOrigin],
    x: Bytes,
    w: Bytes,
    s: Bytes,
    ws2: Pointer[Float32, ImmUnsafeAnyOrigin],
    m32: Int32,
    n32: Int32,
    k32: Int32,
):
    """Multiplies.

    Parameters:
        NT: Eights of rows of activations.

    Args:
        y: Out, [m, n].
        x: [m, k] of type bfloat16; block_idx.y has 8 NT of its rows.
        w: [n, k / 2], two codes a byte, the first in the low half.
        s: [n, k / 16].
        ws2: [1], the tensor's scale.
        m32: Rows of activations.
        n32: Rows of the weight.
        k32: Columns, a multiple of 256.
    """
    var n = Int(n32)
    var k = Int(k32)
    comptime stages = STAGE_COUNT
    var tid = Int(thread_idx.x)
    var lane = tid & 31
    var wid = tid >> 5
    var blocks = Int(grid_dim.x)
    var first = Int(block_idx.x) * n // blocks
    var end = (Int(block_idx.x) + 1) * n // blocks
    var batches = ceildiv(end - first, ROWS)
    var pieces = ceildiv(k, CHUNKS * 128)
    var m0 = Int(block_idx.y) * (8 * NT)
    var m = min(8 * NT, Int(m32) - m0)

    var shared = external_memory[
        UInt32, address_space=AddressSpace.SHARED, alignment=128
    ]()
    var base = UInt32(Int(shared))
    comptime SIZE = stage_bytes[NT]()

    launch_dependent_grids()
    if tid == 0:
        for i in range(stages):
            copies.init_barrier(base + UInt32(FULL + 8 * i), UInt32(PRODUCERS))
            copies.init_barrier(
                base + UInt32(EMPTY + 8 * i), UInt32(TILES * CHUNKS)
            )
        copies.publish_barriers()
    barrier()

    if wid >= TILES * CHUNKS:
        # The same for all lanes, and known to be.
        var producer = Int(warp.broadcast(UInt32(wid - TILES * CHUNKS)))
        var xs_from = x.unsafe_offset(m0 * (2 * k))
        var total = batches * pieces
        var ahead = min(stages, total)
        for i in range(ahead):
            weights(base, w, s, first, end, k, i, pieces, i, SIZE, m, producer)
        wait_on_dependent_grids()
        for i in range(ahead):
            activations(base, xs_from, k, i, pieces, i, SIZE, m, producer)
        var slot = 0
        var parity = UInt32(0)
        for i in range(ahead, total):
            copies.wait(base + UInt32(EMPTY + 8 * slot), parity)
            weights(base, w, s, first, end, k, i, pieces, slot, SIZE, m, producer)
            activations(base, xs_from, k, i, pieces, slot, SIZE, m, producer)
            slot += 1
            if slot == stages:
                slot = 0
                parity ^= 1
        return

    var g = lane >> 2
    var t = lane & 3
    var tile = wid & (TILES - 1)
    var chunk = wid // TILES
    var codes = (
        STAGES + (tile * 16 + g) * CODE_PITCH + chunk * 64 + t * 8
    ) // 4
    var scales = (
        STAGES + SCALES_AT + (tile * 16 + g) * SCALE_PITCH + chunk * 8
    ) // 4
    var xs = (STAGES + X_AT + g * X_PITCH + chunk * 256 + t * 32) // 4
    var byte = UInt32(t * 8)
    var sums = shared.unsafe_offset(
        (STAGES + stages * SIZE) // 4
    ).unsafe_bitcast[Float32]()
    var scale = ws2[unsafe_offset=0] * DROP

    var slot = 0
    var parity = UInt32(0)
    for batch in range(batches):
        var d = Array[SIMD[DType.float32, 4], NT](
            fill=SIMD[DType.float32, 4](0)
        )
        for piece in range(pieces):
            copies.wait(base + UInt32(FULL + 8 * slot), parity)
            var at = slot * (SIZE // 4)
            if (piece * CHUNKS + chunk) * 128 < k:
                var f0 = shared.unsafe_load[width=2, alignment=8](at + scales)
                var f1 = shared.unsafe_load[width=2, alignment=8](
                    at + scales + 8 * SCALE_PITCH // 4
                )
                comptime for half in range(2):
                    # Bytes t and t + 4 are the scales of this lane's columns.
                    var s0 = factor(f0[half] >> byte)
                    var s1 = factor(f1[half] >> byte)
                    var q0 = shared.unsafe_load[width=2, alignment=8](
                        at + codes + half * 8
                    )
                    var q1 = shared.unsafe_load[width=2, alignment=8](
                        at + codes + half * 8 + 8 * CODE_PITCH // 4
                    )
                    comptime for j in range(2):
                        var b = Array[SIMD[DType.bfloat16, 8], NT](
                            fill=SIMD[DType.bfloat16, 8](0)
                        )
                        comptime for i in range(NT):
                            # In the order of `codes_to_bf16`.
                            b[i] = bitcast[DType.bfloat16, 8](
                                shared.unsafe_load[width=4, alignment=16](
                                    at
                                    + xs
                                    + i * (8 * X_PITCH // 4)
                                    + half * 32
                                    + j * 4
                                )
                            ).shuffle[0, 4, 1, 5, 2, 6, 3, 7]()
                        comptime for e in range(2):
                            var a = SIMD[DType.bfloat16, 8]()
                            comptime for h in range(2):
                                var c0 = bitcast[DType.bfloat16, 2](
                                    codes_to_bf16[2 * e + h](q0[j])
                                ) * s0
                                var c1 = bitcast[DType.bfloat16, 2](
                                    codes_to_bf16[2 * e + h](q1[j])
                                ) * s1
                                a[4 * h] = c0[0]
                                a[4 * h + 1] = c0[1]
                                a[4 * h + 2] = c1[0]
                                a[4 * h + 3] = c1[1]
                            comptime for i in range(NT):
                                mma(
                                    d[i],
                                    a,
                                    b[i].slice[4, offset=4 * e](),
                                    d[i],
                                )
            syncwarp()
            if lane == 0:
                copies.arrive(base + UInt32(EMPTY + 8 * slot))
            slot += 1
            if slot == stages:
                slot = 0
                parity ^= 1
        comptime for c in range(CHUNKS):
            if chunk == c:
                comptime for i in range(NT):
                    comptime for v in range(4):
                        var to = (
                            (i * 8 + 2 * t + (v & 1)) * ROWS
                            + tile * 16
                            + g
                            + 8 * (v >> 1)
                        )
                        comptime if c == 0:
                            sums[unsafe_offset=to] = d[i][v]
                        else:
                            sums[unsafe_offset=to] += d[i][v]
            copies.barrier_of(UInt32(THREADS))
        var row0 = first + batch * ROWS
        for i in range(tid, m * ROWS, THREADS):
            var row = row0 + i % ROWS
            if row < end:
                y[unsafe_offset=(m0 + i // ROWS) * n + row] = (
                    sums[unsafe_offset=i] * scale
                ).cast[DType.bfloat16]()
        copies.barrier_of(UInt32(THREADS))


@always_inline
def weights(
    base: UInt32,
    w: Bytes,
    s: Bytes,
    first: Int,
    end: Int,
    k: Int,
    number: Int,
    pieces: Int,
    slot: Int,
    size: Int,
    m: Int,
    producer: Int,
):
    """Announces a stage's bytes and starts the copies of its weights."""
    var full = base + UInt32(FULL + 8 * slot)
    var row = first + number // pieces * ROWS
    var rows = min(ROWS, end - row)
    var column = number % pieces * (CHUNKS * 128)
    var columns = min(CHUNKS * 128, k - column)
    var mine = max(0, (rows - producer + PRODUCERS - 1) // PRODUCERS)
    var xs = max(0, (m - producer + PRODUCERS - 1) // PRODUCERS)
    var code_to = base + UInt32(STAGES + slot * size + producer * CODE_PITCH)
    var scale_to = base + UInt32(
        STAGES + SCALES_AT + slot * size + producer * SCALE_PITCH
    )
    var codes = w.unsafe_offset(
        (row + producer) * (k // 2) + column // 2
    )
    var scales = s.unsafe_offset(
        (row + producer) * (k // 16) + column // 16
    )
    copies.arrive_and_expect(
        full, UInt32(mine * (columns // 16 * 9) + xs * 2 * columns)
    )
    for _ in range(mine):
        copies.copy(code_to, codes, UInt32(columns // 2), full)
        copies.copy(scale_to, scales, UInt32(columns // 16), full)
        code_to += UInt32(PRODUCERS * CODE_PITCH)
        scale_to += UInt32(PRODUCERS * SCALE_PITCH)
        codes = codes.unsafe_offset(PRODUCERS * (k // 2))
        scales = scales.unsafe_offset(PRODUCERS * (k // 16))


@always_inline
def activations(
    base: UInt32,
    x: Bytes,
    k: Int,
    number: Int,
    pieces: Int,
    slot: Int,
    size: Int,
    m: Int,
    producer: Int,
):
    """Starts the copies of a stage's activations."""
    var full = base + UInt32(FULL + 8 * slot)
    var column = number % pieces * (CHUNKS * 128)
    var columns = min(CHUNKS * 128, k - column)
    var to = base + UInt32(STAGES + X_AT + slot * size + producer * X_PITCH)
    var source = x.unsafe_offset(2 * (producer * k + column))
    for _ in range(producer, m, PRODUCERS):
        copies.copy(to, source, UInt32(2 * columns), full)
        to += UInt32(PRODUCERS * X_PITCH)
        source = source.unsafe_offset(PRODUCERS * 2 * k)
