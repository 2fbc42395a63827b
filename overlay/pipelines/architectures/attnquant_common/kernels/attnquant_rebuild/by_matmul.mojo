# SPDX-License-Identifier: Apache-2.0
"""By MAX's matmul, which adds what is shared before it stores."""

from std.sys.info import size_of

from layout import Coord, TileTensor
from linalg.matmul import matmul
from max.gpu.host import DeviceContext


def rebuild_by_matmul[
    *, target: StaticString
](
    rebuilt: TileTensor[mut=True, address_space=AddressSpace.GENERIC, ...],
    w0: TileTensor[address_space=AddressSpace.GENERIC, ...],
    b: TileTensor[address_space=AddressSpace.GENERIC, ...],
    a: TileTensor[address_space=AddressSpace.GENERIC, ...],
    ctx: DeviceContext,
) raises:
    """Rebuilds w0 + b a.

    Parameters:
        target: Where it runs.

    Args:
        rebuilt: Out, [N, K].
        w0: [N, K].
        b: [N, R].
        a: [K, R], which is how MAX's fast matmuls want it.
        ctx: The device.

    Raises:
        Error: If the launch fails.
    """

    @__parameter
    @always_inline
    def add_shared[
        type: DType, width: SIMDLength, *, alignment: Int = 1
    ](at: Coord, product: SIMD[type, width]):
        comptime bytes = alignment * size_of[rebuilt.dtype]()
        var shared = w0.load[width=width, alignment=bytes](at)
        var sum = product.cast[DType.float32]() + shared.cast[DType.float32]()
        rebuilt.store[alignment=bytes](at, sum.cast[rebuilt.dtype]())

    matmul[
        transpose_b=True, elementwise_lambda_fn=add_shared, target=target
    ](rebuilt, b, a, ctx)
    # The closure does not keep alive what it captures.
    _ = w0
    _ = rebuilt
