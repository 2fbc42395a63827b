# SPDX-License-Identifier: Apache-2.0
"""The one door to git, closed to the user's configuration.

Nothing here knows about MAX. A signing key, a hook, an end-of-line or
whitespace setting, or an attributes file of the user must not change what a
patch does, so every call runs without system and user configuration, with a
fixed identity and in UTC.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from .errors import MaxPatchError, ProcessError
from .process import run

IDENTITY = "MAX AttnQuant"
EMAIL = "attnquant@example.invalid"
DATE = "2026-01-01T00:00:00+0000"
NO_BLOB = "0" * 40
"""The blob id that a diff names for a file that isn't there."""

_SETTINGS = {
    "advice.mergeConflict": "false",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.fileMode": "false",
    "core.hooksPath": os.devnull,
    "core.safecrlf": "false",
    "diff.noprefix": "false",
    "gc.auto": "0",
    "init.defaultBranch": "main",
}


def blob_id(data: bytes) -> str:
    """Returns the id git gives to a file's content (SHA-1 object format)."""
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest()


def environment(ceiling: Path) -> dict[str, str]:
    """Returns the environment of a hermetic git call.

    Args:
        ceiling: git doesn't look for a repository in it or above.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return kept | {
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_AUTHOR_DATE": DATE,
        "GIT_AUTHOR_EMAIL": EMAIL,
        "GIT_AUTHOR_NAME": IDENTITY,
        "GIT_CEILING_DIRECTORIES": os.fspath(ceiling),
        "GIT_COMMITTER_DATE": DATE,
        "GIT_COMMITTER_EMAIL": EMAIL,
        "GIT_COMMITTER_NAME": IDENTITY,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_EDITOR": "false",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
        "TZ": "UTC",
    }


class Repository:
    """A git repository, opened at its own top level.

    git called inside a folder that is no repository works on the repository
    above it; for a patch series that would be our own. So a folder that isn't
    its own top level is refused.
    """

    def __init__(self, path: Path) -> None:
        """Opens the repository.

        Raises:
            MaxPatchError: The folder is no repository, or is inside another.
        """
        self.path = path.resolve()
        try:
            found = self.git("rev-parse", "--show-toplevel").strip()
        except ProcessError as error:
            raise MaxPatchError(
                f"{path} is not a git repository: {error.output.strip()}"
            ) from error
        if Path(found) != self.path:
            raise MaxPatchError(
                f"{path} is not the top level of a git repository: "
                f"expected {self.path}, found {found}"
            )

    @classmethod
    def init(cls, path: Path) -> Repository:
        """Makes an empty repository, from no template, and opens it."""
        path.mkdir(parents=True, exist_ok=True)
        run(
            ["git", "init", "--quiet", "--template=", path.resolve()],
            env=environment(path.resolve().parent),
        )
        return cls(path)

    def git(self, *words: str | Path, stdin: bytes = b"") -> str:
        """Runs a git command here and returns what it printed."""
        settings = [
            word
            for key, value in _SETTINGS.items()
            for word in ("-c", f"{key}={value}")
        ]
        return run(
            ["git", *settings, *words],
            cwd=self.path,
            env=environment(self.path.parent),
            stdin=stdin,
        )

    def commit_all(self, message: str) -> None:
        """Commits the folder as it is, also when nothing changed."""
        self.git("add", "--all", "--force", ".")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)

    def am(self, patch: bytes) -> None:
        """Applies a mailbox patch as a commit with its own author and date.

        Raises:
            ProcessError: The patch doesn't apply; the tree is as before.
        """
        try:
            self.git(
                "am",
                "--quiet",
                "--keep-cr",
                "--keep-non-patch",
                "--no-3way",
                "--committer-date-is-author-date",
                stdin=patch,
            )
        except ProcessError:
            with contextlib.suppress(ProcessError):  # the first one tells why
                self.git("am", "--abort")
            raise

    def changed_by_head(self) -> set[str]:
        """Returns the paths that the last commit changed."""
        listed = self.git(
            "diff-tree", "-r", "-z", "--no-commit-id", "--name-only", "HEAD"
        )
        return set(filter(None, listed.split("\0")))
