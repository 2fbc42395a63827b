# SPDX-License-Identifier: Apache-2.0
"""The attention of Gemma 4, with a fault of MAX 26.7 mended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from max.graph import DeviceRef
from max.pipelines.architectures.gemma4 import gemma4
from max.pipelines.architectures.gemma4.layers.attention import Gemma4Attention

from ..attnquant_common.binding import bound


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


@contextmanager
def typed_attention() -> Iterator[None]:
    """Makes attention of that class, as long as it is entered."""
    with bound(gemma4, Gemma4Attention=TypedAttention):
        yield
