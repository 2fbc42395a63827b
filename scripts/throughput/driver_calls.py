# SPDX-License-Identifier: Apache-2.0
"""Counts a server's calls of the CUDA driver, by a preloaded library.

`driver_calls.c` says which calls and how.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections import Counter
from pathlib import Path

from throughput.server import MeasureError

SOURCE = Path(__file__).with_suffix(".c")
LAUNCHES = ("cuLaunchKernel", "cuLaunchKernelEx")
"""The functions that launch a kernel."""

_ENTRY = struct.Struct("24sQ")


def build(folder: Path, *, launches: bool = False) -> Path:
    """Compiles the library with `cc`.

    Args:
        folder: An existing folder to write to.
        launches: Whether the library counts `LAUNCHES`, too.

    Returns:
        The library.

    Raises:
        MeasureError: If there is no `cc`, or it fails.
    """
    library = folder / "driver_calls.so"
    # -O2 makes the jump in dlsym.
    command = ["cc", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
    if launches:
        command.append("-DLAUNCHES")
    try:
        subprocess.run(
            [*command, "-o", library, SOURCE],
            check=True,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError as error:
        raise MeasureError(
            "counting driver calls needs a C compiler named cc, and none is "
            "on the PATH; install gcc or clang"
        ) from error
    except subprocess.CalledProcessError as error:
        raise MeasureError(
            f"cc cannot compile {SOURCE}:\n{error.stderr}"
        ) from error
    return library


def environment(library: Path, counts: Path) -> dict[str, str]:
    """Returns the variables under which a process and its children count.

    Args:
        library: What `build` returned.
        counts: An existing folder, for one file a process.
    """
    others = os.environ.get("LD_PRELOAD")
    return {
        "LD_PRELOAD": f"{library}:{others}" if others else str(library),
        "DRIVER_CALLS": str(counts),
    }


def read(counts: Path) -> dict[str, int]:
    """Returns the calls so far of all processes, by function.

    Args:
        counts: The folder that `environment` names.

    Raises:
        MeasureError: If no process has asked the driver for any of the
            functions.
    """
    total: Counter[str] = Counter()
    for file in counts.iterdir():
        for name, calls in _ENTRY.iter_unpack(file.read_bytes()):
            total[name.rstrip(b"\0").decode()] += calls
    if not total:
        raise MeasureError(
            "no process of the server has looked up a CUDA driver function "
            f"under the counting library (no files in {counts}), so nothing "
            "is known of its calls"
        )
    return dict(total)
