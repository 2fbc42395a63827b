# SPDX-License-Identifier: Apache-2.0
"""What a patched wheel says about itself: version, provenance, notice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from .errors import WheelError
from .overlay import OverlayPackage
from .release import Release, WheelPin
from .series import Patch
from .wheel import Wheel

FILENAME = "maxpatch.json"
"""The provenance's name in ``.dist-info``."""

LAYOUT = 1
"""Raised when the same inputs make a different wheel."""

_ATTRIBUTION = (
    "MAX is licensed by Modular Inc under the Modular MAX Community License "
    "and has been modified by {who}. Copyright Modular Inc IN NO EVENT SHALL "
    "MODULAR INC BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER "
    "IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN "
    "CONNECTION WITH USE OF MAX OR ANY DERIVATIVE WORK THEREOF."
)
"""Required word for word by section 1.1.4 of the wheel's LICENSE (26.7.0)."""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def version(
    release: Release,
    number: int,
    pin: WheelPin,
    patches: Sequence[Patch],
    overlay: Sequence[OverlayPackage],
    mojo: Mapping[str, str] | None = None,
) -> str:
    """Returns the patched wheel's version, ``26.7.0+attnquant.1.g1a2b3c4d``.

    The digest covers whatever decides the wheel's content: the base wheel, the
    patches and their order, the overlay, compiler and sources of rebuilt Mojo
    packages. A change of any is a new version, so that an installer never
    takes a changed wheel for the one it has.

    Args:
        release: The MAX release.
        number: The series' number.
        pin: The base wheel.
        patches: The patches that change the wheel, in order.
        overlay: The overlay packages that it carries.
        mojo: The digest of the sources, by rebuilt Mojo package.
    """
    inputs: dict[str, Any] = {
        "layout": LAYOUT,
        "base": pin.sha256,
        "patches": [[patch.name, patch.sha256] for patch in patches],
        "overlay": {
            member: _sha256(data)
            for package in overlay
            for member, data in sorted(package.files.items())
        },
    }
    if mojo:
        inputs["mojo"] = {"compiler": release.mojo_compiler, **mojo}
    digest = _sha256(json.dumps(inputs, sort_keys=True).encode())
    return f"{release.version}+attnquant.{number}.g{digest[:8]}"


def document(
    release: Release,
    version: str,
    pin: WheelPin,
    patches: Sequence[Patch],
    *,
    before: Mapping[str, bytes],
    changed: Mapping[str, bytes | None],
    added: Mapping[str, bytes],
    mojo: Mapping[str, str] | None = None,
) -> bytes:
    """Returns the provenance, as JSON.

    Args:
        release: The MAX release.
        version: The patched wheel's version.
        pin: The base wheel.
        patches: The applied patches, in order.
        before: The base's content by changed member.
        changed: New content by changed member; None for a removed one.
        added: Content by new member, of patches and overlay.
        mojo: The digest of the sources, by rebuilt Mojo package.
    """
    files = [
        {
            "path": member,
            "before": _sha256(before[member]) if member in before else None,
            "after": None if data is None else _sha256(data),
        }
        for member, data in sorted({**changed, **added}.items())
    ]
    table: dict[str, Any] = {
        "layout": LAYOUT,
        "release": str(release.version),
        "version": version,
        "base": {"filename": pin.filename, "sha256": pin.sha256},
        "patches": [
            {"name": p.name, "sha256": p.sha256, "subject": p.subject}
            for p in patches
        ],
        "files": files,
    }
    if mojo:
        table["mojo"] = {
            "compiler": release.mojo_compiler,
            "sources": dict(sorted(mojo.items())),
        }
    return json.dumps(table, indent=2).encode() + b"\n"


def read(path: Path) -> dict[str, Any]:
    """Returns the provenance of a built wheel.

    Raises:
        WheelError: It has none.
    """
    with Wheel(path) as wheel:
        member = f"{wheel.dist_info}/{FILENAME}"
        if all(info.filename != member for info in wheel.infos):
            raise WheelError(
                f"{path.name} was not built here: expected {member} in it"
            )
        table: dict[str, Any] = json.loads(wheel.read(member))
        return table


def files(path: Path) -> dict[str, str | None]:
    """Returns what a built wheel says isn't as in its base.

    Returns:
        SHA-256 in hex by changed or added member; None for a removed one.
    """
    return {row["path"]: row["after"] for row in read(path)["files"]}


def notice(
    release: Release,
    patches: Sequence[Patch],
    changed: Sequence[str],
    added: Sequence[str],
) -> bytes:
    """Returns the NOTICE of a patched wheel: attribution and modifications."""
    if release.redistributable:
        attribution = _ATTRIBUTION.format(who="the MAX AttnQuant patch series")
    else:
        attribution = (
            f"MAX {release.version} is licensed by Modular. Its LICENSE does "
            "not let the wheel be passed on outside an application: keep this "
            "one to yourself."
        )
    blocks = [
        f"MAX {release.version}, modified by the MAX AttnQuant patch series",
        attribution,
        "The terms are in the file LICENSE beside this one; the notices of "
        "MAX's own components are in Third-Party-Notices. This wheel is not "
        "a product of Modular Inc, nor endorsed by it.",
    ]
    paragraphs = [fill(block, 79) for block in blocks]
    for title, lines in (
        ("Patches applied:", [f"{p.name}: {p.subject}" for p in patches]),
        ("Files of MAX that were modified:", sorted(changed)),
        ("Files that were added:", sorted(added)),
    ):
        listed = [f"  {line}" for line in lines] or ["  none"]
        paragraphs.append("\n".join([title, *listed]))
    paragraphs.append(
        fill(
            f"Digests of all of them are in {FILENAME}. The added files are "
            "under the Apache License 2.0.",
            79,
        )
    )
    return "\n\n".join(paragraphs).encode() + b"\n"
