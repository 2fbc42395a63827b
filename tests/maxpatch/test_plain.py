# SPDX-License-Identifier: Apache-2.0
"""The plain wheel: the overlay's architectures, with nothing of MAX."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installer.sources import WheelFile
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet

from maxpatch.__main__ import main
from maxpatch.build import Inputs, Project, Request, build
from maxpatch.errors import OverlayError, WheelError
from maxpatch.plain import Plain
from tests.maxpatch import toy as made
from tests.maxpatch.test_wheel import (
    install_with_installer,
    install_with_pip,
    install_with_uv,
)
from tests.maxpatch.toy import Toy

ROOT = Path(__file__).resolve().parents[2]
NAME = "attnquant-1-py3-none-any.whl"
INFO = "attnquant-1.dist-info"
OVERLAY = "overlay/pipelines/architectures/"
MANIFEST = b'applies-to = ">=1.0,<2"\nsummary = "For 1.0"\n'
CODE = {
    "attnquant_common/__init__.py": b"",
    "attnquant_common/untouched.py": b"from importlib import import_module\n"
    b"def architectures(package):\n"
    b"    return import_module('.attnquant_toy', package).ARCHITECTURES\n",
    "attnquant_common/kernels/__init__.py": b"OP = 'op'\n",
    "attnquant_common/kernels/toy/op.mojo": b"def op():\n    pass\n",
    "attnquant_toy/__init__.py": b"from .arch import ARCHITECTURES\n",
    "attnquant_toy/arch.py": b"from ..attnquant_common.kernels import OP\n"
    b"ARCHITECTURES = [OP]\n",
}


@pytest.fixture
def toy(toy: Toy) -> Toy:
    """The toy project, with an architecture in the overlay for 1.0."""
    manifests = {
        f"{OVERLAY}{name}/overlay.toml": MANIFEST
        for name in ("attnquant_common", "attnquant_toy")
    }
    made.write_tree(
        toy.root,
        {
            **{OVERLAY + path: data for path, data in CODE.items()},
            **manifests,
            "LICENSE": b"The terms of our own.\n",
            "NOTICE": b"Toy\nCopyright Toy\n\nOn the wheels of MAX.\n",
        },
    )
    return toy


def run(
    toy: Toy,
    *,
    release: str | None = None,
    platform: str = made.FOREIGN,
    output: Path | None = None,
    keep: bool = False,
) -> dict[str, Any]:
    """Builds the toy, by itself for another platform: nothing is installed."""
    request = Request(
        release=release,
        platform=platform,
        output=output or toy.dist,
        keep=keep,
    )
    return build(toy.project, request, lambda _: None)


def contents(path: Path) -> dict[str, bytes]:
    """Returns a wheel's content by member."""
    return {member.name: member.data for member in made.read_members(path)}


