# SPDX-License-Identifier: Apache-2.0
"""The projections that a model should have, by its configuration.

A fused group is multiplied as one matrix, so its members share what holds
for a whole matrix, such as NVFP4's second scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .projections import FUSED


class TextConfig(Protocol):
    """The sizes in a ``config.json`` of a Gemma text model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True)
class Projection:
    """A projection, which every layer has."""

    name: str
    """The module within the layer, such as ``self_attn.q_proj``."""

    group: str
    """The fused group, whose members take the same input."""

    rows: int
    """N, the size of the output."""

    columns: int
    """K, the size of the input."""

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.rows, self.columns

    @property
    def elements(self) -> int:
        """The number of weights."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Layout:
    """A model's projections, and where its checkpoint has them."""

    projections: tuple[Projection, ...]
    layers: int

    prefix: str = "model.layers."
    """What stands before a layer's number in the checkpoint."""

    def module(self, layer: int, projection: Projection) -> str:
        """Returns a projection's module path, as the checkpoint has it."""
        return f"{self.prefix}{layer}.{projection.name}"

    def modules(self) -> list[str]:
        """Returns all module paths, layer by layer."""
        return [self.module(layer, p) for layer, p in self]

    def groups(self) -> dict[str, tuple[Projection, ...]]:
        """Returns the members of each fused group of a layer."""
        return {
            name: tuple(p for p in self.projections if p.group == name)
            for name in dict.fromkeys(p.group for p in self.projections)
        }

    def __iter__(self) -> Iterator[tuple[int, Projection]]:
        for layer in range(self.layers):
            for projection in self.projections:
                yield layer, projection

    def __len__(self) -> int:
        return self.layers * len(self.projections)


def gemma3(config: TextConfig) -> Layout:
    """Returns the seven projections a layer of Gemma 3's text model."""
    hidden = config.hidden_size
    inner = config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    projections = tuple(
        Projection(name, group, *shapes[name])
        for group, names in FUSED.items()
        for name in names
    )
    return Layout(projections, config.num_hidden_layers)
