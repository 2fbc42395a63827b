# SPDX-License-Identifier: Apache-2.0
"""Repacking a wheel, and telling a true wheel from one that isn't."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from installer.sources import WheelFile

from maxpatch.build import Request, build
from maxpatch.errors import WheelError
from maxpatch.wheel import Wheel, check, repack
from tests.maxpatch import toy as made
from tests.maxpatch.toy import Member, Toy

VERSION = "1.0+attnquant.1.gabc"
TAG = made.tag(made.FOREIGN)
PATCHED = f"max-{VERSION}-{TAG}.whl"


def repacked(
    base: Path,
    folder: Path,
    *,
    changed: Mapping[str, bytes | None] | None = None,
    added: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, bytes] | None = None,
) -> Path:
    """Repacks a wheel under the patched version."""
    folder.mkdir(exist_ok=True)
    output = folder / PATCHED
    with Wheel(base) as wheel:
        repack(
            wheel,
            output,
            VERSION,
            changed=changed or {},
            added=added or {},
            metadata=metadata or {},
        )
    return output


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The toy's wheel of 1.0."""
    return made.write_max(tmp_path, "1.0", made.FOREIGN)


CHANGED = {"max/tool.sh": b"#!/bin/sh\necho new\n", "max/legacy.py": None}
ADDED = {"max/new.py": b"NEW = 1\n"}


def digests(files: Mapping[str, bytes | None]) -> dict[str, str | None]:
    """Returns SHA-256 in hex by member, as `check` takes them."""
    return {
        name: None if data is None else hashlib.sha256(data).hexdigest()
        for name, data in files.items()
    }


FILES = digests({**CHANGED, **ADDED})


@pytest.fixture
def patched(base: Path, tmp_path: Path) -> Path:
    """A repacked wheel with a changed, a removed and two added members."""
    return repacked(
        base,
        tmp_path / "out",
        changed=CHANGED,
        added=ADDED,
        metadata={"NOTICE": b"what was changed\n"},
    )


def contents(path: Path) -> dict[str, Member]:
    """Returns a wheel's members by name."""
    return {member.name: member for member in made.read_members(path)}


def compressed(path: Path) -> dict[str, bytes]:
    """Returns a zip file's members as the compressed bytes they are."""
    data = path.read_bytes()
    found = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            at = info.header_offset
            name, extra = struct.unpack_from("<HH", data, at + 26)
            start = at + 30 + name + extra
            found[info.filename] = data[start : start + info.compress_size]
    return found


# What repacking keeps and what it changes.


def test_record_is_true_for_every_member(patched: Path) -> None:
    """RECORD has a true line for each member and no other, by two oracles."""
    with WheelFile.open(patched) as wheel:
        wheel.validate_record(validate_contents=True)
    members = contents(patched)
    record = members.pop(f"max-{VERSION}.dist-info/RECORD").data.decode()
    wanted = {made.record_row(m.name, m.data) for m in members.values()}
    wanted.add(f"max-{VERSION}.dist-info/RECORD,,\n")
    assert sorted(record.splitlines(keepends=True)) == sorted(wanted)


def test_folders_of_the_version_are_renamed(base: Path, patched: Path) -> None:
    """`.data` and `.dist-info` carry the new version, and nothing the old."""
    names = set(contents(patched))
    assert f"max-{VERSION}.data/platlib/max/_core.so" in names
    assert f"max-{VERSION}.dist-info/METADATA" in names
    assert not [name for name in names if name.startswith("max-1.0.")]
    wanted = {n.replace("max-1.0.", f"max-{VERSION}.") for n in contents(base)}
    assert names == (wanted - {"max/legacy.py"}) | {
        "max/new.py",
        f"max-{VERSION}.dist-info/NOTICE",
    }


def test_modes_are_kept(base: Path, patched: Path) -> None:
    """What was executable is, also where its content changed."""
    members = contents(patched)
    assert members["max/tool.sh"].data.endswith(b"new\n")
    for member in contents(base).values():
        name = member.name.replace("max-1.0.", f"max-{VERSION}.")
        if name in members:
            assert members[name].mode == member.mode
    assert members["max/new.py"].mode == 0o100644


