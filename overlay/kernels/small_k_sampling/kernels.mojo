# SPDX-License-Identifier: Apache-2.0
"""The two launches: the best tokens of every tile, then a token for every row.

Each row's k is read on the device, so a captured graph follows it from replay
to replay. A row whose k is not small skips the first launch, and in the second
runs the built-in kernel unchanged.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation
from std.random import Random
from std.utils.numerics import inf
from std.utils.static_tuple import StaticTuple

from layout import TileTensor, row_major
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    lane_id,
    thread_idx,
    warp_id,
)
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from max.gpu.primitives import block, warp
from max.gpu.primitives.grid_controls import (
    PDLLevel,
    launch_dependent_grids,
    pdl_launch_attributes,
    wait_on_dependent_grids,
)
from max.gpu.sync import barrier
from nn.sampling.topk_fi import TopKTopPSamplingFromProbKernel

from .draw import choices, drawn, inverse_of, weight
from .warp_list import (
    LIST,
    NO_TOKEN,
    greatest,
    key_of,
    logit_of,
    merged,
    sort_lists,
    token_of,
)

comptime LOGITS_PER_LANE = 8
comptime TILE_WARPS = 8
comptime TILE = TILE_WARPS * 32 * LOGITS_PER_LANE
"""Logits that a block of the first launch reads."""

comptime ROW_THREADS = 1024
"""Threads of a block of the second launch; the built-in kernel's number."""


@always_inline
def is_small(k: Int64) -> Bool:
    """Says whether a list settles a row, unless many tokens tie."""
    return k >= 1 and k < LIST


@always_inline
def _best_of_block[warps: Int](mine: UInt64) -> UInt64:
    """Merges the sorted lists of a block's warps; warp 0 gets the result.

    Parameters:
        warps: The number of warps, a power of two.
    """
    var lists = unsafe_stack_allocation[
        warps * LIST, UInt64, address_space=AddressSpace.SHARED
    ]()
    var warp_index = Int(warp_id())
    var lane = Int(lane_id())
    var best = mine
    var half = warps // 2
    while half > 0:
        lists[unsafe_offset=warp_index * LIST + lane] = best
        barrier()
        if warp_index < half:
            var other = (warp_index + half) * LIST + lane
            best = merged(best, lists[unsafe_offset=other])
        half //= 2
    return best


