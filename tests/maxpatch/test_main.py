# SPDX-License-Identifier: Apache-2.0
"""The command line: verbs, words, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maxpatch.__main__ import main
from tests.maxpatch import toy as made
from tests.maxpatch.toy import Toy

VERBS = ("build", "fetch", "apply", "verify", "status")
FOREIGN = ("--platform", made.FOREIGN)


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """--help says what there is and what the exit codes mean."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert all(f"    {verb} " in said for verb in VERBS)
    assert "0 done, 1 expected failure, 2 wrong usage" in said


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option of every verb is explained."""
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert f"usage: maxpatch {verb}" in capsys.readouterr().out


def test_build_has_the_documented_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The options that scripts use are there."""
    with pytest.raises(SystemExit):
        main(["build", "--help"])
    said = capsys.readouterr().out
    for option in (
        *("--release", "--source", "--python", "--platform"),
        *("--output", "--offline", "--report", "--keep", "--inexact"),
    ):
        assert option in said


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["bild"],
        ["build", "--releases", "1"],
        ["build", "--inexact"],
        ["apply"],
        ["verify"],
    ],
)
def test_wrong_usage_is_status_two(
    words: list[str], toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """No verb, a wrong verb, option or number of words is wrong usage."""
    with pytest.raises(SystemExit) as caught:
        main(words, toy.root)
    assert caught.value.code == 2
    assert "usage: maxpatch" in capsys.readouterr().err


def test_build_ends_with_the_install_command(
    toy: Toy,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Progress first, states next, and last the line to copy."""
    monkeypatch.chdir(toy.root)
    assert main(["build", *FOREIGN], toy.root) == 0
    said = capsys.readouterr().out
    (wheel,) = toy.built()
    lines = said.splitlines()
    assert lines[0] == "select  series, overlay and release"
    assert lines[-1] == f"install: pip install 'dist/{wheel.name}[serve]'"
    assert "  endings: applied ([Toy] endings)" in lines
    assert f"not imported: the wheel is for {made.FOREIGN}" in said
    assert main(["build", *FOREIGN], toy.root) == 0
    said = capsys.readouterr().out
    assert "nothing changed: the wheel is the one built before" in said
    assert said.endswith(f"'dist/{wheel.name}[serve]'\n")


def test_source_build_ends_with_both_wheels(
    toy: Toy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was rebuilt, and why, and one command that installs the two."""
    made.give_source(toy, monkeypatch)
    monkeypatch.chdir(toy.root)
    words = ["build", *FOREIGN, "--source", "source"]
    assert main(words, toy.root) == 0
    said = capsys.readouterr().out
    (wheel,), (libraries,) = toy.built(), toy.built_libraries()
    assert (
        "  nn.mojoc: compiled (only function bodies in it are changed)\n"
        in said
    )
    assert said.endswith(
        f"install: pip install 'dist/{wheel.name}[serve]' "
        f"dist/{libraries.name}\n"
    )
    assert main(words, toy.root) == 0
    assert "  nn.mojoc: kept from before (only" in capsys.readouterr().out
    assert main(["verify", "--offline", str(libraries)], toy.root) == 0


def test_install_command_works_from_any_folder(
    toy: Toy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outside the project the printed path is whole."""
    monkeypatch.chdir(tmp_path / "home")
    assert main(["build", *FOREIGN], toy.root) == 0
    assert f"'{toy.dist}/max-1.0+" in capsys.readouterr().out


def test_relative_paths_are_the_callers(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--output and --report mean what they mean where they are typed."""
    monkeypatch.chdir(tmp_path)
    words = ["build", *FOREIGN, "--output", "out", "--report", "r/report.json"]
    assert main(words, toy.root) == 0
    (wheel,) = (tmp_path / "out").iterdir()
    report = json.loads((tmp_path / "r/report.json").read_text())
    assert report["wheels"][0]["path"] == str(wheel)
    assert set(report) == {
        *("release", "source", "inexact", "reused", "wheels", "patches"),
        *("overlay", "mojo", "verification", "seconds", "plain"),
    }
    assert {row["state"] for row in report["patches"]} == {
        *("applied", "not-for-this-release", "source-only"),
    }


def test_report_is_only_written_by_a_good_build(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed build leaves the report of the last good one."""
    report = tmp_path / "report.json"
    report.write_text("before")
    toy.patch("endings").write_bytes(b"")
    words = ["build", *FOREIGN, "--report", str(report)]
    assert main(words, toy.root) == 1
    assert report.read_text() == "before"
    assert capsys.readouterr().err == "error: endings.patch is empty\n"


def test_fetch_prints_the_wheels_path(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """fetch ends with the pinned wheel in the cache."""
    words = ["fetch", "--release", "2.0", "--offline", *FOREIGN]
    assert main(words, toy.root) == 0
    assert capsys.readouterr().out == f"{toy.base('2.0')}\n"


def test_apply_says_where_and_what(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """apply makes a new folder and refuses one that is there."""
    tree = tmp_path / "tree"
    words = ["apply", *FOREIGN, "--offline", str(tree)]
    assert main(words, toy.root) == 0
    said = capsys.readouterr().out
    assert said == f"{tree}: max 1.0 and 6 patches, one commit each\n"
    before = made.snapshot(tree)
    assert main(words, toy.root) == 1
    assert "is there already\nhint: name a new" in capsys.readouterr().err
    assert made.snapshot(tree) == before


def test_verify_tells_true_wheels_from_others(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """verify checks a wheel again, proofs included where they can run."""
    main(["build"], toy.root)
    (wheel,) = toy.built()
    capsys.readouterr()
    assert main(["verify", "--offline", str(wheel)], toy.root) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{wheel.name} is a true wheel",
        "in force: tests/test_decode.py::test_decode_divides",
    ]
    for path in (toy.base(), toy.root / "absent.whl", toy.series):
        assert main(["verify", "--offline", str(path)], toy.root) == 1
        assert capsys.readouterr().err.startswith("error: ")


def test_verify_says_what_it_could_not_do(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel for another platform is checked, not imported."""
    main(["build", *FOREIGN], toy.root)
    (wheel,) = toy.built()
    capsys.readouterr()
    assert main(["verify", str(wheel)], toy.root) == 0
    assert "not imported: the wheel is for" in capsys.readouterr().out


def test_status_is_a_table_of_patch_and_release(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each patch and package has a row for each release."""
    assert main(["status", "--json"], toy.root) == 0
    rows = json.loads(capsys.readouterr().out)
    found = {(row["patch"], row["release"]): row["state"] for row in rows}
    assert len(found) == len(rows) == 2 * 9
    assert found["scale-two", "1.0"] == "applied"
    assert found["scale-two", "2.0"] == "landed-upstream"
    assert found["kernel", "1.0"] == "source-only"
    assert found["overlay/extra", "2.0"] == "not-for-this-release"
    assert all(row["reason"] for row in rows)

    assert main(["status"], toy.root) == 0
    said = capsys.readouterr().out
    table = [line.split() for line in said.partition("\n\n")[0].splitlines()]
    assert table[0] == ["patch", "1.0", "2.0"]
    assert ["scale-two", "applied", "landed-upstream"] in table
    assert len(table) == 1 + 9
    assert "scale-two, 2.0: landed-upstream\n  upstream has it since" in said


def test_status_of_an_empty_series_is_an_empty_table(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A project may start without patches and overlay."""
    shutil.rmtree(toy.root / "overlay")
    for path in toy.series.parent.glob("*.patch"):
        path.unlink()
    toy.series.write_text("# nothing yet\n")
    assert main(["status"], toy.root) == 0
    assert capsys.readouterr().out.split() == ["patch", "1.0", "2.0"]


def test_status_of_our_own_series_is_good(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The committed series, overlay and table are well formed."""
    assert main(["status", "--json"]) == 0
    json.loads(capsys.readouterr().out)


def test_interrupt_is_no_traceback(
    toy: Toy,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C ends with one line, the shell's status, and no scratch."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("maxpatch.wheel.check", interrupt)
    before = toy.inputs()
    assert main(["build", *FOREIGN], toy.root) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert toy.inputs() == before
    assert toy.leftovers() == set()


def test_bug_keeps_its_traceback(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only expected failures are turned into a line."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("maxpatch.wheel.check", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["build", *FOREIGN], toy.root)
    assert toy.leftovers() == set()


def test_package_runs_as_a_module() -> None:
    """`python -m maxpatch` is the command line."""
    done = subprocess.run(
        [sys.executable, "-m", "maxpatch", "--help"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("usage: maxpatch")


def test_error_of_the_system_is_one_line(
    toy: Toy,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that can't be read is an expected failure that names it."""
    denied = PermissionError(13, "Permission denied", "overlay")

    def deny(_: object) -> None:
        raise denied

    monkeypatch.setattr("maxpatch.build.Project.overlay", deny)
    assert main(["status"], toy.root) == 1
    said = capsys.readouterr().err
    assert said == "error: [Errno 13] Permission denied: 'overlay'\n"


def test_reader_that_leaves_is_no_traceback(toy: Toy) -> None:
    """`status | head -1` ends quietly."""
    code = (
        "import sys; from pathlib import Path; from maxpatch.__main__ import "
        "main; sys.exit(main(['status'], Path(sys.argv[1])))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, toy.root],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_report_that_is_a_folder_is_refused_first(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is found before any work, and nothing is built."""
    words = ["build", *FOREIGN, "--report", str(toy.root)]
    assert main(words, toy.root) == 1
    assert "it is a folder" in capsys.readouterr().err
    assert toy.built() == []


def test_kept_scratch_folder_is_named(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """--keep says where to look."""
    assert main(["build", *FOREIGN, "--keep"], toy.root) == 0
    (kept,) = (
        line.split(maxsplit=1)[1]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("kept")
    )
    assert (Path(kept) / "tree").is_dir()


def test_damaged_report_means_a_new_build(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier build recorded is trusted only if it can be read."""
    assert main(["build", *FOREIGN], toy.root) == 0
    (recorded,) = (toy.root / "build/work/reports").iterdir()
    recorded.write_text("{")
    capsys.readouterr()
    assert main(["build", *FOREIGN], toy.root) == 0
    assert "nothing changed" not in capsys.readouterr().out
    assert json.loads(recorded.read_text())["reused"] is False