def test_untouched_members_are_the_same_compressed_bytes(
    base: Path, patched: Path
) -> None:
    """What isn't changed isn't compressed anew, stored members included."""
    ours, theirs = compressed(patched), compressed(base)
    written = {"METADATA", "RECORD", "tool.sh", "legacy.py"}
    kept = [n for n in theirs if n.rpartition("/")[2] not in written]
    assert len(kept) == len(theirs) - 5  # two files are named METADATA
    for name in kept:
        assert ours[name.replace("max-1.0.", f"max-{VERSION}.")] == theirs[name]
    members = contents(patched)
    assert members["max/nn/__init__.py"].compression == zipfile.ZIP_STORED
    assert members["max/layers.py"].compression == zipfile.ZIP_DEFLATED


def test_metadata_differs_in_its_version_line_only(
    base: Path, patched: Path
) -> None:
    """The Version field changes; a line that looks like it further down not."""
    ours = contents(patched)[f"max-{VERSION}.dist-info/METADATA"].data
    theirs = contents(base)["max-1.0.dist-info/METADATA"].data
    assert ours == theirs.replace(
        b"Version: 1.0", f"Version: {VERSION}".encode(), 1
    )
    assert ours.endswith(b"\n\nVersion: 1.0\nis also said in the text.\n")


def test_tags_equal_the_file_name(patched: Path) -> None:
    """WHEEL's tags are those of the name."""
    text = contents(patched)[f"max-{VERSION}.dist-info/WHEEL"].data.decode()
    assert f"Tag: {TAG}\n" in text
    assert patched.name.endswith(f"-{TAG}.whl")


def test_compiled_python_is_left_out(base: Path, tmp_path: Path) -> None:
    """A `.pyc` of the base would outlive the source it was made from."""
    members = made.read_members(base)
    pyc = Member("max/__pycache__/layers.cpython-311.pyc", b"old")
    made.write_wheel(base, [*members[:-1], pyc])
    output = repacked(base, tmp_path / "out")
    assert not [name for name in contents(output) if name.endswith(".pyc")]
    check(output, base)


def test_folder_entries_are_left_out(base: Path, tmp_path: Path) -> None:
    """Entries for folders carry nothing and aren't copied."""
    with zipfile.ZipFile(base, "a") as archive:
        archive.mkdir("max/")
    output = repacked(base, tmp_path / "out")
    assert not [name for name in contents(output) if name.endswith("/")]
    check(output, base)


def test_wheel_without_data_folder_is_repacked(tmp_path: Path) -> None:
    """A pure wheel has no `.data` and gets none."""
    base = tmp_path / f"max-1.0-{TAG}.whl"
    members = made.max_members("1.0", made.FOREIGN)
    made.write_wheel(base, [m for m in members if ".data/" not in m.name])
    output = repacked(base, tmp_path / "out")
    check(output, base)
    assert not [name for name in contents(output) if ".data/" in name]


def test_changed_source_has_another_time(base: Path, tmp_path: Path) -> None:
    """Equal sizes don't hide a change from caches that look at times."""
    times = set()
    for data in (b"X = 1\n", b"X = 2\n"):
        output = repacked(base, tmp_path / "o", changed={"max/layers.py": data})
        with zipfile.ZipFile(output) as archive:
            times.add(archive.getinfo("max/layers.py").date_time)
    assert len(times) == 2


@pytest.mark.parametrize(
    ("changed", "added"),
    [
        ({"max/absent.py": b""}, {}),
        ({"max/absent.py": None}, {}),
        ({}, {"max/layers.py": b""}),
    ],
)
def test_changes_must_fit_the_base(
    changed: Mapping[str, bytes | None],
    added: Mapping[str, bytes],
    base: Path,
    tmp_path: Path,
) -> None:
    """A changed member must be there and an added one must not."""
    with pytest.raises(WheelError, match=r"cannot repack max-1.0"):
        repacked(base, tmp_path / "out", changed=changed, added=added)


def test_base_with_a_member_outside_record_is_refused(
    base: Path, tmp_path: Path
) -> None:
    """A member without a digest can't be vouched for."""
    made.write_zip(base, [*made.read_members(base), Member("max/odd", b"")])
    with pytest.raises(WheelError, match="RECORD has no line for max/odd"):
        repacked(base, tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"Version: 1.0\nSumm", b"Summ"),
        (b"Version: 1.0\nSumm", b"Version: 1.0\nVersion: 1.0\nSumm"),
        (b"Version: 1.0\nSumm", b"Version:  1.0\nSumm"),
    ],
)
def test_metadata_must_have_one_version_line(
    old: bytes, new: bytes, base: Path, tmp_path: Path
) -> None:
    """METADATA that isn't as expected is refused, not guessed at."""
    made.edit_member(base, "1.0.dist-info/METADATA", old, new)
    with pytest.raises(WheelError, match=r"no single line `Version: 1.0`"):
        repacked(base, tmp_path / "out")


