# SPDX-License-Identifier: Apache-2.0
"""Which of a checkpoint's weights AttnQuant works on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Group:
    """The layers' weights of one projection that are of one shape."""

    projection: str
    """The module within a layer, such as ``self_attn.q_proj``."""

    dtype: str
    shape: tuple[int, int]
    """[N, K]: outputs, inputs."""

    modules: tuple[str, ...]
    """The modules' paths, from the first layer to the last."""


def group(specs: Mapping[str, TensorSpec]) -> list[Group]:
    """Groups the language model's projections.

    Args:
        specs: All tensors of a checkpoint, by name.

    Raises:
        ValueError: If a projection is of a type that is no bf16, f16 or f32,
            as in a checkpoint that is already quantized.
    """
    found: dict[tuple[str, str, tuple[int, ...]], dict[int, str]] = {}
    for name, spec in specs.items():
        match = _WEIGHT.fullmatch(name)
        if match is None:
            continue
        if spec.dtype not in WEIGHTS or len(spec.shape) != 2:
            raise ValueError(
                f"{name} is {spec.dtype} {list(spec.shape)}; expected a "
                f"matrix of {' or '.join(WEIGHTS)}"
            )
        key = match["projection"], spec.dtype, spec.shape
        layer = int(match["layer"])
        found.setdefault(key, {})[layer] = name.removesuffix(".weight")
    return [
        Group(
            projection,
            dtype,
            (shape[0], shape[1]),
            tuple(modules[layer] for layer in sorted(modules)),
        )
        for (projection, dtype, shape), modules in found.items()
    ]


def layers(specs: Mapping[str, TensorSpec]) -> int:
    """Returns how many layers the projections belong to."""
    matches = (_WEIGHT.fullmatch(name) for name in specs)
    return len({match["layer"] for match in matches if match})
