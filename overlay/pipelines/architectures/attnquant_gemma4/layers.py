# SPDX-License-Identifier: Apache-2.0
"""Makes the built-in layers as a plan has them.

``Gemma4TextModel`` gives one quantization to all MLPs, and to attention layer
by layer but not projection by projection. It takes no factories, so the names
that it makes layers by are bound to ours while it is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

from max.driver import accelerator_count
from max.dtype import DType
from max.graph import DeviceRef
from max.nn.comm import allreduce
from max.nn.linear import MLP, Linear
from max.nn.quant_config import QuantConfig
from max.pipelines.architectures.gemma4 import gemma4
from max.pipelines.architectures.gemma4.layers.attention import Gemma4Attention

from ..attnquant_common.binding import bound
from ..attnquant_common.loading import Plan


@contextmanager
def planned(plan: Plan) -> Iterator[None]:
    """Makes one model's layers as a plan has them, as long as it is entered.

    Args:
        plan: What is quantized, if the configuration has a ``QuantConfig``.
    """
    with ExitStack() as stack:
        stack.enter_context(
            bound(gemma4, Gemma4Attention=_Attention(plan), MLP=_MLP(plan))
        )
        if accelerator_count() == 0:
            # Allreduce makes the devices that it never reads.
            stack.enter_context(bound(allreduce, Accelerator=_no_device))
        yield


class TypedAttention(Gemma4Attention):
    """The built-in attention, whose shards compute in its own type.

    The built-in shards take the type of ``o_proj``'s weight for that of what
    they compute. Packed, that is uint8.
    """

    def shard(self, devices: Iterable[DeviceRef]) -> list[Gemma4Attention]:
        """Returns the layer's part for each device."""
        shards = super().shard(devices)
        for shard in shards:
            shard.dtype = self.dtype
        return shards


class _Attention:
    """Makes the attention of a layer."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __call__(
        self,
        *,
        hidden_size: int,
        layer_idx: int,
        dtype: DType,
        devices: list[DeviceRef],
        quant_config: QuantConfig | None,
        **others: object,
    ) -> Gemma4Attention:
        groups = self._plan.quantized_groups(layer_idx)
        inputs = bool(groups & {"qkv", "qk"})
        layer = TypedAttention(
            hidden_size=hidden_size,
            layer_idx=layer_idx,
            dtype=dtype,
            devices=devices,
            quant_config=quant_config if inputs else None,
            **others,
        )
        if ("o" in groups) != inputs:
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

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._layers = count()

    def __call__(
        self,
        *,
        dtype: DType,
        devices: list[DeviceRef],
        quant_config: QuantConfig | None,
        **others: object,
    ) -> MLP:
        groups = self._plan.quantized_groups(next(self._layers))
        inputs = "gate_up" in groups
        layer = MLP(
            dtype=dtype,
            devices=devices,
            quant_config=quant_config if inputs else None,
            **others,
        )
        if ("down" in groups) != inputs:
            layer.down_proj = Linear(
                in_dim=layer.feed_forward_length,
                out_dim=layer.hidden_dim,
                dtype=dtype,
                device=devices[0],
                quant_config=quant_config if "down" in groups else None,
            )
        return layer


def _no_device(id: int) -> None:
    """Stands for an ``Accelerator`` where there is none."""
