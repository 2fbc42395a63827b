# SPDX-License-Identifier: Apache-2.0
"""Makes folders that an interpreter takes for an installed MAX."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from throughput.server import Arm

FAKE = Path(__file__).with_name("fake_max.py")


@pytest.fixture
def fake_site(tmp_path: Path) -> Callable[..., str]:
    """Returns a function that makes a PYTHONPATH with a fake MAX on it."""

    def make(name: str = "site", **settings: object) -> str:
        site = tmp_path / name
        package = site / "max" / "_entrypoints"
        package.mkdir(parents=True)
        (site / "max" / "__init__.py").touch()
        (package / "__init__.py").touch()
        shutil.copy(FAKE, package / "pipelines.py")
        (site / "settings.json").write_text(json.dumps(settings))
        info = site / f"max-1.0+{name}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: max\nVersion: 1.0+{name}\n"
        )
        return str(site)

    return make


@pytest.fixture
def fake_arm(fake_site: Callable[..., str]) -> Callable[..., Arm]:
    """Returns a function that makes an arm served by a fake MAX."""

    def make(
        name: str = "arm",
        *,
        flags: tuple[str, ...] = (),
        capture: bool = False,
        **settings: object,
    ) -> Arm:
        path = fake_site(name, **settings)
        return Arm(name, sys.executable, path, flags, capture)

    return make
