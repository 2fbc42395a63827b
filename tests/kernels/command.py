# SPDX-License-Identifier: Apache-2.0
"""What the command lines of the checks have in common."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from max.driver import (
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)


class Parser(argparse.ArgumentParser):
    """Takes ``--output``, and one of ``--cpu`` and ``--compile``."""

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


def pretend(architecture: str) -> None:
    """Lets MAX compile for a GPU that is not there."""
    set_virtual_device_api("cuda")
    set_virtual_device_target_arch(architecture)
    set_virtual_device_count(1)


def put(result: dict[str, Any], output: Path | None) -> None:
    """Writes a result to a file, or prints it."""
    text = json.dumps(result, indent=1)
    if output:
        output.write_text(text + "\n")
    else:
        print(text)
