# SPDX-License-Identifier: Apache-2.0
"""The overlay: packages with a range, files that only add."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from maxpatch.errors import OverlayError
from maxpatch.overlay import check_collisions, load
from maxpatch.series import State
from tests.maxpatch.toy import Toy, write_tree

MANIFEST = b'applies-to = ">=1.0,<2"\nsummary = "s"\n'


def test_file_belongs_to_the_nearest_package(tmp_path: Path) -> None:
    """A package inside another one takes its own files."""
    write_tree(
        tmp_path,
        {
            "a/overlay.toml": MANIFEST,
            "a/one.py": b"1",
            "a/deep/er/two.py": b"2",
            "a/b/overlay.toml": MANIFEST,
            "a/b/three.py": b"3",
        },
    )
    assert {p.name: dict(p.files) for p in load(tmp_path)} == {
        "a": {"max/a/one.py": b"1", "max/a/deep/er/two.py": b"2"},
        "a/b": {"max/a/b/three.py": b"3"},
    }


def test_only_what_is_meant_for_users_is_shipped(tmp_path: Path) -> None:
    """Manifests, notes, compiled files and tools' caches stay behind."""
    write_tree(
        tmp_path,
        {
            "a/overlay.toml": MANIFEST,
            "a/one.py": b"1",
            "a/README.md": b"",
            "a/__pycache__/one.cpython-311.pyc": b"",
            "a/one.pyc": b"",
            "a/.tool_cache/0/x.json": b"",
            ".tool_cache/CACHEDIR.TAG": b"",
            "__pycache__/x": b"",
        },
    )
    (package,) = load(tmp_path)
    assert set(package.files) == {"max/a/one.py"}


def test_project_may_live_in_a_hidden_folder(tmp_path: Path) -> None:
    """Only names below the overlay's root decide what is shipped."""
    root = tmp_path / ".hidden/__pycache__/overlay"
    write_tree(root, {"a/overlay.toml": MANIFEST, "a/one.py": b"1"})
    (package,) = load(root)
    assert set(package.files) == {"max/a/one.py"}


def test_package_has_a_state_for_each_release(toy: Toy) -> None:
    """A package outside its range is left out with the reason."""
    (package,) = toy.project.overlay()
    assert package.state(Version("1.0")) == (
        State.APPLIED,
        "One module for 1.0",
    )
    state, reason = package.state(Version("2.0"))
    assert state is State.NOT_FOR_RELEASE
    assert reason == "applies-to <2,>=1.0 excludes 2.0"
    why = replace(package, because="2.0 has it")
    assert why.state(Version("2.0"))[1] == f"{reason}: 2.0 has it"


def test_every_covered_file_is_listed(tmp_path: Path) -> None:
    """All collisions come in one error, each with its package."""
    write_tree(
        tmp_path,
        {"a/overlay.toml": MANIFEST, "a/X.py": b"", "a/y.py": b"", "a/z": b""},
    )
    with pytest.raises(OverlayError) as caught:
        check_collisions(load(tmp_path), ["max/a/x.py", "max/a/y.py"], "base")
    assert str(caught.value).splitlines() == [
        "the overlay would cover files of base:",
        "  a: max/a/X.py",
        "  a: max/a/y.py",
    ]
    check_collisions(load(tmp_path), ["max/a/w.py"], "base")
