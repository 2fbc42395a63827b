# SPDX-License-Identifier: Apache-2.0
"""The built-in configuration, with float32, and what AttnQuant is to do."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import ClassVar

from max.pipelines.architectures.gemma3.model_config import Gemma3Config
from max.pipelines.modeling.config_enums import SupportedEncoding
from transformers import AutoConfig

from ..attnquant_common.layout import gemma3
from ..attnquant_common.loading import Plan
from ..attnquant_common.settings import (
    Settings,
    SettingsError,
    from_environment,
)


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
        SettingsError: If they cannot be followed by this build.
    """
    found = from_environment(os.environ) or Settings()
    if not found.precompute_outside:
        raise SettingsError(
            "ATTNQUANT_PRECOMPUTE_OUTSIDE=0: this build rebuilds weights at "
            "load only; expected 1"
        )
    return found


def plan_for(huggingface_config: AutoConfig) -> Plan:
    """Returns what becomes of each projection of a model.

    Args:
        huggingface_config: That of the model or, if it has one, of its text
            model.

    Raises:
        SettingsError: If the settings do not fit the model.
    """
    text = getattr(huggingface_config, "text_config", huggingface_config)
    return Plan(gemma3(text), settings())
