# SPDX-License-Identifier: Apache-2.0
"""Puts AttnQuant architectures in the place of MAX's built-in ones.

MAX calls :func:`override` when AttnQuant is switched on: when an environment
variable whose name starts with ``ATTNQUANT`` is set, unless ``ATTNQUANT=0``.
A taken-over architecture keeps the built-in name, because MAX finds an
architecture, and pairs it with a draft model, by that name.
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
}
"""The taken-over architectures, by built-in name."""


def override(architectures: Sequence[_LazyArch]) -> list[_LazyArch]:
    """Returns MAX's architectures, in order, with those taken over replaced.

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
    return [
        replace(entry, **TAKEN_OVER[entry.name])
        if entry.name in TAKEN_OVER
        else entry
        for entry in architectures
    ]
