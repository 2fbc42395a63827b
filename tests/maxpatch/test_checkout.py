# SPDX-License-Identifier: Apache-2.0
"""The scratch tree, and a user's source checkout that is only read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from maxpatch.checkout import Checkout, check_source, member_path, source_path
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


@pytest.mark.parametrize("name", ["absent", "file"])
def test_source_that_is_no_folder_is_refused(
    name: str, toy: Toy, tmp_path: Path
) -> None:
    """A path that isn't a folder is no checkout."""
    (tmp_path / "file").write_bytes(b"")
    with (
        Wheel(toy.base()) as wheel,
        pytest.raises(SourceError, match="is not a MAX source checkout"),
    ):
        check_source(tmp_path / name, wheel)
