# SPDX-License-Identifier: Apache-2.0
"""The door to git: hermetic, and never the repository above."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from maxpatch.build import Request, build
from maxpatch.errors import MaxPatchError, ProcessError
from maxpatch.git import Repository, blob_id
from tests.maxpatch import toy as made
from tests.maxpatch.toy import Toy


def quiet(_line: str) -> None:
    """Announces nothing."""


@pytest.mark.parametrize("data", [b"", b"a\r\nb \n", b"\0\xff" * 999])
def test_blob_id_is_gits_own(data: bytes, tmp_path: Path) -> None:
    """`blob_id` is what `git hash-object` says."""
    found = made.git(tmp_path, "hash-object", "--stdin", stdin=data)
    assert blob_id(data) == found.decode().strip()


def test_folder_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    """A plain folder cannot be opened."""
    with pytest.raises(MaxPatchError, match="is not a git repository"):
        Repository(tmp_path)


def test_folder_inside_a_repository_is_refused(tmp_path: Path) -> None:
    """A folder below a repository's top is never taken for a repository."""
    made.git(tmp_path, "init", "--quiet")
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(MaxPatchError, match="not a git repository"):
        Repository(inside)


def test_bare_repository_is_refused(tmp_path: Path) -> None:
    """A repository without a work tree has no top level."""
    made.git(tmp_path, "init", "--quiet", "--bare")
    with pytest.raises(MaxPatchError, match="is not a git repository"):
        Repository(tmp_path)


def test_folder_whose_work_tree_is_elsewhere_is_refused(tmp_path: Path) -> None:
    """A repository that points to another work tree isn't this folder's."""
    other = tmp_path / "other"
    other.mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    made.git(folder, "init", "--quiet")
    made.git(folder, "config", "core.worktree", str(tmp_path))
    with pytest.raises(MaxPatchError, match="is not the top level") as caught:
        Repository(folder)
    assert f"found {tmp_path}" in str(caught.value)


def test_repository_behind_a_link_is_opened(tmp_path: Path) -> None:
    """A symbolic link to a top level is that top level."""
    Repository.init(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert Repository(tmp_path / "link").path == tmp_path / "real"


def test_commits_are_the_same_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Author, committer and dates are fixed, so equal trees make equal ids."""
    heads = set()
    for name, zone in (("a", "UTC"), ("b", "Asia/Tokyo")):
        monkeypatch.setenv("TZ", zone)
        monkeypatch.setenv("GIT_AUTHOR_NAME", name)
        repository = Repository.init(tmp_path / name)
        (repository.path / "f").write_bytes(b"x\r\n")
        repository.commit_all("base")
        heads.add(repository.git("rev-parse", "HEAD"))
    assert len(heads) == 1


def test_failed_patch_leaves_the_repository_as_it_was(tmp_path: Path) -> None:
    """A patch that doesn't apply leaves no half-finished `am` behind."""
    repository = Repository.init(tmp_path / "r")
    (repository.path / "f").write_bytes(b"one\n")
    repository.commit_all("base")
    head = repository.git("rev-parse", "HEAD")
    diff = made.make_diff(tmp_path / "d", {"f": b"two\n"}, {"f": b"three\n"})
    with pytest.raises(ProcessError, match=r"git.* am .*exited with status"):
        repository.am(made.make_patch("x", diff))
    assert repository.git("rev-parse", "HEAD") == head
    assert repository.git("status", "--porcelain") == ""
    assert not (repository.path / ".git/rebase-apply").exists()


@pytest.mark.parametrize(
    "mail", [b"no mail", b"From x\n\nno diff\n", b"From: a\n\n---\n"]
)
def test_mail_that_is_no_patch_is_reported_by_its_own_error(
    mail: bytes, tmp_path: Path
) -> None:
    """When `am` never started, the error is that of `am`, not of its abort."""
    repository = Repository.init(tmp_path / "r")
    repository.commit_all("base")
    with pytest.raises(ProcessError, match=r"am --quiet.*exited"):
        repository.am(mail)
    repository.commit_all("later")


# A user's git that would change what a patch does.

Hostile = Callable[[Path, pytest.MonkeyPatch], None]
HOSTILE: dict[str, Hostile] = {}


def hostile(plant: Hostile) -> Hostile:
    """Registers a hostile configuration under its function's name."""
    HOSTILE[plant.__name__] = plant
    return plant


def configure(home: Path, text: str) -> None:
    """Writes the user's configuration."""
    (home / ".gitconfig").write_text(text)


def failing_hooks(folder: Path) -> Path:
    """Writes hooks that fail and leave a trace; returns their folder."""
    folder.mkdir(parents=True)
    for name in (
        "applypatch-msg",
        "pre-applypatch",
        "pre-commit",
        "commit-msg",
    ):
        hook = folder / name
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    return folder


@hostile
def signs(home: Path, _: pytest.MonkeyPatch) -> None:
    configure(home, "[commit]\ngpgsign = true\n[gpg]\nprogram = /bin/false\n")


@hostile
def rewrites_line_ends(home: Path, _: pytest.MonkeyPatch) -> None:
    configure(home, "[core]\nautocrlf = true\nsafecrlf = true\neol = crlf\n")


@hostile
def normalises_line_ends(home: Path, _: pytest.MonkeyPatch) -> None:
    configure(home, "[core]\nautocrlf = input\n")


@hostile
def strips_whitespace(home: Path, _: pytest.MonkeyPatch) -> None:
    configure(home, "[apply]\nwhitespace = fix\nignorewhitespace = change\n")


@hostile
def refuses_whitespace(home: Path, _: pytest.MonkeyPatch) -> None:
    configure(home, "[apply]\nwhitespace = error\n")


@hostile
def runs_hooks(home: Path, _: pytest.MonkeyPatch) -> None:
    hooks = failing_hooks(home / "hooks")
    configure(home, f"[core]\nhooksPath = {hooks}\n")


@hostile
def has_a_template_with_hooks(home: Path, _: pytest.MonkeyPatch) -> None:
    failing_hooks(home / "template/hooks")
    configure(home, f"[init]\ntemplateDir = {home / 'template'}\n")


@hostile
def has_a_template_in_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_hooks(home / "template/hooks")
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(home / "template"))


