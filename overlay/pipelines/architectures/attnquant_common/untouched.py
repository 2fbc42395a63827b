# SPDX-License-Identifier: Apache-2.0
"""AttnQuant on a MAX as released, by ``--custom-architectures attnquant``.

The package ``attnquant`` of the plain wheel asks here for the architectures
that MAX wants of it. The patched MAX finds them by :mod:`.registration`.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from .registration import BYPASSING, TAKEN_OVER
from .settings import from_environment

if TYPE_CHECKING:
    from max.pipelines.lib import SupportedArchitecture

_OFF = (
    "AttnQuant is off and MAX's own architectures serve: no variable "
    "ATTNQUANT* is set, or ATTNQUANT=0"
)
_ADDED = (
    "AttnQuant on an untouched MAX %s. The patched wheel would add: sampling "
    "from a small top-k with one read of the logits; AttnQuant's kernels "
    "precompiled once, not for each graph; without AttnQuant, Gemma 3 in "
    "captured device graphs and on CPUs"
)

logger = logging.getLogger("max.pipelines.attnquant")


def architectures(package: str) -> list[SupportedArchitecture]:
    """Returns what MAX is to register in place of its own architectures.

    Switched on, those that lead past AttnQuant are among them, and refuse to
    start. It also logs a line: that AttnQuant is off, if it is, or else what
    the patched MAX would add to this one.

    Args:
        package: The name of the package that holds the architectures'.

    Raises:
        SettingsError: If the variables cannot be followed.
    """
    release = version("max")
    modules = dict.fromkeys(row["module"] for row in TAKEN_OVER.values())
    found: list[SupportedArchitecture] = [
        architecture
        for module in modules
        for architecture in import_module(module, package).ARCHITECTURES
    ]
    if from_environment(os.environ) is None:
        logger.info(_OFF)
    elif "+attnquant." not in release:
        logger.info(_ADDED, release)
        found += _refusing()
    return found


def _refusing() -> list[SupportedArchitecture]:
    from max.pipelines.lib.arch_lookup import ARCH_LOOKUP

    from .bypassing import refusing

    return [refusing(ARCH_LOOKUP.find(name)) for name in BYPASSING]
