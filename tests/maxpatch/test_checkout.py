# SPDX-License-Identifier: Apache-2.0
"""The scratch tree, and a user's source checkout that is only read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from maxpatch.checkout import (
    Checkout,
    apply_source,
    check_source,
    member_path,
    source_path,
)
from maxpatch.errors import ConflictError, SourceError
from maxpatch.series import Patch, Target
from maxpatch.wheel import Wheel
from tests.maxpatch import toy as made
from tests.maxpatch.faults import write_source
from tests.maxpatch.toy import Toy


def read(toy: Toy, name: str) -> Patch:
    """Returns a patch of the toy's series."""
    return Patch.parse(name, toy.patch(name).read_bytes())


@pytest.fixture
def checkout(toy: Toy) -> Checkout:
    """A scratch tree with all of the toy's 1.0."""
    checkout = Checkout(toy.root.parent / "tree", "max 1.0")
    with Wheel(toy.base()) as wheel:
        checkout.lay_out(wheel, None)
    return checkout


def files(folder: Path) -> set[str]:
    """Returns the files below a folder, git's own aside."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


def head(checkout: Checkout) -> bytes:
    """Returns the commit that a checkout stands at."""
    return made.git(checkout.folder, "rev-parse", "HEAD")


def test_paths_of_source_and_wheel_are_each_others(toy: Toy) -> None:
    """`max/x` in the wheel is `max/python/max/x` in the source tree."""
    patch = read(toy, "endings")
    (target,) = patch.targets
    assert target.path == source_path("max/endings.py")
    assert member_path(patch, target) == "max/endings.py"


def test_path_outside_the_wheel_is_refused_with_its_patch(toy: Toy) -> None:
    """What the wheel doesn't carry cannot be changed in it."""
    wrong = Target("max/python/other/x.py", "", "")
    with pytest.raises(ConflictError, match=r"^endings: max/python/other/x.py"):
        member_path(read(toy, "endings"), wrong)


def test_whole_tree_has_the_wheels_text(checkout: Checkout) -> None:
    """All of `max/` is laid out; compiled files and metadata aren't."""
    assert files(checkout.folder) == {
        source_path(member.name)
        for member in made.max_members("1.0", made.FOREIGN)
        if member.name.startswith("max/")
    }
    assert checkout.content(source_path("max/endings.py")) == made.ENDINGS
    status = made.git(checkout.folder, "status", "--porcelain", "--ignored")
    assert status == b""


def test_partial_tree_has_the_named_files_only(toy: Toy) -> None:
    """A build lays out no more than the patches need."""
    tree = Checkout(toy.root.parent / "tree", "max 1.0")
    with Wheel(toy.base()) as wheel:
        tree.lay_out(wheel, {source_path("max/layers.py"), "gone"})
    assert files(tree.folder) == {source_path("max/layers.py")}


def test_patch_is_one_commit_with_its_own_author(
    toy: Toy, checkout: Checkout
) -> None:
    """A patch changes, adds and removes what it says, as a commit."""
    for name in ("endings", "fresh-module", "drop-legacy"):
        checkout.apply(read(toy, name))
    log = made.git(checkout.folder, "log", "--format=%an %s").decode()
    assert log.splitlines() == [
        "MAX AttnQuant [Toy] drop-legacy",
        "MAX AttnQuant [Toy] fresh-module",
        "MAX AttnQuant [Toy] endings",
        "MAX AttnQuant max 1.0",
    ]
    assert checkout.content(source_path("max/fresh.py"))
    assert checkout.content(source_path("max/legacy.py")) is None


def test_refused_patch_leaves_the_tree_as_it_was(
    toy: Toy, checkout: Checkout
) -> None:
    """Whatever is wrong with a patch, the next one finds a clean tree."""
    before = head(checkout)
    data = toy.patch("decode-divides").read_bytes()
    moved = data.replace(b"@@ -11,3 +11,3 @@", b"@@ -5,3 +5,3 @@")
    assert moved != data
    for bad in (moved, data.replace(b"-    y = x * f", b"-    y = x + f")):
        with pytest.raises(ConflictError):
            checkout.apply(Patch.parse("bad", bad))
        assert head(checkout) == before
        assert made.git(checkout.folder, "status", "--porcelain") == b""
    checkout.apply(read(toy, "decode-divides"))
    assert checkout.content(source_path("max/layers.py")) == made.TWINS[
        : made.TWINS.index(b"def decode")
    ] + made.TWINS[made.TWINS.index(b"def decode") :].replace(b"*", b"/")


