# SPDX-License-Identifier: Apache-2.0
"""Quantizes weight matrices to NVFP4, in the layout of NVIDIA's ModelOpt.

A weight is e2m1 * e4m3 * float32: its own 4-bit code, the scale of its block of
16 in a row, and the scale of scales of the matrix (``weight_scale_2``).
Matrices that MAX fuses must share the last: see :func:`group_scale_2`.

Round-to-nearest (``rtn``) gives ModelOpt's bytes. ``sweep`` tries, for each
block, ten neighbouring e4m3 scales and keeps the one of least squared error:
same format, other bytes.

Where this departs from ModelOpt: NaN and infinity are errors, and
``weight_scale_2`` is never below float32's least normal number, so that an
all-zero matrix gets scales that are numbers.

Sources: `NVFP4QTensor
<https://github.com/NVIDIA/Model-Optimizer/blob/main/modelopt/torch/quantization/qtensor/nvfp4_tensor.py>`_;
the sweep's bounds, https://arxiv.org/abs/2606.07618
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from .tensor import Tensor

if TYPE_CHECKING:
    from max.driver import Buffer, Device

    from .kernels.nvfp4 import NVFP4Kernels

VERSION = 1
"""Goes up whenever the same weights get other bytes; a cache's key has it."""

BLOCK = 16
"""Weights that share a block scale."""

Scales = Literal["rtn", "sweep"]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_E2M1_MAX = np.float32(6)
_E4M3_MAX = np.float32(448)
_LEAST_NORMAL = np.finfo(np.float32).smallest_normal
_NEIGHBOURS = (-2, -1, 1, 2, 3, 4, 5, 6, 7)
_SCALE_OF_ZEROS = np.float32(1)
_NAN_SCALE = 0x7F
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Quantized:
    """A matrix [N, K] in NVFP4."""

    weight: Bytes
    """[N, K / 2]: e2m1 codes, an even column in the low half of a byte."""

    weight_scale: Bytes
    """[N, K / 16]: the blocks' scales, as bytes of e4m3."""

    weight_scale_2: np.float32
    """The scale of scales."""


def scale_2(amax: float | np.float32) -> np.float32:
    """Returns ``weight_scale_2`` for weights up to a magnitude.

    Args:
        amax: The greatest magnitude, finite.
    """
    # At its greatest, a scale is e4m3's greatest and a code e2m1's.
    return max(np.float32(amax) / (_E2M1_MAX * _E4M3_MAX), _LEAST_NORMAL)


def group_scale_2(
    weights: Sequence[Tensor | Floats],
    *,
    names: Sequence[str] | None = None,
    device: Device | None = None,
) -> np.float32:
    """Returns one ``weight_scale_2`` for matrices that MAX fuses.

    Args:
        weights: The matrices, such as q, k and v.
        names: Their names, for errors.
        device: Where to compute; the CPU by default.

    Raises:
        ValueError: If a matrix is none, or holds NaN or infinity.
    """
    names = names or [f"weight {i}" for i in range(len(weights))]
    return scale_2(
        max(
            amax(w, name=name, device=device)
            for w, name in zip(weights, names, strict=True)
        )
    )


def amax(
    w: Tensor | Floats, *, name: str = "weight", device: Device | None = None
) -> np.float32:
    """Returns a matrix's greatest magnitude.

    Args:
        w: [N, K], K a multiple of 16.
        name: The matrix's name, for errors.
        device: Where to compute; the CPU by default.

    Raises:
        ValueError: If the matrix is none, or holds NaN or infinity.
    """
    matrix = _matrix(w, name)
    kernels = _kernels(device)
    if kernels is None:
        greatest = _amax(matrix)
    else:
        greatest = kernels.amax(_buffer(matrix, kernels.device))
    if not np.isfinite(greatest):
        raise _not_finite(matrix, name)
    return np.float32(greatest)


