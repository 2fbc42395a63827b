# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from throughput.server import (
    Arm,
    MeasureError,
    check_log,
    serve,
)

ON = """
00:00:00.000 INFO:     pipeline             : OverlapTextGenerationPipeline
00:00:00.000 INFO:     device_graph_capture : True
00:00:09.000 INFO: Device graph capture warmup completed in 1.50s (model=m).
"""
OFF = ON.replace("True", "False").rpartition("00:00:09")[0]


def arm(capture: bool) -> Arm:
    """Returns an arm of which only the capture matters."""
    return Arm("arm", "python", capture=capture)


def test_log_that_agrees_is_quoted() -> None:
    """The quoted lines carry no time, so equal servers quote alike."""
    said = check_log(arm(True), ON)
    assert said["config"] == "device_graph_capture : True"
    assert said["pipeline"] == "pipeline : OverlapTextGenerationPipeline"
    assert said["warmup"].startswith("Device graph capture warmup")
    assert "warmup" not in check_log(arm(False), OFF)


@pytest.mark.parametrize(
    ("capture", "log", "reason"),
    [
        (True, OFF, "expected device graph capture on"),
        (False, ON, "expected device graph capture off"),
        (True, ON.rpartition("00:00:09")[0], "no capture warm-up"),
        (False, OFF.replace("False", "True"), "capture : True"),
        (False, "INFO: Server ready", "no device_graph_capture line"),
    ],
)
def test_log_that_contradicts_is_refused(
    capture: bool, log: str, reason: str
) -> None:
    """Config line and warm-up must both agree with the arm."""
    with pytest.raises(MeasureError, match=reason):
        check_log(arm(capture), log)


def test_server_is_gone_after_the_block(
    fake_arm: Callable[..., Arm], tmp_path: Path
) -> None:
    """The server answers inside the block and nowhere after it."""
    with serve(fake_arm(), tmp_path, tmp_path / "log") as server:
        assert httpx.get(f"{server.url}/health").is_success
        assert 0 < server.startup_s < 60
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_server_that_ends_is_reported_with_its_log(
    fake_arm: Callable[..., Arm], tmp_path: Path
) -> None:
    """The error names the exit code and shows the end of the log."""
    with (
        pytest.raises(MeasureError, match=r"exit code 3(.|\n)*cannot allocate"),
        serve(fake_arm(exit_code=3), tmp_path, tmp_path / "log"),
    ):
        pytest.fail("the block ran without a server")


def test_pythonpath_of_the_harness_does_not_reach_the_server(
    fake_arm: Callable[..., Arm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm imports what it names and nothing of the caller's path."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert "PYTHONPATH" not in arm(False).environment({})
    assert fake_arm("ours").versions()["max"] == "1.0+ours"


def test_interpreter_without_max_is_an_error(tmp_path: Path) -> None:
    """The error says which interpreter was asked."""
    empty = Arm("empty", "/bin/false", str(tmp_path))
    with pytest.raises(MeasureError, match="/bin/false"):
        empty.versions()
