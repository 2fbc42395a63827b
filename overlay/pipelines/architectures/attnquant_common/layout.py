# SPDX-License-Identifier: Apache-2.0
"""The projections that a model should have, by its configuration.

A fused group is multiplied as one matrix, so its members share what holds
for a whole matrix, such as NVFP4's second scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .projections import alike

_SLIDING, _GLOBAL = "sliding_attention", "full_attention"


class TextConfig(Protocol):
    """The sizes in a ``config.json`` of a Gemma text model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


class Gemma4Config(TextConfig, Protocol):
    """Those that a Gemma 4 text model has besides."""

    layer_types: Sequence[str]
    global_head_dim: int
    num_global_key_value_heads: int | None
    attention_k_eq_v: bool
    enable_moe_block: bool
    hidden_size_per_layer_input: int
    num_kv_shared_layers: int
    use_double_wide_mlp: bool


@dataclass(frozen=True)
class Projection:
    """A projection of one shape, and the layers that have it."""

    name: str
    """The module within the layer, such as ``self_attn.q_proj``."""

    group: str
    """The fused group, whose members take the same input."""

    rows: int
    """N, the size of the output."""

    columns: int
    """K, the size of the input."""

    layers: tuple[int, ...]
    """The layers, from the first to the last."""

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        return self.rows, self.columns

    def shared_out(self, block: int) -> tuple[int, str]:
        """Returns how much there is for devices to share out, and of what.

        In tensor parallelism each has some of the outputs of q, k, v, gate and
        up, and some of the inputs of o and down.

        Args:
            block: The inputs that have a scale in common.
        """
        if self.group in {"o", "down"}:
            return self.columns // block, f"blocks of {block} inputs"
        return self.rows, "outputs"

    @property
    def elements(self) -> int:
        """The number of weights."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Layout:
    """A model's projections, and where its checkpoint has them."""

    projections: tuple[Projection, ...]
    layers: int

    prefix: str
    """What stands before a layer's number in the checkpoint."""

    def module(self, layer: int, projection: Projection) -> str:
        """Returns a projection's module path, as the checkpoint has it."""
        return f"{self.prefix}{layer}.{projection.name}"

    def modules(self) -> list[str]:
        """Returns all module paths, layer by layer."""
        return [self.module(layer, p) for layer, p in self]

    def groups(
        self,
    ) -> dict[tuple[str, tuple[int, ...]], tuple[Projection, ...]]:
        """Returns the members of each fused group, by name and layers.

        Layers in which they are of other shapes have another group.
        """
        found: dict[tuple[str, tuple[int, ...]], tuple[Projection, ...]] = {}
        for p in self.projections:
            key = p.group, p.layers
            found[key] = (*found.get(key, ()), p)
        return found

    def group(self, layer: int, name: str) -> str:
        """Returns the fused group that a projection of a layer is in.

        Args:
            layer: The layer.
            name: The projection's, within it.
        """
        (found,) = (
            p.group
            for p in self.projections
            if p.name == name and layer in p.layers
        )
        return found

    def __iter__(self) -> Iterator[tuple[int, Projection]]:
        for layer in range(self.layers):
            for projection in self.projections:
                if layer in projection.layers:
                    yield layer, projection

    def __len__(self) -> int:
        return sum(len(p.layers) for p in self.projections)


def gemma3(config: TextConfig) -> Layout:
    """Returns the seven projections a layer of Gemma 3's text model."""
    hidden = config.hidden_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    mlp = _mlp(hidden, config.intermediate_size)
    layer = _attention(hidden, q, kv) | mlp
    return _layout([layer] * config.num_hidden_layers, "model.layers.")


def gemma4(config: Gemma4Config) -> Layout:
    """Returns the projections of Gemma 4's text model.

    Global layers have heads of another size and number, and may use their
    keys as values: then they have no ``v_proj``, and a fused group ``qk``.

    Raises:
        ValueError: If the model has weights that are not served here: experts,
            embeddings of each layer, or layers that use others' keys.
    """
    _check_dense(config)
    hidden, heads = config.hidden_size, config.num_attention_heads
    keys = config.num_key_value_heads
    global_keys = config.num_global_key_value_heads
    if global_keys is None:
        global_keys = keys
    size, global_size = config.head_dim, config.global_head_dim
    kinds = {
        _SLIDING: _attention(hidden, heads * size, keys * size),
        _GLOBAL: _attention(
            hidden, heads * global_size, global_keys * global_size
        ),
    }
    if config.attention_k_eq_v:
        del kinds[_GLOBAL]["self_attn.v_proj"]
    mlp = _mlp(hidden, config.intermediate_size)
    return _layout(
        [kinds[kind] | mlp for kind in config.layer_types],
        "model.language_model.layers.",
    )


def _check_dense(config: Gemma4Config) -> None:
    for name, value in (
        ("enable_moe_block", config.enable_moe_block),
        ("hidden_size_per_layer_input", config.hidden_size_per_layer_input),
        ("num_kv_shared_layers", config.num_kv_shared_layers),
        ("use_double_wide_mlp", config.use_double_wide_mlp),
    ):
        if value:
            raise ValueError(
                f"AttnQuant serves the dense Gemma 4; config.json has {name} "
                f"{value}. ATTNQUANT=0 switches AttnQuant off"
            )
    kinds = set(config.layer_types)
    count = len(config.layer_types)
    if not kinds <= {_SLIDING, _GLOBAL} or count != config.num_hidden_layers:
        raise ValueError(
            f"config.json's layer_types has {count} of {sorted(kinds)}; "
            f"expected {_SLIDING} or {_GLOBAL} for each of "
            f"{config.num_hidden_layers} layers"
        )


def _attention(hidden: int, q: int, kv: int) -> dict[str, tuple[int, int]]:
    return {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
    }


def _mlp(hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    return {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _layout(
    layers: Sequence[Mapping[str, tuple[int, int]]], prefix: str
) -> Layout:
    """Makes a layout.

    Args:
        layers: Each layer's projections' shapes, by name.
        prefix: As :attr:`Layout.prefix`.
    """
    projections = []
    for group, members, those in alike(dict(enumerate(layers))):
        if group == "qkv" and len(members) == 2:
            group = "qk"
        projections += [
            Projection(name, group, *shape, those)
            for name, shape in members.items()
        ]
    return Layout(tuple(projections), len(layers), prefix)