def test_new_file_may_not_be_there(toy: Toy, checkout: Checkout) -> None:
    """A patch that adds a file doesn't replace one."""
    patch = read(toy, "fresh-module")
    path = checkout.folder / source_path("max/fresh.py")
    path.write_bytes(b"another\n")
    with pytest.raises(ConflictError, match=f"expected blob {'0' * 40}, found"):
        checkout.apply(patch)


def test_already_applied_patch_is_told_from_a_conflict(
    toy: Toy, checkout: Checkout
) -> None:
    """The same patch twice is `already in`, with what to do about it."""
    checkout.apply(read(toy, "endings"))
    with pytest.raises(ConflictError, match=r"already in max 1.0") as caught:
        checkout.apply(read(toy, "endings"))
    assert caught.value.hint and "Accepted" in caught.value.hint


# A user's source checkout.


@pytest.fixture
def source(toy: Toy) -> Path:
    """A source checkout of the toy's 1.0 that is a plain folder."""
    write_source(toy)
    return toy.root / "source"


def as_repository(folder: Path) -> Path:
    """Makes a folder a git repository with one commit."""
    made.git(folder, "init", "--quiet")
    made.git(folder, "add", "--all")
    made.git(folder, "commit", "--quiet", "--message", "MAX")
    return folder


def as_folder(source: Path) -> Path:
    """Returns the checkout as it is."""
    return source


def as_clone(source: Path) -> Path:
    """Returns a git clone of the checkout."""
    as_repository(source)
    made.git(source.parent, "clone", "--quiet", "source", "clone")
    return source.parent / "clone"


def as_worktree(source: Path) -> Path:
    """Returns a git worktree of the checkout."""
    as_repository(source)
    made.git(source, "worktree", "add", "--quiet", "../worktree")
    return source.parent / "worktree"


@pytest.mark.parametrize("kind", [as_folder, as_clone, as_worktree])
def test_true_source_is_accepted_and_never_touched(
    kind: object, toy: Toy, source: Path
) -> None:
    """A folder, a clone and a worktree are read, as files, and left alone."""
    assert callable(kind)
    folder = kind(source)
    before = made.snapshot(folder.parent)
    with Wheel(toy.base()) as wheel:
        check_source(folder, wheel)
    assert made.snapshot(folder.parent) == before


@pytest.mark.parametrize("kind", [as_folder, as_clone, as_worktree])
def test_source_of_another_state_is_refused_and_never_touched(
    kind: object, toy: Toy, source: Path
) -> None:
    """A local change is found, named, and kept."""
    assert callable(kind)
    folder = kind(source)
    changed = folder / "max/python/max/layers.py"
    changed.write_bytes(b"# mine\n")
    before = made.snapshot(folder.parent)
    with (
        Wheel(toy.base()) as wheel,
        pytest.raises(SourceError, match=r"max/layers.py the first") as caught,
    ):
        check_source(folder, wheel)
    assert "expected its Python files, found 1 of 5" in str(caught.value)
    assert made.snapshot(folder.parent) == before


def test_source_without_python_files_is_refused(toy: Toy, source: Path) -> None:
    """A tree with no file in common is no source of the release."""
    shutil.rmtree(source / "max/python/max")
    (source / "max/python/max").mkdir()
    with (
        Wheel(toy.base()) as wheel,
        pytest.raises(SourceError, match="found 0 of 0 different"),
    ):
        check_source(source, wheel)


