# SPDX-License-Identifier: Apache-2.0
"""The patch series: each patch's header, the order, and the selection.

A patch is a git-format patch whose message ends with the fields described in
``patches/README.md`` (after DEP-3 and Yocto's ``Upstream-Status``). It is made
for exact files: the ids on its ``index`` lines say which content it changes
and what becomes of it. :mod:`maxpatch.checkout` says how far a file may differ.
"""

from __future__ import annotations

import email
import email.policy
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .errors import SeriesError
from .git import NO_BLOB

PYTHON_ROOT = "max/python/"
"""Where MAX's source tree keeps what the wheel installs."""

REASONS = ("temporary", "build", "permanent")
_UPSTREAM = re.compile(
    r"Pending"
    r"|(?:Submitted|Denied) \[https?://\S+\]"
    r"|Accepted \[https?://\S+, (?P<first>[^\s\]]+)\]"
    r"|Inappropriate \[[^\]]+\]"
)
_URL = re.compile(r"https?://\S+")
_COMMITS = re.compile(r"[0-9a-f]{10,40}\.\.[0-9a-f]{10,40}")


def _reason(text: str) -> str:
    if text not in REASONS:
        raise ValueError(f"expected {' | '.join(REASONS)}, found {text!r}")
    return text


def _upstream_status(text: str) -> str:
    match = _UPSTREAM.fullmatch(text)
    if not match:
        raise ValueError(
            "expected Pending | Submitted [url] | Accepted [url, first "
            f"release] | Denied [url] | Inappropriate [why], found {text!r}"
        )
    if match["first"]:
        Version(match["first"])
    return text


def _url(text: str) -> str:
    if not _URL.fullmatch(text):
        raise ValueError(f"expected a url, found {text!r}")
    return text


def _commits(text: str) -> str:
    if not _COMMITS.fullmatch(text):
        raise ValueError(f"expected FIRST..LAST commit ids, found {text!r}")
    return text


def _mojo_packages(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(re.split(r",\s*", text))


_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "Reason": ("reason", _reason),
    "Applies-To": ("applies_to", SpecifierSet),
    "Upstream-Status": ("upstream_status", _upstream_status),
    "Bug": ("bug", _url),
    "Touches-Mojo": ("mojo_packages", _mojo_packages),
    "Source-Commits": ("source_commits", _commits),
    "Proof": ("proof", str),
    "Last-Update": ("last_update", date.fromisoformat),
}
"""By field, the attribute of :class:`Patch` and what parses its value."""

_OPTIONAL = {"Bug", "Source-Commits"}
_DIFF = re.compile(r"^diff --git a/(?P<old>\S+) b/(?P<new>\S+)$", re.MULTILINE)
_INDEX = re.compile(
    r"^index (?P<before>[0-9a-f]+)\.\.(?P<after>[0-9a-f]+)(?: \d+)?$",
    re.MULTILINE,
)
_SOURCE_CONTEXT = 3
"""Lines of context that a patch of sources may have: git's own default."""

_NOT_TEXT = (
    "GIT binary patch",
    "Binary files ",
    "copy from ",
    "old mode ",
    "rename from ",
    "similarity index ",
)


class State(StrEnum):
    """What a build does with one patch or overlay package."""

    APPLIED = "applied"
    LANDED = "landed-upstream"
    NOT_FOR_RELEASE = "not-for-this-release"
    SOURCE_ONLY = "source-only"


def covers(applies_to: SpecifierSet, version: Version) -> bool:
    """Whether a range covers a MAX version, nightlies included.

    PEP 440 puts ``26.8.0.dev1`` before 26.8.0 and so inside ``<26.8``, while
    its code is that of 26.8.0 in the making. A nightly therefore counts as the
    release it leads to, and a local version as the one it was made from.
    """
    return Version(version.base_version) in applies_to


