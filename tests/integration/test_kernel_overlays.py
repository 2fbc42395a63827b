# SPDX-License-Identifier: Apache-2.0
"""Kernel overlays in a patched MAX: a graph that names none uses them all.

With ``MAXPATCH_TEST_PYTHON`` the tests hold for MAX 26.5 as well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOYS = ROOT / "tests" / "toys" / "kernels"
PROBE = TOYS / "probe.py"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(patched_env: Path, compile_cache: Path) -> Run:
    """Runs the patched environment's Python, with settings by name."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MODULAR_", "MAX_", "ATTNQUANT"))
    }
    fixed = {
        "MODULAR_MAX_CACHE_DIR": str(compile_cache),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def call(
        *arguments: str | Path, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [patched_env, *arguments],
            env={**inherited, **fixed, **settings},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.fixture(scope="module")
def kernels(run: Run) -> Path:
    """The folder of kernel overlays in the environment's MAX."""
    shown = run("-c", "import max.kernels; print(max.kernels.__file__)")
    assert shown.returncode == 0, shown.stderr
    return Path(shown.stdout.strip()).parent


@pytest.fixture(scope="module")
def overlay(kernels: Path) -> Iterator[Path]:
    """The toy overlay, in the environment while the tests use it."""
    placed = kernels / "overlay_toy"
    shutil.copytree(TOYS / "overlay_toy", placed)
    yield placed
    shutil.rmtree(placed)


def probe(run: Run, what: str, **settings: str) -> dict[str, list[Any]]:
    """What the probe prints."""
    done = run(PROBE, what, **settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_graph_takes_the_library(run: Run, overlay: Path) -> None:
    """Graph, sampler and group get every library, with none named."""
    folders = {init.parent.name for init in overlay.parent.glob("*/*.mojo")}
    taken = probe(run, "paths")
    assert "overlay_toy" in folders
    assert {Path(library).stem for library in taken["default"]} == folders
    every = sorted(taken["default"])
    assert {name: sorted(paths) for name, paths in taken.items()} == (
        dict.fromkeys(taken, every)
    )


def test_switched_off(run: Run, overlay: Path) -> None:
    """With MAX_KERNEL_OVERLAYS=0 MAX hands graphs no library."""
    code = "import max.graph as g; print(g.default_custom_extensions())"
    assert run("-c", code).stdout != "()\n"
    assert run("-c", code, MAX_KERNEL_OVERLAYS="0").stdout == "()\n"


def test_graph_uses_overlays(run: Run, overlay: Path) -> None:
    """A compiled graph runs the new op, and ours for the built-in one."""
    assert probe(run, "graph") == {"alone": [42, 42, 42, 7, 7, 7]}


def test_group_compile_uses_overlays(run: Run, overlay: Path) -> None:
    """So do a decoder and a vision tower that compile as one group."""
    assert probe(run, "group") == {
        "decoder": [42, 42, 42, 7, 7, 7],
        "vision": [42, 42, 42],
    }


LIBRARIES = """\
import sys
from pathlib import Path
from typing import Any

from max.kernels import libraries

for library in libraries(Path(sys.argv[1])):
    print(library)
"""


def libraries(run: Run, root: Path, cache: Path) -> list[Path]:
    """The libraries of the overlays in a folder, as the environment has it."""
    done = run("-c", LIBRARIES, root, MODULAR_MAX_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


def test_no_overlay_no_library(run: Run, tmp_path: Path) -> None:
    """A folder without kernels costs nothing, whatever else it holds."""
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "README.md").write_text("Kernels.\n")
    assert libraries(run, tmp_path, tmp_path / "cache") == []


def test_precompiled_library_is_taken_as_it_is(
    run: Run, tmp_path: Path
) -> None:
    """A ``.mojoc`` in an overlay's folder is not built again."""
    shipped = tmp_path / "shipped" / "shipped.mojoc"
    shipped.parent.mkdir()
    shipped.write_bytes(b"MPKG")
    assert libraries(run, tmp_path, tmp_path / "cache") == [shipped]


def test_library_depends_on_content_alone(run: Run, tmp_path: Path) -> None:
    """The same sources elsewhere give the same file; others another one.

    MAX's compile cache has the library's path and content in its key.
    """
    for place in ("here", "there"):
        shutil.copytree(TOYS / "overlay_toy", tmp_path / place / "overlay_toy")

    def built(place: str) -> list[Path]:
        return libraries(run, tmp_path / place, tmp_path / "cache")

    [library] = built("here")
    content = library.read_bytes()
    library.unlink()
    assert built("there") == [library]
    assert library.read_bytes() == content

    written = library.stat().st_mtime_ns
    assert built("here") == [library]
    assert library.stat().st_mtime_ns == written, "built a second time"

    changed = tmp_path / "there" / "overlay_toy" / "__init__.mojo"
    changed.write_text(changed.read_text().replace("42", "43"))
    assert built("there") != [library]


def test_broken_kernel_is_one_clear_error(run: Run, tmp_path: Path) -> None:
    """The error names the package, the compiler's reason and the way out."""
    broken = tmp_path / "root" / "broken"
    broken.mkdir(parents=True)
    (broken / "__init__.mojo").write_text("struct\n")
    cache = tmp_path / "cache"
    done = run(
        "-c",
        LIBRARIES,
        tmp_path / "root",
        MODULAR_MAX_CACHE_DIR=str(cache),
    )
    assert done.returncode == 1
    assert f"cannot precompile the kernel overlay {broken}" in done.stderr
    assert "__init__.mojo:1:" in done.stderr
    assert "MAX_KERNEL_OVERLAYS=0" in done.stderr
    assert not [file for file in cache.rglob("*") if file.is_file()]
