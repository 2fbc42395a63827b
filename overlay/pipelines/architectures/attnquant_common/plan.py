# SPDX-License-Identifier: Apache-2.0
"""What becomes of each of a checkpoint's projections, as the settings ask.

Weights are decomposed and rebuilt, rounded to the checkpoint's type, and then
quantized: what is served is what a checkpoint with the rebuilt weights would
give. All is done band by band and fused group by fused group, so memory holds
no more than one group's weights of one band at a time. Where the graph
rebuilds them instead, the bands' parts are made, under a bundle's names, and
:mod:`.runtime` makes the graph's weights of those.

A quantized module ``X`` has the tensors of ModelOpt's layout:

- ``X.weight``: U8 [N, K/2], two codes a byte,
- ``X.weight_scale``: F8_E4M3 [N, K/16],
- ``X.weight_scale_2``: F32 [], the same throughout a fused group,
- ``X.input_scale``: F32 [], see :data:`INPUT_SCALE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import nvfp4
from .bundle import Bundle, Shared, Widened
from .decomposition import Band, bands, decompose_band
from .layout import Layout, Projection
from .runtime import Fused
from .settings import Settings, SettingsError
from .tensor import WEIGHTS, Tensor, TensorSpec, from_float32

VERSION = "1"
"""Of what :meth:`Plan.rewrite` makes; another one makes cached weights anew."""

INPUT_SCALE = 1.0
"""The second scale of activations, where a kernel quantizes those too.

It would be the largest activation in a calibration run, by 6 * 448. Without a
run, 1 lets the blocks' scales, which are found at each forward, reach
activations up to 2688 and keep all their bits from 0.09 on, which suits what
leaves a norm.
"""


class CheckpointError(ValueError):
    """A checkpoint's tensor is missing or is not what the model needs."""