@always_inline
def _first_of_block[warps: Int](mine: UInt64) -> UInt64:
    """Returns, in warp 0, the greatest key of a block.

    Parameters:
        warps: The number of warps, a power of two up to 32.
    """
    var firsts = unsafe_stack_allocation[
        warps, UInt64, address_space=AddressSpace.SHARED
    ]()
    var first = greatest(mine)
    if lane_id() == 0:
        firsts[unsafe_offset=Int(warp_id())] = first
    barrier()
    return greatest(firsts[unsafe_offset=Int(lane_id()) % warps])


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(TILE_WARPS * 32))
)
def best_of_tile[
    dtype: DType
](
    logits: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    top_k: Pointer[Int64, ImmUnsafeAnyOrigin],
    temperature: Pointer[Float32, ImmUnsafeAnyOrigin],
    lists: Pointer[UInt64, MutUnsafeAnyOrigin],
    sums: Pointer[SIMD[DType.float32, 2], MutUnsafeAnyOrigin],
    row_length: Int32,
    tiles: Int32,
):
    """Finds the 32 best tokens of a tile, and its warps' sums of weights.

    Block (row, tile) reads TILE logits of the row, each once. Where k is 1 it
    finds the best token alone.

    Args:
        logits: [rows, row_length].
        top_k: [rows].
        temperature: [rows].
        lists: Out, [rows, tiles, 32]: a sorted list of keys a tile, of which
            only the first is written where k is 1.
        sums: Out, [rows, tiles, TILE_WARPS]: a warp's greatest logit, and the
            sum of its tokens' weights relative to it.
        row_length: Logits in a row.
        tiles: Tiles in a row.
    """
    wait_on_dependent_grids()
    launch_dependent_grids()
    var row = Int(block_idx.x)
    if not is_small(top_k[unsafe_offset=row]):
        return
    var tile = row * Int(tiles) + Int(block_idx.y)
    var warp_index = Int(warp_id())
    var lane = Int(lane_id())
    var first = Int(block_idx.y) * TILE + warp_index * 32 * LOGITS_PER_LANE
    var row_logits = logits.unsafe_offset(row * Int(row_length))
    var inverse_temperature = inverse_of(temperature[unsafe_offset=row])

    # All loads first, to have them in flight together.
    var loaded = StaticTuple[Scalar[dtype], LOGITS_PER_LANE]()
    comptime for j in range(LOGITS_PER_LANE):
        var token = min(first + j * 32 + lane, Int(row_length) - 1)
        loaded[j] = row_logits[unsafe_offset=token]

    var keys = StaticTuple[UInt64, LOGITS_PER_LANE]()
    comptime for j in range(LOGITS_PER_LANE):
        var token = UInt32(first + j * 32 + lane)
        keys[j] = token.lt(UInt32(row_length)).select(
            key_of(loaded[j].cast[DType.float32](), token), NO_TOKEN
        )

    if top_k[unsafe_offset=row] == 1:
        var first_key = keys[0]
        comptime for j in range(1, LOGITS_PER_LANE):
            first_key = max(first_key, keys[j])
        first_key = _first_of_block[TILE_WARPS](first_key)
        if thread_idx.x == 0:
            lists[unsafe_offset=tile * LIST] = first_key
        return

    var best = keys
    sort_lists(best)
    comptime for level in [4, 2, 1]:
        comptime for j in range(level):
            best[j] = merged(best[j], best[j + level])

    var top = logit_of(warp.broadcast(best[0]))
    var sum = Float32(0)
    comptime for j in range(LOGITS_PER_LANE):
        sum += weight(logit_of(keys[j]), top, inverse_temperature)
    sum = warp.sum(sum)
    if lane == 0:
        var place = tile * TILE_WARPS + warp_index
        sums[unsafe_offset=place] = SIMD[DType.float32, 2](top, sum)

    var tile_best = _best_of_block[TILE_WARPS](best[0])
    if warp_index == 0:
        lists[unsafe_offset=tile * LIST + lane] = tile_best


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(ROW_THREADS))
)
def token_of_row[
    dtype: DType, vector: Int
](
    tokens: Pointer[Int64, MutUnsafeAnyOrigin],
    logits: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    top_k: Pointer[Int64, ImmUnsafeAnyOrigin],
    temperature: Pointer[Float32, ImmUnsafeAnyOrigin],
    top_p: Pointer[Float32, ImmUnsafeAnyOrigin],
    min_p: Pointer[Float32, ImmUnsafeAnyOrigin],
    seed: Pointer[UInt64, ImmUnsafeAnyOrigin],
    lists: Pointer[UInt64, ImmUnsafeAnyOrigin],
    sums: Pointer[SIMD[DType.float32, 2], ImmUnsafeAnyOrigin],
    rows: Int32,
    row_length: Int32,
    tiles: Int32,
):
    """Draws a row's token, from the lists of its tiles if its k is small.

    Parameters:
        dtype: Of the logits.
        vector: Logits that the built-in kernel reads at once; it divides
            `row_length`.

    Args:
        tokens: Out, [rows].
        logits: [rows, row_length].
        top_k: [rows].
        temperature: [rows].
        top_p: [rows].
        min_p: [rows].
        seed: [rows].
        lists: [rows, tiles, 32], from `best_of_tile`.
        sums: [rows, tiles, TILE_WARPS], from `best_of_tile`.
        rows: Number of rows.
        row_length: Logits in a row.
        tiles: Tiles in a row.
    """
    wait_on_dependent_grids()
    var row = Int(block_idx.x)
    if is_small(top_k[unsafe_offset=row]):
        if _draw_from_lists(
            tokens.unsafe_offset(row),
            lists.unsafe_offset(row * Int(tiles) * LIST),
            sums.unsafe_offset(row * Int(tiles) * TILE_WARPS),
            Int(tiles),
            Int(top_k[unsafe_offset=row]),
            inverse_of(temperature[unsafe_offset=row]),
            top_p[unsafe_offset=row],
            min_p[unsafe_offset=row],
            seed[unsafe_offset=row],
        ):
            return

    var rows_of_logits = TileTensor(
        logits, row_major(Int(rows), Int(row_length))
    )
    var rows_of_tokens = TileTensor(tokens, row_major(Int(rows)))
    TopKTopPSamplingFromProbKernel[
        rows_of_logits.LayoutType,
        ImmOrigin(rows_of_logits.origin),
        rows_of_tokens.LayoutType,
        rows_of_tokens.origin,
        ROW_THREADS,
        vector,
        dtype,
        DType.int64,
        deterministic=False,
        from_logits=True,
    ](
        rows_of_logits,
        rows_of_tokens,
        None,
        None,
        top_k,
        row_length,
        top_p,
        Float32(1),
        row_length,
        seed,
        UInt64(0),
        temperature,
        min_p,
        None,
    )