def test_a_build_makes_it_beside_the_wheel_of_max(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is in the report, and in no command that installs the other one."""
    report = run(toy)
    path = toy.dist / NAME
    assert report["plain"] == {
        "path": str(path),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "size": path.stat().st_size,
        "version": "1",
    }
    assert [Path(row["path"]) for row in report["wheels"]] == toy.built()
    assert main(["build", "--platform", made.FOREIGN], toy.root) == 0
    *_, listed, install = capsys.readouterr().out.splitlines()
    assert listed == f"{path}  sha256 {report['plain']['sha256']}"
    assert install.startswith("install: ") and NAME not in install
    assert toy.leftovers() == set()


def test_a_release_without_architectures_has_none(toy: Toy) -> None:
    """Where the overlay's ranges leave them out, no plain wheel is made."""
    assert run(toy, release="2.0")["plain"] is None
    assert not (toy.dist / NAME).exists()


def test_it_holds_the_architectures_and_nothing_of_max(toy: Toy) -> None:
    """Each file is the overlay's, byte for byte, but for the package's own."""
    run(toy)
    members = contents(toy.dist / NAME)
    description = {"METADATA", "RECORD", "WHEEL"}
    description |= {"licenses/LICENSE", "licenses/NOTICE"}
    own = {f"{INFO}/{name}" for name in description}
    own.add("attnquant/__init__.py")
    assert members.keys() == own | {f"attnquant/{path}" for path in CODE}
    for path, data in CODE.items():
        assert members[f"attnquant/{path}"] == data


def test_terms_are_ours(toy: Toy) -> None:
    """LICENSE is the project's; of NOTICE only what is true of this wheel."""
    run(toy)
    members = contents(toy.dist / NAME)
    assert members[f"{INFO}/licenses/LICENSE"] == b"The terms of our own.\n"
    notice = members[f"{INFO}/licenses/NOTICE"].decode()
    assert notice.startswith("Toy\nCopyright Toy\n\n")
    assert "nothing of Modular MAX" in notice
    assert "On the wheels of MAX" not in notice


def test_metadata_is_valid_and_has_the_overlays_range(toy: Toy) -> None:
    """packaging accepts it; MAX and Python are required as declared."""
    narrower = toy.root / OVERLAY / "attnquant_toy/overlay.toml"
    narrower.write_bytes(MANIFEST.replace(b"<2", b"<1.5"))
    run(toy)
    data = contents(toy.dist / NAME)[f"{INFO}/METADATA"]
    found = Metadata.from_email(data, validate=True)
    assert (found.name, str(found.version)) == ("attnquant", "1")
    assert found.license_expression == "Apache-2.0"
    assert found.license_files == ["LICENSE", "NOTICE"]
    assert found.requires_python == SpecifierSet(">=3.11")
    assert found.requires_dist is not None
    (needed,) = found.requires_dist
    assert (needed.name, needed.extras) == ("max", {"serve"})
    accepted = ["1.0", "1.0+attnquant.1.gabc", "1.4", "1.5", "2.0", "0.9"]
    assert list(needed.specifier.filter(accepted)) == accepted[:3]


def test_record_is_true_for_every_member(toy: Toy) -> None:
    """RECORD has a true line for each member and no other, by two oracles."""
    run(toy)
    with WheelFile.open(toy.dist / NAME) as wheel:
        wheel.validate_record(validate_contents=True)
    members = contents(toy.dist / NAME)
    record = members.pop(f"{INFO}/RECORD").decode()
    wanted = {made.record_row(name, data) for name, data in members.items()}
    wanted.add(f"{INFO}/RECORD,,\n")
    assert sorted(record.splitlines(keepends=True)) == sorted(wanted)


@pytest.mark.parametrize(
    "install", [install_with_pip, install_with_uv, install_with_installer]
)
def test_every_installer_puts_everything_in_place(
    install: Callable[[Path, Path], None], toy: Toy, tmp_path: Path
) -> None:
    """pip, uv and installer agree, and MAX's way of asking works."""
    run(toy)
    target = tmp_path / "target"
    install(toy.dist / NAME, target)
    for path, data in CODE.items():
        assert (target / "attnquant" / path).read_bytes() == data
    code = (
        "import attnquant as a; first = a.ARCHITECTURES;"
        "assert first is a.ARCHITECTURES; print(first, hasattr(a, 'OTHER'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(target)},
        check=True,
        capture_output=True,
    ).stdout
    assert found == b"['op'] False\n"


def test_bytes_depend_on_the_project_alone(toy: Toy, tmp_path: Path) -> None:
    """Another platform, place and time of files give the same wheel."""
    run(toy)
    data = (toy.dist / NAME).read_bytes()
    for path in (toy.root / OVERLAY).rglob("*"):
        os.utime(path, (10**9, 10**9))
    with pytest.MonkeyPatch.context() as patched:
        absent = (None, "not here")
        patched.setattr("maxpatch.verify.find_python", lambda *_: absent)
        run(toy, platform=made.PLATFORM, output=tmp_path / "other")
    assert (tmp_path / "other" / NAME).read_bytes() == data


def test_an_unchanged_one_is_left_alone(toy: Toy) -> None:
    """A build with nothing changed does not write it again."""
    first = run(toy)
    before = (toy.dist / NAME).stat()
    second = run(toy)
    assert second["reused"]
    assert second["plain"] == first["plain"]
    assert (toy.dist / NAME).stat() == before


@pytest.mark.parametrize("spoilt", [None, b"no wheel"])
def test_a_missing_or_spoilt_one_is_made_again(
    spoilt: bytes | None, toy: Toy
) -> None:
    """It is, although the wheel of `max` is the one built before."""
    first = run(toy)
    path = toy.dist / NAME
    data = path.read_bytes()
    path.unlink()
    if spoilt:
        path.write_bytes(spoilt)
    second = run(toy)
    assert second["reused"]
    assert second["plain"] == first["plain"]
    assert path.read_bytes() == data


def test_terms_that_changed_are_in_the_next_one(toy: Toy) -> None:
    """What the wheel of `max` does not have is followed all the same."""
    run(toy)
    (toy.root / "LICENSE").write_bytes(b"Other terms.\n")
    report = run(toy)
    path = toy.dist / NAME
    assert report["reused"]
    assert contents(path)[f"{INFO}/licenses/LICENSE"] == b"Other terms.\n"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert report["plain"]["sha256"] == digest


def test_what_was_kept_outlives_a_reuse(toy: Toy) -> None:
    """--keep's scratch tree is not the place where it is made again."""
    run(toy, keep=True)
    (name,) = toy.leftovers()
    assert run(toy)["reused"]
    assert toy.leftovers() == {name}
    assert (toy.root / "build/work" / name / "tree").is_dir()


FAULTS = {
    "of MAX by dots": (b"from ..gemma3 import arch\n", "arch.py:1: ..gemma3"),
    "too many dots": (
        b"from ....attnquant_common import x\n",
        "arch.py:1: ....attnquant_common",
    ),
    "in a function": (
        b"def f():\n    from .absent.module import x\n",
        "arch.py:2: .absent.module",
    ),
    "by full name": (
        b"from max.pipelines.architectures.attnquant_common import x\n",
        "arch.py:1: max.pipelines.architectures.attnquant_common",
    ),
    "syntax": (b"def f(:\n", "arch.py: invalid syntax"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_import_of_what_is_not_there_is_an_error(
    name: str, toy: Toy
) -> None:
    """The build ends with it, and the output stays as it was."""
    code, words = FAULTS[name]
    (toy.root / OVERLAY / "attnquant_toy/arch.py").write_bytes(code)
    before = toy.inputs()
    with pytest.raises(OverlayError, match=f"{NAME} would not import") as found:
        run(toy)
    assert f"\n  attnquant/attnquant_toy/{words}" in str(found.value)
    assert toy.inputs() == before
    assert toy.leftovers() == set()


def test_one_that_is_not_true_to_itself_is_an_error(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was packed is read again before it goes anywhere."""
    row = ["a", "sha256=b", "0"]
    monkeypatch.setattr("maxpatch.wheel._record_row", lambda *_: row)
    before = toy.inputs()
    with pytest.raises(WheelError, match=f"{NAME} is not a true wheel"):
        run(toy)
    assert toy.inputs() == before


def test_a_build_that_fails_later_leaves_none(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes into the output only with a verified wheel of `max`."""

    def fail(*_: object, **__: object) -> None:
        raise WheelError("no")

    monkeypatch.setattr("maxpatch.build.verify", fail)
    before = toy.inputs()
    with pytest.raises(WheelError):
        run(toy)
    assert toy.inputs() == before


def test_verify_tells_a_true_one_from_another(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """`maxpatch verify` takes it too."""
    run(toy)
    path = toy.dist / NAME
    assert main(["verify", str(path)], toy.root) == 0
    assert f"{NAME} is a true wheel\n" in capsys.readouterr().out
    made.edit_member(path, "toy/arch.py", b"OP", b"PO", record=False)
    assert main(["verify", str(path)], toy.root) == 1
    assert "arch.py didn't match RECORD" in capsys.readouterr().err


# The project's own.


@pytest.fixture(scope="module")
def real() -> Plain:
    """The plain wheel of this project's default release."""
    plain = Inputs.resolve(Project(ROOT), Request()).plain
    assert plain is not None
    return plain


def test_none_of_its_files_is_modulars(real: Plain, tmp_path: Path) -> None:
    """Each file of code has our line on top; none names Modular's rights."""
    members = contents(real.pack(ROOT, tmp_path))
    code = {n: data for n, data in members.items() if n.startswith("attnq")}
    for name, data in code.items():
        assert b"Modular Inc" not in data, name
        if name.endswith((".py", ".mojo")):
            assert b"SPDX-License-Identifier: Apache-2.0" in data[:60], name
    assert any(name.endswith("attnquant_nvfp4/op.mojo") for name in members)


def test_its_tools_need_no_max(real: Plain, tmp_path: Path) -> None:
    """The weight cache can be listed where MAX is not installed."""
    target = tmp_path / "target"
    install_with_pip(real.pack(ROOT, tmp_path), target)
    done = subprocess.run(
        [sys.executable, "-m", "attnquant.attnquant_common", "cache", "ls"],
        cwd=tmp_path,
        env={
            **os.environ,
            "ATTNQUANT_CACHE_DIR": str(tmp_path / "weights"),
            "PYTHONPATH": str(target),
        },
        check=True,
        capture_output=True,
        text=True,
    )
    assert "0 entries, 0 B, in" in done.stdout
