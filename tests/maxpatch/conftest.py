# SPDX-License-Identifier: Apache-2.0
"""Toy projects, sealed off from the user's git and from every index."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.maxpatch.toy import Toy, write_project


@pytest.fixture(scope="package", autouse=True)
def no_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Takes the user's settings of git, pip, pytest and ours away."""
    with pytest.MonkeyPatch.context() as patched:
        for name in os.environ:
            if name.startswith(("GIT_", "MAXPATCH_", "PIP_", "PYTEST_ADDOPTS")):
                patched.delenv(name)
        home = str(tmp_path_factory.mktemp("home"))
        patched.setenv("HOME", home)
        patched.setenv("XDG_CONFIG_HOME", f"{home}/.config")
        patched.setenv("GIT_CONFIG_NOSYSTEM", "1")
        # A cache that starts empty, so that no package comes from the user's.
        patched.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patched.setenv("UV_HTTP_RETRIES", "0")
        # Whatever asks an index after all is told so at once.
        for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
            patched.setenv(name, "http://127.0.0.1:9/simple")
        # Proofs run in a pytest of their own, which needs no plugins.
        patched.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        yield


@pytest.fixture(autouse=True)
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own home, without configuration."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    return home


@pytest.fixture(scope="package")
def template(
    no_settings: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A toy project that tests copy."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "scratch").mkdir()
    write_project(folder / "project", folder / "scratch")
    return folder / "project"


@pytest.fixture
def toy(template: Path, tmp_path: Path) -> Toy:
    """A fresh toy project."""
    root = tmp_path / "project"
    shutil.copytree(template, root)
    return Toy(root, template)
