# SPDX-License-Identifier: Apache-2.0
"""Environments that have the wheels built from this repository installed."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from maxpatch.build import Project, Request, build
from maxpatch.verify import PYTHON_VARIABLE, find_python, install

ROOT = Path(__file__).resolve().parents[1]

Check = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def environment(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """Gives, for a release, the Python of a fresh environment with our wheel.

    The wheel is built into ``dist/``, or recognised there. The environment is
    the tests' own: they may put files into it.
    """

    @functools.cache
    def make(release: str) -> Path:
        request = Request(release=release, output=ROOT / "dist")
        report = build(Project(ROOT), request, print)
        interpreter, reason = find_python(request.python, request.platform)
        assert interpreter is not None, reason
        python = install(
            Path(report["wheels"][0]["path"]),
            interpreter,
            tmp_path_factory.mktemp(f"max-{release}") / "environment",
            offline=False,
        )
        # MAX then starts in half the time. Not every file is for this Python.
        subprocess.run(
            [python, "-m", "compileall", "-qq", "-j0", python.parents[1]],
            check=False,
        )
        return python

    return make


@pytest.fixture(scope="session")
def release_env(
    environment: Callable[[str], Path],
) -> Callable[[str], Path]:
    """Gives the Python of an environment with a release, or the one named.

    A test is skipped if the one that is named has another release.
    """

    def give(release: str) -> Path:
        named = os.environ.get(PYTHON_VARIABLE)
        if not named:
            return environment(release)
        if (found := _release(Path(named))) != release:
            pytest.skip(f"{PYTHON_VARIABLE} has MAX {found}")
        return Path(named)

    return give


@pytest.fixture(scope="session")
def run_check(release_env: Callable[[str], Path]) -> Check:
    """Runs a module of tests/kernels with a release's MAX.

    By itself without the kernel overlays of the wheel: a check names those it
    is about, and a graph takes each once.
    """

    def run(
        release: str, module: str, *arguments: str | Path, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [release_env(release), "-m", f"tests.kernels.{module}", *arguments],
            cwd=ROOT,
            env={
                "MODULAR_MAX_CACHE_DIR": str(_compile_cache(release)),
                **os.environ,
                "MAX_KERNEL_OVERLAYS": "0",
                "PYTHONDONTWRITEBYTECODE": "1",
                **settings,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def patched_env(environment: Callable[[str], Path]) -> Path:
    """The Python with the default release's wheel, or the one named.

    A build names the environment that it verifies, and runs a patch's proof
    with it.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    default = Project(ROOT).releases().default
    return Path(named) if named else environment(default)


@pytest.fixture(scope="session")
def settings(compile_cache: Path) -> Mapping[str, str]:
    """The environment variables under which MAX runs."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "MAX_SERVE_DISABLE_TELEMETRY": "1",
        "MODULAR_MAX_CACHE_DIR": str(compile_cache),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
    }


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy Gemma 3's checkpoint in float32."""
    # Here, so that a proof runs where the toy's libraries aren't installed.
    from tests.toys import gemma3

    folder = tmp_path_factory.mktemp("gemma3")
    gemma3.write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def served_env(patched_env: Path) -> Path:
    """The same, for tests that serve a model."""
    return patched_env


@pytest.fixture(scope="session")
def compile_cache(patched_env: Path) -> Path:
    """A cache of compiled graphs that all tests and later runs share.

    MAX's keys cover the graph, the kernels and the release, so a stale entry
    cannot be taken for a fresh one. But two releases in one folder evict each
    other's entries, so each has its own.
    """
    return _compile_cache(_release(patched_env))


def _release(python: Path) -> str:
    """The release of MAX in an environment."""
    code = "import importlib.metadata as m; print(m.version('max-core'))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def _compile_cache(release: str) -> Path:
    folder = ROOT / "build" / "work" / "compile-cache" / release
    folder.mkdir(parents=True, exist_ok=True)
    return folder
