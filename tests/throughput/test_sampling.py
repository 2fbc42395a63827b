# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.throughput.fake_driver import compiled

from throughput import sampling
from throughput.server import MeasureError

DRIVER = """\
int cuStreamSynchronize(void *stream) { return 0; }
int cuEventSynchronize(void *event) { return 0; }
int cuGraphLaunch(void *graph, void *stream) { return 0; }
"""

SERVER = """\
import ctypes
from max._entrypoints import fake_server
from max.graph import default_custom_extensions

driver = ctypes.CDLL({driver!r})
stream, event = driver.cuStreamSynchronize, driver.cuEventSynchronize
step = fake_server.Request.step


def calling(self, rows, row):
    if self.given == 0:
        for _ in range(9):
            stream(None)
    else:
        driver.cuGraphLaunch(None, None)
    event(None)
    if not default_custom_extensions():
        stream(None)
    step(self, rows, row)


fake_server.Request.step = calling
fake_server.main()
"""
"""Waits nine times in a prefill, and, without the overlay, once a step."""

GRAPH = """\
import os
from pathlib import Path


def default_custom_extensions():
    off = os.environ["MAX_KERNEL_OVERLAYS"] == "0"
    return () if off else (Path("ours.mojoc"),)
"""


CALLS = """\
| calls a decode step | cuCtxSynchronize | cuEventSynchronize | cuGraphLaunch \
| cuMemcpyDtoH_v2 | cuStreamSynchronize |
| --- | --- | --- | --- | --- | --- |
| overlays off | 0.00 | 1.00 | 1.00 | 0.00 | 1.00 |
| overlays on | 0.00 | 1.00 | 1.00 | 0.00 | 0.00 |
"""
"""What the program has to say of that server."""


@pytest.fixture
def site(fake_site: Callable[..., str], tmp_path: Path) -> str:
    """A fake MAX with one kernel overlay, which waits as MAX 26.5 does."""
    path = Path(fake_site(supports_capture=True))
    entry = path / "max" / "_entrypoints" / "pipelines.py"
    entry.rename(entry.with_name("fake_server.py"))
    driver = compiled(tmp_path, "libcuda.so.1", DRIVER)
    entry.write_text(SERVER.format(driver=str(driver)))
    graph = path / "max" / "graph"
    graph.mkdir()
    (graph / "__init__.py").write_text(GRAPH)
    return str(path)


@pytest.fixture
def run(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """Runs the program with flags."""
    monkeypatch.setattr(sampling, "_SETTLE_S", 0.05)

    def call(*flags: str) -> int:
        command = (
            *("sampling", "--patched", sys.executable),
            *("--patched-path", site, "--model", str(tmp_path)),
            *("--output", str(tmp_path / "results.json")),
            *("--starts", "1", "--rounds", "1", *flags),
        )
        monkeypatch.setattr(sys, "argv", list(command))
        return sampling.main()

    return call


def test_arms_are_timed_and_their_calls_counted(
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The known waits of a step are found, those of a prefill left out."""
    assert run("--overlay", "ours", "--time-limit", "0") == 0
    counted = json.loads((tmp_path / "results.json").read_text())
    assert counted["trials"] == []

    assert run("--overlay", "ours") == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["driver_calls"] == counted["driver_calls"], "counted twice"
    assert {a: v["overlays"] for a, v in results["arms"].items()} == {
        "overlays off": "",
        "overlays on": "ours",
    }
    assert [t["arm"] for t in results["trials"]] == list(results["arms"])

    shown = capsys.readouterr().out
    assert "| overlays on | 1.0+site | 1 |" in shown
    assert shown.endswith(CALLS)


def test_a_wheel_without_the_overlay_is_refused(
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is measured under the name of an overlay that is not there."""
    assert run("--overlay", "ours", "theirs") == 1
    error = capsys.readouterr().err
    assert "expected the kernel overlays ['ours', 'theirs']" in error
    assert "found ['ours']" in error
    assert not (tmp_path / "results.json").exists()


def test_an_interpreter_without_max_is_refused(site: str) -> None:
    """The error names the arm and shows the interpreter's own words."""
    Path(site, "max", "graph", "__init__.py").write_text("import nothing")
    off, _ = sampling.arms(sys.executable, site, ("ours",))
    with pytest.raises(MeasureError, match=r"(?s)overlays off: .*No module"):
        off.versions()


def test_calls_a_step_are_differences() -> None:
    """What short answers call too is no call of a step."""
    pair = [
        {"tokens": sampling.SHORT, "calls": {"a": 40, "b": 7}},
        {"tokens": sampling.LONG, "calls": {"a": 40 + 128 * 3, "b": 7}},
    ]
    assert sampling.calls_a_step(pair * 2) == {"a": 3.0, "b": 0.0}
