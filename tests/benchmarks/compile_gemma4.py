# SPDX-License-Identifier: Apache-2.0
"""Compiles Gemma 4's graphs for a GPU that need not be there.

For the interpreter of an environment that holds MAX and what the toys need:

    ATTNQUANT_QUANT=nvfp4 python -m tests.benchmarks.compile_gemma4 \
        --python ENV/bin/python --size 31b --output compile.json

The checkpoint has a header and no bytes, so the 31B takes no room on the disk.
The text model and the vision tower are compiled together, or with `--drafter`
the text model, the drafter and the tower. The compile cache is a new folder.
Written are the seconds, the CPU seconds and the peak memory of `max
warm-cache`, and what it logs of AttnQuant.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.toys import gemma4

_MTP = ("--speculative-method", "mtp", "--num-speculative-tokens", "3")
_SAID = re.compile(r"AttnQuant: \w+, .*")


def compile_graphs(
    python: Path, size: str, target: str, folder: Path, *, drafter: bool
) -> dict[str, Any]:
    """Compiles a size's graphs, under this process's variables `ATTNQUANT*`.

    Args:
        python: The interpreter that has MAX.
        size: Of `gemma4.SHAPES`.
        target: As `max warm-cache` takes it, such as `cuda:sm_100a`.
        folder: An empty folder for checkpoints, cache and log.
        drafter: Whether the drafter is compiled, too.

    Returns:
        What is written.

    Raises:
        RuntimeError: If MAX fails; the message ends with its log's end.
    """
    gemma4.write_checkpoint(folder / "model", size=size, sparse=True)
    flags = ["--model", folder / "model", "--target", target]
    flags += ["--max-length", "1024", "--max-batch-size", "8"]
    if drafter:
        gemma4.write_drafter(folder / "draft", size=size, sparse=True)
        flags += [*_MTP, "--draft-model-path", folder / "draft"]
    log = folder / "log"
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", "max._entrypoints.pipelines", "warm-cache", *flags],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "MODULAR_MAX_CACHE_DIR": str(folder / "cache"),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        # Of this process and its own alone, whatever else the caller ran.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - start
    text = log.read_text(errors="replace")
    if process.returncode:
        raise RuntimeError(
            f"max warm-cache ended with exit code {process.returncode}:\n"
            f"{text[-3000:]}"
        )
    said = _SAID.search(text)
    return {
        "size": size,
        "target": target,
        "drafter": drafter,
        "attnquant": said[0] if said else None,
        "seconds": round(seconds),
        "cpu_seconds": round(used.ru_utime + used.ru_stime),
        "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 1),
        "cores": os.cpu_count(),
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--python", type=Path, default=Path(sys.executable))
    add("--size", choices=gemma4.SHAPES, default="31b")
    add("--target", default="cuda:sm_100a")
    add("--drafter", action="store_true")
    add("--output", type=Path, help="JSON, instead of printing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compile_graphs(
            args.python,
            args.size,
            args.target,
            Path(folder),
            drafter=args.drafter,
        )
    text = json.dumps(found, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
