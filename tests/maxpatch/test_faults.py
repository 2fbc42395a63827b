# SPDX-License-Identifier: Apache-2.0
"""Bad input: one clear error, nothing half-written, the next run is good."""

from __future__ import annotations

import shutil
import time

import pytest

from maxpatch.__main__ import main
from tests.maxpatch import toy as made
from tests.maxpatch.faults import FAULTS, source_folder
from tests.maxpatch.toy import Toy


def command(toy: Toy, options: tuple[str, ...]) -> list[str]:
    """Returns the words of a build that isn't installed here."""
    if options[:1] == ("--source",):
        options = ("--source", str(source_folder(toy)), *options[1:])
    return ["build", "--platform", made.FOREIGN, *options]


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_one_clear_error_and_leaves_no_trace(
    name: str, toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault is one error and status 1; then a good project builds."""
    fault = FAULTS[name]
    with pytest.MonkeyPatch.context() as patched:
        fault.plant(toy, patched)
        before = toy.inputs()
        start = time.monotonic()
        status = main(command(toy, fault.options), toy.root)
        seconds = time.monotonic() - start
    error = capsys.readouterr().err
    assert status == 1, error
    assert error.startswith("error: ") and "\nerror: " not in error
    missing = [word for word in fault.words if word not in error]
    assert not missing, error
    assert toy.inputs() == before
    assert toy.leftovers() == set()
    assert seconds < 30

    toy.restore()
    if not toy.dist.is_dir():
        toy.dist.unlink()
    assert main(command(toy, ()), toy.root) == 0
    assert len(toy.built()) == 1
    assert toy.leftovers() == set()


def test_git_alone_would_edit_the_twin(toy: Toy) -> None:
    """The twin fault is one that git at its defaults doesn't notice."""
    with pytest.MonkeyPatch.context() as patched:
        FAULTS["patch_for_the_twin_of_its_place"].plant(toy, patched)
    tree = toy.root.parent / "tree"
    made.write_tree(tree, {f"{made.PYTHON_ROOT}max/layers.py": made.TWINS})
    made.git(tree, "init", "--quiet")
    made.git(tree, "add", "--all")
    made.git(tree, "commit", "--quiet", "--message", "base")
    made.git(tree, "am", stdin=toy.patch("endings").read_bytes())
    text = (tree / f"{made.PYTHON_ROOT}max/layers.py").read_bytes()
    encode, decode = text.split(b"def decode")
    assert b"x - factor" in encode and b"x - factor" not in decode


@pytest.mark.parametrize(
    "field",
    [f for f in made.HEADER],
)
def test_each_required_field_is_missed(
    field: str, toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header without one of its fields is an error that names the field."""
    lines = toy.patch("fresh-module").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(f"{field}: ")]
    assert len(kept) == len(lines) - 1
    toy.patch("fresh-module").write_text("".join(kept))
    assert main(command(toy, ()), toy.root) == 1
    error = capsys.readouterr().err
    assert f"fresh-module.patch is malformed:\n  field {field} is m" in error
    assert not toy.built()


@pytest.mark.parametrize("name", ["patches", "overlay"])
def test_builder_needs_no_overlay_but_a_series(
    name: str, toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A project without an overlay builds; one without a series doesn't."""
    shutil.rmtree(toy.root / name)
    assert main(command(toy, ()), toy.root) == (name == "patches")
    assert ("series is missing" in capsys.readouterr().err) == (
        name == "patches"
    )