def quantize(
    w: Tensor | Floats,
    *,
    scales: Scales = "rtn",
    weight_scale_2: float | np.float32 | None = None,
    name: str = "weight",
    device: Device | None = None,
) -> Quantized:
    """Quantizes a matrix.

    Where MAX is not installed, :func:`quantize_numpy` does the work.

    Args:
        w: [N, K], K a multiple of 16: float32, or a tensor of F32, F16 or BF16.
        scales: How the blocks' scales are found.
        weight_scale_2: The scale of scales, if the matrix is one of a group.
        name: The matrix's name, for errors.
        device: Where to compute; the CPU by default.

    Raises:
        ValueError: If the matrix is none, holds NaN or infinity, or a setting
            is out of range.
    """
    kernels = _kernels(device)
    if kernels is None:
        return quantize_numpy(
            w, scales=scales, weight_scale_2=weight_scale_2, name=name
        )
    matrix = _matrix(w, name)
    sweep = _is_sweep(scales)
    buffer = _buffer(matrix, kernels.device)
    if weight_scale_2 is None:
        greatest = kernels.amax(buffer)
        if not np.isfinite(greatest):
            raise _not_finite(matrix, name)
        factor = scale_2(greatest)
    else:
        factor = _checked(weight_scale_2, name)
    codes, block_scales = (
        result.to_numpy()
        for result in kernels.quantize(buffer, factor, sweep=sweep)
    )
    if weight_scale_2 is not None and (block_scales == _NAN_SCALE).any():
        raise _not_finite(matrix, name)
    return Quantized(codes, block_scales, factor)