@pytest.mark.parametrize("inexact", [False, True])
@pytest.mark.parametrize("name", ["absent", "file", "empty"])
def test_source_that_is_no_checkout_is_refused(
    name: str, inexact: bool, toy: Toy, tmp_path: Path
) -> None:
    """A path without MAX's folders is no checkout, not even an inexact one."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with (
        Wheel(toy.base()) as wheel,
        pytest.raises(SourceError, match="is not a MAX source check") as caught,
    ):
        check_source(tmp_path / name, wheel, inexact=inexact)
    assert caught.value.hint == "name the top folder of a clone of " + (
        "modular/modular"
    )


def test_line_ends_of_another_system_are_named(toy: Toy, source: Path) -> None:
    """A checkout with CRLF is told from one of another release."""
    changed = source / "max/python/max/layers.py"
    changed.write_bytes(made.TWINS.replace(b"\n", b"\r\n"))
    with (
        Wheel(toy.base()) as wheel,
        pytest.raises(SourceError, match="its lines end in CRLF") as caught,
    ):
        check_source(source, wheel)
    assert caught.value.hint and "core.autocrlf=false" in caught.value.hint


# Patches of Mojo code on a source checkout.

KERNEL = "max/kernels/src/nn/x.mojo"
TABLE = "max/kernels/src/nn/table.yaml"
SOURCE = {
    KERNEL: b"# x\n\n\ndef a():\n    one()\n    two()\n\n\n"
    b"def b():\n    three()\n    four()\n",
    TABLE: b"# table\nrows:\n- 1\n- 2\n",
}
CHANGED = {
    KERNEL: SOURCE[KERNEL]
    .replace(b"one()", b"uno()")
    .replace(b"four()", b"quattro()"),
    TABLE: SOURCE[TABLE] + b"- 3\n",
}
NEWER = {
    KERNEL: b"# Newer.\n" + SOURCE[KERNEL].replace(b"\n\n\n", b"\n\n#\n\n"),
    TABLE: b"# Newer.\n" + SOURCE[TABLE],
}
"""The same code on another day."""


class Sources:
    """A folder with a source checkout, and patches for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "source"
        self.scratch = root / "scratch"
        self.write(SOURCE)

    def write(self, files: dict[str, bytes]) -> None:
        """Makes the checkout consist of some files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        made.write_tree(self.folder, files)

    def patch(
        self,
        name: str = "kernel",
        before: dict[str, bytes] = SOURCE,
        after: dict[str, bytes] = CHANGED,
        **fields: str,
    ) -> Patch:
        """Makes a patch of Mojo code."""
        diff = made.make_diff(self.root / name, before, after)
        data = made.make_patch(name, diff, Touches_Mojo="nn", **fields)
        return Patch.parse(name, data)

    def refuse(self, *patches: Patch) -> ConflictError | SourceError:
        """Returns the error that patches meet; nothing is left behind."""
        before = made.snapshot(self.folder)
        with pytest.raises((ConflictError, SourceError)) as caught:
            apply_source(self.folder, patches, self.scratch)
        assert not self.scratch.exists()
        assert made.snapshot(self.folder) == before
        return caught.value


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """A source checkout with two files."""
    return Sources(tmp_path)


def test_source_that_a_patch_was_made_for_becomes_what_it_says(
    sources: Sources,
) -> None:
    """The exact files come out as the patch's blobs; the checkout is as is."""
    patch = sources.patch()
    before = made.snapshot(sources.folder)
    tree = apply_source(sources.folder, [patch], sources.scratch)
    assert {path: f.read_bytes() for path, f in tree.files.items()} == CHANGED
    assert tree.landed == {} and tree.removed == frozenset()
    assert made.snapshot(sources.folder) == before
    log = made.git(sources.scratch, "log", "--format=%s").decode().split("\n")
    assert log[0] == "kernel"


def test_newer_source_takes_the_patch_where_it_belongs(
    sources: Sources,
) -> None:
    """Each hunk goes to its one place, whatever the line number."""
    sources.write(NEWER)
    tree = apply_source(sources.folder, [sources.patch()], sources.scratch)
    assert tree.files[KERNEL].read_bytes() == NEWER[KERNEL].replace(
        b"one()", b"uno()"
    ).replace(b"four()", b"quattro()")
    assert tree.files[TABLE].read_bytes() == NEWER[TABLE] + b"- 3\n"


