# SPDX-License-Identifier: Apache-2.0
"""The built-in configuration, with float32, and what AttnQuant is to do."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import ClassVar

from max.pipelines.architectures.gemma3.model_config import Gemma3Config
from max.pipelines.lib import MAXModelConfig
from max.pipelines.modeling.config_enums import SupportedEncoding

from ..attnquant_common.bundle import find_bundle
from ..attnquant_common.layout import gemma3
from ..attnquant_common.loading import Plan
from ..attnquant_common.settings import Settings, from_environment


@dataclass(kw_only=True)
class AttnQuantGemma3Config(Gemma3Config):
    """Gemma 3's configuration."""

    SUPPORTED_ENCODINGS: ClassVar[set[SupportedEncoding]] = {
        *Gemma3Config.SUPPORTED_ENCODINGS,
        "float32",
    }


@functools.cache
def settings() -> Settings:
    """Returns the settings, which are parsed once a process.

    Raises:
        SettingsError: If they cannot be followed.
    """
    return from_environment(os.environ) or Settings()


def plan_for(model: MAXModelConfig) -> Plan:
    """Returns what becomes of each projection of a model.

    Args:
        model: MAX's configuration of it.

    Raises:
        SettingsError: If the settings do not fit the model.
        BundleError: If the checkpoint is a bundle, and damaged.
    """
    config = model.huggingface_config
    text = getattr(config, "text_config", config)
    return Plan(
        gemma3(text), settings(), find_bundle(model.resolved_weight_paths())
    )