@dataclass(frozen=True, slots=True)
class Target:
    """One file that a patch changes."""

    path: str
    """Path in MAX's source tree."""

    before: str
    """Blob id of the file the patch was made for; zeros for a new file."""

    after: str
    """Blob id of the file once patched; zeros for a removed file."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch of the series."""

    name: str
    """File name without ``.patch``."""

    data: bytes
    """The whole file."""

    subject: str
    reason: str
    applies_to: SpecifierSet
    upstream_status: str
    mojo_packages: tuple[str, ...]
    proof: str
    last_update: date
    targets: tuple[Target, ...]
    bug: str = ""
    source_commits: str = ""
    """The first and last commit of MAX's source that it is known to fit."""

    @property
    def sha256(self) -> str:
        """The file's digest, in hex."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def first_release_with_it(self) -> Version | None:
        """The first MAX release that has the change, if upstream took it."""
        match = _UPSTREAM.fullmatch(self.upstream_status)
        first = match and match["first"]
        return Version(first) if first else None

    @classmethod
    def parse(cls, name: str, data: bytes) -> Patch:
        """Reads a patch file.

        Raises:
            SeriesError: The patch is malformed; the message lists every fault.
        """
        if not data.strip():
            raise SeriesError(f"{name}.patch is empty")
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise SeriesError(f"{name}.patch is not UTF-8: {error}") from error
        head, _, diff = text.partition("\ndiff --git ")
        diff = diff and "diff --git " + diff
        subject, fields, faults = _parse_message(head)
        targets = _targets(diff)
        values, field_faults = _parse_values(fields, targets)
        is_source = bool(values.get("mojo_packages"))
        faults += _diff_faults(diff, _SOURCE_CONTEXT if is_source else 1)
        faults += field_faults
        if faults:
            raise SeriesError(
                f"{name}.patch is malformed:\n  " + "\n  ".join(faults),
                hint="patches/README.md describes the form",
            )
        return cls(
            name=name, data=data, subject=subject, targets=targets, **values
        )


def _parse_message(head: str) -> tuple[str, dict[str, str], list[str]]:
    """Returns the subject, the fields of the last paragraph, and faults."""
    faults = []
    first, _, rest = head.partition("\n")
    if not first.startswith(f"From {NO_BLOB} "):
        faults.append(
            f"expected `From {NO_BLOB} ...` first (git format-patch "
            f"--zero-commit), found {first[:60]!r}"
        )
    # The mbox "From " line isn't part of the message proper.
    message = email.message_from_string(rest, policy=email.policy.default)
    body = message.get_content() if not message.is_multipart() else ""
    paragraphs = body.partition("\n---")[0].strip().split("\n\n")
    fields: dict[str, str] = {}
    for line in paragraphs[-1].splitlines():
        key, colon, value = line.partition(": ")
        if not colon or key not in _FIELDS:
            faults.append(
                "expected only fields in the last paragraph "
                f"({', '.join(_FIELDS)}), found {line!r}"
            )
        elif key in fields:
            faults.append(f"field {key} stands twice")
        else:
            fields[key] = value.strip()
    if len(paragraphs) < 2:
        faults.append("the message doesn't say why the patch exists")
    subject = str(message.get("Subject", "")).removeprefix("[PATCH] ")
    if not subject:
        faults.append("the message has no subject")
    return " ".join(subject.split()), fields, faults


def _parse_values(
    fields: Mapping[str, str], targets: Sequence[Target]
) -> tuple[dict[str, Any], list[str]]:
    """Returns the parsed fields, by attribute of :class:`Patch`, and faults."""
    faults = []
    values: dict[str, Any] = {}
    for name, (attribute, parse) in _FIELDS.items():
        text = fields.get(name)
        if text:
            try:
                values[attribute] = parse(text)
            except ValueError as error:
                faults.append(f"{name}: {error}")
        elif name not in _OPTIONAL:
            faults.append(f"field {name} is missing")
    in_diff = any(target.path.endswith(".mojo") for target in targets)
    if in_diff != bool(values.get("mojo_packages", in_diff)):
        faults.append(
            f"Touches-Mojo: {fields['Touches-Mojo']}, but the diff changes "
            f"{'a' if in_diff else 'no'} .mojo file"
        )
    if values.get("mojo_packages"):
        faults += [
            f"{target.path}: a patch of Mojo code changes no Python; make it "
            "a patch of its own"
            for target in targets
            if target.path.startswith(PYTHON_ROOT)
        ]
    elif "source_commits" in values:
        faults.append("Source-Commits: only a patch of Mojo code has it")
    return values, faults


def _targets(diff: str) -> tuple[Target, ...]:
    """Returns the files of a diff, those whose index line can be read."""
    found = []
    for part in re.split(r"(?m)^(?=diff --git )", diff):
        names, index = _DIFF.search(part), _INDEX.search(part)
        if names and index:
            found.append(Target(names["new"], index["before"], index["after"]))
    return tuple(found)


def _diff_faults(diff: str, context: int) -> list[str]:
    """Returns what keeps a diff from being exact, small and reviewable.

    Args:
        diff: The patch after its message.
        context: How many lines of context a change may have on each side.
    """
    if not diff:
        return ["it has no diff"]
    faults = []
    names = _DIFF.findall(diff)
    targets = _targets(diff)
    if len(targets) != len(names):
        faults.append(
            f"expected an index line for each of {len(names)} files, "
            f"found {len(targets)}"
        )
    if len({target.path for target in targets}) != len(targets):
        faults.append("a file stands twice")
    for target in targets:
        if {len(target.before), len(target.after)} != {len(NO_BLOB)}:
            faults.append(f"{target.path}: expected --full-index blob ids")
        elif target.before == target.after:
            faults.append(f"{target.path}: the patch changes nothing")
        path = Path(target.path)
        if path.is_absolute() or ".." in path.parts:
            faults.append(f"{target.path}: leaves the source tree")
    # Only the lines between files or hunks can carry git's own words.
    lines = [line for line in diff.split("\n") if line[:1] not in "+- @"]
    faults += [
        f"expected text changes only, found {line!r}"
        for line in lines
        if line.startswith(_NOT_TEXT)
        or (line.startswith("new file mode ") and not line.endswith(" 100644"))
    ]
    if re.search(r"(?m)^-- \n", diff):
        faults.append("ends with a signature (git format-patch --no-signature)")
    # A character a line: `@` and `d` start a hunk and a file, ` ` is context.
    kinds = "".join(
        line[:1] or " " for line in diff.removesuffix("\n").split("\n")
    )
    wider = " " * (context + 1)
    between = " " * (2 * context + 1)
    if re.search(rf"@{wider}|{between}|{wider}(?=\\?(?:[@d]|$))", kinds):
        allowed = "one line" if context == 1 else f"{context} lines"
        faults.append(
            f"expected {allowed} of context each side (git format-patch "
            f"-U{context}), found more"
        )
    return faults


@dataclass(frozen=True, slots=True)
class Selection:
    """What a build does with one patch, and why."""

    patch: Patch
    state: State
    reason: str


@dataclass(frozen=True, slots=True)
class Series:
    """The patches, in order."""

    patches: tuple[Patch, ...]

    @classmethod
    def load(cls, folder: Path) -> Series:
        """Reads ``series`` and every patch it names.

        Args:
            folder: A folder with a file ``series``, one patch name a line
                (``#`` starts a comment), and one ``<name>.patch`` for each.

        Raises:
            SeriesError: A line has no file, a file no line, or a patch is
                malformed.
        """
        order = folder / "series"
        try:
            lines = order.read_text().splitlines()
        except FileNotFoundError as error:
            raise SeriesError(f"{order} is missing") from error
        names = [
            name for line in lines if (name := line.partition("#")[0].strip())
        ]
        files = {path.stem for path in folder.glob("*.patch")}
        faults = [
            *(f"{n} stands twice" for n in sorted(_repeated(names))),
            *(f"{n}: no file {n}.patch" for n in names if n not in files),
            *(f"{n}.patch: not listed" for n in sorted(files - set(names))),
        ]
        if faults:
            raise SeriesError(
                f"{order} and its folder disagree:\n  " + "\n  ".join(faults),
                hint="list every patch once, by its file name without .patch",
            )
        return cls(
            tuple(
                Patch.parse(name, (folder / f"{name}.patch").read_bytes())
                for name in names
            )
        )

    def select(self, release: Version, *, source: bool) -> list[Selection]:
        """Returns what a build for a release does with each patch, in order.

        Args:
            release: The MAX version that is patched.
            source: Whether MAX's sources are there, and so its Mojo code.
        """
        return [
            Selection(patch, *_decide(patch, release, source))
            for patch in self.patches
        ]

    def check_used(self, releases: Iterable[Version]) -> None:
        """Raises SeriesError for a patch that no release selects."""
        bases = list(releases)
        unused = [
            f"{patch.name}: Applies-To {patch.applies_to}, "
            f"Upstream-Status {patch.upstream_status}"
            for patch in self.patches
            if not any(
                _decide(patch, base, True)[0] is State.APPLIED for base in bases
            )
        ]
        if unused:
            raise SeriesError(
                f"no release ({', '.join(map(str, bases))}) selects:\n  "
                + "\n  ".join(unused),
                hint="correct the range, or drop the patch",
            )


def _repeated(names: Sequence[str]) -> set[str]:
    return {name for name in names if names.count(name) > 1}


def _decide(patch: Patch, release: Version, source: bool) -> tuple[State, str]:
    """Returns a patch's state for a release and the reason."""
    first = patch.first_release_with_it
    if first and first <= Version(release.base_version):
        return State.LANDED, f"upstream has it since {first}"
    if not covers(patch.applies_to, release):
        return (
            State.NOT_FOR_RELEASE,
            f"Applies-To {patch.applies_to} excludes {release}",
        )
    if patch.mojo_packages and not source:
        return (
            State.SOURCE_ONLY,
            "changes Mojo code, which a wheel carries only compiled",
        )
    return State.APPLIED, patch.subject
