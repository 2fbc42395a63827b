# SPDX-License-Identifier: Apache-2.0
"""The scratch tree that patches are applied to.

The tree has the paths of MAX's source repository, where the wheel's ``max/``
is ``max/python/max/``. What a wheel carries is patched only where it is the
exact file that a patch was made for, so no hunk can move to a twin of its
place. A source checkout moves daily: there each hunk must have one place only
(:mod:`maxpatch.hunks`). Either way each file must come out as foreseen.
"""

from __future__ import annotations

import shlex
import shutil
import stat
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .errors import ConflictError, ProcessError, SourceError
from .git import NO_BLOB, Repository, blob_id
from .hunks import Hunk, find, hunks_of, lines_of, replaced
from .series import PYTHON_ROOT, Patch, Target
from .wheel import Wheel

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_CRLF = "its lines end in CRLF (core.autocrlf)"
_CRLF_HINT = "clone it anew with `git clone -c core.autocrlf=false`"


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
            self._write(path, wheel.read(info.filename))
        self._repository.commit_all(self.base)

    def copy_in(self, files: Mapping[str, bytes]) -> None:
        """Writes files, by source path, as one commit."""
        for path, data in files.items():
            self._write(path, data)
        self._repository.commit_all(self.base)

    def apply(self, patch: Patch) -> None:
        """Applies a patch as a commit.

        Raises:
            ConflictError: The tree isn't the one the patch was made for, or
                doesn't become the one it says. The tree is as before.
        """
        self._check_before(patch)
        self._commit(patch, {t.path: t.after for t in patch.targets})

    def place(self, patch: Patch) -> bool:
        """Applies a patch as a commit wherever each hunk has one place only.

        Returns:
            Whether it was applied; if not, the tree has all of it already.

        Raises:
            ConflictError: A hunk has no place or several, some of the patch is
                there already, or it doesn't become what is foreseen. The tree
                is as before.
        """
        try:
            hunks = hunks_of(patch.data)
        except ValueError as error:
            raise ConflictError(
                f"{patch.name} cannot be read: {error}",
                hint="make the patch anew; its hunks were edited by hand",
            ) from error
        fits = [
            _fit(target, self.content(target.path), hunks[target.path])
            for target in patch.targets
        ]
        faults = [fault for fit in fits for fault in fit.faults]
        landed = [there for fit in fits for there in fit.landed]
        after = {fit.path: fit.after for fit in fits if fit.after}
        if faults or (landed and after):
            raise ConflictError(
                f"{patch.name} does not fit {self.base}: expected the old "
                "lines of every hunk in one place and its new lines nowhere, "
                "found\n  " + "\n  ".join(faults + landed),
                hint=_where_it_fits(patch),
            )
        if after:
            self._commit(patch, after)
        return bool(after)

    def _commit(self, patch: Patch, expected: Mapping[str, str]) -> None:
        """Commits a patch whose files must become the expected blobs."""
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

    def _write(self, path: str, data: bytes) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

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


@dataclass(frozen=True, slots=True)
class _Fit:
    """How a patch fits one file: by hunk, or as a whole."""

    path: str
    after: str = ""
    """Blob id of the file once patched, if it can be."""

    landed: tuple[str, ...] = ()
    """What is there already."""

    faults: tuple[str, ...] = ()
    """What has no place, or several."""


def _fit(target: Target, data: bytes | None, hunks: Sequence[Hunk]) -> _Fit:
    """Returns how a patch fits a file, which isn't there if data is None."""
    path = target.path
    blob = NO_BLOB if data is None else blob_id(data)
    if blob == target.before:
        return _Fit(path, target.after)
    if blob == target.after:
        return _Fit(path, landed=(f"{path}: is as the patch leaves it",))
    if data is None or NO_BLOB in (target.before, target.after):
        wrong = f"{path}: expected {_file(target.before)}, found {_file(blob)}"
        return _Fit(path, faults=(wrong,))
    lines = lines_of(data)
    places = [find(hunk, lines) for hunk in hunks]
    landed = tuple(f"{path}: {at}" for at in places if at.has_landed)
    faults = tuple(
        f"{path}: {at}" for at in places if not (at.is_open or at.has_landed)
    )
    opened = len(places) - len(landed) - len(faults)
    if faults or not opened:
        return _Fit(path, landed=landed, faults=faults)
    try:
        after = replaced([at for at in places if at.is_open], lines)
    except ValueError as error:
        return _Fit(path, faults=(f"{path}: {error}",))
    # A second run must find the patch in the file.
    again = [find(hunk, after) for hunk in hunks]
    faults = tuple(
        f"{path}: {at}, once it is applied" for at in again if not at.has_landed
    )
    return _Fit(path, blob_id(b"".join(after)), landed, faults)


def _file(blob: str) -> str:
    return "no file" if blob == NO_BLOB else f"blob {blob}"


def _where_it_fits(patch: Patch) -> str:
    if patch.source_commits:
        return (
            f"the patch fits modular/modular {patch.source_commits}: check "
            "out one of these, or make the patch anew on this one"
        )
    return "make the patch anew on this source, or narrow its Applies-To"


@dataclass(frozen=True, slots=True)
class SourceTree:
    """What the patches of Mojo code make of a source checkout."""

    files: Mapping[str, Path]
    """The new file by path in the checkout, for each that differs from it."""

    removed: frozenset[str]
    """The paths of the checkout that are no more."""

    landed: Mapping[str, str]
    """By patch that the checkout has already, the reason to leave it out."""

    before: Mapping[str, bytes | None] = field(default_factory=dict)
    """What those patches change, by path, as it was before them.

    None for a file that they add; empty where it can't be told.
    """


