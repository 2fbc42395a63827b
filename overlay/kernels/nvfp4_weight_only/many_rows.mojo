# SPDX-License-Identifier: Apache-2.0
"""Many rows of activations: `wgmma`, whose A is decoded into registers.

A block has 128 rows of the weight, 64 a warp group, and NT rows of
activations, and goes through the columns, 64 a stage. While one warp group
decodes, the other's products run.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.compute.mma import WGMMADescriptor, wgmma_async
from max.gpu.compute.mma import wgmma_commit_group_sync, wgmma_fence_aligned
from max.gpu.compute.mma import wgmma_wait_group_sync
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.primitives.grid_controls import launch_dependent_grids
from max.gpu.primitives.grid_controls import wait_on_dependent_grids
from std.sys._assembly import inlined_assembly
from std.utils.static_tuple import StaticTuple

from . import copies
from .copies import Bytes
from .codes import DROP, byte_to_bf16, factor

comptime ROWS = 128
comptime COLUMNS = 64
comptime STAGES = 4
comptime CONSUMERS = 256
comptime THREADS = CONSUMERS + 128
comptime Y_PITCH = ROWS + 8
"""Elements from one row of results to the next, in shared memory."""


def shared_bytes[NT: Int]() -> Int:
    """Bytes of shared memory that a block takes, with 1024 to align it."""
    return 1024 + STAGES * (NT * 128 + ROWS * 36) + 16 * STAGES


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
)
def many_rows[
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
        NT: Rows of activations of a block, 64, 128 or 256.

    Args:
        y: Out, [m, n].
        x: [m, k] of type bfloat16; block_idx.x has NT of its rows.
        w: [n, k / 2], two codes a byte; block_idx.y has 128 of its rows.
        s: [n, k / 16].
        ws2: [1], the tensor's scale.
        m32: Rows of activations.
        n32: Rows of the weight.
        k32: Columns, a multiple of 64.
    """
    var m = Int(m32)
    var n = Int(n32)
    var k = Int(k32)
    var tid = Int(thread_idx.x)
    var m0 = Int(block_idx.x) * NT
    var n0 = Int(block_idx.y) * ROWS
    var pieces = k // COLUMNS

    var dynamic = external_memory[
        UInt32, address_space=AddressSpace.SHARED, alignment=1024
    ]()
    var base = (UInt32(Int(dynamic)) + 1023) & ~UInt32(1023)
    var shared = dynamic.unsafe_offset(
        Int(base - UInt32(Int(dynamic))) // 4
    )
    comptime X = NT * 128
    comptime CODES = STAGES * X
    comptime SCALES = CODES + STAGES * ROWS * 32
    comptime FULL = SCALES + STAGES * ROWS * 4
    comptime EMPTY = FULL + 8 * STAGES

    launch_dependent_grids()
    if tid == 0:
        for i in range(STAGES):
            copies.init_barrier(base + UInt32(FULL + 8 * i), 128)
            copies.init_barrier(
                base + UInt32(EMPTY + 8 * i), UInt32(CONSUMERS // 32)
            )
        copies.publish_barriers()
    barrier()

    if tid >= CONSUMERS:
        warpgroup_reg_dealloc[40]()
        wait_on_dependent_grids()
        var one = tid - CONSUMERS
        var row = min(n0 + one, n - 1)
        var codes = w.unsafe_offset(row * (k // 2))
        var scales = s.unsafe_offset(row * (k // 16))
        var chunk = one & 7
        var r = one >> 3
        var activations = x.unsafe_offset(
            ((m0 + r) * k + chunk * 8) * 2
        )
        var slot = 0
        var parity = UInt32(1)
        for piece in range(pieces):
            copies.wait(base + UInt32(EMPTY + 8 * slot), parity)
            # What is not copied makes columns that nobody stores.
            var to = base + UInt32(
                slot * X + r * 128 + ((chunk ^ (r & 7)) << 4)
            )
            var source = activations.unsafe_offset(
                piece * (COLUMNS * 2)
            )
            for _ in range(m0 + r, min(m0 + NT, m), 16):
                copies.copy16(to, source)
                to += 16 * 128
                source = source.unsafe_offset(16 * 2 * k)
            comptime for i in range(2):
                copies.copy16(
                    base
                    + UInt32(CODES + slot * (ROWS * 32) + one * 32 + i * 16),
                    codes.unsafe_offset(piece * (COLUMNS // 2) + i * 16),
                )
            copies.copy4(
                base + UInt32(SCALES + slot * (ROWS * 4) + one * 4),
                scales.unsafe_offset(piece * (COLUMNS // 16)),
            )
            copies.arrive_when_copied(base + UInt32(FULL + 8 * slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                parity ^= 1
        return

    warpgroup_reg_alloc[232]()
    var lane = tid & 31
    var g = lane >> 2
    var t = lane & 3
    var row0 = (tid >> 5) * 16 + g
    # Selects byte t of one word and byte t of another.
    var select = UInt32(t | (t + 4) << 4)
    var d = SIMD[DType.float32, NT // 2](0)
    var slot = 0
    var parity = UInt32(0)
    for _ in range(pieces):
        copies.wait(base + UInt32(FULL + 8 * slot), parity)
        copies.publish_shared()
        var at = (CODES + slot * (ROWS * 32) + row0 * 32) // 4
        var scales_at = (SCALES + slot * (ROWS * 4)) // 4 + row0
        var f0 = shared[unsafe_offset=scales_at]
        var f1 = shared[unsafe_offset=scales_at + 8]
        var q0 = shared.unsafe_load[width=8, alignment=16](at)
        var q1 = shared.unsafe_load[width=8, alignment=16](at + 64)
        var a = Array[SIMD[DType.bfloat16, 8], 4](
            fill=SIMD[DType.bfloat16, 8](0)
        )
        comptime for i in range(4):
            var s0 = factor(f0 >> UInt32(8 * i))
            var s1 = factor(f1 >> UInt32(8 * i))
            var b0 = permute(q0[2 * i], q0[2 * i + 1], select)
            var b1 = permute(q1[2 * i], q1[2 * i + 1], select)
            a[i] = (
                (byte_to_bf16[0](b0) * s0).join(byte_to_bf16[0](b1) * s1)
            ).join((byte_to_bf16[1](b0) * s0).join(byte_to_bf16[1](b1) * s1))
        wgmma_fence_aligned()
        comptime for i in range(4):
            var start = Int64(
                (base + UInt32(slot * X + i * 32)) >> 4
            )
            # K-major, rows of 128 bytes, eights of them, swizzled.
            var desc = WGMMADescriptor[DType.bfloat16](
                start | Int64(1) << 16 | Int64(1024 >> 4) << 32 | Int64(1) << 62
            )
            d = wgmma_async[
                64,
                NT,
                16,
                a_type=DType.bfloat16,
                b_type=DType.bfloat16,
            ](a[i], desc, d)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[0]()
        if lane == 0:
            copies.arrive(base + UInt32(EMPTY + 8 * slot))
        slot += 1
        if slot == STAGES:
            slot = 0
            parity ^= 1

    # Through shared memory, whose stages are done with, for whole lines.
    copies.barrier_of(UInt32(CONSUMERS))
    var scale = ws2[unsafe_offset=0] * DROP
    var out = shared.unsafe_bitcast[BFloat16]()
    comptime for j in range(NT // 8):
        comptime for v in range(4):
            var token = 8 * j + 2 * t + (v & 1)
            out[unsafe_offset=token * Y_PITCH + row0 + 8 * (v >> 1)] = (d[4 * j + v] * scale).cast[DType.bfloat16]()
    copies.barrier_of(UInt32(CONSUMERS))
    for i in range(tid, NT * ROWS // 8, CONSUMERS):
        var r = i // (ROWS // 8)
        var c = i % (ROWS // 8) * 8
        if m0 + r < m and n0 + c < n:
            var to = y.unsafe_offset((m0 + r) * n + n0 + c)
            var values = out.unsafe_load[width=8, alignment=16](r * Y_PITCH + c)
            if n % 8 == 0:
                to.unsafe_store[alignment=16](values)
            else:
                comptime for v in range(8):
                    if n0 + c + v < n:
                        to[unsafe_offset=v] = values[v]


@always_inline
def permute(low: UInt32, high: UInt32, select: UInt32) -> UInt32:
    """Selects four of eight bytes."""
    return inlined_assembly[
        "prmt.b32 $0, $1, $2, $3;",
        UInt32,
        constraints="=r,r,r,r",
        has_side_effect=False,
    ](low, high, select)