# Reproducible.

_BUILD = """
import os, sys, time
from pathlib import Path
from maxpatch.build import Project, Request, build
os.umask(int(sys.argv[3], 8))
report = build(Project(Path(sys.argv[1])), Request(
    platform=sys.argv[2], output=Path(sys.argv[1], "dist")), lambda _: None)
print(report["wheels"][0]["path"])
"""


def test_two_builds_are_byte_identical(toy: Toy, tmp_path: Path) -> None:
    """Folder, umask, time zone, date and hash seed leave no trace."""
    other = tmp_path / "elsewhere/deep"
    shutil.copytree(toy.root, other)
    found = []
    for root, umask, zone, seed in (
        (toy.root, "022", "UTC", "1"),
        (other, "077", "Pacific/Apia", "2"),
    ):
        for path in root.rglob("*"):
            os.utime(path, (1, 1) if seed == "1" else None)
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, root, made.FOREIGN, umask],
            env={**os.environ, "TZ": zone, "PYTHONHASHSEED": seed}
            | {"PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        )
        found.append(Path(done.stdout.strip()))
    assert found[0].name == found[1].name
    assert found[0].read_bytes() == found[1].read_bytes()


# Zip files of other makers.


class Unseekable(io.RawIOBase):
    """A stream that zipfile can only write with data descriptors."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.data += data
        return len(data)


def streamed(path: Path, members: list[Member]) -> None:
    """Writes a zip whose sizes stand after each member (flag bit 3)."""
    stream = Unseekable()
    with zipfile.ZipFile(stream, "w") as archive:  # type: ignore[call-overload]
        for member in members:
            info = zipfile.ZipInfo(member.name)
            info.external_attr = member.mode << 16
            info.compress_type = member.compression
            with archive.open(info, "w") as file:
                file.write(member.data)
    path.write_bytes(stream.data)


def zip64(path: Path, members: list[Member]) -> None:
    """Writes a zip with zip64 sizes in the local headers."""
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            info = zipfile.ZipInfo(member.name)
            info.external_attr = member.mode << 16
            info.compress_type = member.compression
            with archive.open(info, "w", force_zip64=True) as file:
                file.write(member.data)


def with_extras(path: Path, members: list[Member]) -> None:
    """Writes a zip with extra fields and comments, as Info-ZIP does."""
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            info = zipfile.ZipInfo(member.name)
            info.external_attr = member.mode << 16
            info.compress_type = member.compression
            info.extra = b"UT\x05\x00\x03\x00\x00\x00\x00"
            info.comment = b"a comment"
            archive.writestr(info, member.data)
        archive.comment = b"of the archive"


@pytest.mark.parametrize("write", [streamed, zip64, with_extras])
def test_members_of_any_zip_are_copied_right(
    write: Callable[[Path, list[Member]], None], base: Path, tmp_path: Path
) -> None:
    """Data descriptors, zip64 and extra fields don't shift what is copied."""
    members = made.read_members(base)
    write(base, members)
    with zipfile.ZipFile(base) as archive:
        flags = {info.flag_bits & 8 for info in archive.infolist()}
    assert flags == ({8} if write is streamed else {0})
    output = repacked(base, tmp_path / "out", added=ADDED)
    check(output, base, digests(ADDED))
    subprocess.run([sys.executable, "-m", "zipfile", "-t", output], check=True)
    if unzip := shutil.which("unzip"):
        subprocess.run([unzip, "-tqq", output], check=True)
    ours = contents(output)
    for member in members:
        if not member.name.endswith(("RECORD", "1.0.dist-info/METADATA")):
            name = member.name.replace("max-1.0.", f"max-{VERSION}.")
            assert ours[name] == replace(member, name=name)


names = st.text(
    st.characters(categories=("L", "N"), include_characters="-_ .é"),
    min_size=1,
    max_size=12,
).filter(lambda name: name.strip(" .") == name)
members = st.builds(
    Member,
    name=st.builds("max/{}/{}".format, names, names),
    data=st.binary(max_size=400),
    mode=st.sampled_from([0o100644, 0o100755, 0o100777, 0o100600]),
    compression=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
)


@settings(max_examples=40, deadline=None)
@given(
    there=st.lists(members, max_size=6, unique_by=lambda m: m.name),
    write=st.sampled_from([made.write_zip, streamed, zip64]),
    data=st.data(),
)
def test_any_members_survive_repacking(
    there: list[Member],
    write: Callable[[Path, list[Member]], object],
    data: st.DataObject,
) -> None:
    """Content and mode of every member are what they were or were set to."""
    changed = {
        member.name: data.draw(st.none() | st.binary(max_size=40))
        for member in there
        if data.draw(st.booleans())
    }
    described = [
        m
        for m in made.max_members("1.0", made.FOREIGN)
        if m.name.endswith(("1.0.dist-info/METADATA", "dist-info/WHEEL"))
    ]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, f"max-1.0-{TAG}.whl")
        everything = [*there, *described]
        write(base, [*everything, made.record_of(everything, "max-1.0")])
        output = repacked(base, Path(folder, "out"), changed=changed)
        check(output, base, digests(changed))
        ours = contents(output)
    for member in there:
        wanted = changed.get(member.name, member.data)
        if wanted is None:
            assert member.name not in ours
        else:
            found = ours[member.name]
            assert (found.data, found.mode) == (wanted, member.mode)


