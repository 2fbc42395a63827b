# SPDX-License-Identifier: Apache-2.0
"""The plain wheel: the overlay's architectures, for a MAX as released.

It holds nothing of MAX. Architectures import each other's modules by relative
imports, so that the same files serve under ``max.pipelines.architectures`` in
the patched wheel and under ``attnquant`` in this one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from . import wheel
from .errors import OverlayError
from .overlay import OverlayPackage

NAME = "attnquant"
"""Of the wheel and of its one top-level package."""

_ARCHITECTURES = "pipelines/architectures/"
_OURS = "max.pipelines.architectures.attnquant"
_INIT = '''\
# SPDX-License-Identifier: Apache-2.0
"""AttnQuant for a MAX as released: ``--custom-architectures attnquant``."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """Loads ``ARCHITECTURES`` when MAX asks; the tools need no MAX."""
    if name != "ARCHITECTURES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .attnquant_common.untouched import architectures

    return globals().setdefault(name, architectures(__name__))
'''
_NOTICE = """
This wheel holds our own work under the Apache License 2.0 (LICENSE), and
nothing of Modular MAX.
"""


def is_plain(path: Path) -> bool:
    """Says whether a wheel is a plain one, by its name."""
    return path.name.startswith(f"{NAME}-")


@dataclass(frozen=True, slots=True)
class Plain:
    """The plain wheel that a build makes beside that of ``max``."""

    number: int
    """The series' number, which is its version."""

    packages: Sequence[OverlayPackage]
    """The architectures that it holds, and what they share."""

    requires_python: str

    @classmethod
    def of(
        cls,
        packages: Sequence[OverlayPackage],
        number: int,
        requires_python: str,
    ) -> Plain | None:
        """Returns the plain wheel of a release, if there is one.

        Args:
            packages: The overlay packages that the release's wheel carries.
            number: The series' number.
            requires_python: The range of Pythons that they are written for.
        """
        held = [p for p in packages if p.name.startswith(_ARCHITECTURES)]
        return cls(number, held, requires_python) if held else None

    @property
    def filename(self) -> str:
        """Its file name."""
        return f"{NAME}-{self.number}-py3-none-any.whl"

    def pack(self, root: Path, folder: Path) -> Path:
        """Writes the wheel.

        Args:
            root: The folder that holds ``LICENSE`` and ``NOTICE``.
            folder: The folder to write it to.

        Returns:
            Its path.
        """
        path = folder / self.filename
        wheel.write(path, {**self._code(), **self._description(root)})
        return path

    def check(self, path: Path) -> None:
        """Checks the wheel that was written.

        Raises:
            OverlayError: A module imports what would not be there.
            WheelError: It isn't true to its metadata.
        """
        wheel.check(path)
        if faults := sorted(_faults(self._code())):
            raise OverlayError(
                f"{self.filename} would not import:\n  " + "\n  ".join(faults),
                hint="import other architectures' modules by relative "
                "imports, and MAX's by their full names",
            )

    def _code(self) -> dict[str, bytes]:
        """Returns content by member of the package."""
        prefix = f"max/{_ARCHITECTURES}"
        moved = {
            f"{NAME}/{member.removeprefix(prefix)}": data
            for package in self.packages
            for member, data in package.files.items()
        }
        return {f"{NAME}/__init__.py": _INIT.encode(), **moved}

    def _description(self, root: Path) -> dict[str, bytes]:
        """Returns content by member of ``.dist-info``, RECORD aside."""
        applies_to = SpecifierSet()
        for package in self.packages:
            applies_to &= package.applies_to
        # The rest of NOTICE is about the repository and the wheels of MAX.
        holders, _, _ = (root / "NOTICE").read_text().partition("\n\n")
        info = f"{NAME}-{self.number}.dist-info"
        metadata = [
            "Metadata-Version: 2.4",
            f"Name: {NAME}",
            f"Version: {self.number}",
            "Summary: AttnQuant's architectures for Modular MAX as released",
            "License-Expression: Apache-2.0",
            "License-File: LICENSE",
            "License-File: NOTICE",
            f"Requires-Python: {self.requires_python}",
            f"Requires-Dist: max[serve]{applies_to}",
        ]
        description = [
            "Wheel-Version: 1.0",
            "Generator: maxpatch",
            "Root-Is-Purelib: true",
            "Tag: py3-none-any",
        ]
        return {
            f"{info}/METADATA": "\n".join([*metadata, ""]).encode(),
            f"{info}/WHEEL": "\n".join([*description, ""]).encode(),
            f"{info}/licenses/LICENSE": (root / "LICENSE").read_bytes(),
            f"{info}/licenses/NOTICE": f"{holders}\n{_NOTICE}".encode(),
        }


def _faults(code: Mapping[str, bytes]) -> Iterator[str]:
    """Yields the imports that would find nothing in the wheel."""
    modules = {
        member.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for member in code
        if member.endswith(".py")
    }
    for member, data in code.items():
        if not member.endswith(".py"):
            continue
        package = member.split("/")[:-1]
        try:
            nodes = list(ast.walk(ast.parse(data)))
        except (SyntaxError, ValueError) as error:
            yield f"{member}: {error}"
            continue
        for node in nodes:
            if not isinstance(node, ast.ImportFrom):
                continue
            name = "." * node.level + (node.module or "")
            if node.level:
                kept = package[: max(len(package) - node.level + 1, 0)]
                wanted = ".".join([*kept, *filter(None, [node.module])])
                wrong = wanted not in modules
            else:
                wrong = name.startswith(_OURS)
            if wrong:
                yield f"{member}:{node.lineno}: {name}"
