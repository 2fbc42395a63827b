# SPDX-License-Identifier: Apache-2.0
"""Batches whose inputs a captured device graph can be given."""

from __future__ import annotations

from dataclasses import dataclass

from max import tree
from max.driver import Buffer
from max.nn.kv_cache import KVCacheInputs
from max.pipelines.architectures.gemma3.batch_processor import (
    Gemma3BatchProcessor,
)
from max.pipelines.architectures.gemma3.model import Gemma3Inputs


@dataclass
class AttnQuantGemma3Inputs(Gemma3Inputs):
    """Gemma 3's inputs, in the order of the graph's.

    An untouched MAX's have no ``buffers``; the patch
    ``gemma3-model-abi-buffers`` gives them the same.
    """

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The inputs of the graph, as ``Gemma3.input_tree`` has them.

        The row offsets are given once a device; there is one signal buffer a
        device. A replay copies them all into the captured graph's, so they
        may be other buffers at each step.
        """
        return (
            self.tokens,
            self.return_n_logits,
            *(self.input_row_offsets.to(s.device) for s in self.signal_buffers),
            *self.signal_buffers,
            *tree.leaves(self.kv_cache_inputs),
        )


class AttnQuantGemma3BatchProcessor(Gemma3BatchProcessor):
    """Gemma 3's batch processor, which gives such inputs."""

    def _make_inputs(
        self,
        *,
        tokens: Buffer,
        input_row_offsets: Buffer,
        return_n_logits: Buffer,
        kv_cache_inputs: KVCacheInputs[Buffer, Buffer] | None,
        signal_buffers: list[Buffer],
    ) -> AttnQuantGemma3Inputs:
        return AttnQuantGemma3Inputs(
            tokens=tokens,
            input_row_offsets=input_row_offsets,
            return_n_logits=return_n_logits,
            signal_buffers=signal_buffers,
            kv_cache_inputs=kv_cache_inputs,
        )
