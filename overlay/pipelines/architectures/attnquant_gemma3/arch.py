# SPDX-License-Identifier: Apache-2.0
"""The architecture, which is the built-in one with some parts replaced.

On an untouched MAX it is loaded by ``--custom-architectures``, which wants
``ARCHITECTURES``.
"""

from __future__ import annotations

import dataclasses
import os

from max.pipelines.architectures.gemma3.arch import gemma3_arch

from ..attnquant_common.planner import planner
from ..attnquant_common.settings import from_environment
from .batch_processor import AttnQuantGemma3BatchProcessor
from .model import AttnQuantGemma3Model
from .model_config import AttnQuantGemma3Config, plan_for

attnquant_gemma3_arch = dataclasses.replace(
    gemma3_arch,
    pipeline_model=AttnQuantGemma3Model,
    batching=AttnQuantGemma3BatchProcessor,
    config=AttnQuantGemma3Config,
    supported_encodings=AttnQuantGemma3Config.SUPPORTED_ENCODINGS,
    memory_planner=planner(
        gemma3_arch.memory_planner,
        plan_for,
        AttnQuantGemma3Config.DEFAULT_ENCODING,
    ),
    supports_overlap_scheduler=True,
    supports_device_graph_capture=True,
)

# Not asked for, the built-in architecture stays what it is.
ARCHITECTURES = [
    attnquant_gemma3_arch if from_environment(os.environ) else gemma3_arch
]
