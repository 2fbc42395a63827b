# SPDX-License-Identifier: Apache-2.0
"""The built-in architectures that refuse to start while AttnQuant is on.

MAX looks an architecture up as an attribute of a module. Here it is a name
such as ``.gemma4:gemma4_unified_arch``: where MAX has the built-in one.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import NoReturn

from max.pipelines.lib import SupportedArchitecture

from .registration import BYPASSING
from .settings import SettingsError

_PACKAGE = "max.pipelines.architectures"


def __getattr__(symbol: str) -> SupportedArchitecture:
    module, _, name = symbol.partition(":")
    if not name:
        raise AttributeError(symbol)
    return refusing(getattr(import_module(module, _PACKAGE), name))


def refusing(built_in: SupportedArchitecture) -> SupportedArchitecture:
    """Returns an architecture that is found and listed, and does not start.

    Args:
        built_in: One of :data:`.registration.BYPASSING`.
    """

    def refuse(*_: object, **__: object) -> NoReturn:
        raise SettingsError(
            f"AttnQuant does not serve {built_in.name}: "
            f"{BYPASSING[built_in.name]}. "
            "ATTNQUANT=0 switches AttnQuant off"
        )

    # What MAX calls first: of a configuration, and of an architecture with a
    # drafter.
    methods = dict.fromkeys(
        ("calculate_max_seq_len", "initialize"), staticmethod(refuse)
    )
    config = type(built_in.config.__name__, (built_in.config,), methods)
    return dataclasses.replace(
        built_in, config=config, checkpoint_draft_width=refuse
    )