# A wheel that isn't one, or isn't true.


@pytest.mark.parametrize(
    "name", ["max.whl", "max-1.0.zip", f"max-1.0-{TAG}.whl"]
)
def test_what_is_no_wheel_cannot_be_opened(name: str, tmp_path: Path) -> None:
    """A wrong name, an absent file and a file that is no zip are named."""
    with pytest.raises(WheelError, match="is not a wheel: "):
        Wheel(tmp_path / name)
    (tmp_path / name).write_bytes(b"no zip")
    with pytest.raises(WheelError, match="is not a wheel: "):
        Wheel(tmp_path / name)


@pytest.mark.parametrize("name", ["METADATA", "RECORD", "WHEEL"])
def test_wheel_must_describe_itself(name: str, base: Path) -> None:
    """Without one of its three descriptions a zip is no wheel."""
    absent = f"max-1.0.dist-info/{name}"
    made.rewrite(base, lambda m: None if m.name == absent else m, record=False)
    with pytest.raises(WheelError, match=f"expected {absent}, found max-1.0"):
        Wheel(base)


def test_name_of_the_metadata_folder_is_checked(base: Path) -> None:
    """A wheel under the name of another version is no wheel."""
    renamed = base.rename(base.with_name(f"max-2.0-{TAG}.whl"))
    with pytest.raises(WheelError, match=r"max-2\.0\.dist-info/METADATA"):
        check(renamed)


INFO = f"max-{VERSION}.dist-info"
Spoil = Callable[[Path], object]


def drop(suffix: str, *, record: bool) -> Spoil:
    """Returns a fault that removes a member."""
    return lambda path: made.rewrite(
        path,
        lambda m: None if m.name.endswith(suffix) else m,
        record=record,
    )


def append(member: Member, *, record: bool) -> Spoil:
    """Returns a fault that adds a member."""

    def spoil(path: Path) -> None:
        there = made.read_members(path)
        if record:
            made.write_wheel(
                path,
                [m for m in there if m.name != f"{INFO}/RECORD"] + [member],
            )
        else:
            made.write_zip(path, [*there, member])

    return spoil


def edit(suffix: str, old: str, new: str, *, record: bool = True) -> Spoil:
    """Returns a fault that edits a member."""
    return lambda path: made.edit_member(
        path, suffix, old.encode(), new.encode(), record=record
    )


def flip(path: Path) -> None:
    """Flips a bit of a compressed member."""
    data = bytearray(path.read_bytes())
    at = data.index(
        compressed(path)[f"max-{VERSION}.data/platlib/max/_core.so"]
    )
    data[at + 50_000] ^= 1
    path.write_bytes(data)


def flip_record(path: Path) -> None:
    """Flips a bit of a member that is stored, RECORD."""
    data = bytearray(path.read_bytes())
    data[data.index(b"max/nn/__init__.py,sha256=") + 30] ^= 1
    path.write_bytes(data)


def without_exec(path: Path) -> None:
    """Takes the executable bit from the shared object."""
    made.rewrite(
        path,
        lambda m: replace(m, mode=0o100644) if m.name.endswith(".so") else m,
    )


