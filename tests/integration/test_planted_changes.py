# SPDX-License-Identifier: Apache-2.0
"""A changed kernel is in force in a compiled graph, whatever is cached.

MAX keeps compiled graphs and compiled kernels between processes. Had it no
trace of a kernel library's content in their keys, a rebuilt library would be
installed and the old code would run. (MAX 26.4.0 did serve a changed ``nn``
from its cache.)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zstandard

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "tests" / "toys" / "kernels" / "overlay_toy"

PROBE = """\
import json
import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

cpu = DeviceRef.CPU()


def both(x, indices):
    return ops.cumsum(ops.gather(x, indices, axis=0), axis=0)


vector = TensorType(DType.float32, ["n"], cpu)
indices = TensorType(DType.int64, ["k"], cpu)
graph = Graph("both", both, [vector, indices])
model = InferenceSession(devices=[CPU()]).load(graph)


def run(*indices):
    return model.execute(np.ones(3, np.float32), np.array(indices, np.int64))


shown = {"overlay": run(0, 2)[0].to_numpy().tolist()}
try:
    run(0, 7)
except Exception as error:
    shown["nn"] = str(error)
print(json.dumps(shown))
"""
"""An overlay's op on what an op of ``nn`` gives, with an index it refuses."""

SAID = b"gather index {} is out of bounds"
PLANTED = b"planted text {} in the place of."
"""A text in ``nn``'s code, and another one of its length."""

_HEADER = 96
"""Bytes before the zstd frame in a ``.mojoc`` of 26.5 and of 26.7. One of them
is the frame's length when unpacked."""


def plant(library: Path) -> None:
    """Replaces the constant in a copy of ``nn.mojoc``, by another file."""
    assert len(SAID) == len(PLANTED)
    packed = library.read_bytes()
    content = zstandard.decompress(packed[_HEADER:])
    assert content.count(SAID) == 1
    changed = zstandard.compress(content.replace(SAID, PLANTED), 1)
    library.unlink()
    library.write_bytes(packed[:_HEADER] + changed)


@dataclass(frozen=True)
class Installed:
    """An installed MAX with the toy overlay, and caches of its own.

    Attributes:
        nn: The library ``nn.mojoc`` that graphs are compiled with.
        overlay: The overlay's source.
        probe: Returns what the probe shows.
        cached: Returns the files of the caches.
    """

    nn: Path
    overlay: Path
    probe: Callable[[], dict[str, Any]]
    cached: Callable[[], set[Path]]


@pytest.fixture(params=["26.5.0", "26.7.0"])
def installed(
    request: pytest.FixtureRequest,
    environment: Callable[[str], Path],
    tmp_path: Path,
) -> Iterator[Installed]:
    """A release with our wheel, as it was again after the test."""
    python = environment(request.param)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MODULAR_", "MAX_"))
    }
    # All of MAX's caches: graphs, their kernels, and what Mojo made of those.
    fixed = {
        "MODULAR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run(code: str) -> str:
        done = subprocess.run(
            [python, "-c", code],
            env=inherited | fixed,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    kernels = Path(run("import max.kernels as k; print(*k.__path__)").strip())
    nn = kernels.parents[1] / "modular" / "lib" / "mojo" / "nn.mojoc"
    overlay, kept = kernels / "overlay_toy", tmp_path / "nn.mojoc"
    shutil.copytree(OVERLAY, overlay)
    os.link(nn, kept)
    yield Installed(
        nn,
        overlay,
        lambda: json.loads(run(PROBE)),
        lambda: {f for f in tmp_path.glob("cache/**/*") if f.is_file()},
    )
    kept.replace(nn)
    shutil.rmtree(overlay)


def test_planted_changes_are_in_force(installed: Installed) -> None:
    """A change in ``nn``, and one in an overlay, surfaces in a warm cache."""
    refused = "gather index 7 is out of bounds for axis 0 with size 3"
    before = installed.probe()
    assert before["overlay"] == [42, 42]
    assert refused in before["nn"]
    cached = installed.cached()
    assert installed.probe() == before
    assert installed.cached() == cached, "unchanged, and compiled again"

    source = installed.overlay / "__init__.mojo"
    source.write_text(source.read_text().replace("42", "43"))
    after = installed.probe()
    assert after == before | {"overlay": [43, 43]}

    plant(installed.nn)
    planted = "planted text 7 in the place of. for axis 0 with size 3"
    after = installed.probe()
    assert after["overlay"] == [43, 43]
    assert planted in after["nn"]
    assert installed.cached() >= cached, "the cache was emptied on the way"
