# SPDX-License-Identifier: Apache-2.0
"""The whole story: a build, another one, one that is killed, two at once."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import pytest

from maxpatch.build import (
    Request,
    Steps,
    build,
    lay_out,
    verify_built,
    write_json,
)
from maxpatch.errors import (
    ConflictError,
    OutputError,
    SourceError,
    VerifyError,
    WheelError,
)
from maxpatch.provenance import files, read
from maxpatch.verify import check_imports, install
from maxpatch.wheel import check
from tests.maxpatch import toy as made
from tests.maxpatch.toy import Toy


class Changes(TypedDict, total=False):
    """What a build asks for besides the toy's own."""

    release: str
    source: Path
    inexact: bool
    output: Path
    offline: bool
    keep: bool


def run(toy: Toy, **changes: Unpack[Changes]) -> dict[str, Any]:
    """Builds the toy for another platform, which installs nothing."""
    request = Request(platform=made.FOREIGN, output=toy.dist)
    return build(toy.project, replace(request, **changes), lambda _: None)


def member(path: Path, name: str) -> bytes:
    """Returns a member's content."""
    (data,) = [m.data for m in made.read_members(path) if m.name == name]
    return data


def test_build_makes_installs_and_proves_a_wheel(toy: Toy) -> None:
    """A build for this machine ends with the proofs having run."""
    lines: list[str] = []
    before = toy.inputs()
    report = build(toy.project, Request(output=toy.dist), lines.append)
    (wheel,) = toy.built()
    assert report["wheels"] == [
        {
            "path": str(wheel),
            "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "size": wheel.stat().st_size,
            "version": wheel.name.split("-")[1],
        }
    ]
    assert report["verification"] == {
        "imported": True,
        "proofs": ("tests/test_decode.py::test_decode_divides",),
        "reason": "",
    }
    steps = ["select", "reuse", "fetch", "apply", "overlay", "pack"]
    steps += ["check", "verify", "move"]
    assert [line.split()[0] for line in lines] == steps
    assert list(report["seconds"]) == steps
    check(wheel, toy.base(platform=made.PLATFORM), files(wheel))
    now = toy.inputs()
    assert set(now) - set(before) == {f"dist/{wheel.name}"}
    assert {path: now[path] for path in before} == before
    assert toy.leftovers() == set()


def test_report_has_every_patch_and_package(toy: Toy) -> None:
    """Each patch and package has its state and reason, used or not."""
    states = {}
    for release in ("1.0", "2.0"):
        report = run(toy, release=release)
        assert report["release"] == release
        rows = [*report["patches"], *report["overlay"]]
        states[release] = [f"{row['name']}: {row['state']}" for row in rows]
        assert all(row["reason"] for row in rows)
    assert states["1.0"] == [
        "decode-divides: applied",
        "decode-eight: applied",
        "endings: applied",
        "fresh-module: applied",
        "drop-legacy: applied",
        "scale-two: applied",
        "two-only: not-for-this-release",
        "kernel: source-only",
        "extra: applied",
    ]
    assert states["2.0"][5:] == [
        "scale-two: landed-upstream",
        "two-only: applied",
        "kernel: source-only",
        "extra: not-for-this-release",
    ]


def test_patches_add_change_and_remove_members(toy: Toy) -> None:
    """What the series says is what stands in the wheel."""
    run(toy)
    (wheel,) = toy.built()
    members = {m.name: m.data for m in made.read_members(wheel)}
    assert "max/legacy.py" not in members
    assert members["max/fresh.py"] == b'"""New."""\n\nFRESH = 1\n'
    assert members["max/nn/__init__.py"] == made.SCALES_FIXED
    assert members["max/layers.py"] == made.GUARDED
    assert members["max/extra/__init__.py"] == b'"""Added."""\n\nEXTRA = 1\n'