@dataclass(frozen=True)
class Plan:
    """What becomes of each projection of a model."""

    layout: Layout
    settings: Settings

    bundle: Bundle | None = None
    """The checkpoint, if it is one that is already decomposed."""

    def __post_init__(self) -> None:
        self.settings.check_ignored(self.layout.modules())
        if self.bundle is None:
            self.settings.decomposition(self.layout.layers)
        else:
            self._check_bundle(self.bundle)
        if not (self.settings.precompute_outside or self.decomposed):
            raise SettingsError(
                "ATTNQUANT_PRECOMPUTE_OUTSIDE=0 has nothing to rebuild: each "
                f"of the {self.layout.layers} layers is a band of its own"
            )
        for (_, layers), group in self.layout.groups().items():
            for layer in layers:
                self._check_group(layer, group)

    @property
    def blocks(self) -> int:
        """The number of bands; that of layers if nothing is decomposed."""
        if self.bundle is not None:
            return self.bundle.blocks
        return self.settings.decomposition(self.layout.layers)[0]

    @property
    def rank(self) -> int:
        """The rank of each layer's difference from its band."""
        if self.bundle is not None:
            return self.bundle.rank if self.decomposed else 0
        return self.settings.decomposition(self.layout.layers)[1]

    @property
    def decomposed(self) -> bool:
        """Whether there are bands of several layers."""
        return self.blocks < self.layout.layers

    @property
    def runtime(self) -> bool:
        """Whether the graph rebuilds weights, in each forward."""
        return self.decomposed and not self.settings.precompute_outside

    @cached_property
    def fused(self) -> list[Fused]:
        """The matrices that the graph rebuilds, of all bands."""
        if not self.runtime:
            return []
        return [
            Fused(
                self.layout,
                members[0].group,
                layers,
                members,
                tuple(min(self.rank, *p.shape) for p in members),
            )
            for layers, members in self._bands()
            if len(layers) > 1
        ]

    @cached_property
    def quantized(self) -> frozenset[str]:
        """The modules that are quantized."""
        if self.settings.quant is None:
            return frozenset()
        return frozenset(
            module
            for module in self.layout.modules()
            if not self.settings.ignores(module)
        )

    @cached_property
    def rewritten(self) -> list[tuple[int, Projection]]:
        """The projections whose weights are not the checkpoint's."""
        shared = {
            (layer, p) for layers, p in self._shared() for layer in layers
        }
        return [
            (layer, projection)
            for layer, projection in self.layout
            if (layer, projection) in shared
            or self.layout.module(layer, projection) in self.quantized
        ]

    def quantized_groups(self, layer: int) -> frozenset[str]:
        """Returns the fused groups of a layer that are quantized."""
        return frozenset(
            projection.group
            for projection in self.layout.projections
            if layer in projection.layers
            and self.layout.module(layer, projection) in self.quantized
        )

    def specs(self, source: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
        """Returns the tensors that :meth:`rewrite` makes, by name.

        Raises:
            CheckpointError: As :meth:`check`.
        """
        self.check(source)
        if self.runtime:
            return {
                name: spec
                for layers, p in self._shared()
                for name, spec in self._parts(source, layers, p).specs().items()
            }
        found: dict[str, TensorSpec] = {}
        for layer, projection in self.rewritten:
            module = self.layout.module(layer, projection)
            if module in self.quantized:
                found |= packed(module, projection.shape)
            else:
                dtype = self._dtype(source, module)
                spec = TensorSpec(dtype, projection.shape)
                found[f"{module}.weight"] = spec
        return found

    def check(self, source: Mapping[str, Tensor]) -> None:
        """Checks that a checkpoint has the weights to rewrite, unquantized.

        Raises:
            CheckpointError: If one is missing, of another shape, or of a type
                that is no weight's.
        """
        for layer, projection in self.rewritten:
            module = self.layout.module(layer, projection)
            if module in self._bundled:
                continue
            name = f"{module}.weight"
            tensor = source.get(name)
            if tensor is None:
                raise CheckpointError(f"the checkpoint has no {name}")
            if tensor.dtype not in WEIGHTS:
                raise CheckpointError(
                    f"{name} is {tensor.dtype}; AttnQuant needs "
                    f"{', '.join(WEIGHTS)}, not an already quantized weight"
                )
            if tensor.shape != projection.shape:
                raise CheckpointError(
                    f"{name} has shape {list(tensor.shape)}; the model's "
                    f"configuration says {list(projection.shape)}"
                )

    def needed(self) -> list[str]:
        """Returns the checkpoint's tensors that :meth:`rewrite` reads."""
        return [
            name
            for layer, projection in self.rewritten
            for name in self._stored(self.layout.module(layer, projection))
        ]

    def rewrite(
        self, source: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Makes the rewritten tensors, one by one.

        Args:
            source: The checkpoint's tensors, by name.

        Raises:
            ValueError: If a weight holds NaN or infinity, or a bundle is
                damaged.
        """
        if self.runtime:
            for layers, p in self._shared():
                parts = self._parts(source, layers, p)
                band = self._band(source, layers, p)
                for name, part in parts.named(band):
                    yield name, Tensor(part, "F32")
            return
        rewritten = set(self.rewritten)
        for layers, group in self._bands():
            # Of a band, all layers are rewritten or it is one layer.
            if (layers[0], group[0]) in rewritten:
                yield from self._rewrite_group(source, layers, group)

    def check_devices(self, count: int, *, native: bool) -> None:
        """Checks that as many devices can serve the model.

        MAX would find out too, but only once the weights are made.

        Args:
            count: How many share each layer.
            native: Whether the graph multiplies by NVFP4.

        Raises:
            SettingsError: If the graph is to rebuild weights on several, or a
                quantized weight's scales cannot be shared out evenly.
        """
        if self.runtime and count > 1:
            raise SettingsError(
                "ATTNQUANT_PRECOMPUTE_OUTSIDE=0 serves on one device, and "
                f"there are {count}; set it to 1 or name one by --devices"
            )
        if not native:
            return
        for layer, projection in self.layout:
            module = self.layout.module(layer, projection)
            shared, what = projection.shared_out(nvfp4.BLOCK)
            if module in self.quantized and shared % count:
                raise SettingsError(
                    f"ATTNQUANT_QUANT=nvfp4: {module} has {shared} {what}, "
                    f"which {count} devices cannot share evenly; set "
                    f"ATTNQUANT_QUANT_IGNORE={self._ignoring(projection)}, or "
                    "other --devices"
                )

    def _rewrite_group(
        self,
        source: Mapping[str, Tensor],
        layers: tuple[int, ...],
        group: Sequence[Projection],
    ) -> Iterator[tuple[str, Tensor]]:
        weights = [self._rebuilt(source, layers, p) for p in group]
        for place, layer in enumerate(layers):
            modules = [self.layout.module(layer, p) for p in group]
            names = [f"{module}.weight" for module in modules]
            rebuilt = [each[place] for each in weights]
            if modules[0] not in self.quantized:
                yield from zip(names, rebuilt, strict=True)
                continue
            scale_2 = nvfp4.group_scale_2(rebuilt, names=names)
            for module, name, weight in zip(
                modules, names, rebuilt, strict=True
            ):
                quantized = nvfp4.quantize(
                    weight,
                    scales=self.settings.scales,
                    weight_scale_2=scale_2,
                    name=name,
                )
                yield name, Tensor(quantized.weight, "U8")
                scale = Tensor(quantized.weight_scale, "F8_E4M3")
                yield f"{module}.weight_scale", scale
                yield f"{module}.weight_scale_2", _scalar(scale_2)
                yield f"{module}.input_scale", _scalar(INPUT_SCALE)

    def _rebuilt(
        self,
        source: Mapping[str, Tensor],
        layers: tuple[int, ...],
        p: Projection,
    ) -> Sequence[Tensor]:
        modules = [self.layout.module(layer, p) for layer in layers]
        if len(modules) == 1:
            return [source[f"{modules[0]}.weight"]]
        band = self._band(source, layers, p)
        return _Rebuilt(band, [self._dtype(source, m) for m in modules])

    def _band(
        self,
        source: Mapping[str, Tensor],
        layers: tuple[int, ...],
        p: Projection,
    ) -> Band:
        modules = [self.layout.module(layer, p) for layer in layers]
        if self.bundle is not None:
            return self.bundle.band(self._bundled[modules[0]])
        names = [f"{module}.weight" for module in modules]
        return decompose_band(Widened(source, names), self.rank, names=names)

    def _shared(self) -> Iterator[tuple[tuple[int, ...], Projection]]:
        """Gives the bands of several layers, and their projections."""
        for layers, group in self._bands():
            if len(layers) > 1:
                for projection in group:
                    yield layers, projection

    def _bands(self) -> list[tuple[tuple[int, ...], tuple[Projection, ...]]]:
        """Returns the bands of each fused group, that of the first layer first.

        The layers that have a group, in their order, are cut into as many
        bands as there should be, or one a layer where they are fewer.
        """
        found = [
            (layers[band.start : band.stop], group)
            for (_, layers), group in self.layout.groups().items()
            for band in bands(len(layers), min(self.blocks, len(layers)))
        ]
        return sorted(found, key=lambda each: each[0][0])

    def _parts(
        self,
        source: Mapping[str, Tensor],
        layers: tuple[int, ...],
        p: Projection,
    ) -> Shared:
        modules = tuple(self.layout.module(layer, p) for layer in layers)
        dtype = self._dtype(source, modules[0])
        return Shared(dtype, p.shape, min(self.rank, *p.shape), modules)

    @cached_property
    def _bundled(self) -> dict[str, Shared]:
        """The bundle's bands of several layers, by module."""
        shared = self.bundle.shared if self.bundle is not None else []
        return {module: band for band in shared for module in band.modules}

    def _dtype(self, source: Mapping[str, Tensor], module: str) -> str:
        """Returns the type of a weight before it was decomposed."""
        if module in self._bundled:
            return self._bundled[module].dtype
        return source[f"{module}.weight"].dtype

    def _stored(self, module: str) -> list[str]:
        """Returns the checkpoint's tensors that make a module's weight."""
        if module in self._bundled:
            return self._bundled[module].of(module)
        return [f"{module}.weight"]

    def _check_bundle(self, bundle: Bundle) -> None:
        settings, layout = self.settings, self.layout
        for name, asked, found in (
            ("ATTNQUANT_BLOCKS", settings.blocks, bundle.blocks),
            ("ATTNQUANT_RANK", settings.rank, bundle.rank),
        ):
            if asked not in (None, found):
                raise SettingsError(
                    f"{name}={asked}: {bundle.path} is decomposed already, "
                    f"with {found}; unset it"
                )
        expected = {
            tuple(layout.module(layer, p) for layer in layers): p.shape
            for layers, p in self._shared()
        }
        found = {band.modules: band.shape for band in bundle.shared}
        if found != expected:
            raise CheckpointError(
                f"{bundle.path} has bands of other modules or shapes than the "
                "model's configuration says; make it again from its checkpoint"
            )

    def _ignoring(self, projection: Projection) -> str:
        """Returns patterns that leave out a projection's fused group."""
        members = self.layout.groups()[projection.group, projection.layers]
        return ",".join(p.name.rpartition(".")[2] for p in members)

    def _check_group(self, layer: int, group: Sequence[Projection]) -> None:
        modules = [self.layout.module(layer, p) for p in group]
        chosen = [m for m in modules if m in self.quantized]
        if chosen and len(chosen) < len(modules):
            raise SettingsError(
                f"ATTNQUANT_QUANT_IGNORE leaves {', '.join(chosen)} of the "
                f"fused {', '.join(modules)}; ignore all of them or none"
            )
        if chosen and group[0].columns % nvfp4.BLOCK:
            raise SettingsError(
                f"ATTNQUANT_QUANT=nvfp4: {modules[0]} has inputs of "
                f"{group[0].columns}, no multiple of {nvfp4.BLOCK}; set "
                f"ATTNQUANT_QUANT_IGNORE={self._ignoring(group[0])}"
            )


def packed(module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    """Returns the tensors of a quantized module, by name.

    Args:
        module: Its path.
        shape: [N, K] of its weight.
    """
    rows, columns = shape
    return {
        f"{module}.weight": TensorSpec("U8", (rows, columns // 2)),
        f"{module}.weight_scale": TensorSpec(
            "F8_E4M3", (rows, columns // nvfp4.BLOCK)
        ),
        f"{module}.weight_scale_2": TensorSpec("F32", ()),
        f"{module}.input_scale": TensorSpec("F32", ()),
    }


@dataclass(frozen=True)
class _Rebuilt(Sequence[Tensor]):
    """A band's weights, each rebuilt when it is asked for."""

    band: Band
    dtypes: Sequence[str]

    def __len__(self) -> int:
        return len(self.dtypes)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return from_float32(self.band.reconstruct(index), self.dtypes[index])


def _scalar(value: float | np.float32) -> Tensor:
    return Tensor(np.array(value, np.float32), "F32")
