# SPDX-License-Identifier: Apache-2.0
"""Plans memory by the weights that are served, not by the checkpoint's files.

MAX takes the files' size for the weights'. Quantized at load, projections
would count 3.6 times what they need, and the key-value cache would get that
much less.
"""

from __future__ import annotations

from collections.abc import Callable

from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner
from max.pipelines.lib import MAXModelConfig, PipelineConfig
from max.pipelines.lib.config.model_config import (
    _select_dtype_cast,
    _select_quantization_encoding,
)
from max.pipelines.modeling.config_enums import (
    SupportedEncoding,
    supported_encoding_dtype,
)

from .hardware import multiplies_nvfp4
from .loading import served_size
from .plan import Plan
from .weights import dtype_name


def planner(
    base: type[PagedMemoryPlanner],
    plan_for: Callable[[MAXModelConfig], Plan],
    default_encoding: SupportedEncoding,
) -> type[PagedMemoryPlanner]:
    """Makes a memory planner of a built-in one.

    Args:
        base: The built-in architecture's.
        plan_for: Gives the plan for a model's configuration.
        default_encoding: The built-in architecture's.
    """

    class AttnQuantMemoryPlanner(base):  # type: ignore[misc, valid-type]
        def estimate_weights_size(self, pipeline_config: PipelineConfig) -> int:
            model = pipeline_config.model
            encoding = _select_quantization_encoding(model, default_encoding)
            stored, _ = _select_dtype_cast(model, default_encoding)
            plan = plan_for(model)
            return served_size(
                plan,
                plan.bundle.source_nbytes
                if plan.bundle is not None
                else super().estimate_weights_size(pipeline_config),
                supported_encoding_dtype(stored or encoding).size_in_bytes,
                dtype_name(supported_encoding_dtype(encoding)),
                native=multiplies_nvfp4(model.default_device_spec.device_type),
            )

    return AttnQuantMemoryPlanner
