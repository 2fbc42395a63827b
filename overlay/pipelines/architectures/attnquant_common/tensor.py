# SPDX-License-Identifier: Apache-2.0
"""Tensors as numpy arrays, with the element type that safetensors names.

numpy has no bfloat16 and no 8-bit float, so their bits travel in unsigned
integers and :attr:`Tensor.dtype` says what they mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

STORED_AS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""The numpy type that holds each of safetensors' types."""

WEIGHTS = ("F32", "F16", "BF16")
"""The types that :meth:`Tensor.float32` widens without loss."""

_QUIET_NAN = np.uint16(0x7FC0)
_CHUNK = 1 << 20


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its elements."""

    dtype: str
    """safetensors' name of the type."""

    shape: tuple[int, ...]
    """The sizes of the dimensions."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * STORED_AS[self.dtype].itemsize


@dataclass(frozen=True)
class Tensor:
    """An array and what its elements are.

    Raises:
        ValueError: If ``data`` has not the type that holds ``dtype``.
    """

    data: npt.NDArray[Any]
    dtype: str
    """safetensors' name, such as ``F32`` or ``BF16``."""

    def __post_init__(self) -> None:
        if self.dtype not in STORED_AS:
            raise ValueError(
                f"unknown tensor type {self.dtype!r}; "
                f"known are {', '.join(STORED_AS)}"
            )
        if self.data.dtype != STORED_AS[self.dtype]:
            raise ValueError(
                f"{self.dtype} is held as {STORED_AS[self.dtype]}, "
                f"not as {self.data.dtype}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions."""
        return self.data.shape

    @property
    def spec(self) -> TensorSpec:
        """The tensor without its elements."""
        return TensorSpec(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.data.nbytes

    def float32(self) -> npt.NDArray[np.float32]:
        """Returns the values in float32, each exactly.

        An F32 tensor gives its own array, not a copy.

        Raises:
            ValueError: If float32 cannot hold every value of the type.
        """
        if self.dtype == "F32":
            return self.data
        if self.dtype == "F16":
            return self.data.astype(np.float32)
        if self.dtype == "BF16":
            wide = self.data.astype(np.uint32)
            np.left_shift(wide, np.uint32(16), out=wide)
            return wide.view(np.float32)
        raise ValueError(
            f"a weight is one of {', '.join(WEIGHTS)}, not {self.dtype}"
        )


def from_float32(array: npt.NDArray[np.float32], dtype: str) -> Tensor:
    """Returns values as a tensor of another type.

    BF16 and F16 round to nearest, ties to even, and overflow to infinity. Any
    NaN becomes a quiet NaN.

    Args:
        array: The values, of any shape.
        dtype: ``F32``, ``F16`` or ``BF16``.

    Raises:
        ValueError: If the array is not float32, or the type another one.
    """
    if array.dtype != np.float32:
        raise ValueError(f"expected float32 values, found {array.dtype}")
    if dtype == "F32":
        return Tensor(array, dtype)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return Tensor(array.astype(np.float16), dtype)
    if dtype == "BF16":
        return Tensor(_bfloat16(array), dtype)
    raise ValueError(f"a weight is one of {', '.join(WEIGHTS)}, not {dtype}")


def _bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    result = np.empty(array.shape, np.uint16)
    source = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
    target = result.reshape(-1)
    # In chunks, so that the temporary arrays stay in the cache.
    for start in range(0, source.size, _CHUNK):
        bits = source[start : start + _CHUNK]
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        target[start : start + _CHUNK] = np.where(nan, _QUIET_NAN, rounded)
    return result
