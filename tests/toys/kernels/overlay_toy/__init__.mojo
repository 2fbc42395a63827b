# SPDX-License-Identifier: Apache-2.0
"""A kernel overlay for the tests: one new op, one in a built-in op's place.

The source holds for the Mojo of MAX 26.5 and of MAX 26.7.
"""

from extensibility import InputTensor, OutputTensor, register
from max.gpu.host import DeviceContext


@register("overlay_toy.sevens")
struct Sevens:
    """A new op: 7 in the place of every element."""

    @staticmethod
    def execute(
        output: OutputTensor[dtype = DType.float32, rank=1, ...],
        input: InputTensor[dtype = DType.float32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        for i in range(output.dim_size(0)):
            output[i] = 7


@register("mo.cumsum")
struct RunningSum:
    """The built-in op's name and form, and 42 where the sums would be."""

    @staticmethod
    def execute[
        dtype: DType, rank: Int, exclusive: Int, reverse: Int, axis: Int
    ](
        output: OutputTensor[dtype=dtype, rank=rank, ...],
        input: InputTensor[dtype=dtype, rank=rank, ...],
        ctx: DeviceContext,
    ) raises:
        var data = output.unsafe_ptr()
        for i in range(output.size()):
            data.unsafe_store(i, Scalar[dtype](42))