def quantize_numpy(
    w: Tensor | Floats,
    *,
    scales: Scales = "rtn",
    weight_scale_2: float | np.float32 | None = None,
    name: str = "weight",
) -> Quantized:
    """Quantizes a matrix as :func:`quantize` does, to the byte, but slowly."""
    matrix = _matrix(w, name)
    sweep = _is_sweep(scales)
    greatest = _amax(matrix)
    if not np.isfinite(greatest):
        raise _not_finite(matrix, name)
    if weight_scale_2 is None:
        factor = scale_2(greatest)
    else:
        factor = _checked(weight_scale_2, name)
    results = [_quantize(chunk, factor, sweep) for chunk in _chunks(matrix)]
    codes, block_scales = map(np.concatenate, zip(*results, strict=True))
    n, k = matrix.shape
    return Quantized(
        codes.reshape(n, k // 2), block_scales.reshape(n, k // BLOCK), factor
    )


def dequantize(quantized: Quantized) -> Floats:
    """Returns the weights [N, K] that the codes and scales stand for."""
    codes = quantized.weight
    result = np.empty((codes.shape[0], 2 * codes.shape[1]), np.float32)
    result[:, 0::2] = _E2M1[codes & 0xF]
    result[:, 1::2] = _E2M1[codes >> 4]
    scales = _E4M3[quantized.weight_scale] * quantized.weight_scale_2
    result.reshape(*scales.shape, BLOCK)[...] *= scales[..., None]
    return result


def _values(bits: int, fraction: int, least: int) -> Floats:
    """The numbers of a small float format, by code.

    Args:
        bits: All bits of the format.
        fraction: Its bits of fraction.
        least: The exponent of its least normal number.
    """
    code = np.arange(1 << bits)
    magnitude = code & ((1 << (bits - 1)) - 1)
    exponent, places = magnitude >> fraction, magnitude % (1 << fraction)
    places = np.where(exponent > 0, places + (1 << fraction), places)
    value: Floats = np.ldexp(
        places.astype(np.float32),
        np.maximum(exponent - 1, 0) + least - fraction,
    )
    return np.where(code >> (bits - 1), -value, value).astype(np.float32)


_E2M1 = _values(bits=4, fraction=1, least=0)
_E4M3 = _values(bits=8, fraction=3, least=-6)
_E4M3[[_NAN_SCALE, _NAN_SCALE | 0x80]] = np.nan


def _rounded(
    value: Floats, fraction: int, least: int
) -> tuple[npt.NDArray[np.int32], Floats]:
    """Rounds numbers to a small float format, ties to the even code.

    Args:
        value: Numbers from 0 to the format's greatest.
        fraction: The format's bits of fraction.
        least: The exponent of its least normal number.

    Returns:
        The codes, and the numbers that they stand for.
    """
    exponent = np.maximum(np.frexp(value)[1] - 1, least)
    places = np.rint(np.ldexp(value, fraction - exponent))
    codes = places.astype(np.int32) + ((exponent - least) << fraction)
    return codes, np.ldexp(places, exponent - fraction)


def _quantize(
    weights: Floats, factor: np.float32, sweep: bool
) -> tuple[Bytes, Bytes]:
    """Quantizes blocks [B, 16] to codes [B, 8] and scales [B]."""
    with np.errstate(under="ignore", over="ignore"):
        ideal = np.abs(weights).max(axis=1) / (_E2M1_MAX * factor)
        ideal[ideal == 0] = _SCALE_OF_ZEROS
        scale, value = _rounded(
            ideal.clip(_E4M3[1], _E4M3_MAX), fraction=3, least=-6
        )
        codes, error = _with_scale(weights, value * factor)
        if sweep:
            # By more than the rounding of errors, so that none gets worse.
            error *= 1 - 2.0**-20
            first = scale.copy()
            for step in _NEIGHBOURS:
                other = first + step
                other = np.where(
                    (other >= 1) & (other < _NAN_SCALE), other, first
                )
                other_codes, other_error = _with_scale(
                    weights, _E4M3[other] * factor
                )
                better = other_error < error
                scale = np.where(better, other, scale)
                codes = np.where(better[:, None], other_codes, codes)
                error = np.where(better, other_error, error)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed.astype(np.uint8), scale.astype(np.uint8)


def _with_scale(
    weights: Floats, scale: Floats
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Quantizes blocks with given scales; returns codes and squared errors."""
    quotient = weights / scale[:, None]
    codes, value = _rounded(
        np.minimum(np.abs(quotient), _E2M1_MAX), fraction=1, least=0
    )
    # In float64 the product is exact: this is a fused multiply-add.
    exact = np.abs(weights) - value * scale[:, None].astype(np.float64)
    squares = np.square(exact.astype(np.float32), dtype=np.float64)
    error = squares[:, 0]
    for i in range(1, BLOCK):  # in the kernel's order
        error = error + squares[:, i]
    return np.where(quotient < 0, codes | 8, codes), error


def _amax(matrix: Tensor) -> np.float32:
    # numpy's max, unlike Python's, gives NaN if there is one.
    greatest = [np.abs(chunk).max() for chunk in _chunks(matrix)]
    return np.float32(np.max(greatest))


def _chunks(matrix: Tensor) -> list[Floats]:
    """Blocks [B, 16] of a matrix, in pieces that fit a processor's cache."""
    blocks = matrix.data.reshape(-1, BLOCK)
    step = _CHUNK // BLOCK
    return [
        Tensor(blocks[i : i + step], matrix.dtype).float32()
        for i in range(0, len(blocks), step)
    ]


def _matrix(w: Tensor | Floats, name: str) -> Tensor:
    """Returns a matrix that can be quantized, of F32 or BF16, contiguous."""
    if not isinstance(w, Tensor):
        if w.dtype != np.float32:
            raise ValueError(
                f"{name}: expected float32 or a Tensor, found {w.dtype}"
            )
        w = Tensor(w, "F32")
    if w.data.ndim != 2 or 0 in w.shape or w.shape[1] % BLOCK:
        raise ValueError(
            f"{name}: NVFP4 needs a matrix [N, K] whose K is a multiple of "
            f"{BLOCK}, found {list(w.shape)}"
        )
    if w.dtype != "BF16":
        w = Tensor(w.float32(), "F32")
    return Tensor(np.ascontiguousarray(w.data), w.dtype)


def _is_sweep(scales: Scales) -> bool:
    if scales not in ("rtn", "sweep"):
        raise ValueError(f"scales is rtn or sweep, not {scales!r}")
    return scales == "sweep"


def _checked(weight_scale_2: float | np.float32, name: str) -> np.float32:
    factor = np.float32(weight_scale_2)
    if not _LEAST_NORMAL <= factor < np.inf:
        raise ValueError(
            f"{name}: weight_scale_2 is a normal float32 above 0, "
            f"not {weight_scale_2!r}"
        )
    return factor


def _not_finite(matrix: Tensor, name: str) -> ValueError:
    bad = np.argwhere(~np.isfinite(matrix.float32()))
    return ValueError(
        f"{name}: {len(bad)} of {matrix.data.size} weights are NaN or "
        f"infinite, the first at {bad[0].tolist()}; NVFP4 cannot hold them"
    )


def _kernels(device: Device | None) -> NVFP4Kernels | None:
    """Returns a device's kernels, or None without MAX."""
    if device is None and importlib.util.find_spec("max") is None:
        return None
    from max.driver import CPU

    from .kernels.nvfp4 import kernels_of

    return kernels_of(device or CPU())


def _buffer(matrix: Tensor, device: Device) -> Buffer:
    from max.driver import Buffer
    from max.dtype import DType

    buffer = Buffer.from_numpy(matrix.data)
    if matrix.dtype == "BF16":
        buffer = buffer.view(DType.bfloat16, matrix.shape)
    return buffer.to(device)
