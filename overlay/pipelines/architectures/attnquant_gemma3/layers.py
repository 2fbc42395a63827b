# SPDX-License-Identifier: Apache-2.0
"""Makes the built-in layers as a plan has them.

``Gemma3TextModel`` gives one quantization to all layers and takes no
factories, so the names that it makes layers by are bound to ours while it is
made. Norms and devices are bound for an untouched MAX on a CPU; the patch
``gemma3-cpu-float32`` does the same in the built-in files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

from max.driver import accelerator_count
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.comm import allreduce
from max.nn.linear import MLP, Linear
from max.nn.quant_config import QuantConfig
from max.pipelines.architectures.gemma3 import gemma3
from max.pipelines.architectures.gemma3.layers import attention
from max.pipelines.architectures.gemma3.layers.attention import Gemma3Attention
from max.pipelines.architectures.gemma3.layers.rms_norm import Gemma3RMSNorm

from ..attnquant_common.binding import bound
from ..attnquant_common.loading import Plan
from ..attnquant_common.rebuilt import (
    OneDevice,
    Rebuild,
    RebuiltLayers,
    RebuiltMLP,
)


@contextmanager
def planned(plan: Plan, dtype: DType, rebuild: Rebuild) -> Iterator[None]:
    """Makes layers as a plan has them, as long as it is entered.

    Args:
        plan: What is quantized, if the configuration has a ``QuantConfig``,
            and what the graph rebuilds.
        dtype: The type of the weights that are not quantized.
        rebuild: How the graph rebuilds weights.
    """
    rebuilt = RebuiltLayers(plan, rebuild)
    with ExitStack() as stack:
        stack.enter_context(
            bound(
                gemma3,
                Gemma3Attention=_Attention(plan, rebuilt),
                MLP=_MLP(plan, rebuilt),
            )
        )
        if dtype != DType.bfloat16:
            norm = _norm(dtype)
            stack.enter_context(bound(gemma3, Gemma3RMSNorm=norm))
            stack.enter_context(bound(attention, Gemma3RMSNorm=norm))
        if accelerator_count() == 0:
            # Allreduce makes the devices that it never reads.
            stack.enter_context(bound(allreduce, Accelerator=_no_device))
        yield


class _RebuiltAttention(OneDevice, Gemma3Attention):
    """The built-in attention, whose projections are rebuilt."""


class _Attention:
    """Makes the attention of one layer after the other."""

    def __init__(self, plan: Plan, rebuilt: RebuiltLayers) -> None:
        self._plan = plan
        self._rebuilt = rebuilt
        self._layers = count()

    def __call__(
        self,
        *,
        hidden_size: int,
        dtype: DType,
        devices: list[DeviceRef],
        quant_config: QuantConfig | None,
        **others: object,
    ) -> Gemma3Attention:
        index = next(self._layers)
        groups = self._plan.quantized_groups(index)
        rebuilt = index in self._rebuilt
        layer = (_RebuiltAttention if rebuilt else Gemma3Attention)(
            hidden_size=hidden_size,
            dtype=dtype,
            devices=devices,
            quant_config=quant_config if "qkv" in groups else None,
            **others,
        )
        if rebuilt:
            for group in ("qkv", "o"):
                made = self._rebuilt.linear(index, group, dtype, devices[0])
                setattr(layer, f"{group}_proj", made)
        elif ("o" in groups) != ("qkv" in groups):
            layer.o_proj = Linear(
                in_dim=layer.q_weight_dim,
                out_dim=hidden_size,
                dtype=dtype,
                device=devices[0],
                quant_config=quant_config if "o" in groups else None,
            )
        return layer


class _MLP:
    """Makes the MLP of one layer after the other."""

    def __init__(self, plan: Plan, rebuilt: RebuiltLayers) -> None:
        self._plan = plan
        self._rebuilt = rebuilt
        self._layers = count()

    def __call__(
        self,
        *,
        dtype: DType,
        devices: list[DeviceRef],
        quant_config: QuantConfig | None,
        **others: object,
    ) -> MLP:
        index = next(self._layers)
        if index in self._rebuilt:
            gate_up, down = (
                self._rebuilt.linear(index, group, dtype, devices[0])
                for group in ("gate_up", "down")
            )
            return RebuiltMLP(
                gate_up, down, dtype=dtype, devices=devices, **others
            )
        groups = self._plan.quantized_groups(index)
        layer = MLP(
            dtype=dtype,
            devices=devices,
            quant_config=quant_config if "gate_up" in groups else None,
            **others,
        )
        if ("down" in groups) != ("gate_up" in groups):
            layer.down_proj = Linear(
                in_dim=layer.feed_forward_length,
                out_dim=layer.hidden_dim,
                dtype=dtype,
                device=devices[0],
                quant_config=quant_config if "down" in groups else None,
            )
        return layer


def _norm(dtype: DType) -> Callable[[int, DType, float], Gemma3RMSNorm]:
    """Makes norms of a type; the built-in ones are bfloat16 everywhere."""

    def make(dim: int, _: DType, eps: float) -> Gemma3RMSNorm:
        return Gemma3RMSNorm(dim, dtype, eps)

    return make


def _no_device(id: int) -> None:
    """Stands for an ``Accelerator`` where there is none."""
