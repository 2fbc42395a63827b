# SPDX-License-Identifier: Apache-2.0
"""Which of a checkpoint's weights AttnQuant works on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .tensor import WEIGHTS, TensorSpec

FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""A layer's projections, by fused group: what MAX multiplies as one."""

_NAMES = "|".join(re.escape(name) for names in FUSED.values() for name in names)

# A vision tower's layers have other prefixes.
_WEIGHT = re.compile(
    r"(?:model\.|language_model\.model\.|model\.language_model\.)"
    rf"layers\.(?P<layer>\d+)\.(?P<projection>{_NAMES})\.weight"
)


_Kind = TypeVar("_Kind")


def alike(
    layers: Mapping[int, Mapping[str, _Kind]],
) -> Iterator[tuple[str, dict[str, _Kind], tuple[int, ...]]]:
    """Gives fused groups, and for each the layers that have it of one kind.

    Layers whose group has other members, or members of another kind, make a
    group of their own.

    Args:
        layers: What kind of weight a layer's projections have, such as their
            shapes: by layer, and by projection.

    Yields:
        The group's name, its members' kinds, and the layers in order.
    """
    for name, projections in FUSED.items():
        found: dict[tuple[tuple[str, _Kind], ...], list[int]] = {}
        for layer in sorted(layers):
            kinds = layers[layer]
            members = tuple((p, kinds[p]) for p in projections if p in kinds)
            if members:
                found.setdefault(members, []).append(layer)
        for members, those in found.items():
            yield name, dict(members), tuple(those)


@dataclass(frozen=True)
class Group:
    """The weights of one projection in layers that are alike in it."""

    projection: str
    """The module within a layer, such as ``self_attn.q_proj``."""

    dtype: str
    shape: tuple[int, int]
    """[N, K]: outputs, inputs."""

    modules: tuple[str, ...]
    """The modules' paths, from the first layer to the last."""


def group(specs: Mapping[str, TensorSpec]) -> list[Group]:
    """Groups the language model's projections, as :func:`alike` does.

    Args:
        specs: All tensors of a checkpoint, by name.

    Raises:
        ValueError: If a projection is of a type that is no bf16, f16 or f32,
            as in a checkpoint that is already quantized.
    """
    found: dict[int, dict[str, TensorSpec]] = {}
    modules: dict[tuple[int, str], str] = {}
    for name, spec in specs.items():
        match = _WEIGHT.fullmatch(name)
        if match is None:
            continue
        if spec.dtype not in WEIGHTS or len(spec.shape) != 2:
            raise ValueError(
                f"{name} is {spec.dtype} {list(spec.shape)}; expected a "
                f"matrix of {' or '.join(WEIGHTS)}"
            )
        layer, projection = int(match["layer"]), match["projection"]
        found.setdefault(layer, {})[projection] = spec
        modules[layer, projection] = name.removesuffix(".weight")
    return [
        Group(
            projection,
            spec.dtype,
            (spec.shape[0], spec.shape[1]),
            tuple(modules[layer, projection] for layer in those),
        )
        for _, members, those in alike(found)
        for projection, spec in members.items()
    ]


def layers(specs: Mapping[str, TensorSpec]) -> int:
    """Returns how many layers the projections belong to."""
    matches = (_WEIGHT.fullmatch(name) for name in specs)
    return len({match["layer"] for match in matches if match})
