# SPDX-License-Identifier: Apache-2.0
"""Layers that rebuild a weight in each forward and multiply by it.

They stand in the place of MAX's ``StackedLinear``, ``Linear`` and ``MLP``, on
one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.layer import Module
from max.nn.linear import MLP, linear

from .kernels.rebuild import project
from .plan import Plan
from .runtime import Fused

Rebuild = Callable[
    [TensorValue, TensorValue, TensorValue, TensorValue], TensorValue
]
"""Makes ``w0 + b @ a`` of w0 [N, K], b [N, R] and a [R, K], for x [M, K]; see
:mod:`.kernels.rebuild`."""


class OneDevice:
    """A layer that has one shard, which is the layer itself.

    MAX shards every layer, on one device too, as the built-in class.
    """

    sharding_strategy: Any = None

    def shard(self, devices: Iterable[DeviceRef]) -> list[Any]:
        """Returns the layer.

        Raises:
            ValueError: If there is more than one device.
        """
        (_,) = devices
        return [self]


class RebuiltLinear(OneDevice, Module):
    """Multiplies by ``(w0 + b @ a).T``."""

    def __init__(
        self,
        fused: Fused,
        dtype: DType,
        device: DeviceRef,
        rebuild: Rebuild,
        first: RebuiltLinear | None,
    ) -> None:
        """Makes the layer.

        Args:
            fused: The fused group.
            dtype: The type of weights and activations.
            device: Where the weights are.
            rebuild: How the weight is rebuilt.
            first: The layer of the band that has its ``w0``, if another.
        """
        super().__init__()
        rows, columns = fused.shape
        self._rebuild = rebuild
        if first is None:
            self.w0 = Weight("w0", dtype, [rows, columns], device)
        else:
            self.set_shared_weight("w0", first.w0)
        self._has_factors = fused.rank > 0
        if self._has_factors:
            self.b = Weight("b", dtype, [rows, fused.rank], device)
            self.a = Weight("a", dtype, [fused.rank, columns], device)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Returns x [M, K] times the weight, [M, N]."""
        if not self._has_factors:
            return linear(x, self.w0)
        return project(x, self._rebuild(self.w0, self.b, self.a, x))


class RebuiltMLP(OneDevice, MLP):
    """A gated MLP of two such layers."""

    def __init__(
        self, gate_up: RebuiltLinear, down: RebuiltLinear, **options: object
    ) -> None:
        """Makes the layer.

        Args:
            gate_up: Both projections of the input, gate first.
            down: That of the output.
            options: The built-in layer's arguments.
        """
        super().__init__(**options, is_sharding=True)
        self.gate_up_proj = gate_up
        self.down_proj = down

    def __call__(self, x: TensorValue) -> TensorValue:
        """Returns the output for x [M, K]."""
        width = self.feed_forward_length
        gate, up = ops.split(self.gate_up_proj(x), [width, width], axis=1)
        return self.down_proj(self.activation_function(gate) * up)


class RebuiltLayers:
    """Makes the rebuilt layers of a model, each band's sharing its mean."""

    def __init__(self, plan: Plan, rebuild: Rebuild) -> None:
        self._rebuild = rebuild
        self._fused = {
            (layer, fused.name): fused
            for fused in plan.fused
            for layer in fused.layers
        }
        self._first: dict[Fused, RebuiltLinear] = {}

    def __contains__(self, group: tuple[int, str]) -> bool:
        """Says whether a layer's fused group is rebuilt."""
        return group in self._fused

    def linear(
        self, layer: int, group: str, dtype: DType, device: DeviceRef
    ) -> RebuiltLinear:
        """Makes the layer that multiplies by a fused group.

        Args:
            layer: The decoder layer; a band's are asked for in order.
            group: The group's name.
            dtype: As in :class:`RebuiltLinear`.
            device: Likewise.
        """
        fused = self._fused[layer, group]
        made = RebuiltLinear(
            fused, dtype, device, self._rebuild, self._first.get(fused)
        )
        self._first.setdefault(fused, made)
        return made
