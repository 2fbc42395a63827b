# SPDX-License-Identifier: Apache-2.0
"""Tensors to and from the forms that MAX has them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from max.driver import Buffer
from max.dtype import DType
from max.graph import Shape
from max.graph.weights import WeightData

from .tensor import STORED_AS, WEIGHTS, Tensor, TensorSpec, from_float32

_DTYPES = {
    "F32": DType.float32,
    "F16": DType.float16,
    "BF16": DType.bfloat16,
    "F8_E4M3": DType.float8_e4m3fn,
    "U8": DType.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: DType) -> str:
    """Returns safetensors' name of a type, or MAX's if there is none here."""
    return _NAMES.get(dtype, str(dtype))


def spec(data: WeightData) -> TensorSpec:
    """Returns the type and shape of a weight."""
    shape = tuple(int(size) for size in data.shape)
    return TensorSpec(dtype_name(data.dtype), shape)


def to_tensor(data: WeightData) -> Tensor:
    """Returns a weight without copying it.

    Raises:
        ValueError: If it is of a type that no projection has.
    """
    found = spec(data)
    if found.dtype not in _DTYPES:
        raise ValueError(f"{data.name} is {found.dtype}, which is no weight's")
    # numpy has no such types as bfloat16; the bits travel as integers.
    stored = DType.from_numpy(STORED_AS[found.dtype])
    array = data.to_buffer().view(stored, found.shape).to_numpy()
    return Tensor(array, found.dtype)


def to_weight(name: str, tensor: Tensor) -> WeightData:
    """Returns a tensor as a weight; MAX copies it only if it is read-only."""
    dtype = _DTYPES[tensor.dtype]
    buffer = Buffer.from_numpy(np.ascontiguousarray(tensor.data))
    buffer = buffer.view(dtype, tensor.shape)  # makes a scalar one again
    return WeightData(buffer, name, dtype, Shape(tensor.shape))


def cast(data: WeightData, dtype: DType) -> WeightData:
    """Returns a weight in another type; a quantized one as it is."""
    if data.dtype == dtype or dtype_name(data.dtype) not in WEIGHTS:
        return data
    tensor = from_float32(to_tensor(data).float32(), dtype_name(dtype))
    return to_weight(data.name, tensor)


class Source(Mapping[str, Tensor]):
    """A checkpoint's tensors, each looked at when it is asked for."""

    def __init__(self, load: Mapping[str, Callable[[], WeightData]]) -> None:
        self._load = load

    def __getitem__(self, name: str) -> Tensor:
        return to_tensor(self._load[name]())

    def __iter__(self) -> Iterator[str]:
        return iter(self._load)

    def __len__(self) -> int:
        return len(self._load)


def placeholders(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Returns zeros, for a graph that is compiled and never run."""
    return {
        name: Tensor(np.zeros(s.shape, STORED_AS[s.dtype]), s.dtype)
        for name, s in specs.items()
    }
