# SPDX-License-Identifier: Apache-2.0
"""The op, and which kernel has which shape."""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.host.info import is_cpu
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes
from std.math import ceildiv

from . import few_rows as few
from . import many_rows as many
from . import one_row as one
from .any_shape import TOKENS, WARPS, any_shape
from .cpu import cpu
from .few_rows import few_rows
from .many_rows import many_rows
from .one_row import one_row

comptime FEW = 16
"""The most rows of activations that a weight is streamed by for."""

comptime SHARED = 227 * 1024
"""Bytes of shared memory that a block of sm_90 may take."""


@register("nvfp4.weight_only_matmul")
struct WeightOnlyMatmul:
    """Multiplies activations by a weight in NVFP4, as ModelOpt stores it.

    `y = x @ dequantized(weight).T`: activations are not quantized, sums are in
    float32, and the tensor's scale is applied once, to them. On NVIDIA GPUs
    from Hopper on, the shape selects one of four kernels when it runs; others
    have the general one, and so has a CPU, in float32 too.
    """

    @staticmethod
    def execute[
        dtype: DType, scale_dtype: DType, target: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        weight: InputTensor[dtype=DType.uint8, rank=2, ...],
        weight_scale: InputTensor[dtype=scale_dtype, rank=2, ...],
        weight_scale_2: InputTensor[dtype=DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Multiplies.

        Args:
            y: Out, [m, n].
            x: [m, k], of type bfloat16, on a CPU also float32.
            weight: [n, k / 2], two e2m1 a byte, the first in the low half.
            weight_scale: [n, k / 16], the bytes of e4m3.
            weight_scale_2: [1].
            ctx: The device.

        Raises:
            If the shapes do not belong together.
        """
        comptime assert (
            scale_dtype == DType.float8_e4m3fn or scale_dtype == DType.uint8
        ), "weight_scale has the type float8_e4m3fn or uint8"
        var m = x.dim_size(0)
        var k = x.dim_size(1)
        var n = weight.dim_size(0)
        if (
            k % 16 != 0
            or weight.dim_size(1) != k // 2
            or weight_scale.dim_size(0) != n
            or weight_scale.dim_size(1) != k // 16
            or weight_scale_2.dim_size(0) != 1
            or y.dim_size(0) != m
            or y.dim_size(1) != n
        ):
            raise Error(
                t"nvfp4.weight_only_matmul: x [{m}, {k}] by a weight"
                t" [{n}, {weight.dim_size(1)}] with scales"
                t" [{weight_scale.dim_size(0)}, {weight_scale.dim_size(1)}]:"
                t" expected [n, {k} / 2] and [n, {k} / 16]"
            )
        if m == 0 or n == 0:
            return
        var w = weight.unsafe_ptr().as_unsafe_any_origin().as_imm()
        var s = (
            weight_scale.unsafe_ptr()
            .unsafe_bitcast[UInt8]()
            .as_unsafe_any_origin()
            .as_imm()
        )
        comptime if is_cpu[target]():
            cpu(
                y.unsafe_ptr().as_unsafe_any_origin(),
                x.unsafe_ptr().as_unsafe_any_origin().as_imm(),
                w,
                s,
                weight_scale_2.unsafe_ptr()[unsafe_offset=0],
                m,
                n,
                k,
            )
        else:
            comptime assert (
                dtype == DType.bfloat16
            ), "on a GPU activations have the type bfloat16"
            enqueue(
                y.unsafe_ptr().unsafe_bitcast[BFloat16]().as_unsafe_any_origin(),
                x.unsafe_ptr()
                .unsafe_bitcast[BFloat16]()
                .as_unsafe_any_origin()
                .as_imm(),
                w,
                s,
                weight_scale_2.unsafe_ptr().as_unsafe_any_origin().as_imm(),
                m,
                n,
                k,
                ctx,
            )


def enqueue(
    y: Pointer[BFloat16, MutUnsafeAnyOrigin],
    x: Pointer[BFloat16, ImmUnsafeAnyOrigin],
    w: Pointer[UInt8, ImmUnsafeAnyOrigin],
    s: Pointer[UInt8, ImmUnsafeAnyOrigin],
    ws2: Pointer[Float32, ImmUnsafeAnyOrigin],
    m: Int,
    n: Int,
    k: Int,
    ctx: DeviceContext,
) raises:
    """Launches the kernel for a shape; the arguments are the op's."""
    # wgmma and bulk copies as these are Hopper's alone.
    comptime if ctx.target.is_nvidia_gpu() and (
        ctx.default_device_info.compute == 9.0
    ):
        var bytes = x.unsafe_bitcast[UInt8]()
        var blocks = Int(
            ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        )

        @always_inline
        def streamed[NT: Int]() raises {imm}:
            comptime shared = few.shared_bytes[NT]()
            ctx.enqueue_function[few_rows[NT]](
                y,
                bytes,
                w,
                s,
                ws2,
                Int32(m),
                Int32(n),
                Int32(k),
                grid_dim=blocks,
                block_dim=few.THREADS + few.PRODUCERS * 32,
                shared_mem_bytes=shared,
                func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                    UInt32(shared)
                ),
                attributes=pdl_launch_attributes(PDLLevel.ON),
            )

        @always_inline
        def tiled[NT: Int]() raises {imm}:
            comptime shared = many.shared_bytes[NT]()
            ctx.enqueue_function[many_rows[NT]](
                y,
                bytes,
                w,
                s,
                ws2,
                Int32(m),
                Int32(n),
                Int32(k),
                grid_dim=(ceildiv(m, NT), ceildiv(n, many.ROWS)),
                block_dim=many.THREADS,
                shared_mem_bytes=shared,
                func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                    UInt32(shared)
                ),
                attributes=pdl_launch_attributes(PDLLevel.ON),
            )

        var plan = one.plan(n, k, blocks)
        if m == 1 and plan.stages >= one.FEWEST_STAGES:
            ctx.enqueue_function[one_row](
                y,
                x,
                w,
                s,
                ws2,
                Int32(n),
                Int32(k),
                Int32(plan.chunks),
                Int32(plan.stages),
                grid_dim=blocks,
                block_dim=(plan.chunks + one.PRODUCERS) * 32,
                shared_mem_bytes=plan.shared_bytes,
                func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                    UInt32(plan.shared_bytes)
                ),
                attributes=pdl_launch_attributes(PDLLevel.ON),
            )
            return
        if m <= FEW and k % 256 == 0:
            if m <= 8:
                streamed[1]()
            else:
                streamed[2]()
            return
        if k % 64 == 0 and m > 4:
            if m <= 64:
                tiled[64]()
            elif m <= 128:
                tiled[128]()
            else:
                tiled[256]()
            return
    ctx.enqueue_function[any_shape](
        y,
        x,
        w,
        s,
        ws2,
        Int32(m),
        Int32(n),
        Int32(k),
        grid_dim=(ceildiv(n, WARPS), ceildiv(m, TOKENS)),
        block_dim=WARPS * 32,
    )