def test_patches_of_a_source_build_on_each_other(sources: Sources) -> None:
    """A later patch sees what an earlier one made."""
    later = {**CHANGED, KERNEL: CHANGED[KERNEL].replace(b"uno", b"un")}
    patches = [
        sources.patch("first"),
        sources.patch("second", CHANGED, later),
    ]
    tree = apply_source(sources.folder, patches, sources.scratch)
    assert tree.files[KERNEL].read_bytes() == later[KERNEL]


@pytest.mark.parametrize("base", [SOURCE, NEWER], ids=["exact", "newer"])
def test_landed_patch_is_recognised(
    base: dict[str, bytes], sources: Sources
) -> None:
    """What a patch made has the patch: it is left out, with the reason."""
    patch = sources.patch()
    sources.write(base)
    tree = apply_source(sources.folder, [patch], sources.scratch)
    sources.write({path: f.read_bytes() for path, f in tree.files.items()})
    shutil.rmtree(sources.scratch)
    again = apply_source(sources.folder, [patch], sources.scratch)
    assert again.files == {}
    assert again.landed == {
        "kernel": "the source has it already; nn is rebuilt from it"
    }
    assert again.before == base


def test_what_landed_files_were_before_is_empty_where_unclear(
    sources: Sources,
) -> None:
    """Only a file that has each hunk once is taken back, patch by patch."""
    twin = {KERNEL: b"x\n" * 9 + b"a\n1\nb\n" + b"x\n" * 9 + b"a\n2\nb\nx\n"}
    after = {KERNEL: twin[KERNEL].replace(b"1", b"2")}
    patch = sources.patch("twin", twin, after)
    sources.write(after)
    tree = apply_source(sources.folder, [patch], sources.scratch)
    assert (set(tree.landed), tree.before) == ({"twin"}, {KERNEL: b""})
    shutil.rmtree(sources.scratch)
    later = {**CHANGED, KERNEL: CHANGED[KERNEL].replace(b"# x", b"# y")}
    patches = [
        sources.patch("first"),
        sources.patch("second", CHANGED, later),
    ]
    sources.write(later)
    tree = apply_source(sources.folder, patches, sources.scratch)
    assert tree.before == SOURCE


def test_half_landed_patch_is_refused(sources: Sources) -> None:
    """One hunk in the source and another not: neither state is guessed."""
    half = SOURCE[KERNEL].replace(b"one()", b"uno()")
    sources.write({**NEWER, KERNEL: half})
    error = sources.refuse(sources.patch())
    assert "kernel does not fit" in str(error)
    assert f"{KERNEL}: @@ -4,3 +4,3 @@: its old lines nowhere, its new" in str(
        error
    )
    assert "@@ -10,2" not in str(error)  # it has its place


def test_twin_of_a_place_is_refused_with_both_lines(sources: Sources) -> None:
    """Two places are none: the error names file, hunk and both."""
    twin = SOURCE[KERNEL] + b"    more()\n\n\n" + SOURCE[KERNEL]
    sources.write({**SOURCE, KERNEL: b"# First.\n" + twin})
    patch = sources.patch(
        "one",
        {KERNEL: SOURCE[KERNEL] + b"    more()\n"},
        {KERNEL: SOURCE[KERNEL].replace(b"two()", b"due()") + b"    more()\n"},
        Source_Commits="0123456789..abcdefabcd",
    )
    error = sources.refuse(patch)
    assert f"{KERNEL}: @@ -5,3 +5,3 @@" in str(error)
    assert "its old lines at line 6, 20, its new lines nowhere" in str(error)
    assert error.hint and "modular/modular 0123456789..abcdefabcd" in error.hint


def test_source_without_the_code_is_refused(sources: Sources) -> None:
    """No place is an error that says so, with what to do."""
    sources.write({**SOURCE, KERNEL: b"def rewritten():\n    pass\n"})
    error = sources.refuse(sources.patch())
    assert str(error).count("its old lines nowhere, its new lines nowhere") == 2
    assert error.hint and "make the patch anew" in error.hint


def test_patch_that_would_apply_twice_is_refused(sources: Sources) -> None:
    """A hunk whose own result has a place for it could be applied again."""
    patch = sources.patch(
        "run",
        {KERNEL: b"0\na\na\na\nb\n"},
        {KERNEL: b"0\na\na\nb\n"},
    )
    sources.write({KERNEL: b"x\n0\na\na\na\nb\n"})
    assert "once it is applied" in str(sources.refuse(patch))