def test_releases_and_platforms_stand_side_by_side(toy: Toy) -> None:
    """Each release has its own wheel in one folder."""
    run(toy)
    run(toy, release="2.0")
    assert [path.name.split("+")[0] for path in toy.built()] == [
        "max-1.0",
        "max-2.0",
    ]


def test_second_build_is_the_first(toy: Toy) -> None:
    """With nothing changed the wheel is recognised and nothing is done."""
    first = run(toy)
    (wheel,) = toy.built()
    before = wheel.stat()
    second = run(toy)
    assert (first["reused"], second["reused"]) == (False, True)
    assert list(second["seconds"]) == ["select", "reuse"]
    assert wheel.stat() == before
    for report in (first, second):
        del report["reused"], report["seconds"]
    assert json.loads(json.dumps(second)) == json.loads(json.dumps(first))


def test_reused_report_has_the_states_of_today(toy: Toy) -> None:
    """A patch for other releases that came since stands in the report."""
    run(toy)
    toy.add_patch("later", {}, {"max/later.py": b"\n"}, Applies_To=">=2.0")
    report = run(toy)
    assert report["reused"]
    assert report["patches"][-1]["name"] == "later"
    assert report["patches"][-1]["state"] == "not-for-this-release"


def test_spoilt_or_missing_wheel_is_built_anew(toy: Toy) -> None:
    """Only the very wheel that was built before is taken again."""
    run(toy)
    (wheel,) = toy.built()
    data = wheel.read_bytes()
    wheel.write_bytes(data[:-1])
    assert not run(toy)["reused"]
    assert wheel.read_bytes() == data
    wheel.unlink()
    assert not run(toy)["reused"]
    assert wheel.read_bytes() == data


def test_wheel_is_known_in_another_folder_too(toy: Toy, tmp_path: Path) -> None:
    """A wheel moved with its folder is recognised under its new path."""
    run(toy)
    toy.dist.rename(tmp_path / "moved")
    report = run(toy, output=tmp_path / "moved")
    assert report["reused"]
    assert report["wheels"][0]["path"].startswith(str(tmp_path / "moved"))


def test_scratch_is_kept_on_request(toy: Toy) -> None:
    """--keep leaves the scratch tree, also for the next build to replace."""
    run(toy, keep=True)
    (name,) = toy.leftovers()
    scratch = toy.root / "build/work" / name
    assert (scratch / "tree/max/python/max/layers.py").is_file()
    toy.built()[0].unlink()
    (scratch / "stale").write_bytes(b"")
    run(toy, keep=True)
    assert not (scratch / "stale").exists()


def test_scratch_of_a_failed_build_is_kept_on_request(toy: Toy) -> None:
    """--keep is for looking at what went wrong."""
    toy.edit_patch("endings", "-HEIGHT = 1\t", "-HEIGHT = 3\t")
    with pytest.raises(ConflictError):
        run(toy, keep=True)
    assert len(toy.leftovers()) == 1
    toy.restore()
    run(toy)
    assert toy.leftovers() == set()


