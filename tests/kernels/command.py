# SPDX-License-Identifier: Apache-2.0
"""What the command lines of the checks have in common."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max.driver import (
    set_virtual_cpu_target,
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)
from max.engine import InferenceSession

if TYPE_CHECKING:
    from max.graph import Graph


class Parser(argparse.ArgumentParser):
    """Takes ``--output``, ``--mefs``, and ``--cpu`` or ``--compile``."""

    def __init__(self, description: str | None, **cpu: str) -> None:
        """Makes the parser.

        Args:
            description: The check's docstring.
            cpu: How ``--cpu`` is taken, as ``add_argument`` has it.
        """
        super().__init__(
            description=description,
            formatter_class=argparse.RawTextHelpFormatter,
        )
        self.add_argument(
            "--output",
            type=Path,
            help="written after every part, instead of printing",
        )
        self.other = self.add_mutually_exclusive_group()
        self.other.add_argument(
            "--cpu", help="compare on the CPU, and nothing else", **cpu
        )
        self.other.add_argument(
            "--compile",
            metavar="ARCH",
            help="compile for a GPU that need not be there, such as sm_90a",
        )
        self.add_argument(
            "--mefs",
            type=Path,
            help="with --compile, a folder to put the compiled graphs into; "
            "without, one to take them from, maybe on another machine",
        )

    def arguments(self) -> argparse.Namespace:
        """Parses the command line, and does what ``--mefs`` says."""
        arguments = self.parse_args()
        if arguments.mefs:
            use_graphs(arguments.mefs, made=bool(arguments.compile))
        return arguments


def pretend(architecture: str) -> None:
    """Lets MAX compile for a GPU that is not there."""
    set_virtual_device_api("cuda")
    set_virtual_device_target_arch(architecture)
    set_virtual_device_count(1)


def use_graphs(folder: Path, *, made: bool) -> None:
    """Keeps compiled graphs in a folder, or takes them from it.

    Graphs that are not in it are compiled. MAX 26.7 and later.

    Args:
        folder: The folder.
        made: Whether graphs are put into it.
    """
    from max.engine._precompiled_mefs import MefStore, _fingerprint

    def name(graph: Graph) -> str:
        return f"{graph.name}-{_fingerprint(graph)[:16]}.mef"

    def found(graph: Graph) -> str | None:
        return name(graph) if (folder / name(graph)).exists() else None

    if made:
        # So that the other machine's CPU has all that is used.
        set_virtual_cpu_target("x86-64-v3")
        InferenceSession.default_mef_store = MefStore.for_export(
            folder, key=name
        )
    else:
        InferenceSession.default_mef_store = MefStore.for_import(
            folder, key=found
        )


def put(result: dict[str, Any], output: Path | None) -> None:
    """Writes a result to a file, or prints it."""
    text = json.dumps(result, indent=1)
    if output:
        output.write_text(text + "\n")
    else:
        print(text)
