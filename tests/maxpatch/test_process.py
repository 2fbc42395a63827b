# SPDX-License-Identifier: Apache-2.0
"""The door to other programs."""

from __future__ import annotations

import sys

import pytest

from maxpatch.errors import MaxPatchError, ProcessError
from maxpatch.process import run


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