@hostile
def hides_prefixes(home: Path, _: pytest.MonkeyPatch) -> None:
    configure(home, "[diff]\nnoprefix = true\n[am]\nthreeWay = true\n")


@hostile
def has_attributes(home: Path, _: pytest.MonkeyPatch) -> None:
    (home / "attributes").write_text("* text eol=crlf\n*.py ident filter=no\n")
    configure(
        home,
        f"[core]\nattributesFile = {home / 'attributes'}\n"
        '[filter "no"]\nclean = false\nsmudge = false\nrequired = true\n',
    )


@hostile
def has_attributes_at_the_default_place(
    home: Path, _: pytest.MonkeyPatch
) -> None:
    folder = home / ".config/git"
    folder.mkdir(parents=True)
    (folder / "attributes").write_text("* text eol=crlf\n")
    (folder / "config").write_text("[core]\nautocrlf = true\n")


@hostile
def has_no_identity(home: Path, _: pytest.MonkeyPatch) -> None:
    configure(home, "[user]\nuseConfigOnly = true\n")


@hostile
def points_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = home / "other"
    other.mkdir()
    made.git(other, "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(other / "objects"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", "/")


@hostile
def configures_by_environment(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.autocrlf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'apply.whitespace=error'")
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")


@hostile
def has_a_broken_configuration(home: Path, _: pytest.MonkeyPatch) -> None:
    configure(home, "[core\n")


@pytest.fixture(scope="package")
def true_wheel(
    template: Path, tmp_path_factory: pytest.TempPathFactory
) -> bytes:
    """What the toy project makes without any configuration."""
    output = tmp_path_factory.mktemp("true-wheel")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "maxpatch.build.Project.work", output / "work", raising=True
        )
        patched.setenv("MAXPATCH_CACHE", str(template / "build/work/downloads"))
        request = Request(platform=made.FOREIGN, output=output)
        report = build(Toy(template, template).project, request, quiet)
    return Path(report["wheels"][0]["path"]).read_bytes()


@pytest.mark.parametrize("name", HOSTILE)
def test_users_git_changes_nothing(
    name: str,
    true_wheel: bytes,
    toy: Toy,
    sealed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hostile configuration gives the same wheel and isn't touched."""
    HOSTILE[name](sealed, monkeypatch)
    before = made.snapshot(sealed)
    request = Request(platform=made.FOREIGN, output=toy.dist)
    report = build(toy.project, request, quiet)
    assert Path(report["wheels"][0]["path"]).read_bytes() == true_wheel
    assert made.snapshot(sealed) == before


def test_line_ends_and_trailing_spaces_survive(
    true_wheel: bytes, toy: Toy
) -> None:
    """CRLF, mixed line ends and trailing blanks come through byte for byte."""
    path = toy.root / "max-1.0.whl"
    path.write_bytes(true_wheel)
    (member,) = [
        m for m in made.read_members(path) if m.name == "max/endings.py"
    ]
    assert member.data == made.ENDINGS.replace(
        b"HEIGHT = 1\t\n", b"HEIGHT = 2  \t\r\n"
    )


def test_outer_repository_is_not_reached(toy: Toy) -> None:
    """A project inside a git repository is built without touching it."""
    outer = toy.root.parent
    made.git(outer, "init", "--quiet")
    made.write_tree(outer, {"note": b"x\n", ".gitattributes": b"* eol=crlf\n"})
    made.git(outer, "add", "note")
    made.git(outer, "commit", "--quiet", "--message", "outer")
    before = made.snapshot(outer / ".git")
    request = Request(platform=made.FOREIGN, output=toy.dist)
    build(toy.project, request, quiet)
    assert made.snapshot(outer / ".git") == before


def test_git_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without git the error says what to install."""
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(MaxPatchError, match="cannot run `git`") as caught:
        Repository.init(tmp_path / "r")
    assert caught.value.hint == "install git"
