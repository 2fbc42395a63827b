# SPDX-License-Identifier: Apache-2.0
"""Where ``attnquant_common`` lies in the overlay.

Installed, the package is ``max.pipelines.architectures.attnquant_common``; it
imports its own modules relatively only, so a test needs neither MAX nor a
wheel for a module that needs no MAX.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def package_path() -> Path:
    """The folder for a child process's ``PYTHONPATH``."""
    return ROOT / "overlay" / "pipelines" / "architectures"
