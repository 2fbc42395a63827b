# SPDX-License-Identifier: Apache-2.0
"""AttnQuant's own ops, for MAX graphs.

Each folder beside this file is a Mojo package that adds ops; the modules call
them. They replace nothing in MAX, so a graph without them is MAX's own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_FOLDER = Path(__file__).parent


def libraries() -> tuple[Path, ...]:
    """Returns the Mojo packages for a graph's ``custom_extensions``.

    They are precompiled where MAX has kernel overlays, which keeps them in
    its compile cache. An untouched MAX gets the sources, and precompiles them
    for every graph.

    Raises:
        RuntimeError: If a package cannot be precompiled.
    """
    if importlib.util.find_spec("max.kernels") is not None:
        from max.kernels import libraries as precompiled

        # None, if kernel overlays are switched off.
        found: tuple[Path, ...] = precompiled(_FOLDER)
        if found:
            return found
    return tuple(
        sorted(init.parent for init in _FOLDER.glob("*/__init__.mojo"))
    )
