# SPDX-License-Identifier: Apache-2.0
"""The expected failures of a build.

A message says what failed and where, what was expected and what was found; a
hint is the next command. Anything that isn't a :class:`MaxPatchError` is a bug
and keeps its traceback.
"""

from __future__ import annotations


class MaxPatchError(Exception):
    """An expected failure, shown to the user without a traceback."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        """The next command or step, if there is one."""


class ReleaseError(MaxPatchError):
    """A release is unknown, or its pinned wheel can't be had."""


class SeriesError(MaxPatchError):
    """The series and its folder disagree, or a patch's header is malformed."""


class ConflictError(MaxPatchError):
    """A patch doesn't apply exactly to the tree it was selected for."""


class OverlayError(MaxPatchError):
    """An overlay file has no owner or would cover a file of MAX."""


class SourceError(MaxPatchError):
    """A source checkout isn't the source of the release."""


class CompileError(MaxPatchError):
    """Mojo sources don't compile, or the compiler isn't the release's."""


class WheelError(MaxPatchError):
    """A wheel isn't what its own metadata says it is."""


class VerifyError(MaxPatchError):
    """A built wheel doesn't install, import or pass a patch's proof."""


class OutputError(MaxPatchError):
    """The output folder can't be written, or another build holds it."""


class ProcessError(MaxPatchError):
    """A command failed."""

    def __init__(
        self, command: str, returncode: int, output: str, *, hint: str | None
    ) -> None:
        tail = "\n".join(output.rstrip().splitlines()[-20:])
        super().__init__(
            f"`{command}` exited with status {returncode}:\n{tail}", hint=hint
        )
        self.returncode = returncode
        """The command's exit status."""

        self.output = output
        """What the command printed, both streams."""
