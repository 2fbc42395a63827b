# SPDX-License-Identifier: Apache-2.0
"""Gives MAX what a plan makes: through the cache, and checked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import nvfp4
from .cache import DEFAULT_LIMIT, Cache, Weights, entry_key
from .plan import VERSION, CheckpointError, Plan, packed
from .settings import default_cache_dir
from .tensor import STORED_AS, Tensor, TensorSpec


@dataclass(frozen=True)
class Report:
    """What was done to a model's weights."""

    plan: Plan
    cache: str
    """``hit``, ``miss``, ``off`` if it could not be used, or ``unused`` if
    nothing was rewritten or only a graph is compiled."""

    native: bool
    """Whether the graph multiplies by NVFP4; else it was dequantized."""

    form: str = ""
    """How the graph rebuilds weights, if it does."""

    def line(self, architecture: str, *, capture: bool) -> str:
        """Returns the line that a start logs.

        Args:
            architecture: Its name.
            capture: Whether device graphs are captured.
        """
        count = len(self.plan.quantized)
        marked = "" if self.native or not count else " (dequantized at load)"
        path = "precompute-outside"
        if self.plan.runtime:
            path = f"runtime by {self.form}"
        return (
            f"AttnQuant: {architecture}, blocks {self.plan.blocks}, "
            f"rank {self.plan.rank}, NVFP4 {count} of "
            f"{len(self.plan.layout)} projections{marked}, "
            f"{path}, cache {self.cache}, "
            f"capture {'on' if capture else 'off'}"
        )


def load(
    plan: Plan,
    source: Mapping[str, Tensor],
    paths: Sequence[Path],
    model: str,
) -> Weights:
    """Returns the rewritten tensors, from the cache if they are there.

    Args:
        plan: What to make.
        source: The checkpoint's tensors, by name.
        paths: The checkpoint's files.
        model: The model's name, for whoever lists the cache.

    Raises:
        CheckpointError: As :meth:`Plan.check`.
        ValueError: As :meth:`Plan.rewrite`.
        OSError: If the checkpoint cannot be read.
    """
    specs = plan.specs(source)
    settings = plan.settings
    cache = Cache(
        settings.cache_dir or default_cache_dir(os.environ),
        settings.cache_limit * 10**9 if settings.cache_limit else DEFAULT_LIMIT,
    )
    digests = cache.source_digests(paths)
    key = entry_key(
        {name: digests[name] for name in plan.needed()},
        settings.identity(),
        f"{VERSION}.{nvfp4.VERSION}",
    )
    label = {
        "model": model,
        "settings": ", ".join(
            f"{name} {value}"
            for name, value in settings.identity().items()
            if value not in (None, [])
        ),
    }
    return cache.load(key, specs, lambda: plan.rewrite(source), label)


def in_graph(
    plan: Plan, parts: Mapping[str, Tensor], dtype: str
) -> Iterator[tuple[str, Tensor]]:
    """Gives the weights of a graph that rebuilds the projections.

    Args:
        plan: What the parts were made by.
        parts: What :meth:`Plan.rewrite` made, by name.
        dtype: The type of the graph's weights.
    """
    for fused in plan.fused:
        yield from fused.weights(parts, dtype)


def dequantized(
    plan: Plan, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Gives rewritten tensors with quantized weights as float32 instead.

    Args:
        plan: What they were made by.
        tensors: What :meth:`Plan.rewrite` made, by name.
    """
    for layer, projection in plan.rewritten:
        module = plan.layout.module(layer, projection)
        name = f"{module}.weight"
        if module not in plan.quantized:
            yield name, tensors[name]
            continue
        weight = nvfp4.dequantize(
            nvfp4.Quantized(
                tensors[name].data,
                tensors[f"{module}.weight_scale"].data,
                np.float32(tensors[f"{module}.weight_scale_2"].data),
            )
        )
        yield name, Tensor(weight, "F32")


def served(plan: Plan, dtype: str, *, native: bool) -> dict[str, TensorSpec]:
    """Returns the projections' tensors that a graph needs, by name.

    Args:
        plan: What becomes of the projections.
        dtype: The type of weights that are not quantized.
        native: Whether the graph multiplies by NVFP4.
    """
    found: dict[str, TensorSpec] = {}
    for fused in plan.fused:
        found |= fused.specs(dtype)
    in_graph = {
        (layer, projection)
        for fused in plan.fused
        for layer in fused.layers
        for projection in fused.members
    }
    for layer, projection in plan.layout:
        module = plan.layout.module(layer, projection)
        if (layer, projection) in in_graph:
            continue
        if native and module in plan.quantized:
            found |= packed(module, projection.shape)
        else:
            found[f"{module}.weight"] = TensorSpec(dtype, projection.shape)
    return found


def served_size(
    plan: Plan,
    stored_bytes: int,
    stored_width: int,
    dtype: str,
    *,
    native: bool,
) -> int:
    """Returns the bytes of a model's weights as they are served.

    Args:
        plan: What becomes of the projections.
        stored_bytes: The size of the checkpoint's files, whose headers are
            counted as weights.
        stored_width: The bytes of one weight there.
        dtype: The served weights' type, as :func:`served` has it.
        native: Whether the graph multiplies by NVFP4.
    """
    projections = sum(p.elements for _, p in plan.layout)
    others = max(stored_bytes // stored_width - projections, 0)
    tensors = served(plan, dtype, native=native).values()
    return others * STORED_AS[dtype].itemsize + sum(
        tensor.nbytes for tensor in tensors
    )


def check_served(
    needed: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec]
) -> None:
    """Checks a state dict before MAX has it.

    MAX takes packed weights of any shape, and under some of its loaders fills
    what is missing with zeros.

    Args:
        needed: The tensors of the projections, by name.
        found: All tensors of the state dict, by name.

    Raises:
        CheckpointError: If one is missing or another one, or a projection has
            a scale too many.
    """
    for name, spec in needed.items():
        if name not in found:
            raise CheckpointError(f"{name} is missing from the state dict")
        if found[name] != spec:
            raise CheckpointError(
                f"{name} is {found[name].dtype} {list(found[name].shape)}; "
                f"the graph needs {spec.dtype} {list(spec.shape)}"
            )
    modules = {name.rpartition(".")[0] for name in needed}
    for name in found.keys() - needed.keys():
        if name.rpartition(".")[0] in modules:
            raise CheckpointError(f"{name} has no place in the graph")
