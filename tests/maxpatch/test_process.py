# SPDX-License-Identifier: Apache-2.0
"""The door to other programs."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from maxpatch.errors import MaxPatchError, ProcessError
from maxpatch.process import install_hint, kill_running, run


def test_output_is_returned_and_input_passed_on() -> None:
    """What a command prints is the result; it reads what it is given."""
    echo = "import sys; print(sys.stdin.read()[::-1])"
    assert run([sys.executable, "-c", echo], stdin=b"abc") == "cba\n"


def test_failure_carries_command_status_and_both_streams() -> None:
    """A failed command says what it was, how it ended and what it printed."""
    fail = (
        "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    )
    with pytest.raises(ProcessError) as caught:
        run([sys.executable, "-c", fail], hint="try again")
    error = caught.value
    assert (error.returncode, error.output) == (7, "out\nerr\n")
    assert "exited with status 7:\nout\nerr" in str(error)
    assert error.hint == "try again"


def test_failure_message_shows_the_end_of_a_long_output() -> None:
    """Only the last twenty lines are shown; the rest stays in `output`."""
    fail = "import sys; [print(i) for i in range(99)]; sys.exit(1)"
    with pytest.raises(ProcessError) as caught:
        run([sys.executable, "-c", fail])
    assert "\n98" in str(caught.value) and "\n78" not in str(caught.value)
    assert "\n0\n" in "\n" + caught.value.output


def test_program_that_is_not_there_is_named() -> None:
    """A missing program is an expected failure with its hint."""
    with pytest.raises(MaxPatchError, match="cannot run `no-such-tool`") as it:
        run(["no-such-tool"], hint="install it")
    assert it.value.hint == "install it"


def test_commands_of_other_threads_are_killed(tmp_path: Path) -> None:
    """What would outlive an interrupted build ends at once, and says how."""
    wait = (
        "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); "
        "time.sleep(600)"
    )
    there = tmp_path / "there"
    with ThreadPoolExecutor() as pool:
        done = pool.submit(run, [sys.executable, "-c", wait, there])
        while not there.exists():
            time.sleep(0.02)
        kill_running()
        with pytest.raises(ProcessError) as caught:
            done.result(timeout=60)
    assert caught.value.returncode == -signal.SIGKILL


def test_full_disk_is_no_question_of_the_network() -> None:
    """What uv says decides what the user is told to do."""
    full = "failed to copy file: No space left on device (os error 28)"
    for offline in (False, True):
        assert "make room" in install_hint(full, offline=offline)
    assert "check the network" in install_hint("timed out", offline=False)
    assert "uv's cache" in install_hint("not cached", offline=True)
