# SPDX-License-Identifier: Apache-2.0
"""What the pipeline models do with a text model's weights and graph."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, ClassVar

from max.driver import is_virtual_device_mode
from max.dtype import DType
from max.graph.weights import WeightData
from max.nn.quant_config import QuantConfig
from max.pipelines.lib import MAXModelConfig, PipelineModelWithKVCache
from max.pipelines.lib.graph_specs import GraphSpec
from max.pipelines.weights.quant import apply_fused_kernel_flags

from . import kernels, layers
from .hardware import multiplies_nvfp4, target
from .kernels import rebuild
from .loading import (
    Report,
    check_served,
    dequantized,
    in_graph,
    load,
    served,
)
from .plan import CheckpointError, Plan
from .tensor import WEIGHTS, Tensor
from .weights import (
    Source,
    cast,
    dtype_name,
    placeholders,
    spec,
    to_weight,
)

_MLP = {"gate_up", "down"}

logger = logging.getLogger("max.pipelines.attnquant")


class AttnQuantModel(PipelineModelWithKVCache[Any, Any, Any]):
    """A pipeline model whose text model's projections are rewritten at load.

    It comes before the built-in class among a model's bases. The built-in
    classes keep weights in different places, so each architecture overrides
    their methods itself and calls what is here.
    """

    _served_prefix: ClassVar[str]
    """What stands before a layer's number in MAX's names."""

    _plan: Plan
    _native: bool
    _gemm: bool
    _report: Report

    @staticmethod
    def _plan_for(model: MAXModelConfig) -> Plan:
        """Returns what becomes of each projection of a model."""
        raise NotImplementedError

    def _rewrite(
        self, weights: Mapping[str, WeightData]
    ) -> dict[str, WeightData]:
        """Returns the text model's weights with its projections rewritten.

        Args:
            weights: All of them, by MAX's names.

        Raises:
            CheckpointError: If the checkpoint is already quantized, or does
                not have the projections that its configuration says.
            SettingsError: If the settings do not fit the model.
            BundleError: If the checkpoint is a bundle, and damaged.
        """
        model = self.pipeline_config.model
        self._plan = self._plan_for(model)
        if dtype_name(self.dtype) not in WEIGHTS:
            raise CheckpointError(
                f"{model.model_path} is served as {self.dtype}, already "
                "quantized; AttnQuant needs a checkpoint in bfloat16 "
                "(ATTNQUANT=0 switches AttnQuant off)"
            )
        device = model.default_device_spec.device_type
        self._native = multiplies_nvfp4(device)
        self._plan.check_devices(len(self.devices), native=self._native)
        self._gemm = self._plan.settings.uses_gemm(
            target(device), self._plan.rank
        )
        if self._plan.bundle is not None and not is_virtual_device_mode():
            # MAX reads what is not decomposed by its own loader.
            self._plan.bundle.verify()
        replaced = {self._served_name(name) for name in self._plan.needed()}
        found = {
            name: cast(data, self.dtype)
            for name, data in weights.items()
            if name not in replaced
        }
        rewritten, cache = self._rewritten()
        for name, tensor in rewritten:
            data = to_weight(self._served_name(name), tensor)
            # Scales are float32 in every model.
            if name.endswith(".weight"):
                data = cast(data, self.dtype)
            found[data.name] = data
        form = "matmuls" if self._gemm else "a custom op"
        if self._plan.rank == 0:
            form = "the means alone"
        self._report = Report(self._plan, cache, self._native, form)
        return found

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

    def _quant_config(
        self,
        weights: Mapping[str, WeightData],
        embedding_output_dtype: DType | None = None,
    ) -> QuantConfig | None:
        """Returns the quantization of the graph's layers, if there is any.

        Args:
            weights: The text model's, by MAX's names.
            embedding_output_dtype: As in ``QuantConfig``.
        """
        if not (self._native and self._plan.quantized):
            return None
        groups = [
            self._plan.quantized_groups(layer)
            for layer in range(self._plan.layout.layers)
        ]
        return apply_fused_kernel_flags(
            QuantConfig.nvfp4(
                attn_quantized_layers=[
                    i for i, g in enumerate(groups) if g - _MLP
                ],
                mlp_quantized_layers=[
                    i for i, g in enumerate(groups) if g & _MLP
                ],
                embedding_output_dtype=embedding_output_dtype,
            ),
            weights,
        )

    def _planned(
        self,
        weights: Mapping[str, WeightData],
        module: ModuleType,
        attention: str,
    ) -> AbstractContextManager[None]:
        """Checks the weights, and has layers made as the plan has them.

        Args:
            weights: The text model's, by MAX's names.
            module: As in :func:`.layers.planned`.
            attention: Likewise.

        Raises:
            CheckpointError: If MAX would take them for others than they are.
        """
        needed = served(self._plan, dtype_name(self.dtype), native=self._native)
        check_served(
            {self._served_name(n): s for n, s in needed.items()},
            {name: spec(data) for name, data in weights.items()},
        )
        form = rebuild.by_matmul if self._gemm else rebuild.by_custom_op
        return layers.planned(module, attention, self._plan, form)

    def _finished(
        self, specs: dict[str, GraphSpec], role: str, architecture: str
    ) -> dict[str, GraphSpec]:
        """Returns a model's graphs with the kernels they need, and logs.

        Args:
            specs: The graphs, by role.
            role: The text model's.
            architecture: The name that MAX resolved.
        """
        if self._plan.runtime:
            text = specs[role]
            extensions = *text.custom_extensions, *kernels.libraries()
            specs[role] = dataclasses.replace(
                text, custom_extensions=extensions
            )
        logger.info(
            self._report.line(
                architecture,
                capture=bool(self.pipeline_config.runtime.device_graph_capture),
            )
        )
        return specs

    def _served_name(self, name: str) -> str:
        """Returns MAX's name of a projection's tensor in the checkpoint."""
        return self._served_prefix + name.removeprefix(self._plan.layout.prefix)