@always_inline
def _draw_from_lists(
    token: Pointer[Int64, MutUnsafeAnyOrigin],
    lists: Pointer[UInt64, ImmUnsafeAnyOrigin],
    sums: Pointer[SIMD[DType.float32, 2], ImmUnsafeAnyOrigin],
    tiles: Int,
    k: Int,
    inverse_temperature: Float32,
    p: Float32,
    min_p: Float32,
    seed: UInt64,
) -> Bool:
    """Draws one row's token, unless the choice goes beyond the row's list.

    All threads of the block return the same.

    Returns:
        Whether the token is drawn.
    """
    var weights = unsafe_stack_allocation[
        LIST, Float32, address_space=AddressSpace.SHARED
    ]()
    var top_shared = unsafe_stack_allocation[
        1, Float32, address_space=AddressSpace.SHARED
    ]()
    var done = unsafe_stack_allocation[
        1, Bool, address_space=AddressSpace.SHARED
    ]()
    var list = unsafe_stack_allocation[
        LIST, UInt64, address_space=AddressSpace.SHARED
    ]()
    comptime warps = ROW_THREADS // 32
    var warp_index = Int(warp_id())
    var lane = Int(lane_id())

    if k == 1:
        # Greedy: ties at the top do not widen the choice, and neither top-p
        # nor min-p can narrow it.
        var first = NO_TOKEN
        for tile in range(Int(thread_idx.x), tiles, ROW_THREADS):
            first = max(first, lists[unsafe_offset=tile * LIST])
        first = _first_of_block[warps](first)
        if thread_idx.x == 0:
            token[] = _token_or_first(first)
        return True

    var best = NO_TOKEN
    for tile in range(warp_index, tiles, warps):
        best = merged(best, lists[unsafe_offset=tile * LIST + lane])
    best = _best_of_block[warps](best)

    if warp_index == 0:
        var top = logit_of(warp.broadcast(best))
        list[unsafe_offset=lane] = best
        weights[unsafe_offset=lane] = weight(
            logit_of(best), top, inverse_temperature
        )
        if lane == 0:
            top_shared[unsafe_offset=0] = top
    barrier()
    var top = top_shared[unsafe_offset=0]

    var sum = Float32(0)
    for i in range(Int(thread_idx.x), tiles * TILE_WARPS, ROW_THREADS):
        sum += sums[unsafe_offset=i][1] * weight(
            sums[unsafe_offset=i][0], top, inverse_temperature
        )
    var row_weight = block.sum[block_size=ROW_THREADS, broadcast=False](sum)

    if thread_idx.x == 0:
        var count = choices(weights, k, p, min_p, row_weight)
        var place = 0
        if count > 1:
            var random = Random(seed=seed)
            place = drawn(weights, count, random.step_uniform()[0])
        token[] = _token_or_first(
            list[unsafe_offset=place] if count > 0 else NO_TOKEN
        )
        # The built-in draws nothing sound where a logit is plus infinity.
        done[unsafe_offset=0] = count < LIST or top == inf[DType.float32]()
    barrier()
    return done[unsafe_offset=0]


@always_inline
def _token_or_first(key: UInt64) -> Int64:
    """Returns a key's token; token 0, as the built-in, where there is none."""
    return key.eq(NO_TOKEN).select(Int64(0), token_of(key).cast[DType.int64]())


def sample_rows[
    dtype: DType
](
    ctx: DeviceContext,
    tokens: Pointer[Int64, MutUnsafeAnyOrigin],
    logits: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    top_k: Pointer[Int64, ImmUnsafeAnyOrigin],
    temperature: Pointer[Float32, ImmUnsafeAnyOrigin],
    top_p: Pointer[Float32, ImmUnsafeAnyOrigin],
    min_p: Pointer[Float32, ImmUnsafeAnyOrigin],
    seed: Pointer[UInt64, ImmUnsafeAnyOrigin],
    rows: Int,
    row_length: Int,
) raises:
    """Enqueues the sampling of one token a row.

    Shapes alone decide what is launched.

    Args:
        ctx: The device.
        tokens: Out, [rows].
        logits: [rows, row_length].
        top_k: [rows]; below 1 all tokens.
        temperature: [rows].
        top_p: [rows].
        min_p: [rows].
        seed: [rows].
        rows: Number of rows.
        row_length: Logits in a row.

    Raises:
        Error: If a launch fails.
    """
    if rows == 0:
        return
    var tiles = ceildiv(row_length, TILE)
    var lists = ctx.enqueue_create_buffer[DType.uint64](rows * tiles * LIST)
    var sums = ctx.enqueue_create_buffer[DType.float32](
        rows * tiles * TILE_WARPS * 2
    )
    var lists_ptr = lists.unsafe_ptr().as_unsafe_any_origin()
    var sums_ptr = (
        sums.unsafe_ptr()
        .unsafe_bitcast[SIMD[DType.float32, 2]]()
        .as_unsafe_any_origin()
    )
    ctx.enqueue_function[best_of_tile[dtype]](
        logits,
        top_k,
        temperature,
        lists_ptr,
        sums_ptr,
        Int32(row_length),
        Int32(tiles),
        grid_dim=(rows, tiles),
        block_dim=TILE_WARPS * 32,
        attributes=pdl_launch_attributes(PDLLevel.ON),
    )
    comptime for vector in [8, 4, 2, 1]:
        if row_length % vector == 0:
            ctx.enqueue_function[token_of_row[dtype, vector]](
                tokens,
                logits,
                top_k,
                temperature,
                top_p,
                min_p,
                seed,
                lists_ptr.as_imm(),
                sums_ptr.as_imm(),
                Int32(rows),
                Int32(row_length),
                Int32(tiles),
                grid_dim=rows,
                block_dim=ROW_THREADS,
                attributes=pdl_launch_attributes(PDLLevel.ON),
            )
            break
    _ = lists^
    _ = sums^
