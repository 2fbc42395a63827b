# SPDX-License-Identifier: Apache-2.0
"""The op."""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from .by_matmul import rebuild_by_matmul
from .cpu import rebuild_on_cpu
from .gpu import rebuild_on_gpu


@register("attnquant.rebuild")
struct Rebuild:
    """Rebuilds a matrix from what it shares and its own two factors."""

    @staticmethod
    def execute[
        dtype: DType, target: StaticString, *, by_matmul: Bool
    ](
        rebuilt: OutputTensor[dtype=dtype, rank=2, ...],
        w0: InputTensor[dtype=dtype, rank=2, ...],
        b: InputTensor[dtype=dtype, rank=2, ...],
        a: InputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Rebuilds w0 + b a: summed in float32 and rounded once, by our kernel.

        All are rows that lie one after the other, as MAX hands them to ops.

        Parameters:
            dtype: Of the weights, bfloat16 or float32.
            target: Where it runs.
            by_matmul: Whether MAX's matmul does it, or a kernel of ours.

        Args:
            rebuilt: Out, [N, K].
            w0: [N, K].
            b: [N, R].
            a: [R, K]; by matmul its transpose, [K, R].
            x: What is to be multiplied by the weight. It is not read; but for
                it the op would depend on weights alone, and MAX would run it
                once, at load.
            ctx: The device.

        Raises:
            Error: If the shapes do not fit.
        """
        var rows = w0.dim_size(0)
        var row = w0.dim_size(1)
        var rank = b.dim_size(1)
        comptime k, r = (0, 1) if by_matmul else (1, 0)
        if (
            rebuilt.dim_size(0) != rows
            or rebuilt.dim_size(1) != row
            or b.dim_size(0) != rows
            or a.dim_size(k) != row
            or a.dim_size(r) != rank
        ):
            raise Error("attnquant.rebuild: shapes do not fit")
        if rows == 0 or row == 0:
            return

        comptime if by_matmul:
            rebuild_by_matmul[target=target](
                rebuilt.to_tile_tensor[DType.int64](),
                w0.to_tile_tensor[DType.int64](),
                b.to_tile_tensor[DType.int64](),
                a.to_tile_tensor[DType.int64](),
                ctx,
            )
        else:
            var to = rebuilt.unsafe_ptr().as_unsafe_any_origin()
            var from_w0 = w0.unsafe_ptr().as_unsafe_any_origin().as_imm()
            var from_b = b.unsafe_ptr().as_unsafe_any_origin().as_imm()
            var from_a = a.unsafe_ptr().as_unsafe_any_origin().as_imm()

            comptime if is_cpu[target]():
                rebuild_on_cpu(
                    to, from_w0, from_b, from_a, rows, row, rank, ctx
                )
            else:
                rebuild_on_gpu(
                    to, from_w0, from_b, from_a, rows, row, rank, ctx
                )
