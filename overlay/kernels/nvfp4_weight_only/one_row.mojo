# SPDX-License-Identifier: Apache-2.0
"""One row of activations: a GEMV on the tensor cores.

The block of thread blocks shares the weight's rows out evenly, to two rows,
and each reads its own once, 16 rows and some hundred columns a stage. A warp
multiplies 16 rows by 128 columns: eight `mma.m16n8k16`, with codes as A and
activations as a B that is block-diagonal, column n with the activations of one
scale's 16 columns alone. So one accumulator keeps eight scales' sums apart,
and a scale is applied once to a sum instead of to sixteen products.
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
from .codes import CODES_UP, SCALES_UP, codes_to_bf16, scales_to_float

comptime V4 = SIMD[DType.uint32, 4]
comptime CHUNK = 128
comptime MAX_WARPS = 18
comptime PRODUCERS = 4
"""Warps that start copies: one would not start them as fast as they end."""
comptime FEWEST_STAGES = 3
comptime MOST_STAGES = 4
comptime SHARED_BYTES = 113 * 1024
"""What two blocks have of a multiprocessor: one may start while another ends."""
comptime X_UP = Float32(2.0) ** 64
"""Puts activations where their products with codes are not subnormal."""
comptime Y_UP = CODES_UP * SCALES_UP / X_UP

comptime ZEROS = 0
comptime FULL = 32
comptime EMPTY = FULL + 8 * MOST_STAGES
comptime STAGES = 256


@always_inline
def code_pitch(chunks: Int) -> Int:
    """Bytes from row to row of a stage's codes: an odd multiple of 64.

    Then a quarter of a warp, which reads 64 bytes of two rows, has each bank
    once.
    """
    return chunks * 64 + (64 if chunks % 2 == 0 else 0)


@always_inline
def scale_pitch(chunks: Int) -> Int:
    """Bytes from row to row of a stage's scales, not a multiple of 128."""
    return chunks * 8 + (16 if chunks % 16 == 0 else 0)


@always_inline
def stage_bytes(chunks: Int) -> Int:
    """Bytes of a stage."""
    return 16 * (code_pitch(chunks) + scale_pitch(chunks))


@fieldwise_init
struct Plan(TrivialRegisterPassable):
    """How a block goes through its rows."""

    var chunks: Int
    """The warps that multiply: a stage has 128 columns for each."""

    var stages: Int
    """How many stages are under way; too few if the shape has no plan."""

    var shared_bytes: Int
    """What of shared memory a block takes."""


