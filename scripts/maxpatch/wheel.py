# SPDX-License-Identifier: Apache-2.0
"""Wheels: repacking one under a new version, and checking one.

Untouched members are copied as the compressed bytes they are, which keeps
large shared objects cheap and identical. What we write ourselves is stored
uncompressed, so that the result doesn't depend on the zlib at hand. The format
is that of the PyPA's binary distribution specification.
"""

from __future__ import annotations

import base64
import csv
import email.parser
import hashlib
import io
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from installer.exceptions import InstallerError
from installer.sources import WheelFile as InstallerWheel
from packaging.tags import Tag, parse_tag
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    parse_wheel_filename,
)

from .errors import WheelError

FILE_MODE = 0o100644
_DESCRIPTION = ("METADATA", "RECORD", "WHEEL")
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a zip member's local header, the lengths of its name and extra field."""


class Wheel:
    """A wheel opened for reading."""

    def __init__(self, path: Path) -> None:
        """Opens a wheel.

        Raises:
            WheelError: It isn't a zip file, or its name or its ``.dist-info``
                isn't that of a wheel.
        """
        self.path = path
        try:
            name, self.version, _, self.tags = parse_wheel_filename(path.name)
            self.archive = zipfile.ZipFile(path)
        except (InvalidWheelFilename, OSError, zipfile.BadZipFile) as error:
            raise WheelError(f"{path} is not a wheel: {error}") from error
        self.name = str(name)
        self.infos = [i for i in self.archive.infolist() if not i.is_dir()]
        self.stem = "-".join(path.name.split("-")[:2])
        self.dist_info = f"{self.stem}.dist-info"
        self.data = f"{self.stem}.data"
        names = {info.filename for info in self.infos}
        needed = {f"{self.dist_info}/{name}" for name in _DESCRIPTION}
        if missing := sorted(needed - names):
            self.archive.close()
            found = sorted(n for n in names if n.endswith(_DESCRIPTION))
            raise WheelError(
                f"{path} is not a valid wheel: expected {', '.join(missing)}, "
                f"found {', '.join(found) or 'none'}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.archive.close()

    def read(self, member: str) -> bytes:
        """Returns a member's content."""
        return self.archive.read(member)

    def record(self) -> dict[str, list[str]]:
        """Returns RECORD: hash and size by member."""
        text = self.read(f"{self.dist_info}/RECORD").decode()
        return {row[0]: row[1:] for row in csv.reader(text.splitlines()) if row}

    def renamed(self, stem: str, member: str) -> str:
        """Returns a member's name in a wheel of another ``NAME-VERSION``."""
        top, slash, rest = member.partition("/")
        if top in {self.dist_info, self.data}:
            top = f"{stem}.{top.rpartition('.')[2]}"
        return top + slash + rest

    def installed(self, member: str) -> str:
        """Returns where a member lands, relative to site-packages."""
        parts = PurePosixPath(member).parts
        if parts[0] == self.data and parts[1] in {"platlib", "purelib"}:
            return str(PurePosixPath(*parts[2:]))
        return member

    def installed_paths(self) -> Iterator[str]:
        """Yields where the members land, relative to site-packages."""
        for info in self.infos:
            yield self.installed(info.filename)


class _Archive(zipfile.ZipFile):
    """A zip file that also takes members as they are in another one."""

    def copy_member(
        self, source: zipfile.ZipFile, info: zipfile.ZipInfo, filename: str
    ) -> None:
        """Copies a member's compressed bytes under another name."""
        assert source.fp is not None and self.fp is not None
        source.fp.seek(info.header_offset)
        lengths = _LOCAL_HEADER.unpack(source.fp.read(_LOCAL_HEADER.size))
        source.fp.seek(sum(lengths), os.SEEK_CUR)
        copied = copy(info)
        copied.filename = filename
        copied.extra = b""
        copied.flag_bits &= ~0x08  # the sizes stand in the header, not after
        copied.header_offset = self.fp.tell()
        self.fp.write(copied.FileHeader())
        self.fp.write(source.fp.read(info.compress_size))
        self.filelist.append(copied)
        self.NameToInfo[filename] = copied
        self.start_dir = self.fp.tell()

    def store(self, filename: str, data: bytes, mode: int) -> None:
        """Writes a member uncompressed, dated by its content."""
        info = zipfile.ZipInfo(filename, _time(data))
        info.create_system = 3
        info.external_attr = mode << 16
        self.writestr(info, data)


def _time(data: bytes) -> tuple[int, int, int, int, int, int]:
    """Returns a date in 2026 that is the content's own.

    Python takes a ``.pyc`` for fresh if the source's time and size are those
    it was compiled from. Under one fixed date, a change of one character would
    leave the old code running wherever zip times are kept.
    """
    step = int.from_bytes(hashlib.sha256(data).digest()[:4])
    minutes, second = divmod(step, 30)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    months, day = divmod(days, 28)
    return (2026, months % 12 + 1, day + 1, hour, minute, 2 * second)


def _record_row(member: str, data: bytes) -> list[str]:
    digest = hashlib.sha256(data).digest()
    return [member, _record_hash(digest), str(len(data))]


def _record_hash(digest: bytes) -> str:
    encoded = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    return f"sha256={encoded}"


def repack(
    base: Wheel,
    output: Path,
    version: str,
    *,
    changed: Mapping[str, bytes | None],
    added: Mapping[str, bytes],
    metadata: Mapping[str, bytes],
) -> None:
    """Writes a wheel like another one, under another version.

    Args:
        base: The wheel to start from.
        output: The file to write, named for ``version``.
        version: The new version; it also names ``.dist-info`` and ``.data``.
        changed: New content by member of ``base``; None removes the member.
        added: Content by new member.
        metadata: Content by new file of ``.dist-info``.

    Raises:
        WheelError: A changed member isn't in ``base``, or an added one is.
    """
    names = {info.filename for info in base.infos}
    if wrong := sorted((changed.keys() - names) | (added.keys() & names)):
        raise WheelError(
            f"cannot repack {base.path.name}: expected changed members to be "
            f"there and added ones not, found otherwise for {wrong}"
        )
    stem = f"{base.stem.rsplit('-', 1)[0]}-{version}"
    record_of_base = base.record()
    rows: list[list[str]] = []
    renamed = partial(base.renamed, stem)

    def store(member: str, data: bytes, mode: int = FILE_MODE) -> None:
        archive.store(member, data, mode)
        rows.append(_record_row(member, data))

    modes = {i.filename: i.external_attr >> 16 for i in base.infos}
    described = f"{base.dist_info}/METADATA"
    recorded = f"{base.dist_info}/RECORD"
    with _Archive(output, "w") as archive:
        for info in base.infos:
            member = info.filename
            if member.endswith(".pyc") or member in {described, recorded}:
                continue
            data = changed.get(member)
            if data is not None:
                store(renamed(member), data, modes[member])
            elif member not in changed:
                if member not in record_of_base:
                    raise WheelError(
                        f"{base.path.name}: RECORD has no line for {member}"
                    )
                archive.copy_member(base.archive, info, renamed(member))
                rows.append([renamed(member), *record_of_base[member]])
        for member in sorted(added):
            store(member, added[member])
        for name in sorted(metadata):
            store(f"{stem}.dist-info/{name}", metadata[name])
        store(
            renamed(described),
            _with_version(base.read(described), str(base.version), version),
            modes[described],
        )
        _store_record(archive, renamed(recorded), rows, modes[recorded])


def write(path: Path, files: Mapping[str, bytes]) -> None:
    """Writes a wheel of files, and the RECORD that is true for them.

    Args:
        path: The file to write, named as a wheel is.
        files: Content by member, those of ``.dist-info`` included.
    """
    stem = "-".join(path.name.split("-")[:2])
    # As the specification recommends, the description comes last.
    info = f"{stem}.dist-info/"
    rows: list[list[str]] = []
    with _Archive(path, "w") as archive:
        for member in sorted(files, key=lambda m: (m.startswith(info), m)):
            archive.store(member, files[member], FILE_MODE)
            rows.append(_record_row(member, files[member]))
        _store_record(archive, f"{info}RECORD", rows, FILE_MODE)


def _store_record(
    archive: _Archive, member: str, rows: list[list[str]], mode: int
) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([*rows, [member, "", ""]])
    archive.store(member, text.getvalue().encode(), mode)


def _with_version(metadata: bytes, before: str, after: str) -> bytes:
    head, separator, body = metadata.partition(b"\n\n")
    lines = head.split(b"\n")
    old = f"Version: {before}".encode()
    if lines.count(old) != 1:
        raise WheelError(f"METADATA has no single line `Version: {before}`")
    lines[lines.index(old)] = f"Version: {after}".encode()
    return b"\n".join(lines) + separator + body


def check(
    path: Path,
    base: Path | None = None,
    files: Mapping[str, str | None] | None = None,
) -> None:
    """Checks a wheel against its own metadata, and against its base.

    Args:
        path: The wheel.
        base: The wheel it was made from. Every member of it must be there as
            it was, and no other one, ``.dist-info`` aside.
        files: The exceptions: SHA-256 in hex by changed or added member, None
            for a removed one.

    Raises:
        WheelError: The message lists every fault.
    """
    faults: list[str] = []
    try:
        with Wheel(path) as wheel:
            faults += _metadata_faults(wheel)
            if base is not None:
                with Wheel(base) as original:
                    faults += _differences(wheel, original, files or {})
        with InstallerWheel.open(path) as source:
            source.validate_record(validate_contents=True)
    except InstallerError as error:
        faults += getattr(error, "issues", None) or [str(error)]
    except (zipfile.BadZipFile, zlib.error) as error:
        faults.append(f"a member cannot be read: {error}")
    if faults:
        raise WheelError(
            f"{path.name} is not a true wheel:\n  " + "\n  ".join(faults)
        )


def _metadata_faults(wheel: Wheel) -> list[str]:
    faults = []
    names = [info.filename for info in wheel.infos]
    faults += [
        f"{n} stands twice" for n, count in Counter(names).items() if count > 1
    ]
    faults += [f"{n} is compiled Python" for n in names if n.endswith(".pyc")]
    faults += [
        f"{n} stands in RECORD and isn't there"
        for n in sorted(wheel.record().keys() - set(names))
    ]
    allowed = {wheel.dist_info, wheel.data}
    faults += [
        f"expected only {' and '.join(sorted(allowed))}, found {top}"
        for top in sorted({n.partition("/")[0] for n in names} - allowed)
        if top.endswith((".dist-info", ".data"))
    ]
    parser = email.parser.Parser()
    metadata = parser.parsestr(
        wheel.read(f"{wheel.dist_info}/METADATA").decode()
    )
    name, version = metadata.get("Name", ""), metadata.get("Version", "")
    if canonicalize_name(name) != wheel.name:
        faults.append(f"METADATA: Name {name}, not {wheel.name}")
    if version != str(wheel.version):
        faults.append(f"METADATA: Version {version}, not {wheel.version}")
    described = parser.parsestr(wheel.read(f"{wheel.dist_info}/WHEEL").decode())
    tags: set[Tag] = set()
    for text in described.get_all("Tag", []):
        tags |= parse_tag(text)
    if tags != wheel.tags:
        faults.append(
            f"WHEEL: tags {sorted(map(str, tags))}, "
            f"not {sorted(map(str, wheel.tags))}"
        )
    return faults


def _differences(
    wheel: Wheel, base: Wheel, files: Mapping[str, str | None]
) -> list[str]:
    """Returns what differs from the base although it shouldn't.

    RECORD's digests stand for the contents, which are held against it.
    """
    ours = {info.filename: info for info in wheel.infos}
    record, record_of_base = wheel.record(), base.record()
    wanted, modes = {}, {}
    for info in base.infos:
        if not info.filename.endswith(".pyc"):
            member = base.renamed(wheel.stem, info.filename)
            wanted[member] = record_of_base.get(info.filename, [""])[0]
            modes[member] = info.external_attr >> 16
    for member, digest in files.items():
        wanted.pop(member, None)
        if digest is not None:
            wanted[member] = _record_hash(bytes.fromhex(digest))
    described = {f"{wheel.dist_info}/{n}" for n in ("METADATA", "RECORD")}
    metadata = base.read(f"{base.dist_info}/METADATA")
    expected = _with_version(metadata, str(base.version), str(wheel.version))
    faults = [f"{m} is missing" for m in sorted(wanted.keys() - ours.keys())]
    faults += [
        f"{member} is neither the base's nor one that was added"
        for member in sorted(ours.keys() - wanted.keys())
        if not member.startswith(f"{wheel.dist_info}/")
    ]
    if wheel.read(f"{wheel.dist_info}/METADATA") != expected:
        faults.append("METADATA differs from the base's by more than Version")
    for member in sorted(wanted.keys() & ours.keys()):
        found = record.get(member, [""])[0]
        if member not in described and found != wanted[member]:
            faults.append(f"{member}: {found}, not {wanted[member]}")
        mode = ours[member].external_attr >> 16
        if mode != modes.get(member, mode):
            faults.append(f"{member}: mode {mode:o}, not {modes[member]:o}")
    return faults