def apply_source(
    source: Path, patches: Sequence[Patch], folder: Path
) -> SourceTree:
    """Applies patches of Mojo code to copies of a checkout's files.

    The checkout is only read, as a folder: git never runs in it.

    Args:
        source: A MAX source checkout, or a plain folder with its files.
        patches: The selected patches of Mojo code, in order.
        folder: A folder that isn't there yet: a scratch repository with one
            commit a patch.

    Raises:
        SourceError: A file that a patch changes isn't there, or isn't a plain
            file with its content.
        ConflictError: A patch doesn't fit. In either case the folder is gone.
    """
    base = f"the source in {source}"
    files: dict[str, bytes] = {}
    for patch in patches:
        for target in patch.targets:
            data = _read(source, patch, target)
            if data is not None:
                files[target.path] = data
    try:
        checkout = Checkout(folder, base)
        checkout.copy_in(files)
        landed = [patch for patch in patches if not checkout.place(patch)]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    paths = sorted({t.path for patch in patches for t in patch.targets})
    content = {path: checkout.content(path) for path in paths}
    before: dict[str, bytes | None] = {}
    for patch in reversed(landed):
        for target in patch.targets:
            data = before.get(target.path, files.get(target.path))
            before[target.path] = _without(patch, target, data)
    return SourceTree(
        files={
            path: checkout.folder / path
            for path, data in content.items()
            if data is not None and data != files.get(path)
        },
        removed=frozenset(path for path in files if content[path] is None),
        landed={
            patch.name: "the source has it already; "
            + " and ".join(patch.mojo_packages)
            + (" is" if len(patch.mojo_packages) == 1 else " are")
            + " rebuilt from it"
            for patch in landed
        },
        before=before,
    )


def _without(patch: Patch, target: Target, data: bytes | None) -> bytes | None:
    """Returns a file that has a patch as it was before; empty if unknown."""
    if target.before == NO_BLOB:
        return None
    lines = lines_of(data or b"")
    places = [
        find(replace(hunk, old=hunk.new, new=hunk.old), lines)
        for hunk in hunks_of(patch.data)[target.path]
    ]
    if not all(at.is_open for at in places):
        return b""
    return b"".join(replaced(places, lines))


def _read(source: Path, patch: Patch, target: Target) -> bytes | None:
    """Returns a file of a checkout, or None where a patch needs none.

    Raises:
        SourceError: It isn't there, isn't a plain file, or its content isn't.
    """
    path = source / target.path
    where = f"{path}, which {patch.name} changes,"
    git = f"git -C {shlex.quote(str(source))}"
    if path.resolve() != source.resolve() / target.path:
        raise SourceError(
            f"{where} is not a file of the checkout itself: a symbolic link "
            f"leads to {path.resolve()}",
            hint="copy the file to its place",
        )
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        data = path.read_bytes() if is_file else b""
    except (FileNotFoundError, NotADirectoryError):
        if NO_BLOB in (target.before, target.after):
            return None
        name = shlex.quote(target.path)
        folder = shlex.quote(str(Path(target.path).parent))
        raise SourceError(
            f"{where} is not there: expected a checkout of modular/modular "
            "with it",
            hint=f"{git} sparse-checkout add {folder} (if it is a sparse "
            f"one), or {git} checkout HEAD -- {name}",
        ) from None
    except OSError as error:
        raise SourceError(
            f"{where} cannot be read: {error.strerror}"
        ) from error
    if not is_file:
        raise SourceError(f"{where} is not a file: expected a file there")
    if data.startswith(_LFS_POINTER):
        raise SourceError(
            f"{where} is a Git LFS pointer: expected the file that it names",
            hint=f"{git} lfs pull --include {shlex.quote(target.path)}",
        )
    ends = data.count(b"\r\n")
    if ends and ends == data.count(b"\n") and b"\r\n" not in patch.data:
        raise SourceError(
            f"{where} is not as in modular/modular: {_CRLF}", hint=_CRLF_HINT
        )
    return data


def check_source(
    source: Path,
    wheel: Wheel,
    patched: Collection[str] = (),
    *,
    inexact: bool = False,
) -> None:
    """Checks that a source checkout is that of a release, by its Python files.

    The checkout is only read, as a folder: git never runs in it. A file of the
    wheel that isn't in it may be one that MAX's build generates.

    Args:
        source: The checkout.
        wheel: The release's wheel.
        patched: The source paths that patches change; what the wheel has of
            them, the checkout must have.
        inexact: Whether any MAX checkout will do, also one without Python.

    Raises:
        SourceError: It is no MAX checkout, or its files differ from the
            wheel's.
    """
    root = "max/kernels" if inexact else f"{PYTHON_ROOT}{wheel.name}"
    if not (source / root).is_dir():
        raise SourceError(
            f"{source} is not a MAX source checkout: expected the folder "
            f"{root} in it",
            hint="name the top folder of a clone of modular/modular",
        )
    if inexact:
        return
    shared = differing = 0
    first = ends = ""
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
            data = (source / path).read_bytes()
            released = wheel.read(info.filename)
            if data != released:
                differing += 1
                first = first or info.filename
                if data.replace(b"\r\n", b"\n") == released:
                    ends = f"; {_CRLF}"
    if differing or not shared:
        raise SourceError(
            f"{source} is not the source of {wheel.path.name}: expected its "
            f"Python files, found {differing} of {shared} different"
            + (f", {first} the first" if first else "")
            + ends,
            hint=_CRLF_HINT
            if ends
            else "check out the release's tag (upstream-tag in "
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
