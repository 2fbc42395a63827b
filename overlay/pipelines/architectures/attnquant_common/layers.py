# SPDX-License-Identifier: Apache-2.0
"""Makes MAX's layers as a plan has them.

MAX's text models give one quantization to all layers, or to those of a kind,
and take no factories. So the names that a model makes its attention and its
MLPs by are bound, while it is made, to the factories here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType
from typing import Any

from max.driver import accelerator_count
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.comm import allreduce
from max.nn.layer import Module
from max.nn.linear import MLP, Linear
from max.nn.quant_config import QuantConfig

from .binding import bound
from .plan import Plan
from .rebuilt import OneDevice, Rebuild, RebuiltLayers, RebuiltMLP


@contextmanager
def planned(
    module: ModuleType, attention: str, plan: Plan, rebuild: Rebuild
) -> Iterator[None]:
    """Makes one model's layers as a plan has them, as long as it is entered.

    Args:
        module: MAX's, which makes the layers.
        attention: The name by which it makes attention; MLPs are ``MLP``.
        plan: What is quantized, if the configuration has a ``QuantConfig``,
            and what the graph rebuilds.
        rebuild: How the graph rebuilds weights.
    """
    layers = _Layers(plan, rebuild)
    factories = {
        attention: layers.attention(getattr(module, attention)),
        "MLP": layers.mlp(),
    }
    with bound(module, **factories), _devices():
        yield


@contextmanager
def _devices() -> Iterator[None]:
    """Lets layers be made where there is no accelerator.

    Allreduce makes the devices, which it never reads.
    """
    if accelerator_count():
        yield
        return
    with bound(allreduce, Accelerator=lambda id: None):
        yield


class _Layers:
    """Makes a model's layers, one after the other."""

    def __init__(self, plan: Plan, rebuild: Rebuild) -> None:
        self._plan = plan
        self._rebuilt = RebuiltLayers(plan, rebuild)

    def attention(self, built_in: type[Any]) -> Callable[..., Module]:
        """Returns what makes a layer's attention.

        Args:
            built_in: MAX's class of it.
        """
        name = f"Rebuilt{built_in.__name__}"
        rebuilt = type(name, (OneDevice, built_in), {})
        layers = count()

        def make(
            *,
            hidden_size: int,
            dtype: DType,
            devices: list[DeviceRef],
            quant_config: QuantConfig | None,
            **others: object,
        ) -> Module:
            layer = next(layers)
            inputs = self._plan.layout.group(layer, "self_attn.q_proj")
            quantized = self._plan.quantized_groups(layer)
            made = (rebuilt if (layer, "o") in self._rebuilt else built_in)(
                hidden_size=hidden_size,
                dtype=dtype,
                devices=devices,
                quant_config=quant_config if inputs in quantized else None,
                **others,
            )
            if (layer, "o") in self._rebuilt:
                for group in (inputs, "o"):
                    setattr(
                        made,
                        f"{group}_proj",
                        self._rebuilt.linear(layer, group, dtype, devices[0]),
                    )
            elif ("o" in quantized) != (inputs in quantized):
                made.o_proj = Linear(
                    made.q_weight_dim,
                    hidden_size,
                    dtype,
                    devices[0],
                    quant_config=quant_config if "o" in quantized else None,
                )
            return made

        return make

    def mlp(self) -> Callable[..., MLP]:
        """Returns what makes a layer's MLP."""
        layers = count()

        def make(
            *,
            dtype: DType,
            devices: list[DeviceRef],
            quant_config: QuantConfig | None,
            **others: object,
        ) -> MLP:
            layer = next(layers)
            if (layer, "down") in self._rebuilt:
                gate_up, down = (
                    self._rebuilt.linear(layer, group, dtype, devices[0])
                    for group in ("gate_up", "down")
                )
                return RebuiltMLP(
                    gate_up, down, dtype=dtype, devices=devices, **others
                )
            quantized = self._plan.quantized_groups(layer)
            inputs = "gate_up" in quantized
            made = MLP(
                dtype=dtype,
                devices=devices,
                quant_config=quant_config if inputs else None,
                **others,
            )
            if ("down" in quantized) != inputs:
                made.down_proj = Linear(
                    made.feed_forward_length,
                    made.hidden_dim,
                    dtype,
                    devices[0],
                    quant_config=quant_config if "down" in quantized else None,
                )
            return made

        return make
