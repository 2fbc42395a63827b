# SPDX-License-Identifier: Apache-2.0
"""The proof that a built wheel works."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from maxpatch.build import Inputs, Request, build
from maxpatch.errors import VerifyError
from maxpatch.series import Patch
from maxpatch.verify import (
    check_imports,
    find_python,
    install,
    run_proofs,
    verify,
)
from tests.maxpatch import toy as made
from tests.maxpatch.toy import Toy


@pytest.fixture(scope="module")
def ready(
    template: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Toy, Path]:
    """A toy whose wheel is built, unverified, and an environment with it."""
    root = tmp_path_factory.mktemp("ready") / "project"
    shutil.copytree(template, root)
    toy = Toy(root, template)
    with pytest.MonkeyPatch.context() as patched:
        absent = (None, "not here")
        patched.setattr("maxpatch.verify.find_python", lambda *_: absent)
        build(toy.project, Request(output=toy.dist), lambda _: None)
    (wheel,) = toy.built()
    folder = root.parent / "environment"
    return toy, install(wheel, Path(sys.executable), folder, offline=True)


def test_running_python_is_taken_for_its_own_version() -> None:
    """The Python that builds can install the wheel, on the path or not."""
    found = find_python(made.host_python(), made.PLATFORM)
    assert found == (Path(sys.executable), "")


def test_other_python_is_found_on_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wheel for another Python is verified if that one is here."""
    version = made.host_python()
    monkeypatch.setattr("maxpatch.verify.host_python", lambda: "3.0")
    there = f"{sys.base_prefix}/bin{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", there)
    path, reason = find_python(version, made.PLATFORM)
    assert path is not None and path.exists()
    assert reason == ""


def test_other_platform_has_its_reason() -> None:
    """A wheel for another machine is not installed, and it is said why."""
    path, reason = find_python(made.host_python(), made.FOREIGN)
    assert path is None
    assert reason == (
        f"the wheel is for {made.FOREIGN}, this is {made.PLATFORM}"
    )


def test_python_that_is_not_here_has_its_reason() -> None:
    """A wheel for a Python that isn't installed is not verified."""
    path, reason = find_python("3.99", made.PLATFORM)
    assert path is None
    assert reason == "there is no Python 3.99 here"


def test_installed_wheel_imports(ready: tuple[Toy, Path]) -> None:
    """Version, compiler and each changed module are checked."""
    toy, python = ready
    (wheel,) = toy.built()
    check_imports(wheel, toy.project.releases().get("1.0"), python)


def test_wrong_compiler_is_found(ready: tuple[Toy, Path]) -> None:
    """The installed mojo-compiler must be the release's own."""
    toy, python = ready
    (wheel,) = toy.built()
    release = replace(toy.project.releases().get("1.0"), mojo_compiler="9.8")
    with pytest.raises(VerifyError, match="does not import") as caught:
        check_imports(wheel, release, python)
    assert "mojo-compiler: expected 9.8, found 9.9" in str(caught.value)


def test_other_installed_version_is_found(
    ready: tuple[Toy, Path], tmp_path: Path
) -> None:
    """The environment must have this very wheel."""
    toy, python = ready
    (wheel,) = toy.built()
    built = made.read_members(wheel)
    version = wheel.name.split("-")[1]
    other = tmp_path / wheel.name
    made.write_zip(
        other,
        [
            replace(m, data=m.data.replace(version.encode(), b"1.0+other"))
            for m in built
        ],
    )
    with pytest.raises(VerifyError, match=r"max: expected 1\.0\+other, found"):
        check_imports(other, toy.project.releases().get("1.0"), python)


def test_module_that_does_not_import_is_found(toy: Toy) -> None:
    """A patch or overlay that breaks an import stops the build."""
    path = toy.root / "overlay/extra/__init__.py"
    path.write_bytes(b"import no_such_module\n")
    before = toy.inputs()
    with pytest.raises(VerifyError, match="does not import") as caught:
        build(toy.project, Request(output=toy.dist), lambda _: None)
    assert "No module named 'no_such_module'" in str(caught.value)
    assert toy.inputs() == before
    assert toy.leftovers() == set()


