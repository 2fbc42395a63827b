# SPDX-License-Identifier: Apache-2.0
"""The one door to other programs."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import MaxPatchError, ProcessError

_running: set[subprocess.Popen[bytes]] = set()


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    hint: str | None = None,
) -> str:
    """Runs a command to its end and returns its standard output.

    Args:
        command: The program and its arguments; no shell is involved.
        cwd: The working directory.
        env: The whole environment; the caller's own if omitted.
        stdin: What the command reads.
        hint: What the user can do if the command fails.

    Raises:
        ProcessError: The command exited with a status other than 0.
        MaxPatchError: The program isn't there.
    """
    words = [os.fspath(word) for word in command]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            words, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        raise MaxPatchError(
            f"cannot run `{words[0]}`: {error.strerror}",
            hint=hint or f"install {Path(words[0]).name}",
        ) from error
    _running.add(process)
    with process:
        try:
            stdout, stderr = (
                data.decode(errors="replace")
                for data in process.communicate(stdin)
            )
        except BaseException:
            process.kill()
            raise
        finally:
            _running.discard(process)
    if process.returncode:
        raise ProcessError(
            shlex.join(words), process.returncode, stdout + stderr, hint=hint
        )
    return stdout


def kill_running() -> None:
    """Kills the commands that run, those of other threads too."""
    for process in list(_running):
        process.kill()


def install_hint(output: str, *, offline: bool) -> str:
    """Returns what the user can do after a failed installation by uv.

    Args:
        output: What uv printed.
        offline: Whether only uv's cache could be used.
    """
    if "No space left on device" in output:
        return "make room on the disk and run again"
    if offline:
        return "with --offline, it and what it depends on must be in uv's cache"
    return (
        "check the network and uv's index settings (UV_DEFAULT_INDEX); "
        "pip's do not hold for uv"
    )
