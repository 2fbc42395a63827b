# SPDX-License-Identifier: Apache-2.0
"""The built-in models, with their projections rewritten at load."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from max.driver import is_virtual_device_mode
from max.graph.weights import WeightData
from max.nn.quant_config import QuantConfig
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
from max.pipelines.lib import PipelineModelWithKVCache
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec
from max.pipelines.weights.quant import apply_fused_kernel_flags

from ..attnquant_common.hardware import multiplies_nvfp4
from ..attnquant_common.loading import (
    CheckpointError,
    Plan,
    Report,
    check_served,
    dequantized,
    load,
    served,
)
from ..attnquant_common.tensor import WEIGHTS, Tensor
from ..attnquant_common.weights import (
    Source,
    cast,
    dtype_name,
    placeholders,
    spec,
    to_weight,
)
from .layers import planned
from .model_config import AttnQuantGemma4Config, plan_for

_SERVED_PREFIX = "layers."

logger = logging.getLogger("max.pipelines.attnquant")


class _Rewriting(PipelineModelWithKVCache[Any, Any, Any]):
    """What both models do with the text model's weights.

    Each overrides the methods of :class:`PipelineModelWithKVCache` itself,
    because the built-in classes keep the weights in different places.
    """

    _plan: Plan
    _native: bool
    _report: Report

    def _rewrite(
        self, language: Mapping[str, WeightData]
    ) -> dict[str, WeightData]:
        """Returns the text model's weights with its projections rewritten.

        Args:
            language: All of them, by MAX's names.

        Raises:
            CheckpointError: If the checkpoint is already quantized, or does
                not have the projections that its configuration says.
        """
        model = self.pipeline_config.model
        self._plan = plan_for(model)
        self._native = multiplies_nvfp4(model.default_device_spec.device_type)
        if dtype_name(self.dtype) not in WEIGHTS:
            raise CheckpointError(
                f"{model.model_path} is served as {self.dtype}, already "
                "quantized; AttnQuant needs a checkpoint in bfloat16 "
                "(ATTNQUANT=0 switches AttnQuant off)"
            )
        replaced = {_served_name(self._plan, n) for n in self._plan.needed()}
        found = {
            name: cast(data, self.dtype)
            for name, data in language.items()
            if name not in replaced
        }
        rewritten, cache = self._rewritten()
        for name, tensor in rewritten:
            data = to_weight(_served_name(self._plan, name), tensor)
            # Scales are float32 in every model.
            if name.endswith(".weight"):
                data = cast(data, self.dtype)
            found[data.name] = data
        self._report = Report(self._plan, cache, self._native)
        return found

    def _rewritten(self) -> tuple[Iterable[tuple[str, Tensor]], str]:
        """Gives the projections' new tensors, and the cache's part in it."""
        plan = self._plan
        if not plan.rewritten:
            return (), "unused"
        source = Source({n: w.data for n, w in self.weights.items()})
        if is_virtual_device_mode():
            plan.check(source)
            specs = served(plan, dtype_name(self.dtype), native=self._native)
            return placeholders(specs).items(), "unused"
        model = self.pipeline_config.model
        weights = load(
            plan, source, model.resolved_weight_paths(), model.model_path
        )
        if self._native:
            return weights.items(), weights.outcome
        return dequantized(plan, weights), weights.outcome

    def _quantize(
        self,
        config: Gemma4ForConditionalGenerationConfig,
        language: Mapping[str, WeightData],
    ) -> None:
        """Adds the quantization to a configuration of bfloat16."""
        if not (self._native and self._plan.quantized):
            return
        groups = [
            self._plan.quantized_groups(layer)
            for layer in range(self._plan.layout.layers)
        ]
        config.text_config.quant_config = apply_fused_kernel_flags(
            QuantConfig.nvfp4(
                attn_quantized_layers=[
                    i for i, g in enumerate(groups) if g & {"qkv", "qk", "o"}
                ],
                mlp_quantized_layers=[
                    i for i, g in enumerate(groups) if g & {"gate_up", "down"}
                ],
                embedding_output_dtype=config.unquantized_dtype,
            ),
            language,
        )

    def _check(self, language: Mapping[str, WeightData]) -> None:
        """Checks the text model's weights before MAX has them."""
        needed = served(self._plan, dtype_name(self.dtype), native=self._native)
        check_served(
            {_served_name(self._plan, n): s for n, s in needed.items()},
            {name: spec(data) for name, data in language.items()},
        )

    def _log(self, architecture: str) -> None:
        logger.info(
            self._report.line(
                architecture,
                capture=bool(self.pipeline_config.runtime.device_graph_capture),
            )
        )


class AttnQuantGemma4Model(_Rewriting, Gemma3_MultiModalModel):
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
        self._check(self._language_weights_dict)
        with planned(self._plan):
            specs = super().graph_specs(model_config)
        self._log("Gemma4ForConditionalGeneration")
        return specs


class AttnQuantUnifiedMTPGemma4Model(_Rewriting, UnifiedMTPGemma4Model):
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
        self._check(self._target_state_dict)
        with planned(self._plan):
            specs = super().graph_specs(model_config)
        module = specs[GraphRole.SPEC_DECODER].module
        _check_names(
            module.raw_state_dict().keys(),
            convert_unified_safetensor_state_dict(
                self._target_state_dict, self._draft_state_dict
            ).keys(),
        )
        self._log("UnifiedMTPGemma4ForCausalLM")
        return specs


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


def _served_name(plan: Plan, name: str) -> str:
    """Returns MAX's name of a projection's tensor in the checkpoint."""
    return _SERVED_PREFIX + name.removeprefix(plan.layout.prefix)
