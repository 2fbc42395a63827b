# SPDX-License-Identifier: Apache-2.0
"""The real MAX wheels, patched and packed, against the ones from PyPI.

Nothing here imports MAX: these tests hold what the builder did to the archive,
for every release, and for Pythons and platforms that this machine isn't.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from maxpatch import provenance
from maxpatch.build import Inputs, Project, Request, Steps, pack
from maxpatch.wheel import Wheel, check

PROJECT = Project(Path(__file__).resolve().parents[2])
RELEASES = tuple(PROJECT.releases().rows)
FOREIGN = (("3.12", "linux-x86_64"), ("3.13", "linux-aarch64"))
FOREIGN += (("3.11", "macos-arm64"),)


@dataclass(frozen=True)
class Packed:
    """A patched wheel, not verified, and the one it was made from."""

    path: Path
    base: Path
    inputs: Inputs

    @functools.cached_property
    def files(self) -> dict[str, tuple[str | None, str | None]]:
        """Digests before and after by changed member, as the wheel has it."""
        rows = provenance.read(self.path)["files"]
        return {row["path"]: (row["before"], row["after"]) for row in rows}


def pack_for(request: Request, folder: Path) -> Packed:
    """Packs a patched wheel; the base is downloaded once and kept."""
    inputs = Inputs.resolve(PROJECT, request)
    path = pack(PROJECT, request, inputs, Steps(lambda _: None), folder)
    return Packed(path, PROJECT.cache / inputs.pin.filename, inputs)


@pytest.fixture(scope="module", params=RELEASES)
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Packed:
    """The patched wheel of each release, for this machine."""
    folder = tmp_path_factory.mktemp("packed")
    return pack_for(Request(release=request.param), folder)


def infos(path: Path) -> dict[str, zipfile.ZipInfo]:
    """Returns a wheel's members, under names without the version."""
    with Wheel(path) as wheel:
        return {wheel.renamed("max-X", i.filename): i for i in wheel.infos}


def test_wheel_is_true(packed: Packed) -> None:
    """RECORD, names, tags, modes and untouched members all hold."""
    check(packed.path, packed.base, provenance.files(packed.path))


def test_version_meets_the_release_pin(packed: Packed) -> None:
    """`==26.7.0` accepts the wheel, by a local version of 26.7.0."""
    with Wheel(packed.path) as ours, Wheel(packed.base) as theirs:
        assert ours.version.public == str(theirs.version)
        assert ours.version.local
        assert ours.tags == theirs.tags


def test_only_the_listed_members_differ(packed: Packed) -> None:
    """Whatever provenance doesn't list is the same, compressed as it was."""
    ours, theirs = infos(packed.path), infos(packed.base)
    own = {f"max-X.dist-info/{n}" for n in ("METADATA", "RECORD")}
    new = {"max-X.dist-info/NOTICE", f"max-X.dist-info/{provenance.FILENAME}"}
    for name, info in theirs.items():
        if name in packed.files or name in own:
            continue
        found = ours[name]
        for key in ("CRC", "file_size", "compress_size", "compress_type"):
            assert getattr(found, key) == getattr(info, key), name
        assert found.external_attr == info.external_attr, name
    added = {n for n, (before, _) in packed.files.items() if before is None}
    assert ours.keys() - theirs.keys() == added | new
    assert theirs.keys() - ours.keys() == {
        name for name, (_, after) in packed.files.items() if after is None
    }


def test_series_and_overlay_are_what_was_done(packed: Packed) -> None:
    """The listed members are the patches' targets and the overlay's files."""
    overlay = {m for p in packed.inputs.packages for m in p.files}
    targets = {
        target.path.removeprefix("max/python/")
        for patch in packed.inputs.patches
        for target in patch.targets
    }
    assert packed.files.keys() == overlay | targets
    assert all(before != after for before, after in packed.files.values())


def test_licence_stays_and_notice_is_added(packed: Packed) -> None:
    """MAX's terms travel with the wheel, and so does what was modified."""
    with Wheel(packed.path) as ours, Wheel(packed.base) as theirs:
        for name in ("LICENSE", "Third-Party-Notices"):
            kept = ours.read(f"{ours.dist_info}/{name}")
            assert kept == theirs.read(f"{theirs.dist_info}/{name}")
        notice = ours.read(f"{ours.dist_info}/NOTICE").decode()
    assert all(patch.name in notice for patch in packed.inputs.patches)


@pytest.mark.parametrize(("python", "platform"), FOREIGN)
def test_wheel_for_another_machine_is_true(
    python: str, platform: str, tmp_path: Path
) -> None:
    """Nothing compiled is touched, so any released wheel can be patched."""
    request = Request(python=python, platform=platform)
    packed = pack_for(request, tmp_path)
    check(packed.path, packed.base, provenance.files(packed.path))
    assert str(packed.inputs.pin.tag) in packed.path.name
    here = Inputs.resolve(PROJECT, Request())
    assert packed.files.keys() == {
        *(m for p in here.packages for m in p.files),
        *(
            t.path.removeprefix("max/python/")
            for p in here.patches
            for t in p.targets
        ),
    }


def with_pip(wheel: Path, target: Path) -> None:
    """Installs with pip."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    options = ["--no-compile", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*command, *options, "--target", target, wheel], check=True)


def with_uv(wheel: Path, target: Path) -> None:
    """Installs with uv."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
    options = ["--no-deps", "--offline", "--python", sys.executable]
    subprocess.run([*command, *options, "--target", target, wheel], check=True)


def with_installer(wheel: Path, target: Path) -> None:
    """Installs with pypa/installer, and puts its prefix together."""
    command = [sys.executable, "-m", "installer", "--no-compile-bytecode"]
    prefix = target.with_name("prefix")
    subprocess.run([*command, "--prefix", prefix, wheel], check=True)
    for folder in sorted(prefix.rglob("site-packages")):
        shutil.copytree(folder, target, dirs_exist_ok=True)


@pytest.mark.parametrize("install", [with_pip, with_uv, with_installer])
def test_every_installer_puts_every_file_in_place(
    install: Callable[[Path, Path], None], packed: Packed, tmp_path: Path
) -> None:
    """pip, uv and installer leave the same files, the shared objects too."""
    install(packed.path, tmp_path / "target")
    with Wheel(packed.path) as wheel:
        wanted = {n for n in wheel.installed_paths() if n.startswith("max/")}
        sizes = {i.filename: i.file_size for i in wheel.infos}
    found = {
        path.relative_to(tmp_path / "target").as_posix()
        for path in (tmp_path / "target/max").rglob("*")
        if path.is_file()
    }
    assert found == wanted
    assert any(name.endswith(".so") for name in found)
    for name in wanted & sizes.keys():
        assert (tmp_path / "target" / name).stat().st_size == sizes[name]
