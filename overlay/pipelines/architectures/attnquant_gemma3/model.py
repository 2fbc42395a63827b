# SPDX-License-Identifier: Apache-2.0
"""The built-in model, with its projections rewritten at load."""

from __future__ import annotations

from typing import Any, ClassVar

from max.graph.weights import WeightData
from max.pipelines.architectures.gemma3 import gemma3
from max.pipelines.architectures.gemma3.model import Gemma3Model
from max.pipelines.architectures.gemma3.model_config import Gemma3Config
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec

from ..attnquant_common.model import AttnQuantModel
from .batch_processor import AttnQuantGemma3BatchProcessor
from .layers import norms
from .model_config import AttnQuantGemma3Config, plan_for


class AttnQuantGemma3Model(AttnQuantModel, Gemma3Model):
    """Gemma 3 with AttnQuant."""

    model_config_cls: ClassVar[type[Any]] = AttnQuantGemma3Config
    batch_processor_cls: ClassVar[type[AttnQuantGemma3BatchProcessor]] = (
        AttnQuantGemma3BatchProcessor
    )

    _plan_for = staticmethod(plan_for)
    _served_prefix = "language_model.layers."

    def _load_state_dict(self) -> dict[str, WeightData]:
        """Loads the weights and rewrites the projections among them."""
        weights = self._rewrite(super()._load_state_dict())
        self._language_weights_dict = weights
        return weights

    def _create_model_config(
        self, state_dict: dict[str, WeightData]
    ) -> Gemma3Config:
        """Creates the built-in configuration and adds the quantization."""
        config = super()._create_model_config(state_dict)
        quantized = self._quant_config(state_dict)
        if quantized is not None:
            config.quant_config = quantized
        return config

    def graph_specs(self, model_config: Gemma3Config) -> dict[str, GraphSpec]:
        """Returns the built-in decoder graph, with the plan's layers."""
        weights = self._language_weights_dict
        with (
            self._planned(weights, gemma3, "Gemma3Attention"),
            norms(model_config.dtype),
        ):
            specs = super().graph_specs(model_config)
        return self._finished(specs, GraphRole.DECODER, "Gemma3ForCausalLM")
