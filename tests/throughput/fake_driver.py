# SPDX-License-Identifier: Apache-2.0
"""Makes shared libraries that stand in for the CUDA driver."""

from __future__ import annotations

import subprocess
from pathlib import Path


def compiled(folder: Path, name: str, source: str) -> Path:
    """Compiles C source to a shared library of that name."""
    library = folder / name
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"],
        input=source,
        text=True,
        check=True,
    )
    return library
