# SPDX-License-Identifier: Apache-2.0
"""Version, provenance and NOTICE of a patched wheel."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from maxpatch import provenance
from maxpatch.build import Inputs, Request, build
from maxpatch.errors import WheelError
from maxpatch.release import Release
from tests.maxpatch import toy as made
from tests.maxpatch.toy import Toy


def inputs(toy: Toy, **request: str) -> Inputs:
    """Returns what a build of the toy would be made of."""
    return Inputs.resolve(
        toy.project, Request(platform=made.FOREIGN, **request)
    )


def test_version_is_local_to_the_release(toy: Toy) -> None:
    """`==1.0` accepts the patched 1.0, whose local part says what it is."""
    version = inputs(toy).version
    parsed = Version(version)
    assert parsed.public == "1.0"
    assert parsed.local is not None
    name, number, digest = parsed.local.split(".")
    assert (name, number, digest[0], len(digest)) == ("attnquant", "1", "g", 9)
    assert str(parsed) == version


def test_every_input_makes_its_own_version(toy: Toy) -> None:
    """Base wheel, patches, their order and the overlay each count."""
    there = inputs(toy)
    versions = {there.version}
    swapped = [*reversed(there.selections)]
    for other in (
        replace(there, series_number=2),
        replace(there, pin=replace(there.pin, sha256="0" * 64)),
        replace(there, selections=there.selections[1:]),
        replace(there, selections=swapped),
        replace(there, overlay=[]),
        inputs(toy, release="2.0"),
    ):
        versions.add(other.version)
    assert len(versions) == 7


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("overlay/extra/__init__.py", True),
        ("overlay/extra/kernels/op.mojo", True),
        ("patches/max/endings.patch", True),
        # Not part of this release's wheel.
        ("patches/max/two-only.patch", False),
        ("patches/max/kernel.patch", False),
        ("overlay/README.md", False),
    ],
)
def test_one_byte_counts_if_it_reaches_the_wheel(
    path: str, counts: bool, toy: Toy
) -> None:
    """A changed byte of what goes in is a new version; of others it isn't."""
    before = inputs(toy).version
    file = toy.root / path
    old, new = (b"toy needs", b"toy wants") if "patch" in path else (b"s", b"S")
    data = file.read_bytes() + b"s\n" * ("patch" not in path)
    file.write_bytes(data.replace(old, new))
    assert (inputs(toy).version != before) is counts


@pytest.fixture
def built(toy: Toy) -> Path:
    """The toy's wheel."""
    request = Request(platform=made.FOREIGN, output=toy.dist)
    build(toy.project, request, lambda _: None)
    (path,) = toy.built()
    return path


def test_document_says_what_was_made_of_what(toy: Toy, built: Path) -> None:
    """Base, patches and files stand in it with their digests."""

    def sha256(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    table = provenance.read(built)
    assert table["version"] == inputs(toy).version
    assert table["release"] == "1.0"
    assert table["base"] == {
        "filename": toy.base().name,
        "sha256": sha256(toy.base().read_bytes()),
    }
    assert [row["name"] for row in table["patches"]] == [
        "decode-divides",
        "decode-eight",
        "endings",
        "fresh-module",
        "drop-legacy",
        "scale-two",
    ]
    assert table["patches"][2]["sha256"] == sha256(
        toy.patch("endings").read_bytes()
    )
    files = {r["path"]: (r["before"], r["after"]) for r in table["files"]}
    members = {m.name: sha256(m.data) for m in made.read_members(built)}
    assert files["max/layers.py"] == (
        sha256(made.TWINS),
        members["max/layers.py"],
    )
    assert files["max/legacy.py"][1] is None
    assert files["max/fresh.py"] == (None, members["max/fresh.py"])
    assert files["max/extra/__init__.py"][0] is None
    assert set(files) == {
        "max/endings.py",
        "max/extra/__init__.py",
        "max/extra/kernels/op.mojo",
        "max/fresh.py",
        "max/layers.py",
        "max/legacy.py",
        "max/nn/__init__.py",
    }


def test_wheel_from_elsewhere_has_no_provenance(toy: Toy) -> None:
    """A wheel that wasn't built here is told so."""
    with pytest.raises(WheelError, match="was not built here: expected"):
        provenance.read(toy.base())


def test_document_is_json_without_anything_of_the_machine(
    toy: Toy, built: Path
) -> None:
    """No path, date or name of the machine goes into a wheel."""
    (data,) = [
        m.data
        for m in made.read_members(built)
        if m.name.endswith(f"/{provenance.FILENAME}")
    ]
    json.loads(data)
    assert str(toy.root.parent).encode() not in data


def test_notice_gives_attribution_and_changes(built: Path) -> None:
    """NOTICE has the licence's own words and lists every changed file."""
    (data,) = [
        m.data
        for m in made.read_members(built)
        if m.name.endswith(".dist-info/NOTICE")
    ]
    text = " ".join(data.decode().split())
    assert (
        "MAX is licensed by Modular Inc under the Modular MAX Community "
        "License and has been modified by the MAX AttnQuant patch series. "
        "Copyright Modular Inc IN NO EVENT SHALL MODULAR INC BE LIABLE FOR "
        "ANY CLAIM" in text
    )
    assert "endings: [Toy] endings" in text
    changed = text.partition("Files of MAX that were modified:")[2]
    changed, _, added = changed.partition("Files that were added:")
    assert changed.split() == [
        "max/endings.py",
        "max/layers.py",
        "max/legacy.py",
        "max/nn/__init__.py",
    ]
    assert added.split()[:3] == [
        "max/extra/__init__.py",
        "max/extra/kernels/op.mojo",
        "max/fresh.py",
    ]
    assert max(map(len, data.decode().splitlines())) <= 79


def test_rebuilt_packages_make_their_own_version(toy: Toy) -> None:
    """Compiler and sources count, and are named; none are no change."""
    there = inputs(toy)
    release = there.release

    def version(release: Release, mojo: dict[str, str] | None) -> str:
        return provenance.version(
            release, 1, release.mojo_libs, there.patches, [], mojo
        )

    plain = version(release, None)
    assert version(release, {}) == plain
    versions = {
        plain,
        version(release, {"nn": "1"}),
        version(release, {"nn": "2"}),
        version(release, {"base": "1"}),
        version(replace(release, mojo_compiler="9.8"), {"nn": "1"}),
    }
    assert len(versions) == 5
    table = json.loads(
        provenance.document(
            release,
            plain,
            release.mojo_libs,
            [],
            before={},
            changed={},
            added={},
            mojo={"nn": "1", "base": "2"},
        )
    )
    assert table["mojo"] == {
        "compiler": made.MOJO_COMPILER,
        "sources": {"base": "2", "nn": "1"},
    }


def test_notice_of_a_wheel_to_keep_says_so(toy: Toy) -> None:
    """Where the licence forbids passing on, NOTICE says that instead."""
    release = toy.project.releases().get("2.0")
    text = " ".join(provenance.notice(release, [], [], []).decode().split())
    assert "keep this one to yourself" in text
    assert "Community License" not in text
    assert "Patches applied: none" in text
