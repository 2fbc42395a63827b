# SPDX-License-Identifier: Apache-2.0
"""The built-in models, with their projections rewritten at load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from max.graph.weights import WeightData
from max.pipelines.architectures.gemma4 import gemma4
from max.pipelines.architectures.gemma4.model import Gemma3_MultiModalModel
from max.pipelines.architectures.gemma4.model_config import (
    Gemma4ForConditionalGenerationConfig,
)
from max.pipelines.architectures.unified_mtp_gemma4.model import (
    UnifiedMTPGemma4Model,
)
from max.pipelines.architectures.unified_mtp_gemma4.weight_adapters import (
    convert_unified_safetensor_state_dict,
)
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec

from ..attnquant_common.model import AttnQuantModel
from ..attnquant_common.plan import CheckpointError
from .layers import typed_attention
from .model_config import AttnQuantGemma4Config, plan_for


class _Gemma4(AttnQuantModel):
    """What both models have in common."""

    _plan_for = staticmethod(plan_for)
    _served_prefix = "layers."

    def _quantize(
        self,
        config: Gemma4ForConditionalGenerationConfig,
        language: Mapping[str, WeightData],
    ) -> None:
        """Adds the quantization to a configuration of bfloat16."""
        quantized = self._quant_config(
            language, embedding_output_dtype=config.unquantized_dtype
        )
        if quantized is not None:
            config.text_config.quant_config = quantized


class AttnQuantGemma4Model(_Gemma4, Gemma3_MultiModalModel):
    """Gemma 4 with AttnQuant."""

    model_config_cls: ClassVar[type[Any]] = AttnQuantGemma4Config

    def _load_state_dict(self) -> dict[str, Any]:
        """Loads the weights and rewrites the projections among them.

        What is returned is the checkpoint's, for the configuration.
        """
        state_dict = super()._load_state_dict()
        self._language_weights_dict = self._rewrite(self._language_weights_dict)
        return state_dict

    def _create_model_config(
        self, state_dict: dict[str, Any]
    ) -> Gemma4ForConditionalGenerationConfig:
        """Creates the built-in configuration and adds the quantization.

        On a CPU it has no vision tower, which is for GPUs in MAX.
        """
        config = super()._create_model_config(state_dict)
        config.unquantized_dtype = self.dtype
        if self.devices[0].is_host:
            config.vision_config = None
        self._quantize(config, self._language_weights_dict)
        return config

    def graph_specs(
        self, model_config: Gemma4ForConditionalGenerationConfig
    ) -> dict[str, GraphSpec]:
        """Returns the built-in graphs, the decoder with the plan's layers."""
        weights = self._language_weights_dict
        with (
            typed_attention(),
            self._planned(weights, gemma4, "Gemma4Attention"),
        ):
            specs = super().graph_specs(model_config)
        return self._finished(
            specs, GraphRole.DECODER, "Gemma4ForConditionalGeneration"
        )


class AttnQuantUnifiedMTPGemma4Model(_Gemma4, UnifiedMTPGemma4Model):
    """Gemma 4 and its drafter with AttnQuant; the drafter is left as it is."""

    def _load_state_dict(self) -> dict[str, Any]:
        """Loads the weights and rewrites the target's projections."""
        return self._rewrite(super()._load_state_dict())

    def _create_model_config(
        self, state_dict: dict[str, Any]
    ) -> Gemma4ForConditionalGenerationConfig:
        """Creates the built-in configuration and adds the quantization."""
        config = super()._create_model_config(state_dict)
        self._quantize(config, state_dict)
        return config

    def graph_specs(
        self, model_config: Gemma4ForConditionalGenerationConfig
    ) -> dict[str, GraphSpec]:
        """Returns the built-in graphs, the target with the plan's layers.

        Raises:
            CheckpointError: If either checkpoint has a weight too few or too
                many. MAX would serve zeros for one that is missing.
        """
        weights = self._target_state_dict
        with (
            typed_attention(),
            self._planned(weights, gemma4, "Gemma4Attention"),
        ):
            specs = super().graph_specs(model_config)
        module = specs[GraphRole.SPEC_DECODER].module
        _check_names(
            module.raw_state_dict().keys(),
            convert_unified_safetensor_state_dict(
                self._target_state_dict, self._draft_state_dict
            ).keys(),
        )
        return self._finished(
            specs, GraphRole.SPEC_DECODER, "UnifiedMTPGemma4ForCausalLM"
        )


def _check_names(needed: Iterable[str], found: Iterable[str]) -> None:
    missing, extra = sorted({*needed} - {*found}), sorted({*found} - {*needed})
    for names, what in (
        (missing, "missing from its checkpoint"),
        (extra, "in its checkpoint and has no place in the graph"),
    ):
        if names:
            model, _, name = names[0].partition(".")
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{model} model: {name} is {what}{more}")
