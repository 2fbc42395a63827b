# SPDX-License-Identifier: Apache-2.0
"""The scratch tree that patches are applied to.

The tree has the paths of MAX's source repository, where the wheel's ``max/``
is ``max/python/max/``. A patch is applied only to the exact files it was made
for, so no hunk can move to a twin of its place, and each file it changes must
come out as the patch says.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path

from .errors import ConflictError, ProcessError, SourceError
from .git import NO_BLOB, Repository, blob_id
from .series import Patch, Target
from .wheel import Wheel

PYTHON_ROOT = "max/python/"
"""Where MAX's source tree keeps what the wheel installs."""


def source_path(member: str) -> str:
    """Returns the path in MAX's source tree of a wheel's member."""
    return PYTHON_ROOT + member


def member_path(patch: Patch, target: Target) -> str:
    """Returns the wheel member that a patch changes.

    Raises:
        ConflictError: The wheel doesn't carry what stands there.
    """
    if not target.path.startswith(f"{PYTHON_ROOT}max/"):
        raise ConflictError(
            f"{patch.name}: {target.path} isn't part of the wheel: "
            f"expected a path below {PYTHON_ROOT}max/"
        )
    return target.path.removeprefix(PYTHON_ROOT)


class Checkout:
    """A scratch repository with files of one MAX release."""

    def __init__(self, folder: Path, base: str) -> None:
        """Makes an empty one.

        Args:
            folder: The folder to create.
            base: What it holds, for messages, as ``max 26.7.0``.
        """
        self.base = base
        self._repository = Repository.init(folder)

    @property
    def folder(self) -> Path:
        """The tree's root."""
        return self._repository.path

    def lay_out(self, wheel: Wheel, paths: Collection[str] | None) -> None:
        """Writes the wheel's files as one commit.

        Args:
            wheel: The release's wheel.
            paths: The source paths to write; all below ``max/`` if None.
        """
        for info in wheel.infos:
            path = source_path(info.filename)
            if not info.filename.startswith(f"{wheel.name}/") or (
                paths is not None and path not in paths
            ):
                continue
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(wheel.read(info.filename))
        self._repository.commit_all(self.base)

    def apply(self, patch: Patch) -> None:
        """Applies a patch as a commit.

        Raises:
            ConflictError: The tree isn't the one the patch was made for, or
                doesn't become the one it says. The tree is as before.
        """
        self._check_before(patch)
        try:
            self._repository.am(patch.data)
        except ProcessError as error:
            raise ConflictError(
                f"{patch.name} does not apply to {self.base}, although its "
                f"files are those it was made for:\n{_indented(error)}",
                hint="make the patch anew; its hunks were edited by hand",
            ) from error
        # What was committed, so that nothing outside the targets goes unseen.
        changed = self._repository.changed_by_head()
        expected = {target.path: target.after for target in patch.targets}
        found = {path: self._blob(path) for path in changed | expected.keys()}
        if found != expected:
            self._repository.git("reset", "--hard", "--quiet", "HEAD~1")
            raise ConflictError(
                f"{patch.name} came out wrong:\n  "
                + "\n  ".join(
                    f"{path}: expected {_named(expected.get(path))}, "
                    f"found {_named(blob)}"
                    for path, blob in sorted(found.items())
                    if blob != expected.get(path)
                ),
                hint="make the patch anew; its hunks were edited by hand",
            )

    def content(self, path: str) -> bytes | None:
        """Returns a file's content, or None if it isn't there."""
        target = self.folder / path
        return target.read_bytes() if target.is_file() else None

    def _blob(self, path: str) -> str:
        data = self.content(path)
        return NO_BLOB if data is None else blob_id(data)

    def _check_before(self, patch: Patch) -> None:
        found = {t: self._blob(t.path) for t in patch.targets}
        if all(blob == target.after for target, blob in found.items()):
            raise ConflictError(
                f"{patch.name} is already in {self.base}",
                hint="narrow its Applies-To, or mark it Accepted with the "
                "first release that has it",
            )
        wrong = [
            f"{target.path}: expected blob {target.before}, found {blob}"
            for target, blob in found.items()
            if blob != target.before
        ]
        if wrong:
            raise ConflictError(
                f"{patch.name} was made for other files than those of "
                f"{self.base}{self._verdict(patch)}:\n  " + "\n  ".join(wrong),
                hint="make the patch anew on this base, or narrow its "
                "Applies-To",
            )

    def _verdict(self, patch: Patch) -> str:
        """Returns what git would do with a patch that isn't exact, in words."""
        git = self._repository.git
        try:
            git("apply", "--check", "--reverse", "-", stdin=patch.data)
            return " and seems to be in them"
        except ProcessError:
            pass
        try:
            git("apply", "--check", "-", stdin=patch.data)
        except ProcessError as error:
            found = error.output.strip().replace("\n", "; ")
            return f" and does not apply ({found})"
        return " and would apply, but perhaps in the wrong place"


def _named(blob: str | None) -> str:
    return f"blob {blob}" if blob else "no change"


def _indented(error: ProcessError) -> str:
    """Returns git's own errors; its advice is for a tree that is gone."""
    lines = error.output.strip().splitlines()
    errors = [x for x in lines if x.startswith(("error:", "fatal:"))]
    return textwrap.indent("\n".join(errors or lines), "  ")


def check_source(
    source: Path, wheel: Wheel, patched: Collection[str] = ()
) -> None:
    """Checks that a source checkout is that of a release, by its Python files.

    The checkout is only read, as a folder: git never runs in it. A file of the
    wheel that isn't in it may be one that MAX's build generates.

    Args:
        source: The checkout.
        wheel: The release's wheel.
        patched: The source paths that patches change; what the wheel has of
            them, the checkout must have.

    Raises:
        SourceError: It is no MAX checkout, or its files differ from the
            wheel's.
    """
    root = source / PYTHON_ROOT / wheel.name
    if not root.is_dir():
        raise SourceError(
            f"{source} is not a MAX source checkout: expected the folder "
            f"{PYTHON_ROOT}{wheel.name} in it"
        )
    shared = differing = 0
    first = ""
    for info in wheel.infos:
        path = source_path(info.filename)
        is_there = (source / path).is_file()
        if path in patched and not is_there:
            raise SourceError(
                f"{source} is not the source of {wheel.path.name}: expected "
                f"{path}, which a patch changes, found no such file"
            )
        if info.filename.endswith(".py") and is_there:
            shared += 1
            if (source / path).read_bytes() != wheel.read(info.filename):
                differing += 1
                first = first or info.filename
    if differing or not shared:
        raise SourceError(
            f"{source} is not the source of {wheel.path.name}: expected its "
            f"Python files, found {differing} of {shared} different"
            + (f", {first} the first" if first else ""),
            hint="check out the release's tag (upstream-tag in "
            "build/releases.toml), without local changes",
        )


def changed_members(
    checkout: Checkout, patches: Collection[Patch], wheel: Wheel
) -> tuple[Mapping[str, bytes | None], Mapping[str, bytes]]:
    """Returns what the patches made of the wheel's members.

    Returns:
        New content by member of the wheel (None for a removed one), and
        content by new member.
    """
    there = {info.filename for info in wheel.infos}
    changed: dict[str, bytes | None] = {}
    added: dict[str, bytes] = {}
    members = {member_path(p, t): t.path for p in patches for t in p.targets}
    for member, path in sorted(members.items()):
        data = checkout.content(path)
        if member in there:
            changed[member] = data
        elif data is not None:
            added[member] = data
    return changed, added