def test_downloads_may_live_elsewhere(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MAXPATCH_CACHE names the folder of downloaded wheels."""
    shutil.move(toy.root / "build/work/downloads", tmp_path / "cache")
    monkeypatch.setenv("MAXPATCH_CACHE", str(tmp_path / "cache"))
    run(toy, offline=True)
    assert toy.built()


def test_work_folder_that_cannot_be_written_is_named(
    toy: Toy, tmp_path: Path
) -> None:
    """A scratch folder that can't be made is an error before any work."""
    shutil.move(toy.root / "build/work", tmp_path / "work")
    (toy.root / "build/work").write_text("a file\n")
    before = toy.inputs()
    with pytest.raises(OutputError, match=r"build/work is not a folder"):
        run(toy)
    assert toy.inputs() == before


def test_output_folder_is_made(toy: Toy, tmp_path: Path) -> None:
    """An output folder that isn't there yet is made, with those above it."""
    run(toy, output=tmp_path / "a/b/c")
    assert len(list((tmp_path / "a/b/c").iterdir())) == 1


def test_output_on_another_file_system_is_one_rename_too(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rename can't cross, the copy is made aside and renamed."""
    real = Path.replace
    seen: list[str] = []

    def same_disk_only(self: Path, target: Path) -> Path:
        if Path(target).parent == toy.dist:
            seen.append(self.name)
            if self.parent != toy.dist:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", same_disk_only)
    run(toy)
    (wheel,) = toy.built()
    assert seen == [wheel.name, f".{wheel.name}.part"]
    check(wheel, toy.base(), files(wheel))
    assert len(list(toy.dist.iterdir())) == 2


def test_full_disk_leaves_the_output_as_it_was(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that breaks off leaves no part of the wheel behind."""
    before = toy.inputs()
    real = Path.replace

    def cross(self: Path, target: Path) -> Path:
        if Path(target).parent == toy.dist:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return real(self, target)

    def full(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", cross)
    monkeypatch.setattr("maxpatch.build.shutil.copyfile", full)
    with pytest.raises(OutputError, match="No space left on device"):
        run(toy)
    assert toy.inputs() == before


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A report that can't take its place leaves nothing."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*taken"):
        write_json(tmp_path / "taken", {})
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


# A source checkout.


@pytest.fixture
def sourced(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A toy with a source checkout and a Mojo compiler that uv finds."""
    made.give_source(toy, monkeypatch)
    return toy


def library(name: str, *text: str) -> bytes:
    """Returns what the toy compiler makes of a package."""
    return " ".join([made.COMPILER_BUILD, name, *text]).encode()


LIBRARIES = "{stem}.data/platlib/modular/lib/mojo/{name}.mojoc"


def libraries(path: Path) -> dict[str, bytes]:
    """Returns the compiled packages of a wheel."""
    return {
        Path(m.name).stem: m.data
        for m in made.read_members(path)
        if m.name.endswith(".mojoc")
    }


def test_source_build_without_mojo_gives_the_same_wheel(toy: Toy) -> None:
    """A checkout that matches the release changes nothing, nor is changed."""
    run(toy)
    (wheel,) = toy.built()
    data = wheel.read_bytes()
    toy.write_source()
    lines = toy.series.read_text()
    toy.series.write_text(lines.replace("kernel\n", ""))
    toy.patch("kernel").unlink()
    before = made.snapshot(toy.source)
    report = run(toy, source=toy.source)
    assert not report["reused"]
    assert report["mojo"] == []
    assert wheel.read_bytes() == data
    assert not toy.built_libraries()
    assert made.snapshot(toy.source) == before


def test_source_build_gives_a_second_wheel_of_rebuilt_packages(
    sourced: Toy,
) -> None:
    """The changed package is new, the rest as released, `max` as ever."""
    toy = sourced
    run(toy)
    (wheel,) = toy.built()
    data = wheel.read_bytes()
    before = made.snapshot(toy.source)
    report = run(toy, source=toy.source)
    (ours,) = toy.built_libraries()
    assert [row["path"] for row in report["wheels"]] == [str(wheel), str(ours)]
    assert report["wheels"][1]["sha256"] == (
        hashlib.sha256(ours.read_bytes()).hexdigest()
    )
    assert wheel.read_bytes() == data
    assert made.snapshot(toy.source) == before
    released = libraries(toy.base_libraries())
    code = ("def_f():", "____return", "from_base_import_one")
    assert libraries(ours) == {
        **released,
        "nn": library("nn", "+base", code[2], "from_.x_import_f", *code[:2]),
    }
    check(ours, toy.base_libraries(), files(ours))
    assert {row["name"]: row["state"] for row in report["patches"]}[
        "kernel"
    ] == "applied"
    (row,) = report["mojo"]
    assert (row["package"], row["cached"]) == ("nn", False)
    assert row["reason"] == "only function bodies in it are changed"
    assert toy.leftovers() == set()


@pytest.mark.parametrize("kind", ["shallow clone", "worktree", "sparse clone"])
def test_checkout_of_any_kind_is_only_read(kind: str, sourced: Toy) -> None:
    """A clone or worktree is read as a folder; its `.git` stays as it is."""
    toy = sourced
    upstream, place = toy.source, toy.root.parent / "checkout"
    for words in (("init", "--quiet"), ("add", "--all")):
        made.git(upstream, *words)
    made.git(upstream, "commit", "--quiet", "--message", "all")
    if kind == "worktree":
        made.git(upstream, "worktree", "add", "--quiet", str(place))
    else:
        url = f"file://{upstream}"
        made.git(upstream, "clone", "-q", "--depth=1", url, str(place))
    if kind == "sparse clone":
        folders = ("max/python", f"{made.KERNELS}nn")
        made.git(place, "sparse-checkout", "set", *folders)
        assert not (place / made.KERNELS / "top").exists()
    before = made.snapshot(place)
    run(toy, source=place)
    assert made.snapshot(place) == before
    assert len(toy.built_libraries()) == 1


def test_libraries_say_what_they_are(sourced: Toy) -> None:
    """Provenance has patches, compiler and sources; the terms go along."""
    run(sourced, source=sourced.source)
    (ours,) = sourced.built_libraries()
    table = read(ours)
    assert [row["name"] for row in table["patches"]] == ["kernel"]
    assert table["base"]["filename"] == sourced.base_libraries().name
    assert table["mojo"]["compiler"] == made.MOJO_COMPILER
    assert list(table["mojo"]["sources"]) == ["nn"]
    stem = "-".join(ours.name.split("-")[:2])
    assert set(files(ours)) == {LIBRARIES.format(stem=stem, name="nn")}
    info = f"{stem}.dist-info"
    assert member(ours, f"{info}/LICENSE") == b"The toy's terms.\n"
    notice = member(ours, f"{info}/NOTICE").decode()
    assert "kernel: [Toy] kernel" in notice
    assert "  modular/lib/mojo/nn.mojoc\n" in notice


def test_sources_of_rebuilt_packages_make_the_version(sourced: Toy) -> None:
    """Another line of the package, patched or not, is another version."""
    toy = sourced
    run(toy, source=toy.source)
    path = toy.source / made.KERNELS / "nn/__init__.mojo"
    path.write_bytes(path.read_bytes() + b"comptime N = 1\n")
    run(toy, source=toy.source)
    assert len(toy.built_libraries()) == 2
    path = toy.source / made.KERNELS / "top/__init__.mojo"
    path.write_bytes(path.read_bytes() + b"comptime N = 1\n")
    run(toy, source=toy.source)
    assert len(toy.built_libraries()) == 2
    assert len(toy.built()) == 1


def test_second_source_build_compiles_nothing(sourced: Toy) -> None:
    """The same inputs are the same wheel, without the compiler."""
    toy = sourced
    run(toy, source=toy.source)
    (ours,) = toy.built_libraries()
    data = ours.read_bytes()
    report = run(toy, source=toy.source)
    assert [row["cached"] for row in report["mojo"]] == [True]
    assert ours.read_bytes() == data


def test_dependents_are_rebuilt_against_the_new_package(sourced: Toy) -> None:
    """A changed constant reaches who imports it, and who imports those."""
    toy = sourced
    path = f"../../{made.KERNELS}base/__init__.mojo"
    old = made.MOJO[f"{made.KERNELS}base/__init__.mojo"]
    toy.add_patch(
        "constant",
        {path: old},
        {path: old.replace(b"K = 1", b"K = 2")},
        Touches_Mojo="base",
    )
    report = run(toy, source=toy.source)
    assert {row["package"] for row in report["mojo"]} == {"base", "nn", "top"}
    (ours,) = toy.built_libraries()
    found = libraries(ours)
    assert b"comptime_K_=_2" in found["base"]
    assert found["top"] == library("top", "+nn", "from_nn_import_f")


def test_package_of_a_patch_that_the_source_has_is_rebuilt(
    sourced: Toy,
) -> None:
    """The release lacks what has landed since; the wheel says what it is."""
    toy = sourced
    run(toy, source=toy.source)
    (patched,) = toy.built_libraries()
    path = toy.source / made.KERNELS / "nn/x.mojo"
    path.write_bytes(b"def f():\n    return\n")
    report = run(toy, source=toy.source)
    states = {row["name"]: row for row in report["patches"]}
    assert states["kernel"]["state"] == "landed-upstream"
    assert states["kernel"]["reason"] == (
        "the source has it already; nn is rebuilt from it"
    )
    (row,) = report["mojo"]
    assert (row["package"], row["cached"]) == ("nn", True)
    assert row["compiler"] == made.MOJO_COMPILER
    (ours,) = set(toy.built_libraries()) - {patched}
    assert libraries(ours) == libraries(patched)
    table = read(ours)
    assert (table["patches"], table["mojo"]["sources"]) == (
        [],
        {"nn": row["sources"]},
    )
    check(ours, toy.base_libraries(), files(ours))


def test_source_that_nothing_is_rebuilt_from_is_said(sourced: Toy) -> None:
    """--source on a release without Mojo patches isn't silently idle."""
    toy = sourced
    toy.edit_patch("kernel", "Applies-To: >=1.0", "Applies-To: >=2.0")
    lines: list[str] = []
    request = Request(platform=made.FOREIGN, output=toy.dist, source=toy.source)
    report = build(toy.project, request, lines.append)
    assert (
        lines.count(
            "no selected patch changes Mojo code: nothing is rebuilt from "
            f"{toy.source}"
        )
        == 1
    )
    assert (report["mojo"], len(toy.built_libraries())) == ([], 0)
    assert (report["source"], report["inexact"]) == (str(toy.source), False)


def test_report_of_a_source_build_is_not_another_ones(sourced: Toy) -> None:
    """A build without --source doesn't say that it had one."""
    toy = sourced
    toy.edit_patch("kernel", "Applies-To: >=1.0", "Applies-To: >=2.0")
    run(toy, source=toy.source)
    for reused in (False, True):
        report = run(toy)
        assert (report["source"], report["reused"]) == (None, reused)


@pytest.mark.parametrize("what", ["source", "output", "linked source"])
def test_folder_in_the_scratch_folder_is_refused_before_it_goes(
    what: str, toy: Toy
) -> None:
    """What a build would remove with its scratch folder stays as it is."""
    scratch = toy.root / "build/work" / toy.base().stem
    inside = scratch / "source"
    made.write_tree(inside, made.MOJO)
    before = made.snapshot(scratch)
    if what == "linked source":
        inside = toy.root.parent / "link"
        inside.symlink_to(scratch / "source")
    with pytest.raises(OutputError, match="which every build replaces"):
        if what == "output":
            run(toy, output=inside)
        else:
            run(toy, source=inside, inexact=True)
    assert made.snapshot(scratch) == before


def test_steps_of_one_name_are_added_up() -> None:
    """Two wheels are packed in two steps: both take their time."""
    steps = Steps(lambda _: None)
    for _ in range(2):
        with steps.step("pack", ""):
            time.sleep(0.02)
    assert steps.seconds["pack"] >= 0.04


def test_wheel_build_after_a_source_build_is_recognised(sourced: Toy) -> None:
    """The two don't take each other's report for their own."""
    run(sourced)
    run(sourced, source=sourced.source)
    report = run(sourced)
    assert report["reused"]
    assert len(report["wheels"]) == 1


def test_inexact_source_is_taken_on_request(sourced: Toy) -> None:
    """Python that differs is an error, unless the user knows."""
    toy = sourced
    path = toy.source / made.PYTHON_ROOT / "max/layers.py"
    path.write_bytes(b"# Another day's.\n")
    with pytest.raises(SourceError, match="1 of 5 different"):
        run(toy, source=toy.source)
    run(toy, source=toy.source, inexact=True)
    assert toy.built_libraries()


def test_both_wheels_are_installed_and_proved(sourced: Toy) -> None:
    """In a fresh environment the new package is the one that is installed."""
    toy = sourced
    request = Request(output=toy.dist, source=toy.source)
    report = build(toy.project, request, lambda _: None)
    assert report["verification"]["imported"]
    (ours,) = toy.built_libraries()
    folder = toy.root.parent / "again"
    folder.mkdir()
    done = verify_built(toy.project, ours, folder, offline=True)
    assert (done.imported, done.proofs) == (True, ())
    (there,) = folder.rglob("nn.mojoc")
    assert b"____return" in there.read_bytes()


def test_other_library_than_ours_is_found(sourced: Toy) -> None:
    """A package that isn't the built one after installation is an error."""
    toy = sourced
    run(toy, source=toy.source)
    (ours,) = toy.built_libraries()
    other = toy.root.parent / ours.name
    shutil.copy(ours, other)
    made.edit_member(other, "/nn.mojoc", b"return", b"retorn")
    python = install(
        toy.base(platform=made.PLATFORM),
        Path(sys.executable),
        toy.root.parent / "environment",
        offline=True,
        libraries=other,
    )
    with pytest.raises(VerifyError, match=r"modular/lib/mojo/nn.mojoc: expec"):
        check_imports(ours, toy.project.releases().get("1.0"), python)


@pytest.mark.parametrize(
    "place",
    [
        "maxpatch.build.apply_source",
        "maxpatch.compiler.Compiler.__init__",
        "maxpatch.build.libraries_of",
        "maxpatch.compiler.Compiler.precompile",
        "maxpatch.provenance.notice",
        "maxpatch.build._move",
    ],
)
def test_killed_source_build_is_no_obstacle(place: str, sourced: Toy) -> None:
    """Killed anywhere, dist and source are as before, and the next is good."""
    toy = sourced
    before = toy.inputs()
    killed = made.start(
        toy,
        *("build", "--platform", made.FOREIGN, "--source", str(toy.source)),
        prelude=kill_at(place),
    )
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert toy.inputs() == before
    run(toy, source=toy.source)
    assert len(toy.built_libraries()) == 1


def test_interrupted_build_takes_the_compiler_with_it(
    sourced: Toy,
) -> None:
    """A signal to the builder alone leaves no compiler, and no scratch."""
    toy = sourced
    compilers = toy.root.parent / "compilers"
    (wheel,) = compilers.iterdir()
    there = toy.root.parent / "there"
    made.edit_member(
        wheel,
        "/bin/mojo",
        b"_, _, package",
        f"part = pathlib.Path({str(there)!r} + '.part')\n"
        "part.write_text(str(os.getpid()))\n"
        f"part.rename({str(there)!r})\n"
        "import time; time.sleep(600)\n"
        "_, _, package".encode(),
    )
    before = toy.inputs()
    words = ("build", "--platform", made.FOREIGN, "--source", str(toy.source))
    process = made.start(toy, *words)
    deadline = time.monotonic() + 120
    try:
        while not there.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        pid = int(there.read_text())
        process.terminate()
        _, error = process.communicate(timeout=60)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, error) == (130, "interrupted\n")
    assert toy.inputs() == before
    assert toy.leftovers() == set()


# Killed, and two at once.

KILL_AT = [
    "maxpatch.build.fetch",
    "maxpatch.checkout.Checkout.apply",
    "maxpatch.build.check_collisions",
    "maxpatch.wheel._with_version",
    "maxpatch.wheel.check",
    "maxpatch.build.verify",
    "maxpatch.build._move",
    "maxpatch.build.write_json",
]


def kill_at(place: str) -> str:
    """Returns a script's start after which a function kills the process."""
    owner, _, name = place.rpartition(".")
    return f"""
import os, pkgutil, signal
def kill(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
setattr(pkgutil.resolve_name({owner!r}), {name!r}, kill)
"""


@pytest.mark.parametrize("place", KILL_AT)
def test_killed_build_is_no_obstacle(place: str, toy: Toy) -> None:
    """Killed anywhere, dist is whole or untouched, and the next run is good."""
    before = toy.inputs()
    words = ("build", "--platform", made.FOREIGN)
    killed = made.start(toy, *words, prelude=kill_at(place))
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    if place.endswith("write_json"):
        (wheel,) = toy.built()
        check(wheel, toy.base(), files(wheel))
    else:
        assert toy.inputs() == before
    assert not run(toy)["reused"]
    assert toy.leftovers() == set()
    assert len(list(toy.dist.iterdir())) == 2


def blocked(toy: Toy, *words: str) -> subprocess.Popen[str]:
    """Starts a build and returns once its proof runs and waits."""
    (toy.root / "tests/test_decode.py").write_text(
        "import pathlib, time\n"
        "def test_decode_divides():\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    (here / 'waits').write_text('')\n"
        "    while not (here / 'go').exists():\n"
        "        time.sleep(0.02)\n"
    )
    process = made.start(toy, *words)
    deadline = time.monotonic() + 120
    while not (toy.root / "tests/waits").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_build_killed_in_its_proofs_is_no_obstacle(toy: Toy) -> None:
    """Killed with all its children while verifying, nothing is left."""
    process = blocked(toy, "build")
    assert toy.built() == []
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    toy.restore()
    report = build(toy.project, Request(output=toy.dist), lambda _: None)
    assert report["verification"]["imported"]
    assert toy.leftovers() == set()


def test_second_build_at_once_is_told_so(toy: Toy) -> None:
    """Of two builds of one wheel, the second has an error, the first none."""
    process = blocked(toy, "build")
    with pytest.raises(
        OutputError, match=r"another build of max-1.0"
    ) as caught:
        build(toy.project, Request(output=toy.dist), lambda _: None)
    assert caught.value.hint == "wait for it to end and run again"
    # A wheel for another platform is another build.
    run(toy)
    (toy.root / "tests/go").write_text("")
    output, error = process.communicate()
    assert process.returncode == 0, error
    assert "install: pip install" in output
    assert len(toy.built()) == 2


# The other verbs' work.


def test_apply_lays_out_the_whole_tree(toy: Toy, tmp_path: Path) -> None:
    """A commit a patch, on all of MAX's Python."""
    request = Request(platform=made.FOREIGN)
    checkout, inputs = lay_out(
        toy.project, request, tmp_path / "tree", whole=True
    )
    log = made.git(checkout.folder, "log", "--format=%s").decode().splitlines()
    assert log == [
        *(p.subject for p in reversed(inputs.patches)),
        "max 1.0",
    ]
    assert checkout.content("max/python/max/tool.sh")


def test_failed_apply_leaves_no_tree(toy: Toy, tmp_path: Path) -> None:
    """A conflict leaves no half-patched folder to be taken for a good one."""
    toy.edit_patch("endings", "-HEIGHT = 1\t", "-HEIGHT = 3\t")
    request = Request(platform=made.FOREIGN)
    with pytest.raises(ConflictError):
        lay_out(toy.project, request, tmp_path / "tree", whole=True)
    assert not (tmp_path / "tree").exists()


def test_built_wheel_is_verified_again(toy: Toy, tmp_path: Path) -> None:
    """A built wheel is checked against its base, which it names itself."""
    run(toy)
    (wheel,) = toy.built()
    done = verify_built(toy.project, wheel, tmp_path, offline=True)
    assert not done.imported
    made.edit_member(wheel, "max/layers.pyi", b"float", b"int")
    with pytest.raises(WheelError, match=r"max/layers\.pyi: sha256="):
        verify_built(toy.project, wheel, tmp_path, offline=True)