def with_old_data(path: Path) -> None:
    """Leaves `.data` under the base's version."""
    made.rewrite(
        path,
        lambda m: replace(
            m, name=m.name.replace(f"{VERSION}.data", "1.0.data")
        ),
    )


FAULTS: dict[str, tuple[Spoil, str]] = {
    "flipped_bit": (flip, "a member cannot be read"),
    "flipped_bit_in_record": (flip_record, "a member cannot be read"),
    "changed_member_under_the_old_record": (
        edit("max/layers.py", "factor", "divisor", record=False),
        "max/layers.py didn't match RECORD",
    ),
    "changed_member_under_a_new_record": (
        edit("max/layers.py", "factor", "divisor"),
        "max/layers.py: sha256=",
    ),
    "changed_member_of_the_listed": (
        edit("max/new.py", "1", "2"),
        "max/new.py: sha256=",
    ),
    "missing_record_row": (
        edit("/RECORD", "max/layers.py,", "max/layers.pie,", record=False),
        "max/layers.py is not mentioned in RECORD",
    ),
    "record_row_without_a_member": (
        drop("max/new.py", record=False),
        "max/new.py stands in RECORD and isn't there",
    ),
    "record_row_without_a_digest": (
        edit("/RECORD", "max/new.py,sha256=", "max/new.py,,#", record=False),
        "max/new.py",
    ),
    "missing_member": (
        drop("max/layers.py", record=True),
        "max/layers.py is missing",
    ),
    "extra_member": (
        append(Member("max/odd.py", b""), record=False),
        "max/odd.py is not mentioned in RECORD",
    ),
    "extra_member_in_record": (
        append(Member("max/odd.py", b""), record=True),
        "max/odd.py is neither the base's nor one that was added",
    ),
    "removed_member_that_is_there": (
        append(Member("max/legacy.py", b""), record=True),
        "max/legacy.py is neither the base's nor one that was added",
    ),
    "duplicate_member": (
        append(Member("max/layers.py", made.TWINS), record=True),
        "max/layers.py stands twice",
    ),
    "wrong_tag": (
        edit("/WHEEL", f"Tag: {TAG}", "Tag: py3-none-any"),
        "WHEEL: tags ['py3-none-any'], not",
    ),
    "no_tag": (edit("/WHEEL", f"Tag: {TAG}\n", ""), "WHEEL: tags [], not"),
    "wrong_version": (
        edit(f"{INFO}/METADATA", f"Version: {VERSION}", "Version: 1.0"),
        f"METADATA: Version 1.0, not {VERSION}",
    ),
    "no_version": (
        edit(f"{INFO}/METADATA", f"Version: {VERSION}\n", ""),
        "METADATA: Version",
    ),
    "no_name": (
        edit(f"{INFO}/METADATA", "Name: max\n", ""),
        "METADATA: Name , not max",
    ),
    "wrong_name": (
        edit(f"{INFO}/METADATA", "Name: max\n", "Name: min\n"),
        "METADATA: Name min, not max",
    ),
    "data_of_the_base": (with_old_data, "found max-1.0.data"),
    "second_dist_info": (
        append(Member("other-1.dist-info/METADATA", b"x"), record=True),
        "found other-1.dist-info",
    ),
    "lost_executable_bit": (without_exec, "_core.so: mode 100644, not 100755"),
    "compiled_python": (
        append(Member("max/__pycache__/x.pyc", b""), record=True),
        "max/__pycache__/x.pyc is compiled Python",
    ),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", FAULTS)
def test_check_finds_each_fault(name: str, base: Path, patched: Path) -> None:
    """A planted fault is found, by its own words."""
    spoil, words = FAULTS[name]
    check(patched, base, FILES)
    spoil(patched)
    with pytest.raises(WheelError, match="is not a true wheel") as caught:
        check(patched, base, FILES)
    assert words in str(caught.value)


def test_check_lists_every_fault(base: Path, patched: Path) -> None:
    """Several faults come in one error, a line each."""
    FAULTS["wrong_tag"][0](patched)
    FAULTS["lost_executable_bit"][0](patched)
    with pytest.raises(WheelError) as caught:
        check(patched, base)
    lines = str(caught.value).splitlines()
    # Nobody said here which members were changed on purpose, either.
    assert len(lines) == 1 + 6
    assert "  max/legacy.py is missing" in lines


def test_check_without_base_judges_a_wheel_by_itself(patched: Path) -> None:
    """RECORD, names and tags need no base."""
    check(patched)
    FAULTS["wrong_tag"][0](patched)
    with pytest.raises(WheelError, match="is not a true wheel"):
        check(patched)


def test_output_of_wheel_pack_is_no_true_wheel(
    base: Path, tmp_path: Path
) -> None:
    """`wheel pack --local-version` leaves `.data` behind; we notice."""
    wheel = [sys.executable, "-m", "wheel"]
    subprocess.run([*wheel, "unpack", "-d", tmp_path, base], check=True)
    subprocess.run(
        [
            *wheel,
            "pack",
            "--local-version",
            "attnquant.1.gabc",
            "-d",
            tmp_path,
            tmp_path / "max-1.0",
        ],
        check=True,
    )
    with pytest.raises(WheelError, match=r"found max-1\.0\.data"):
        check(tmp_path / PATCHED)


# Installed by every installer.


def install_with_pip(wheel: Path, target: Path) -> None:
    """Installs with pip."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", target, wheel], check=True)


def install_with_uv(wheel: Path, target: Path) -> None:
    """Installs with uv."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
    subprocess.run(
        [
            *command,
            "--no-deps",
            "--python",
            sys.executable,
            "--offline",
            "--target",
            target,
            wheel,
        ],
        check=True,
    )


def install_with_installer(wheel: Path, target: Path) -> None:
    """Installs with pypa/installer, and puts its prefix together."""
    command = [sys.executable, "-m", "installer", "--no-compile-bytecode"]
    subprocess.run(
        [*command, "--validate-record", "all", "--prefix", target, wheel],
        check=True,
    )
    for folder in target.rglob("site-packages"):
        shutil.copytree(folder, target, dirs_exist_ok=True)


@pytest.mark.parametrize(
    "install", [install_with_pip, install_with_uv, install_with_installer]
)
def test_every_installer_puts_everything_in_place(
    install: Callable[[Path, Path], None], toy: Toy, tmp_path: Path
) -> None:
    """pip, uv and installer agree on the patched wheel, and it imports."""
    wheel = build_unverified(toy, toy.dist)
    target = tmp_path / "target"
    install(wheel, target)
    (core,) = [
        m.data
        for m in made.max_members("1.0", made.PLATFORM)
        if m.name.endswith("_core.so")
    ]
    assert (target / "max/_core.so").read_bytes() == core
    assert os.access(target / "max/_core.so", os.X_OK)
    assert (target / "max/extra/kernels/op.mojo").is_file()
    assert not (target / "max/legacy.py").exists()
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "from max.layers import decode; print(decode(4))",
        ],
        env={"PYTHONPATH": str(target)},
        check=True,
        capture_output=True,
    ).stdout
    assert found == b"2.0\n"


