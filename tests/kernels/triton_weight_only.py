# SPDX-License-Identifier: Apache-2.0
"""A plain kernel in Triton that decodes NVFP4 and multiplies: a peer to beat.

It is what one writes first: a block of the weight is decoded in registers and
multiplied on the tensor cores. Needs torch and Triton, and a GPU.
"""

# Triton gives a kernel's annotations a meaning of its own.
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(
    y,
    x,
    codes,
    scales,
    m,
    n,
    k,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, BLOCK_K // 2)
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        at = start // 2 + half
        here = (columns < n)[:, None] & (at < k // 2)[None, :]
        byte = tl.load(
            codes + columns[:, None] * (k // 2) + at[None, :], here, 0
        )
        bits = tl.load(
            scales + columns[:, None] * (k // 16) + (at // 8)[None, :], here, 0
        ).to(tl.int32)
        exponent = (bits >> 3) & 15
        scale = tl.exp2((tl.maximum(exponent, 1) - 7).to(tl.float32))
        scale *= (bits & 7) / 8 + tl.where(exponent > 0, 1.0, 0.0)
        for part in tl.static_range(2):
            nibble = (byte.to(tl.int32) >> (4 * part)) & 15
            magnitude = nibble & 7
            # Exponent with bias 1 and one bit of mantissa, or 0 and a half.
            power = tl.exp2((tl.maximum(magnitude >> 1, 1) - 1).to(tl.float32))
            value = power * tl.where(
                magnitude > 1, 1 + 0.5 * (magnitude & 1), 0.5 * (magnitude & 1)
            )
            value = tl.where(nibble > 7, -value, value) * scale
            column = 2 * at + part
            activations = tl.load(
                x + rows[:, None] * k + column[None, :],
                (rows < m)[:, None] & (column < k)[None, :],
                0,
            )
            total = tl.dot(activations, value.to(tl.bfloat16).T, total)
    tl.store(
        y + rows[:, None] * n + columns[None, :],
        total.to(tl.bfloat16),
        (rows < m)[:, None] & (columns < n)[None, :],
    )


def multiply(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Returns a product, without the tensor's scale.

    Args:
        x: [M, K] in bfloat16.
        codes: [N, K / 2] in uint8.
        scales: [N, K / 16], the bytes of e4m3.
    """
    m, k = x.shape
    n = codes.shape[0]
    y = torch.empty(m, n, dtype=torch.bfloat16, device=x.device)
    rows = min(128, max(16, triton.next_power_of_2(m)))
    grid = (triton.cdiv(n, 64), triton.cdiv(m, rows))
    _kernel[grid](
        y, x, codes, scales, m, n, k, ROWS=rows, BLOCK_N=64, BLOCK_K=128
    )
    return y