def test_folder_of_the_caller_shadows_nothing(
    ready: tuple[Toy, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `max` beside the caller or on PYTHONPATH isn't what is imported."""
    toy, python = ready
    made.write_tree(tmp_path, {"max/__init__.py": b"raise RuntimeError\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (wheel,) = toy.built()
    check_imports(wheel, toy.project.releases().get("1.0"), python)


@pytest.mark.parametrize(
    ("offline", "hint"),
    [(True, "must be in uv's cache"), (False, "check the network")],
)
def test_wheel_whose_dependency_is_missing_does_not_install(
    offline: bool, hint: str, tmp_path: Path
) -> None:
    """What can't be installed is named, with what to do about it."""
    wheel = made.write_max(tmp_path, "1.0", made.PLATFORM)
    made.edit_member(
        wheel,
        "1.0.dist-info/METADATA",
        b"Provides-Extra",
        b"Requires-Dist: no-such-thing\nProvides-Extra",
    )
    with pytest.raises(VerifyError, match="does not install") as caught:
        install(wheel, Path(sys.executable), tmp_path / "e", offline=offline)
    assert "no-such-thing" in str(caught.value)
    assert caught.value.hint and hint in caught.value.hint


def patches(toy: Toy, *proofs: str) -> list[Patch]:
    """Returns patches with some proofs."""
    patch = toy.project.series().patches[0]
    return [replace(patch, proof=proof) for proof in proofs]


def test_proofs_are_run_once_each_and_commands_are_not(
    ready: tuple[Toy, Path],
) -> None:
    """Tests named as proofs run against the environment; the rest is prose."""
    toy, python = ready
    proof = "tests/test_decode.py::test_decode_divides"
    chosen = patches(toy, proof, "max serve, by hand", proof)
    assert run_proofs(chosen, python, toy.root) == [proof]
    assert run_proofs(chosen[1:2], python, toy.root) == []


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        ("tests/test_gone.py", "file or directory not found"),
        ("tests/test_decode.py::test_gone", "not found"),
        ("tests/test_wrong.py", "assert 1 == 2"),
        ("tests/test_empty.py", "no tests ran"),
        ("tests/test_skipped.py", "1 skipped"),
    ],
)
def test_proof_that_fails_or_is_absent_is_an_error(
    proof: str, words: str, ready: tuple[Toy, Path]
) -> None:
    """A patch whose proof doesn't pass isn't in force."""
    toy, python = ready
    made.write_tree(
        toy.root / "tests",
        {
            "test_wrong.py": b"def test_it():\n    assert 1 == 2\n",
            "test_empty.py": b"",
            "test_skipped.py": b"import pytest\n"
            b"def test_it():\n    pytest.skip('no accelerator')\n",
        },
    )
    with pytest.raises(
        VerifyError, match=r"not in force|did not run"
    ) as caught:
        run_proofs(patches(toy, proof), python, toy.root)
    assert words in str(caught.value)


def test_wheel_for_elsewhere_is_only_checked(tmp_path: Path, toy: Toy) -> None:
    """Without an interpreter nothing is installed, and that is reported."""
    inputs = Inputs.resolve(toy.project, Request(platform=made.FOREIGN))
    done = verify(
        toy.base(),
        inputs.release,
        inputs.pin,
        inputs.patches,
        folder=tmp_path / "e",
        root=toy.root,
        offline=True,
    )
    assert (done.imported, done.proofs) == (False, ())
    assert made.FOREIGN in done.reason
    assert not (tmp_path / "e").exists()


def test_options_of_the_user_leave_no_proof_out(
    ready: tuple[Toy, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTEST_ADDOPTS doesn't reach the proofs."""
    toy, python = ready
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    proof = "tests/test_decode.py::test_decode_divides"
    assert run_proofs(patches(toy, proof), python, toy.root) == [proof]