def build_unverified(toy: Toy, output: Path) -> Path:
    """Builds the toy for this machine, as if there were no Python for it."""
    with pytest.MonkeyPatch.context() as patched:
        absent = (None, "not here")
        patched.setattr("maxpatch.verify.find_python", lambda *_: absent)
        report = build(toy.project, Request(output=output), lambda _: None)
    return Path(report["wheels"][0]["path"])


def environment(folder: Path) -> Path:
    """Makes an environment; returns its Python."""
    command = [sys.executable, "-m", "uv", "venv", "--quiet", "--python"]
    subprocess.run([*command, sys.executable, folder], check=True)
    return folder / "bin/python"


def pip(python: Path, *words: str | Path) -> str:
    """Runs pip on an environment and returns what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, *words],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_pip_takes_the_patched_release_and_each_rebuild(
    toy: Toy, tmp_path: Path
) -> None:
    """`max==1.0` is met by the patched wheel; a rebuild replaces it."""
    python = environment(tmp_path / "environment")
    for value in ("1", "2"):
        (toy.root / "overlay/extra/__init__.py").write_text(
            f"EXTRA = {value}\n"
        )
        wheel = build_unverified(toy, tmp_path / value)
        wanted = ["--find-links", wheel.parent, "max==1.0"]
        pip(
            python,
            *("install", "--no-index", "--no-compile"),
            *(wanted if value == "1" else [wheel]),
        )
        found = subprocess.run(
            [python, "-c", "from max.extra import EXTRA; print(EXTRA)"],
            check=True,
            capture_output=True,
        ).stdout
        assert found.decode().strip() == value
