# SPDX-License-Identifier: Apache-2.0
"""The overlay: files that are added to ``max``, never over a file of it.

``overlay/X`` becomes ``max/X``. Every file belongs to an overlay package, the
nearest folder above it with an ``overlay.toml``, which carries the range of
releases the package is for.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from .errors import OverlayError
from .series import State, covers

MANIFEST = "overlay.toml"


@dataclass(frozen=True, slots=True)
class OverlayPackage:
    """A folder of the overlay that is shipped or left out as a whole."""

    name: str
    """Path below the overlay's root."""

    summary: str
    applies_to: SpecifierSet
    files: Mapping[str, bytes]
    """Content by wheel member, ``max/...``."""

    because: str = ""
    """Why other releases do not get it."""

    def state(self, release: Version) -> tuple[State, str]:
        """Returns what a build for a release does with it, and why."""
        if covers(self.applies_to, release):
            return State.APPLIED, self.summary
        reason = f"applies-to {self.applies_to} excludes {release}"
        if self.because:
            reason += f": {self.because}"
        return State.NOT_FOR_RELEASE, reason


def load(root: Path) -> list[OverlayPackage]:
    """Reads every overlay package, sorted by name.

    Raises:
        OverlayError: A manifest is malformed or a file has no package.
    """
    manifests = sorted(root.rglob(MANIFEST))
    owned: dict[Path, dict[str, bytes]] = {m.parent: {} for m in manifests}
    for path in sorted(root.rglob("*")):
        if not path.is_file() or not _is_shipped(path.relative_to(root)):
            continue
        owner = next((up for up in path.parents if up in owned), None)
        if owner is None:
            raise OverlayError(
                f"{path} belongs to no overlay package",
                hint=f"add {MANIFEST} (applies-to, summary) to its folder",
            )
        member = PurePosixPath("max", path.relative_to(root).as_posix())
        owned[owner][str(member)] = path.read_bytes()
    return [_package(root, folder, files) for folder, files in owned.items()]


def check_collisions(
    packages: Iterable[OverlayPackage], members: Iterable[str], base: str
) -> None:
    """Raises OverlayError where an overlay file would cover a file of MAX.

    Args:
        packages: The overlay packages that are added.
        members: What the base wheel installs, by path.
        base: The base wheel's name, for the message.
    """
    # Case is folded: macOS would let `Max.py` cover `max.py`.
    taken = {member.casefold() for member in members}
    covered = [
        f"{package.name}: {member}"
        for package in packages
        for member in package.files
        if member.casefold() in taken
    ]
    if covered:
        raise OverlayError(
            f"the overlay would cover files of {base}:\n  "
            + "\n  ".join(covered),
            hint="an overlay only adds files; change MAX's with a patch",
        )


def _is_shipped(path: Path) -> bool:
    return (
        path.name != MANIFEST
        and path.suffix not in {".md", ".pyc"}
        # Hidden folders are the caches of linters and type checkers.
        and not any(p == "__pycache__" or p[0] == "." for p in path.parts)
    )


def _package(
    root: Path, folder: Path, files: Mapping[str, bytes]
) -> OverlayPackage:
    manifest = folder / MANIFEST
    try:
        table = tomllib.loads(manifest.read_text())
        if unknown := table.keys() - {"applies-to", "summary", "because"}:
            raise ValueError(f"unknown keys {sorted(unknown)}")
        for key in {"applies-to", "summary", *table}:
            if not isinstance(table[key], str):
                raise ValueError(f"{key} is not a string")
        return OverlayPackage(
            name=folder.relative_to(root).as_posix(),
            summary=table["summary"],
            applies_to=SpecifierSet(table["applies-to"]),
            files=files,
            because=table.get("because", ""),
        )
    except (InvalidSpecifier, KeyError, ValueError) as error:
        raise OverlayError(
            f"{manifest} is malformed: {error!r}",
            hint='expected: applies-to = ">=26.7,<26.8" and summary = "..."',
        ) from error
