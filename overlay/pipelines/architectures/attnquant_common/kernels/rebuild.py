# SPDX-License-Identifier: Apache-2.0
"""Rebuilding a decomposed weight, w0 + b a, inside a graph, and its use.

What depends on weights alone MAX computes once, when it loads a model, and
keeps. So the op also takes what the weight is to be multiplied with, which it
does not read.

The graph must have been made with ``kernels.libraries()`` among its
``custom_extensions``.
"""

from __future__ import annotations

from max.graph import TensorType, TensorValue, ops


def by_matmul(
    w0: TensorValue, b: TensorValue, a: TensorValue, x: TensorValue
) -> TensorValue:
    """Returns w0 + b a by MAX's matmul, which adds ``w0`` as it stores.

    It rounds the product, and then the sum.

    Args:
        w0: [N, K], bfloat16 or float32.
        b: [N, R]; for a GPU MAX compiles it only if R is a multiple of 8.
        a: [R, K], a weight: its transpose is then made at load.
        x: [M, K], what the weight is to be multiplied with.
    """
    return _rebuilt(w0, b, ops.transpose(a, 0, 1), x, by_matmul=True)


def by_custom_op(
    w0: TensorValue, b: TensorValue, a: TensorValue, x: TensorValue
) -> TensorValue:
    """Returns w0 + b a by a kernel of ours, for any shape.

    It sums in float32 and rounds once.

    Args:
        w0: [N, K], bfloat16 or float32.
        b: [N, R].
        a: [R, K].
        x: [M, K], what the weight is to be multiplied with.
    """
    return _rebuilt(w0, b, a, x, by_matmul=False)


def _rebuilt(
    w0: TensorValue,
    b: TensorValue,
    a: TensorValue,
    x: TensorValue,
    *,
    by_matmul: bool,
) -> TensorValue:
    (rebuilt,) = ops.custom(
        "attnquant.rebuild",
        device=x.device,
        values=[w0, b, a, x],
        out_types=[TensorType(w0.dtype, w0.shape, x.device)],
        parameters={"by_matmul": by_matmul},
    )
    return rebuilt.tensor


def project(x: TensorValue, weight: TensorValue) -> TensorValue:
    """Returns x times a rebuilt weight's transpose.

    Of ``x @ weight.T`` MAX makes one matmul only where the weight is constant.
    Of another it would store the transpose, and multiply by that slowly. This
    is the matmul that constants get, called by its name; what follows is fused
    into it likewise.

    Args:
        x: [M, K].
        weight: [N, K], of the same type.
    """
    (product,) = ops.custom(
        "mo.matmul",
        device=x.device,
        values=[x, weight],
        out_types=[
            TensorType(x.dtype, [x.shape[0], weight.shape[0]], x.device)
        ],
        parameters={
            "transpose_b": True,
            "packed_b": False,
            # The compiler sets it where it fuses.
            "has_epilogue_fusion": False,
        },
    )
    return product.tensor
