# SPDX-License-Identifier: Apache-2.0
"""Renders what the checks of the sampling kernels measured, as Markdown.

python -m tests.kernels.report small-k.json sampling.json nvfp4.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def small_k(found: Mapping[str, Any]) -> str:
    """The times of ``check_small_k``, and how its draws fit the rule."""
    lines = [
        "| rows, vocabulary, k | built-in, us | ours, us | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for shape, times in found["timing"].items():
        theirs, ours = times["builtin"], times["overlay"]
        words = [word.partition("=")[2] for word in shape.split()]
        ratio = ours["median"] / theirs["median"]
        lines.append(
            f"| {', '.join(words)} | {_cell(theirs)} | {_cell(ours)} | "
            f"{ratio:.2f} |"
        )
    lines += [
        "",
        "| draws | tokens | built-in, p-value | ours, p-value |",
        "| --- | --- | --- | --- |",
    ]
    for case in found["distribution"]:
        values = [f"{case[x]['p_value']:.2g}" for x in ("builtin", "overlay")]
        lines.append(
            f"| {case['case']} | {case['tokens']} | {' | '.join(values)} |"
        )
    return "\n".join(lines)


def no_wait(found: Mapping[str, Any]) -> str:
    """The times of ``check_fused_token_sampling``."""
    lines = [
        "| k, rows, vocabulary | built-in, us | ours, us | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for shape, times in found["timing"].items():
        theirs = times["builtin"]["device_us"]
        ours = times["overlay"]["device_us"]
        words = [word.partition("=")[2] for word in shape.split()]
        ratio = ours["median"] / theirs["median"]
        lines.append(
            f"| {', '.join(words)} | {_cell(theirs)} | {_cell(ours)} | "
            f"{ratio:.2f} |"
        )
    lines += ["", "| call behind 18 ms of work | returns after, ms |"]
    lines.append("| --- | --- |")
    for arm, calls in found["waiting"].items():
        values = sorted(call["call_ms"] for call in calls)
        lines.append(f"| {arm} | {values[0]:.2f} to {values[-1]:.2f} |")
    return "\n".join(lines)


def nvfp4(found: Mapping[str, Any]) -> str:
    """The times of ``check_nvfp4_quantize``, and how many codes were right."""
    lines = [
        "| weight | copy, us | largest, us | rtn, us | rtn, of copy | "
        "largest and rtn, of copy | sweep, us |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for shape, times in found["timing"].items():
        copy, amax, rtn, sweep = (
            _cell(times[arm]) for arm in ("copy", "amax", "rtn", "sweep")
        )
        alone, both = times["rtn, of copy"], times["amax and rtn, of copy"]
        lines.append(
            f"| {shape} | {copy} | {amax} | {rtn} | {alone:.2f} | {both:.2f} | "
            f"{sweep} |"
        )
    return "\n".join(lines)


def _cell(times: Mapping[str, Any]) -> str:
    low, high = times["range"]
    return f"{times['median']:.1f} [{low:.1f}, {high:.1f}]"


RENDERED = small_k, no_wait, nvfp4


def main() -> None:
    """Runs the command line."""
    for path, render in zip(sys.argv[1:], RENDERED, strict=True):
        print(render(json.loads(Path(path).read_text())), end="\n\n")


if __name__ == "__main__":
    main()
