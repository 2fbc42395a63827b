# SPDX-License-Identifier: Apache-2.0
"""The one door to other programs."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import MaxPatchError, ProcessError


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
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, input=stdin, capture_output=True
        )
    except OSError as error:
        raise MaxPatchError(
            f"cannot run `{words[0]}`: {error.strerror}",
            hint=hint or f"install {Path(words[0]).name}",
        ) from error
    stdout = done.stdout.decode(errors="replace")
    if done.returncode:
        raise ProcessError(
            shlex.join(words),
            done.returncode,
            stdout + done.stderr.decode(errors="replace"),
            hint=hint,
        )
    return stdout
