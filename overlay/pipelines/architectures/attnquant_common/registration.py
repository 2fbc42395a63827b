# SPDX-License-Identifier: Apache-2.0
"""Puts AttnQuant architectures in the place of MAX's built-in ones.

MAX calls :func:`override` when AttnQuant is switched on: when an environment
variable whose name starts with ``ATTNQUANT`` is set, unless ``ATTNQUANT=0``.
A taken-over architecture keeps the built-in name, because MAX finds an
architecture, and pairs it with a draft model, by that name. The names that
lead past AttnQuant are refused, so that nothing is served unlike as asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from max.pipelines.architectures import _LazyArch


class Replacement(TypedDict):
    """Where the architecture is that takes a built-in one's place."""

    module: str
    """Module path, relative to ``max.pipelines.architectures``."""

    symbol: str
    """The module's attribute that holds the ``SupportedArchitecture``."""


TAKEN_OVER: dict[str, Replacement] = {
    "Gemma3ForCausalLM": {
        "module": ".attnquant_gemma3",
        "symbol": "attnquant_gemma3_arch",
    },
    "Gemma4ForConditionalGeneration": {
        "module": ".attnquant_gemma4",
        "symbol": "attnquant_gemma4_arch",
    },
    "UnifiedMTPGemma4ForCausalLM": {
        "module": ".attnquant_gemma4",
        "symbol": "attnquant_unified_mtp_gemma4_arch",
    },
}
"""The taken-over architectures, by built-in name."""

_MODULE_V3 = "--prefer-module-v3 chooses it; leave the flag out"
_MULTIMODAL = "the model's config.json names it"
_SPECULATIVE = (
    "--speculative-method and the draft model choose it; take a drafter of "
    "Gemma4AssistantForCausalLM, or none"
)

BYPASSING = {
    "Gemma3ForCausalLM_ModuleV3": _MODULE_V3,
    "Gemma3ForConditionalGeneration": _MULTIMODAL,
    "Gemma3ForConditionalGeneration_ModuleV3": _MULTIMODAL,
    "Gemma4ForConditionalGeneration_ModuleV3": _MODULE_V3,
    "Gemma4UnifiedForConditionalGeneration": _MULTIMODAL,
    "Gemma4UnifiedForConditionalGeneration_ModuleV3": _MULTIMODAL,
    "UnifiedDSparkGemma4_12BForCausalLM": _SPECULATIVE,
    "UnifiedDSparkGemma4_31BForCausalLM": _SPECULATIVE,
    "UnifiedDflashGemma4_31BForCausalLM": _SPECULATIVE,
    "UnifiedMTPGemma4ForCausalLM_ModuleV3": _MODULE_V3,
}
"""What leads to the Gemmas that AttnQuant does not serve, by built-in name."""


def override(architectures: Sequence[_LazyArch]) -> list[_LazyArch]:
    """Returns MAX's architectures, in order, with ours in their places.

    Those of :data:`TAKEN_OVER` are replaced, and those of :data:`BYPASSING`
    refuse to start.

    Args:
        architectures: The built-in architectures.

    Raises:
        RuntimeError: If this build has nothing to take over with, or a name
            to take over is not one of MAX's.
    """
    if not TAKEN_OVER:
        raise RuntimeError(
            "AttnQuant is switched on by an environment variable ATTNQUANT*, "
            "but this build of MAX carries no AttnQuant architecture; "
            "unset the variable or set ATTNQUANT=0"
        )
    unknown = TAKEN_OVER.keys() - {entry.name for entry in architectures}
    if unknown:
        raise RuntimeError(
            f"AttnQuant takes over {', '.join(sorted(unknown))}, which this "
            "release of MAX does not have; set ATTNQUANT=0 to switch it off"
        )
    return [_replaced(entry) for entry in architectures]


def _replaced(entry: _LazyArch) -> _LazyArch:
    if entry.name in TAKEN_OVER:
        return replace(entry, **TAKEN_OVER[entry.name])
    if entry.name in BYPASSING:
        return replace(
            entry,
            module=".attnquant_common.bypassing",
            symbol=f"{entry.module}:{entry.symbol}",
        )
    return entry
