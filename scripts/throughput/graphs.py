# SPDX-License-Identifier: Apache-2.0
"""Graphs that are compiled on one machine and served on another.

MAX compiles a model for minutes, for which no GPU is needed. With
`--compile-for TARGET --mefs DIR` a program compiles its arms' graphs, and with
`--mefs DIR` alone its servers take them from there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from throughput.server import Arm, MeasureError

# The host's part of the code must run on the other machine's CPU, too.
_WARM_CACHE = """
import sys
from max._entrypoints.pipelines import main
from max.driver import set_virtual_cpu_target
set_virtual_cpu_target("x86-64-v3")
sys.argv[0] = "max"
main()
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--mefs` and `--compile-for`."""
    parser.add_argument(
        "--mefs",
        type=Path,
        help="folder of compiled graphs, with a folder for each `Arm.graphs`",
    )
    parser.add_argument(
        "--compile-for",
        metavar="TARGET",
        help="compile them into --mefs for a GPU that need not be here, such "
        "as cuda:sm_90a, and measure nothing",
    )


def served(
    arms: Sequence[Arm], args: argparse.Namespace, flags: Sequence[str]
) -> list[Arm]:
    """Returns the arms as they are served; or compiles their graphs and exits.

    MAX finds a compiled graph by its name and signature, so that arms whose
    graphs differ otherwise need folders of their own.

    Args:
        arms: The arms.
        args: The parsed arguments.
        flags: Flags of `max serve` that every arm has.

    Raises:
        MeasureError: If graphs cannot be compiled, or have no folder.
        SystemExit: After compiling.
    """
    if args.mefs is None:
        if args.compile_for:
            raise MeasureError("--compile-for needs --mefs, a folder")
        return list(arms)
    if args.compile_for:
        for arm in {arm.graphs: arm for arm in arms}.values():
            _compile(arm, args.model, flags, args.mefs, args.compile_for)
        raise SystemExit(0)
    missing = {a.graphs for a in arms if not (args.mefs / a.graphs).is_dir()}
    if missing:
        raise MeasureError(
            f"{args.mefs} has no {', '.join(sorted(missing))}; make it by "
            "--compile-for"
        )
    return [
        replace(
            arm,
            flags=(
                *arm.flags,
                *("--precompiled-mefs", str(args.mefs / arm.graphs)),
            ),
        )
        for arm in arms
    ]


def _compile(
    arm: Arm, model: Path, flags: Sequence[str], mefs: Path, target: str
) -> None:
    folder, part = mefs / arm.graphs, mefs / f"{arm.graphs}.part"
    if folder.is_dir():
        print(f"{folder} is there", flush=True)
        return
    print(f"{folder}: compiling, which takes minutes", flush=True)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    log = mefs / f"{arm.graphs}.log"
    with log.open("wb") as output:
        done = subprocess.run(
            [
                *(arm.python, "-c", _WARM_CACHE, "warm-cache"),
                *("--model", str(model), "--target", target),
                *("--export-mefs", str(part)),
                *flags,
            ],
            env=arm.environment({"HF_HUB_OFFLINE": "1"}),
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        tail = log.read_text(errors="replace")[-2000:]
        raise MeasureError(
            f"{arm.graphs}: warm-cache ended with exit code {done.returncode}; "
            f"the log {log} ends:\n{tail}"
        )
    part.rename(folder)