def plan(n: Int, k: Int, blocks: Int) -> Plan:
    """Plans for a weight.

    Args:
        n: Its rows.
        k: Its columns.
        blocks: The thread blocks that there will be.
    """
    var chunks = 0
    if k % 128 == 0:
        var all = k // 128
        # Copies start at and have multiples of 16 bytes.
        if all % 2 == 1 and all <= MAX_WARPS and n % 2 == 0:
            chunks = all
        if all % 2 == 0:
            for warps in range(2, MAX_WARPS + 1, 2):
                if all % warps == 0:
                    chunks = warps
    if chunks == 0:
        return Plan(0, 0, 0)
    var tiles = ceildiv(2 * ceildiv(ceildiv(n, 2), blocks), 16)
    var fixed = STAGES + 2 * k + tiles * chunks * 64
    var stages = min(MOST_STAGES, (SHARED_BYTES - fixed) // stage_bytes(chunks))
    return Plan(chunks, stages, fixed + stages * stage_bytes(chunks))


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32((MAX_WARPS + PRODUCERS) * 32)
    )
)
def one_row(
    y: Pointer[BFloat16, MutUnsafeAnyOrigin],
    x: Pointer[BFloat16, ImmUnsafeAnyOrigin],
    w: Bytes,
    s: Bytes,
    ws2: Pointer[Float32, ImmUnsafeAnyOrigin],
    n32: Int32,
    k32: Int32,
    chunks32: Int32,
    stages32: Int32,
):
    """Multiplies.

    Args:
        y: Out, [n].
        x: [k].
        w: [n, k / 2], two codes a byte, the first in the low half.
        s: [n, k / 16].
        ws2: [1], the tensor's scale.
        n32: Rows of the weight, even if k is no multiple of 256.
        k32: Columns, a multiple of 128.
        chunks32: The warps that multiply: a stage has so many times 128
            columns. Even, or all columns.
        stages32: How many stages are under way, 2 to 8.
    """
    var n = Int(n32)
    var k = Int(k32)
    var chunks = Int(chunks32)
    var stages = Int(stages32)
    var tid = Int(thread_idx.x)
    var lane = tid & 31
    var wid = tid >> 5
    var pairs = (n + 1) // 2
    var blocks = Int(grid_dim.x)
    var first = 2 * (Int(block_idx.x) * pairs // blocks)
    var end = min(n, 2 * ((Int(block_idx.x) + 1) * pairs // blocks))
    var tiles = ceildiv(end - first, 16)
    var pieces = k // (chunks * CHUNK)
    var total = tiles * pieces

    var shared = external_memory[
        UInt32, address_space=AddressSpace.SHARED, alignment=128
    ]()
    var base = UInt32(Int(shared))
    var size = stage_bytes(chunks)
    var x_words = (STAGES + stages * size) // 4
    var sums = shared.unsafe_offset(x_words + k // 2).unsafe_bitcast[Float32]()

    launch_dependent_grids()
    if tid < 8:
        shared[unsafe_offset=tid] = 0
    if tid == 0:
        for i in range(stages):
            copies.init_barrier(
                base + UInt32(FULL + 8 * i), UInt32(PRODUCERS)
            )
            copies.init_barrier(base + UInt32(EMPTY + 8 * i), UInt32(chunks))
        copies.publish_barriers()
    barrier()
    if wid >= chunks:
        produce(
            base, w, s, first, end, k, chunks, stages, total, wid - chunks
        )
        return

    var g = lane >> 2
    var t = lane & 3
    wait_on_dependent_grids()
    for i in range(tid, k // 8, chunks * 32):
        var v = x.unsafe_load[width=8, alignment=16](i * 8)
        var z = (v.cast[DType.float32]() * X_UP).cast[DType.bfloat16]()
        # The order in which `codes_to_bf16` gives eight codes.
        var q = z.shuffle[0, 4, 1, 5, 2, 6, 3, 7]()
        shared.unsafe_store[alignment=16](x_words + i * 4, bitcast[DType.uint32, 4](q))
    copies.barrier_of(UInt32(chunks * 32))

    var shift = UInt32((t >> 1) * 8)
    var x0 = x_words + wid * 64 + t * 16 if g == t else 0
    var x1 = x_words + wid * 64 + t * 16 + 8 if g == t + 4 else 0
    var step0 = chunks * 64 if g == t else 0
    var step1 = chunks * 64 if g == t + 4 else 0
    var codes = STAGES // 4 + (g * code_pitch(chunks) + wid * 64 + t * 16) // 4
    var scales = (
        STAGES // 4
        + (
            16 * code_pitch(chunks)
            + g * scale_pitch(chunks)
            + wid * 8
            + (t & 1) * 4
        )
        // 4
    )
    var code8 = 8 * code_pitch(chunks) // 4
    var scale8 = 8 * scale_pitch(chunks) // 4

    var slot = 0
    var parity = UInt32(0)
    for tile in range(tiles):
        var sum0 = Float32(0)
        var sum1 = Float32(0)
        var at0 = x0
        var at1 = x1
        for _ in range(pieces):
            copies.wait(base + UInt32(FULL + 8 * slot), parity)
            var at = slot * (size // 4)
            var q0 = shared.unsafe_load[width=4, alignment=16](at + codes)
            var q1 = shared.unsafe_load[width=4, alignment=16](
                at + codes + code8
            )
            var f0 = shared[unsafe_offset=at + scales] >> shift
            var f1 = shared[unsafe_offset=at + scales + scale8] >> shift
            syncwarp()
            if lane == 0:
                copies.arrive(base + UInt32(EMPTY + 8 * slot))
            slot += 1
            if slot == stages:
                slot = 0
                parity ^= 1

            var d = SIMD[DType.float32, 4](0)
            comptime for j in range(4):
                var b: V4
                comptime if j < 2:
                    b = shared.unsafe_load[width=4, alignment=16](at0 + j * 4)
                else:
                    b = shared.unsafe_load[width=4, alignment=16](at1 + (j - 2) * 4)
                comptime for e in range(2):
                    var a = V4(
                        codes_to_bf16[2 * e](q0[j]),
                        codes_to_bf16[2 * e](q1[j]),
                        codes_to_bf16[2 * e + 1](q0[j]),
                        codes_to_bf16[2 * e + 1](q1[j]),
                    )
                    mma(
                        d,
                        bitcast[DType.bfloat16, 8](a),
                        bitcast[DType.bfloat16, 4](
                            SIMD[DType.uint32, 2](b[2 * e], b[2 * e + 1])
                        ),
                        d,
                    )
            var e0 = scales_to_float(f0)
            var e1 = scales_to_float(f1)
            sum0 = d[0].fma(e0[0], d[1].fma(e0[1], sum0))
            sum1 = d[2].fma(e1[0], d[3].fma(e1[1], sum1))
            at0 += step0
            at1 += step1
        sum0 += warp.shuffle_xor(sum0, UInt32(1))
        sum1 += warp.shuffle_xor(sum1, UInt32(1))
        sum0 += warp.shuffle_xor(sum0, UInt32(2))
        sum1 += warp.shuffle_xor(sum1, UInt32(2))
        if t == 0:
            sums[unsafe_offset=(tile * chunks + wid) * 16 + g] = sum0
            sums[unsafe_offset=(tile * chunks + wid) * 16 + g + 8] = sum1
    copies.barrier_of(UInt32(chunks * 32))
    var scale = ws2[unsafe_offset=0] * Y_UP
    for row in range(tid, end - first, chunks * 32):
        var total_ = Float32(0)
        for c in range(chunks):
            total_ += sums[
                unsafe_offset=((row >> 4) * chunks + c) * 16 + (row & 15)
            ]
        y[unsafe_offset=first + row] = (total_ * scale).cast[DType.bfloat16]()


@always_inline
def produce(
    base: UInt32,
    w: Bytes,
    s: Bytes,
    first: Int,
    end: Int,
    k: Int,
    chunks: Int,
    stages: Int,
    total: Int,
    producer: Int,
):
    """Fills its rows of stage after stage, as they are read out."""
    var pieces = k // (chunks * CHUNK)
    var size = UInt32(stage_bytes(chunks))
    var slot = 0
    var parity = UInt32(1)  # a barrier's phase before the first is complete
    var row = first
    var piece = 0
    for _ in range(total):
        var full = base + UInt32(FULL + 8 * slot)
        var stage = base + UInt32(STAGES) + UInt32(slot) * size
        var code_to = stage + UInt32(producer * code_pitch(chunks))
        var scale_to = stage + UInt32(
            16 * code_pitch(chunks) + producer * scale_pitch(chunks)
        )
        var mine = row + producer
        var codes = w.unsafe_offset(
            mine * (k // 2) + piece * chunks * 64
        )
        var scales = s.unsafe_offset(
            mine * (k // 16) + piece * chunks * 8
        )
        copies.wait(base + UInt32(EMPTY + 8 * slot), parity)
        var rows = max(0, min(16, end - row) - producer + PRODUCERS - 1)
        rows //= PRODUCERS
        if chunks % 2 == 0:
            copies.arrive_and_expect(full, UInt32(rows * chunks * 72))
            for _ in range(rows):
                copies.copy(code_to, codes, UInt32(chunks * 64), full)
                copies.copy(scale_to, scales, UInt32(chunks * 8), full)
                code_to += UInt32(PRODUCERS * code_pitch(chunks))
                scale_to += UInt32(PRODUCERS * scale_pitch(chunks))
                codes = codes.unsafe_offset(PRODUCERS * (k // 2))
                scales = scales.unsafe_offset(PRODUCERS * (k // 16))
        else:
            # All columns: the scales of all rows lie together.
            var all = min(16, end - row) * (k // 16) if producer == 0 else 0
            copies.arrive_and_expect(full, UInt32(rows * chunks * 64 + all))
            for _ in range(rows):
                copies.copy(code_to, codes, UInt32(chunks * 64), full)
                code_to += UInt32(PRODUCERS * code_pitch(chunks))
                codes = codes.unsafe_offset(PRODUCERS * (k // 2))
            if all > 0:
                copies.copy(scale_to, scales, UInt32(all), full)
        piece += 1
        if piece == pieces:
            piece = 0
            row += 16
        slot += 1
        if slot == stages:
            slot = 0
            parity ^= 1
