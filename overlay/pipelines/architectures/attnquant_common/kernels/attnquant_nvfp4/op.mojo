# SPDX-License-Identifier: Apache-2.0
"""The ops, and who does which block."""

from std.math import ceildiv
from std.memory import bitcast
from std.sys.info import size_of
from std.utils.static_tuple import StaticTuple

from extensibility import InputTensor, OutputTensor, register
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from max.gpu.primitives import block

from .blocks import BLOCK, Weights, has_reciprocals, quantized

comptime LANES = 16
"""Blocks that a CPU quantizes together."""

comptime TASK = 1 << 12
"""Blocks in a CPU's task, a multiple of LANES."""

comptime THREADS = 256
"""Threads of a GPU's block."""

comptime ALIGNMENT = 16
"""Bytes of a GPU's widest load, and what addresses must be multiples of."""


@register("attnquant.nvfp4_quantize")
struct NVFP4Quantize:
    """Quantizes a matrix to NVFP4, in ModelOpt's layout."""

    @staticmethod
    def execute[
        dtype: DType, sweep: Bool, target: StaticString
    ](
        codes: OutputTensor[dtype=DType.uint8, rank=2, ...],
        scales: OutputTensor[dtype=DType.uint8, rank=2, ...],
        weights: InputTensor[dtype=dtype, rank=2, ...],
        scale_2: Float32,
        ctx: DeviceContext,
    ) raises:
        """Quantizes.

        Args:
            codes: Out, [N, K / 2], an even column in the low half of a byte.
            scales: Out, [N, K / 16], e4m3; NaN for blocks that have NaN or
                infinity.
            weights: [N, K], bfloat16 or float32.
            scale_2: The scale of scales, a normal number above 0.
            ctx: The device.

        Raises:
            Error: If the shapes do not fit.
        """
        var rows = weights.dim_size(0)
        var row = weights.dim_size(1)
        if (
            row % BLOCK != 0
            or codes.dim_size(0) != rows
            or scales.dim_size(0) != rows
            or codes.dim_size(1) != row // 2
            or scales.dim_size(1) != row // BLOCK
        ):
            raise Error("attnquant.nvfp4_quantize: shapes do not fit")
        var blocks = rows * (row // BLOCK)
        var source = weights.unsafe_ptr().as_unsafe_any_origin().as_imm()
        var to_codes = codes.unsafe_ptr().as_unsafe_any_origin()
        var to_scales = scales.unsafe_ptr().as_unsafe_any_origin()

        if blocks == 0:
            return
        comptime if is_cpu[target]():
            _quantize_on_cpu[sweep](
                source, to_codes, to_scales, blocks, scale_2, ctx
            )
        else:
            if (Int(source) | Int(to_codes)) % ALIGNMENT != 0:
                raise Error("attnquant.nvfp4_quantize: memory is not aligned")

            @always_inline
            def enqueue[by_reciprocal: Bool]() raises {imm}:
                ctx.enqueue_function[
                    _quantize_on_gpu[dtype, sweep, by_reciprocal]
                ](
                    source,
                    to_codes,
                    to_scales,
                    Int64(blocks),
                    scale_2,
                    grid_dim=ceildiv(blocks, THREADS),
                    block_dim=THREADS,
                )

            if has_reciprocals(scale_2):
                enqueue[by_reciprocal=True]()
            else:
                enqueue[by_reciprocal=False]()


@register("attnquant.nvfp4_amax")
struct NVFP4Amax:
    """Finds the greatest magnitude in each row of a matrix."""

    @staticmethod
    def execute[
        dtype: DType, target: StaticString
    ](
        greatest: OutputTensor[dtype=DType.float32, rank=1, ...],
        weights: InputTensor[dtype=dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Finds the magnitudes.

        Args:
            greatest: Out, [N]; NaN if the row has one.
            weights: [N, K], bfloat16 or float32.
            ctx: The device.

        Raises:
            Error: If the shapes do not fit.
        """
        var rows = weights.dim_size(0)
        var row = weights.dim_size(1)
        if row % BLOCK != 0 or greatest.dim_size(0) != rows:
            raise Error("attnquant.nvfp4_amax: shapes do not fit")
        var source = weights.unsafe_ptr().as_unsafe_any_origin().as_imm()
        var to = greatest.unsafe_ptr().as_unsafe_any_origin()

        comptime if is_cpu[target]():

            var share = max(1, TASK * BLOCK // max(1, row))

            @always_inline
            def task(index: Int) {imm}:
                for i in range(index * share, min((index + 1) * share, rows)):
                    to[unsafe_offset=i] = _greatest_of_row(
                        source.unsafe_offset(i * row), row
                    )

            _parallel(task, ceildiv(rows, share), ctx)
        else:
            if rows == 0:
                return
            if Int(source) % ALIGNMENT != 0:
                raise Error("attnquant.nvfp4_amax: memory is not aligned")
            ctx.enqueue_function[_greatest_on_gpu[dtype]](
                source,
                to,
                Int32(row),
                grid_dim=rows,
                block_dim=THREADS,
            )


@always_inline
def _parallel[
    Task: def(Int) -> None
](task: Task, count: Int, ctx: DeviceContext) raises:
    """Runs task(0) to task(count - 1) on all cores.

    `std.algorithm.sync_parallelize` would flush subnormal numbers to zero.
    """
    if count > 0:
        ctx.enqueue_cpu_range(task, count)
        ctx.synchronize()


@always_inline
def _quantize[
    dtype: DType,
    //,
    sweep: Bool,
    by_reciprocal: Bool,
    width: SIMDLength,
    alignment: Int,
](
    weights: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    codes: Pointer[UInt8, MutUnsafeAnyOrigin],
    scales: Pointer[UInt8, MutUnsafeAnyOrigin],
    first: Int,
    scale_2: Float32,
):
    """Quantizes the `width` blocks from `first` on."""
    var result = quantized[sweep, by_reciprocal](
        _loaded[width, alignment](weights.unsafe_offset(first * BLOCK)), scale_2
    )
    # The first code is in the lowest bits, and so in the first byte.
    codes.unsafe_store[alignment = min(alignment, BLOCK // 2)](
        first * (BLOCK // 2),
        bitcast[DType.uint8, Int(width) * BLOCK // 2](
            result.low.interleave(result.high)
        ),
    )
    scales.unsafe_store(first, result.scale.cast[DType.uint8]())


@always_inline
def _loaded[
    dtype: DType, //, width: SIMDLength, alignment: Int
](weights: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin]) -> Weights[width]:
    """Reads blocks that lie one after the other, each into a lane."""
    var result = Weights[width]()
    _deal[first=0, step=1](
        weights.unsafe_load[width = Int(width) * BLOCK, alignment=alignment](),
        result,
    )
    return result


@always_inline
def _deal[
    dtype: DType, size: SIMDLength, width: SIMDLength, //, first: Int, step: Int
](run: SIMD[dtype, size], mut to: Weights[width]):
    """Deals out the elements first, first + step, ... of blocks."""
    comptime if size == width:
        to[first] = rebind[SIMD[DType.float32, width]](
            run.cast[DType.float32]()
        )
    else:
        var even, odd = run.deinterleave()
        _deal[first, 2 * step](even, to)
        _deal[first + step, 2 * step](odd, to)


def _quantize_on_cpu[
    dtype: DType, //, sweep: Bool
](
    weights: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    codes: Pointer[UInt8, MutUnsafeAnyOrigin],
    scales: Pointer[UInt8, MutUnsafeAnyOrigin],
    blocks: Int,
    scale_2: Float32,
    ctx: DeviceContext,
) raises:
    """A run of blocks a task, LANES blocks at a time."""

    @always_inline
    def task(index: Int) {imm}:
        var last = min((index + 1) * TASK, blocks)
        var i = index * TASK
        while i + LANES <= last:
            _quantize[sweep, by_reciprocal=False, width=LANES, alignment=1](
                weights, codes, scales, i, scale_2
            )
            i += LANES
        while i < last:
            _quantize[sweep, by_reciprocal=False, width=1, alignment=1](
                weights, codes, scales, i, scale_2
            )
            i += 1

    _parallel(task, ceildiv(blocks, TASK), ctx)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
)
def _quantize_on_gpu[
    dtype: DType, sweep: Bool, by_reciprocal: Bool
](
    weights: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    codes: Pointer[UInt8, MutUnsafeAnyOrigin],
    scales: Pointer[UInt8, MutUnsafeAnyOrigin],
    blocks: Int64,
    scale_2: Float32,
):
    """A block a thread."""
    var index = Int(block_idx.x) * THREADS + Int(thread_idx.x)
    if index < Int(blocks):
        _quantize[sweep, by_reciprocal, 1, ALIGNMENT](
            weights, codes, scales, index, scale_2
        )


comptime _bits[
    dtype: DType
] = DType.uint16 if dtype == DType.bfloat16 else DType.uint32
"""The integer type as wide as a weight."""


@always_inline
def _magnitudes[
    dtype: DType, //, width: SIMDLength, alignment: Int = 1
](
    weights: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin], offset: Int
) -> SIMD[_bits[dtype], width]:
    """Reads magnitudes as integers: they order infinity and NaN last."""
    comptime sign = Scalar[_bits[dtype]].MAX // 2
    return (
        weights.unsafe_bitcast[Scalar[_bits[dtype]]]().unsafe_load[
            width=width, alignment=alignment
        ](offset)
        & sign
    )


@always_inline
def _as_float32[dtype: DType](magnitude: Scalar[_bits[dtype]]) -> Float32:
    return bitcast[dtype](magnitude).cast[DType.float32]()


def _greatest_of_row[
    dtype: DType, //
](weights: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin], length: Int) -> Float32:
    comptime width = 16 * BLOCK
    var wide = SIMD[_bits[dtype], width](0)
    var i = 0
    while i + width <= length:
        wide = max(wide, _magnitudes[width](weights, i))
        i += width
    var greatest = wide.reduce_max[BLOCK]()
    while i < length:
        greatest = max(greatest, _magnitudes[BLOCK](weights, i))
        i += BLOCK
    return _as_float32[dtype](greatest.reduce_max())


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
)
def _greatest_on_gpu[
    dtype: DType
](
    weights: Pointer[Scalar[dtype], ImmUnsafeAnyOrigin],
    greatest: Pointer[Float32, MutUnsafeAnyOrigin],
    length: Int32,
):
    """A row a block."""
    comptime width = ALIGNMENT // size_of[dtype]()
    var row = weights.unsafe_offset(Int(block_idx.x) * Int(length))
    var mine = SIMD[_bits[dtype], width](0)
    for i in range(
        Int(thread_idx.x) * width, Int(length), THREADS * width
    ):
        mine = max(mine, _magnitudes[width, ALIGNMENT](row, i))
    var result = block.max[block_size=THREADS, broadcast=False](
        mine.reduce_max().cast[DType.uint32]()
    )
    if thread_idx.x == 0:
        greatest[unsafe_offset=Int(block_idx.x)] = _as_float32[dtype](
            result.cast[_bits[dtype]]()
        )
