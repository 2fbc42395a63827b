# SPDX-License-Identifier: Apache-2.0
"""The built-in configuration, with float32, and what AttnQuant is to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from max.pipelines.architectures.gemma3.model_config import Gemma3Config
from max.pipelines.lib import MAXModelConfig
from max.pipelines.modeling.config_enums import SupportedEncoding

from ..attnquant_common.bundle import find_bundle
from ..attnquant_common.layout import gemma3
from ..attnquant_common.plan import Plan
from ..attnquant_common.settings import asked


@dataclass(kw_only=True)
class AttnQuantGemma3Config(Gemma3Config):
    """Gemma 3's configuration."""

    SUPPORTED_ENCODINGS: ClassVar[set[SupportedEncoding]] = {
        *Gemma3Config.SUPPORTED_ENCODINGS,
        "float32",
    }


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
        gemma3(text), asked(), find_bundle(model.resolved_weight_paths())
    )
