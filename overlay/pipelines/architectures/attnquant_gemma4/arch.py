# SPDX-License-Identifier: Apache-2.0
"""The architectures, which are the built-in ones with some parts replaced.

On an untouched MAX they are loaded by ``--custom-architectures``, which wants
``ARCHITECTURES``.
"""

from __future__ import annotations

import dataclasses
import os

from max.pipelines.architectures.gemma4.arch import gemma4_arch
from max.pipelines.architectures.unified_mtp_gemma4.arch import (
    unified_mtp_gemma4_arch,
)

from ..attnquant_common.planner import planner
from ..attnquant_common.settings import from_environment
from .model import AttnQuantGemma4Model, AttnQuantUnifiedMTPGemma4Model
from .model_config import AttnQuantGemma4Config, plan_for

attnquant_gemma4_arch = dataclasses.replace(
    gemma4_arch,
    pipeline_model=AttnQuantGemma4Model,
    config=AttnQuantGemma4Config,
    supported_encodings=AttnQuantGemma4Config.SUPPORTED_ENCODINGS,
    memory_planner=planner(
        gemma4_arch.memory_planner, plan_for, gemma4_arch.default_encoding
    ),
    # The captured graph is the decoder's, which at each decode step gets no
    # rows of images, as it does in the built-in gemma4_unified_arch.
    supports_device_graph_capture=True,
)

# Not captured, as the built-in one: its acceptance is yet to be seen in it.
attnquant_unified_mtp_gemma4_arch = dataclasses.replace(
    unified_mtp_gemma4_arch,
    pipeline_model=AttnQuantUnifiedMTPGemma4Model,
    # The built-in default is an encoding in which norms have no type.
    default_encoding=gemma4_arch.default_encoding,
    memory_planner=planner(
        unified_mtp_gemma4_arch.memory_planner,
        plan_for,
        gemma4_arch.default_encoding,
    ),
)

# Not asked for, the built-in architectures stay what they are.
ARCHITECTURES = (
    [attnquant_gemma4_arch, attnquant_unified_mtp_gemma4_arch]
    if from_environment(os.environ)
    else [gemma4_arch, unified_mtp_gemma4_arch]
)
