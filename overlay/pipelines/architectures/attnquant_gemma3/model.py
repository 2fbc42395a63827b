# SPDX-License-Identifier: Apache-2.0
"""The built-in model, with its projections rewritten at load."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any, ClassVar

from max.driver import accelerator_api, is_virtual_device_mode
from max.graph.weights import WeightData
from max.nn.quant_config import QuantConfig
from max.pipelines.architectures.gemma3.model import Gemma3Model
from max.pipelines.architectures.gemma3.model_config import Gemma3Config
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec
from max.pipelines.weights.quant import apply_fused_kernel_flags

from ..attnquant_common import kernels
from ..attnquant_common.hardware import multiplies_nvfp4
from ..attnquant_common.kernels import rebuild
from ..attnquant_common.loading import (
    Plan,
    Report,
    check_served,
    dequantized,
    in_graph,
    load,
    served,
)
from ..attnquant_common.tensor import Tensor
from ..attnquant_common.weights import (
    Source,
    cast,
    dtype_name,
    placeholders,
    spec,
    to_weight,
)
from .batch_processor import AttnQuantGemma3BatchProcessor
from .layers import planned
from .model_config import AttnQuantGemma3Config, plan_for

_SERVED_PREFIX = "language_model.layers."

logger = logging.getLogger("max.pipelines.attnquant")


class AttnQuantGemma3Model(Gemma3Model):
    """Gemma 3 with AttnQuant."""

    model_config_cls: ClassVar[type[Any]] = AttnQuantGemma3Config
    batch_processor_cls: ClassVar[type[AttnQuantGemma3BatchProcessor]] = (
        AttnQuantGemma3BatchProcessor
    )

    _plan: Plan
    _native: bool
    _gemm: bool
    _report: Report

    def _load_state_dict(self) -> dict[str, WeightData]:
        """Loads the weights and rewrites the projections among them."""
        self._plan = plan_for(self.pipeline_config.model)
        self._plan.check_devices(len(self.devices))
        device = self.pipeline_config.model.default_device_spec.device_type
        self._native = multiplies_nvfp4(device)
        self._gemm = self._plan.settings.uses_gemm(
            accelerator_api() if device == "gpu" else "cpu"
        )
        replaced = {self._served_name(name) for name in self._plan.needed()}
        state_dict = {
            name: cast(data, self.dtype)
            for name, data in super()._load_state_dict().items()
            if name not in replaced
        }
        rewritten, cache = self._rewritten()
        for name, tensor in rewritten:
            data = to_weight(self._served_name(name), tensor)
            # Scales are float32 in every model.
            if name.endswith(".weight"):
                data = cast(data, self.dtype)
            state_dict[data.name] = data
        self._language_weights_dict = state_dict
        self._report = Report(
            self._plan,
            cache,
            self._native,
            "matmuls" if self._gemm else "a custom op",
        )
        return state_dict

    def _rewritten(self) -> tuple[Iterable[tuple[str, Tensor]], str]:
        """Gives the projections' new tensors, and the cache's part in it."""
        plan, dtype = self._plan, dtype_name(self.dtype)
        if not plan.rewritten:
            return (), "unused"
        source = Source({n: w.data for n, w in self.weights.items()})
        if is_virtual_device_mode():
            plan.check(source)
            specs = served(plan, dtype, native=self._native)
            return placeholders(specs).items(), "unused"
        model = self.pipeline_config.model
        weights = load(
            plan, source, model.resolved_weight_paths(), model.model_path
        )
        if plan.runtime:
            return in_graph(plan, weights, dtype), weights.outcome
        if self._native:
            return weights.items(), weights.outcome
        return dequantized(plan, weights), weights.outcome

    def _create_model_config(
        self, state_dict: dict[str, WeightData]
    ) -> Gemma3Config:
        """Creates the built-in configuration and adds the quantization."""
        config = super()._create_model_config(state_dict)
        if self._native and self._plan.quantized:
            groups = [
                self._plan.quantized_groups(layer)
                for layer in range(self._plan.layout.layers)
            ]
            config.quant_config = apply_fused_kernel_flags(
                QuantConfig.nvfp4(
                    attn_quantized_layers=[
                        i for i, g in enumerate(groups) if g & {"qkv", "o"}
                    ],
                    mlp_quantized_layers=[
                        i
                        for i, g in enumerate(groups)
                        if g & {"gate_up", "down"}
                    ],
                ),
                state_dict,
            )
        return config

    def graph_specs(self, model_config: Gemma3Config) -> dict[str, GraphSpec]:
        """Returns the built-in decoder graph, with the plan's layers."""
        check_served(
            {
                self._served_name(name): needed
                for name, needed in served(
                    self._plan, dtype_name(self.dtype), native=self._native
                ).items()
            },
            {n: spec(d) for n, d in self._language_weights_dict.items()},
        )
        form = rebuild.by_matmul if self._gemm else rebuild.by_custom_op
        with planned(self._plan, model_config.dtype, form):
            specs = super().graph_specs(model_config)
        if self._plan.runtime:
            decoder = specs[GraphRole.DECODER]
            specs[GraphRole.DECODER] = dataclasses.replace(
                decoder,
                custom_extensions=(
                    *decoder.custom_extensions,
                    *kernels.libraries(),
                ),
            )
        logger.info(
            self._report.line(
                "Gemma3ForCausalLM",
                capture=bool(self.pipeline_config.runtime.device_graph_capture),
            )
        )
        return specs

    def _served_name(self, name: str) -> str:
        """Returns MAX's name of a projection's tensor in the checkpoint."""
        return _SERVED_PREFIX + name.removeprefix(self._plan.layout.prefix)