def test_new_and_removed_files_of_a_source(sources: Sources) -> None:
    """A file is added only where none is, and removed only if it is known."""
    new = "max/kernels/src/nn/new.mojo"
    patch = sources.patch(
        "files",
        {TABLE: SOURCE[TABLE]},
        {new: b"def n():\n    pass\n"},
    )
    tree = apply_source(sources.folder, [patch], sources.scratch)
    assert set(tree.files) == {new}
    assert tree.removed == {TABLE}
    shutil.rmtree(sources.scratch)
    sources.write({KERNEL: SOURCE[KERNEL], new: b"def n():\n    pass\n"})
    tree = apply_source(sources.folder, [patch], sources.scratch)
    assert tree.landed and not tree.files and not tree.removed
    shutil.rmtree(sources.scratch)
    sources.write({**NEWER, new: b"def other():\n    pass\n"})
    error = str(sources.refuse(patch))
    assert f"{new}: expected no file, found blob" in error
    assert f"{TABLE}: expected blob" in error


def absent(sources: Sources) -> None:
    (sources.folder / KERNEL).unlink()


def link(sources: Sources) -> None:
    (sources.folder / KERNEL).rename(sources.folder / "elsewhere")
    (sources.folder / KERNEL).symlink_to(sources.folder / "elsewhere")


def folder_link(sources: Sources) -> None:
    (sources.folder / "max/kernels").rename(sources.root / "kernels")
    (sources.folder / "max/kernels").symlink_to(sources.root / "kernels")


def pointer(sources: Sources) -> None:
    (sources.folder / KERNEL).write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    )


def folder(sources: Sources) -> None:
    (sources.folder / KERNEL).unlink()
    (sources.folder / KERNEL).mkdir()


def pipe(sources: Sources) -> None:
    (sources.folder / KERNEL).unlink()
    os.mkfifo(sources.folder / KERNEL)


def windows(sources: Sources) -> None:
    path = sources.folder / KERNEL
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


@pytest.mark.parametrize(
    ("spoil", "message", "hint"),
    [
        (absent, "is not there", "sparse-checkout add max/kernels/src/nn"),
        (link, "a symbolic link leads to", "copy the file"),
        (folder_link, "a symbolic link leads to", "copy the file"),
        (pointer, "is a Git LFS pointer", f"lfs pull --include {KERNEL}"),
        (folder, "is not a file", ""),
        (pipe, "is not a file", ""),
        (windows, "its lines end in CRLF", "git clone -c core.autocrlf=false"),
    ],
)
def test_source_file_that_cannot_be_read_is_named(
    spoil: object, message: str, hint: str, sources: Sources
) -> None:
    """The error names file and patch, and the command that mends it."""
    assert callable(spoil)
    patch = sources.patch()
    spoil(sources)
    error = sources.refuse(patch)
    assert isinstance(error, SourceError)
    assert "max/kernels/src/nn/" in str(error)
    assert ", which kernel changes," in str(error)
    assert message in str(error)
    assert hint in (error.hint or "")


def test_denied_source_file_is_no_sparse_clone(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that can't be read is named with its patch, and the reason."""
    patch = sources.patch()

    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    # The tests may run as root, whom no mode stops.
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", deny)
        with pytest.raises(SourceError) as caught:
            apply_source(sources.folder, [patch], sources.scratch)
    assert ", which kernel changes, cannot be read: Permission denied" in str(
        caught.value
    )
    assert caught.value.hint is None


@pytest.mark.parametrize("kind", [as_clone, as_worktree])
def test_git_never_runs_in_the_source(kind: object, sources: Sources) -> None:
    """A repository with hooks and filters of its own is read as files."""
    assert callable(kind)
    made.write_tree(
        sources.folder, {".gitattributes": b"*.mojo filter=x ident\n"}
    )
    checkout = kind(sources.folder)
    patch = sources.patch()
    before = made.snapshot(sources.root)
    apply_source(checkout, [patch], sources.root / "scratch")
    shutil.rmtree(sources.root / "scratch")
    assert made.snapshot(sources.root) == before
