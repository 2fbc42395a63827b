# SPDX-License-Identifier: Apache-2.0
"""The weights of a graph that rebuilds projections in each forward.

A fused group is rebuilt as one matrix, so that it can be multiplied as one:
``W0 + B A``, where ``W0`` [N, K] has the members' means one below the other,
``A`` [R, K] their right factors likewise, and ``B`` [N, R] their left factors
in blocks on its diagonal. R is the sum of the members' ranks, and zeros up to
a multiple of 8. ``W0`` belongs to the band's first layer; the others refer to
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import block_diag

from .bundle import W0, A, B
from .layout import Layout, Projection
from .tensor import Tensor, TensorSpec, from_float32

MODULES = {
    "qkv": "self_attn.qkv_proj",
    "qk": "self_attn.qk_proj",
    "o": "self_attn.o_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}
"""The module in the graph that rebuilds a fused group, within the layer."""

_MULTIPLE = 8
"""Of bfloat16: the 16 bytes that the tensor memory accelerator needs between
rows, without which MAX multiplies by slower kernels."""


@dataclass(frozen=True)
class Fused:
    """A fused group of the layers of one band."""

    layout: Layout
    name: str
    layers: tuple[int, ...]
    members: tuple[Projection, ...]
    ranks: tuple[int, ...]
    """The members' ranks."""

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the matrix."""
        return sum(p.rows for p in self.members), self.members[0].columns

    @property
    def rank(self) -> int:
        """R, 0 if the means are all there is."""
        return -(-sum(self.ranks) // _MULTIPLE) * _MULTIPLE

    def module(self, layer: int) -> str:
        """Returns the path of the module that rebuilds a layer's."""
        return f"{self.layout.prefix}{layer}.{MODULES[self.name]}"

    def specs(self, dtype: str) -> dict[str, TensorSpec]:
        """Returns the graph's weights, by name.

        Args:
            dtype: Their type.
        """
        rows, columns = self.shape
        found = {
            f"{self.module(self.layers[0])}.w0": TensorSpec(dtype, self.shape)
        }
        for layer in self.layers if self.rank else ():
            module = self.module(layer)
            found[f"{module}.b"] = TensorSpec(dtype, (rows, self.rank))
            found[f"{module}.a"] = TensorSpec(dtype, (self.rank, columns))
        return found

    def weights(
        self, parts: Mapping[str, Tensor], dtype: str
    ) -> Iterator[tuple[str, Tensor]]:
        """Makes the graph's weights, one by one.

        Args:
            parts: The bands' parts, as a bundle has them, by name.
            dtype: The type of the weights.
        """
        first = self.layers[0]
        w0 = np.concatenate(self._parts(parts, first, W0))
        yield f"{self.module(first)}.w0", from_float32(w0, dtype)
        for layer in self.layers if self.rank else ():
            b = block_diag(*self._parts(parts, layer, B))
            a = np.concatenate(self._parts(parts, layer, A))
            zeros = 0, self.rank - len(a)
            b, a = np.pad(b, ((0, 0), zeros)), np.pad(a, (zeros, (0, 0)))
            yield f"{self.module(layer)}.b", from_float32(b, dtype)
            yield f"{self.module(layer)}.a", from_float32(a, dtype)

    def _parts(
        self, parts: Mapping[str, Tensor], layer: int, part: str
    ) -> Sequence[np.ndarray]:
        modules = (self.layout.module(layer, p) for p in self.members)
        return [parts[module + part].float32() for module in modules]
