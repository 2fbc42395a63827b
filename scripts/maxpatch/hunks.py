# SPDX-License-Identifier: Apache-2.0
"""Where the hunks of a patch belong in a file it wasn't made for.

A source checkout moves daily, so its file is seldom the very one that a patch
was made for. A hunk belongs where its old lines (context and removed lines)
are, if they are in one place only: then an offset is no guess, and there is no
twin to hit. A hunk whose new lines are in one place, and whose old lines are in
none, is in the file already.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_FILE = re.compile(rb"diff --git a/\S+ b/(?P<path>\S+)\n")
_HUNK = re.compile(
    rb"@@ -(?P<start>\d+)(?:,(?P<old>\d+))? \+\d+(?:,(?P<new>\d+))? @@"
)


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk of a diff; lines keep their ends."""

    header: str
    """Its first line, with git's heading."""

    old: tuple[bytes, ...]
    """Context and removed lines: what it replaces."""

    new: tuple[bytes, ...]
    """Context and added lines: what it puts there."""

    at_start: bool
    """Whether it belongs at the file's start only, as git has it."""

    at_end: bool
    """Whether it belongs at the file's end only: no context follows."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where a file has a hunk's lines, as line numbers from 0."""

    hunk: Hunk
    old: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def is_open(self) -> bool:
        """Whether the hunk has one place, and isn't in the file yet."""
        return len(self.old) == 1 and not self.new

    @property
    def has_landed(self) -> bool:
        """Whether the hunk is in the file already, once."""
        return len(self.new) == 1 and not self.old

    def __str__(self) -> str:
        return (
            f"{self.hunk.header}: its old lines {_named(self.old)}, its new "
            f"lines {_named(self.new)}"
        )


def lines_of(data: bytes) -> list[bytes]:
    """Returns the lines of a file, or a patch, as git counts them."""
    *whole, rest = data.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def hunks_of(patch: bytes) -> dict[str, list[Hunk]]:
    """Returns a git patch's hunks by the path that they change.

    Raises:
        ValueError: A hunk has other lines than its header counts.
    """
    found: dict[str, list[Hunk]] = {}
    path = ""
    lines = lines_of(patch)
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if match := _FILE.fullmatch(line):
            path = match["path"].decode()
            found[path] = []
        elif path and (match := _HUNK.match(line)):
            body = _body(
                lines, at, int(match["old"] or 1), int(match["new"] or 1)
            )
            header = line.decode(errors="replace").rstrip()
            if body is None:
                raise ValueError(
                    f"{path}: the lines of hunk {header} are not those that "
                    "it counts"
                )
            at += len(body)
            found[path].append(_hunk(header, int(match["start"]), body))
    return found


def _body(
    lines: Sequence[bytes], start: int, old: int, new: int
) -> list[bytes] | None:
    """Returns a hunk's lines, or None if they aren't as many as it says."""
    at = start
    while (old or new) and at < len(lines):
        kind = lines[at][:1]
        if kind not in (b" ", b"\n", b"-", b"+", b"\\"):
            return None
        old -= kind in (b" ", b"\n", b"-")
        new -= kind in (b" ", b"\n", b"+")
        at += 1
    if at < len(lines) and lines[at][:1] == b"\\":
        at += 1
    return None if old or new else list(lines[start:at])


def _hunk(header: str, start: int, body: Sequence[bytes]) -> Hunk:
    old: list[bytes] = []
    new: list[bytes] = []
    last: tuple[list[bytes], ...] = ()
    for line in body:
        kind, text = line[:1], line[1:]
        if kind == b"\\":  # the line before has no line end
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
            continue
        last = {b"-": (old,), b"+": (new,)}.get(kind, (old, new))
        for side in last:
            # git takes an empty line for an empty line of context.
            side.append(text if kind != b"\n" else b"\n")
    return Hunk(
        header,
        tuple(old),
        tuple(new),
        at_start=start <= 1,
        at_end=len(last) != 2,
    )


def find(hunk: Hunk, lines: Sequence[bytes]) -> Places:
    """Finds a hunk's old and new lines in a file.

    Where a longer side of the hunk stands, the shorter one that is part of it
    doesn't count.
    """
    old = _starts(hunk.old, hunk, lines)
    new = _starts(hunk.new, hunk, lines)
    return Places(
        hunk,
        _outside(old, len(hunk.old), new, len(hunk.new)),
        _outside(new, len(hunk.new), old, len(hunk.old)),
    )


def replaced(places: Sequence[Places], lines: Sequence[bytes]) -> list[bytes]:
    """Returns a file with its open hunks applied.

    Args:
        places: Where the hunks are, in the order of the patch; all open.
        lines: The file.

    Raises:
        ValueError: The hunks' places overlap, or aren't in the patch's order.
    """
    done: list[bytes] = []
    at = 0
    for place in places:
        (start,) = place.old
        if start < at:
            raise ValueError(
                f"hunk {place.hunk.header} belongs at line {start + 1}, "
                "before the end of the one before it"
            )
        done += [*lines[at:start], *place.hunk.new]
        at = start + len(place.hunk.old)
    return [*done, *lines[at:]]


def _starts(
    wanted: tuple[bytes, ...], hunk: Hunk, lines: Sequence[bytes]
) -> tuple[int, ...]:
    last = len(lines) - len(wanted)
    return tuple(
        at
        for at in range(last + 1)
        if tuple(lines[at : at + len(wanted)]) == wanted
        and not (hunk.at_start and at)
        and not (hunk.at_end and at != last)
    )


def _outside(
    starts: tuple[int, ...], length: int, others: tuple[int, ...], other: int
) -> tuple[int, ...]:
    return tuple(
        at
        for at in starts
        if length >= other
        or not any(o <= at and at + length <= o + other for o in others)
    )


def _named(starts: tuple[int, ...]) -> str:
    if not starts:
        return "nowhere"
    return (
        "at line "
        + ", ".join(str(at + 1) for at in starts[:5])
        + (f" and {len(starts) - 5} more" if len(starts) > 5 else "")
    )
