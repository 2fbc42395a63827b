# SPDX-License-Identifier: Apache-2.0
"""The builder's modules stand in one order and import only upwards."""

from __future__ import annotations

import ast
from pathlib import Path

import maxpatch

ORDER = (
    "errors",
    "process",
    "git",
    "hunks",
    "release",
    "series",
    "wheel",
    "checkout",
    "overlay",
    "plain",
    "provenance",
    "mojo",
    "compiler",
    "verify",
    "build",
    "__main__",
)
FOLDER = Path(maxpatch.__path__[0])


def imported(module: str) -> set[str]:
    """Returns the modules of the package that a module imports."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names |= (
                {node.module} if node.module else {a.name for a in node.names}
            )
    return names


def test_every_module_has_its_place() -> None:
    """A new module is put into the order."""
    found = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert found == set(ORDER)


def test_modules_import_only_what_stands_above_them() -> None:
    """There are no cycles, and no module knows those that use it."""
    wrong = {
        module: below
        for place, module in enumerate(ORDER)
        if (below := imported(module) - set(ORDER[:place]))
    }
    assert wrong == {}


def test_only_the_doors_start_other_programs() -> None:
    """subprocess is imported by `process` alone, and git run by `git`."""
    users = [
        path.stem
        for path in FOLDER.glob("*.py")
        if "import subprocess" in path.read_text()
    ]
    assert users == ["process"]
