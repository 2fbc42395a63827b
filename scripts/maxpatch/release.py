# SPDX-License-Identifier: Apache-2.0
"""The pinned MAX releases, and their wheels."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from .errors import ProcessError, ReleaseError
from .process import run

_SYSTEMS = {"manylinux": "linux", "macosx": "macos"}


def sha256_of(path: Path) -> str:
    """Returns a file's SHA-256, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def host_python() -> str:
    """Returns the running Python's version, as ``3.12``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def host_platform() -> str:
    """Returns this machine's platform, as ``linux-x86_64``."""
    system = {"Darwin": "macos"}.get(platform.system(), platform.system())
    return f"{system.lower()}-{platform.machine()}"


@dataclass(frozen=True, slots=True)
class WheelPin:
    """One wheel of a release, known by its digest."""

    filename: str
    sha256: str

    @classmethod
    def parse(cls, filename: str, sha256: str) -> WheelPin:
        """Reads a row's entry.

        Raises:
            ValueError: The name isn't that of a wheel with exactly one tag.
        """
        pin = cls(filename, sha256)
        _ = pin.tag
        return pin

    @property
    def tag(self) -> Tag:
        """The wheel's compatibility tag; MAX's wheels have exactly one."""
        (tag,) = parse_wheel_filename(self.filename)[3]
        return tag

    @property
    def python(self) -> str:
        """The Python it is for, as ``3.12``."""
        return re.sub(r"cp3(\d+)", r"3.\1", self.tag.interpreter)

    @property
    def platform(self) -> str:
        """The platform it is for, as ``linux-x86_64``."""
        match = re.fullmatch(r"([a-z]+)_\d+_\d+_(\w+)", self.tag.platform)
        if match is None:
            return self.tag.platform
        return f"{_SYSTEMS.get(match[1], match[1])}-{match[2]}"


@dataclass(frozen=True, slots=True)
class Release:
    """A MAX release that the series is applied to."""

    version: Version
    mojo_compiler: str
    """The version of ``mojo-compiler`` that the release pins."""

    upstream_tag: str
    """The release's tag in MAX's source repository."""

    redistributable: bool
    """Whether the wheel's licence lets a modified copy be passed on."""

    wheels: tuple[WheelPin, ...]
    mojo_libs: WheelPin
    """The wheel of the release's Mojo packages, the same everywhere."""

    source_commits: str = ""
    """Commits of MAX's source repository that fit, ``first..last``."""

    def wheel(self, python: str, platform: str) -> WheelPin:
        """Returns the pinned wheel for a Python and a platform.

        Args:
            python: A Python version, as ``3.12``.
            platform: A platform, as ``linux-x86_64``.

        Raises:
            ReleaseError: MAX wasn't released for them.
        """
        for pin in self.wheels:
            if (pin.python, pin.platform) == (python, platform):
                return pin
        pythons = sorted({pin.python for pin in self.wheels}, key=Version)
        platforms = sorted({pin.platform for pin in self.wheels})
        raise ReleaseError(
            f"MAX {self.version} has no wheel for Python {python} on "
            f"{platform}: expected one of {', '.join(pythons)} "
            f"on {', '.join(platforms)}",
            hint="choose with --python and --platform",
        )


@dataclass(frozen=True, slots=True)
class Releases:
    """The rows of ``build/releases.toml``."""

    default: str
    rows: dict[str, Release]

    @classmethod
    def load(cls, path: Path) -> Releases:
        """Reads the table.

        Raises:
            ReleaseError: A row is incomplete or malformed.
        """
        try:
            table = tomllib.loads(path.read_text())
            rows = {
                version: Release(
                    version=Version(version),
                    mojo_compiler=row["mojo-compiler"],
                    upstream_tag=row["upstream-tag"],
                    redistributable=row["redistributable"],
                    wheels=tuple(
                        WheelPin.parse(name, digest)
                        for name, digest in row["wheels"].items()
                    ),
                    mojo_libs=WheelPin.parse(*_only(row["mojo-libs"])),
                    source_commits=row.get("source-commits", ""),
                )
                for version, row in table["release"].items()
            }
            return cls(table["default"], rows)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ReleaseError(f"{path} is malformed: {error!r}") from error

    def get(self, version: str | None) -> Release:
        """Returns a release by its version, or the default one.

        Raises:
            ReleaseError: There is no row for it.
        """
        wanted = version or self.default
        if wanted not in self.rows:
            raise ReleaseError(
                f"no release {wanted}: expected one of {', '.join(self.rows)}",
                hint="a release is one row in build/releases.toml",
            )
        return self.rows[wanted]


def _only(table: dict[str, str]) -> tuple[str, str]:
    (item,) = table.items()
    return item


def fetch(pin: WheelPin, cache: Path, *, offline: bool) -> Path:
    """Returns the pinned wheel's path, downloaded if it isn't cached.

    pip downloads it, so that the user's index, mirror, proxy and certificate
    settings hold.

    Args:
        pin: The wheel.
        cache: The folder that keeps downloads.
        offline: Whether only the cache may be used.

    Raises:
        ReleaseError: It can't be had, or isn't the pinned file.
    """
    path = cache / pin.filename
    if not path.exists():
        if offline:
            raise ReleaseError(
                f"{pin.filename} is not in {cache}, and --offline forbids "
                "a download",
                hint="run once without --offline",
            )
        _download(pin, cache)
    found = sha256_of(path)
    if found != pin.sha256:
        raise ReleaseError(
            f"{path} is not the pinned wheel: expected sha256 {pin.sha256}, "
            f"found {found}",
            hint=f"delete {path} and run again",
        )
    return path


def _download(pin: WheelPin, cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReleaseError(
            f"cannot keep downloads in {cache}: {error.strerror}"
        ) from error
    name, version = parse_wheel_filename(pin.filename)[:2]
    limits: list[str] = []
    if pin.platform != "any":
        limits += ["--python-version", pin.python, "--implementation"]
        limits += [pin.tag.interpreter[:2], "--abi", pin.tag.abi]
        limits += ["--platform", pin.tag.platform]
    with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
        requirement = Path(folder, "requirement.txt")
        requirement.write_text(
            f"{name}=={version} --hash=sha256:{pin.sha256}\n"
        )
        try:
            run(
                [
                    *(sys.executable, "-P", "-m", "pip", "download", "-q"),
                    *("--no-deps", "--only-binary", ":all:", "--retries", "1"),
                    *("--require-hashes", "--requirement", requirement),
                    *(*limits, "--dest", folder),
                ]
            )
        except ProcessError as error:
            last = error.output.strip().splitlines()[-1:]
            raise ReleaseError(
                f"cannot download {pin.filename}: {''.join(last)}",
                hint="check the network and pip's index settings "
                "(`python -m pip config list`)",
            ) from error
        Path(folder, pin.filename).replace(cache / pin.filename)
