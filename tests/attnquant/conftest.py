# SPDX-License-Identifier: Apache-2.0
"""Makes ``attnquant_common`` importable as it lies in the overlay.

Installed, the package is ``max.pipelines.architectures.attnquant_common``; it
imports its own modules relatively only, so a test needs neither MAX nor a
wheel for a module that needs no MAX.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ARCHITECTURES = (
    Path(__file__).resolve().parents[2]
    / "overlay"
    / "pipelines"
    / "architectures"
)
sys.path.insert(0, str(ARCHITECTURES))


@pytest.fixture(scope="session")
def package_path() -> Path:
    """The folder for a child process's ``PYTHONPATH``."""
    return ARCHITECTURES
