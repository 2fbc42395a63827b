# SPDX-License-Identifier: Apache-2.0
"""How fast a bfloat16 matrix is quantized to NVFP4 on this machine's CPU.

Arms: ours, by the kernel (round-to-nearest and sweep) and in numpy; ModelOpt
and torchao where they can be imported; and numpy's copy of the same bytes, the
limit. All but ours get a share of the matrix's rows where a turn would take
long, as the table says. The arms take turns, and ratios are of one turn, since
the machine's own speed drifts; compile and first call are left out.

Needs MAX 26.7. From the repository's root::

    python -m tests.benchmarks.bench_nvfp4 [--turns N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from tests.attnquant.nvfp4_cases import Bits, bfloat16

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "overlay" / "pipelines" / "architectures"))

from attnquant_common import nvfp4  # noqa: E402
from attnquant_common.tensor import Tensor  # noqa: E402

PACKAGES = ("max", "numpy", "nvidia-modelopt", "torchao", "torch")
PEER_ROWS = 128
"""Rows that a torch peer gets at a time; all at once it is slower."""


@dataclass
class Arm:
    """Something that is timed, on the first of a matrix's rows."""

    run: Callable[[Bits], object]
    rows: int


def arms(rows: int) -> dict[str, Arm]:
    """What is timed, by name."""
    some = min(rows, 512)
    copied: dict[tuple[int, ...], Bits] = {}

    def copy(w: Bits) -> None:
        np.copyto(copied.setdefault(w.shape, np.empty_like(w)), w)

    def ours(scales: nvfp4.Scales) -> Callable[[Bits], object]:
        return lambda w: nvfp4.quantize(Tensor(w, "BF16"), scales=scales)

    def numpy(scales: nvfp4.Scales) -> Callable[[Bits], object]:
        return lambda w: nvfp4.quantize_numpy(Tensor(w, "BF16"), scales=scales)

    return {
        "numpy copy": Arm(copy, rows),
        "kernel, rtn": Arm(ours("rtn"), rows),
        "kernel, sweep": Arm(ours("sweep"), rows),
        "numpy, rtn": Arm(numpy("rtn"), some),
        "numpy, sweep": Arm(numpy("sweep"), min(rows, 64)),
        **{name: Arm(run, some) for name, run in peers().items()},
    }


def peers() -> dict[str, Callable[[Bits], object]]:
    """The torch implementations that can be imported, on one thread each.

    They are slower with more threads on chunks that fit a processor's cache.
    """
    found: dict[str, Callable[[Bits], object]] = {}
    try:
        import torch
    except ImportError:
        return found
    torch.set_num_threads(1)

    def by_chunk(
        quantize: Callable[[Any, Any], object],
    ) -> Callable[[Bits], object]:
        def run(w: Bits) -> None:
            tensor = torch.from_numpy(w.view(np.int16)).view(torch.bfloat16)
            scale_2 = tensor.abs().amax().float() / (6 * 448)
            for chunk in tensor.split(PEER_ROWS):
                quantize(chunk, scale_2)

        return run

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from modelopt.torch.quantization.qtensor.nvfp4_tensor import (
                NVFP4QTensor,
            )

            found["modelopt"] = by_chunk(
                lambda w, scale_2: NVFP4QTensor.quantize(
                    w, 16, weights_scaling_factor_2=scale_2
                )
            )
        except ImportError:
            pass
        try:
            from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

            found["torchao"] = by_chunk(
                lambda w, scale_2: nvfp4_quantize(w, 16, scale_2)
            )
        except ImportError:
            pass
    return found


def measure(w: Bits, turns: int) -> dict[str, dict[str, Any]]:
    """GB/s of bfloat16 input of every arm, and its ratios to the copy's."""
    timed = arms(len(w))
    rates: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(turns + 1):
        for name, arm in timed.items():
            part = w[: arm.rows]
            start = time.perf_counter()
            arm.run(part)
            took = time.perf_counter() - start
            if turn:
                rates[name].append(part.nbytes / took / 1e9)
    return {
        name: {
            "rows": timed[name].rows,
            "GB/s": values,
            "of copy": [
                value / copy
                for value, copy in zip(values, rates["numpy copy"], strict=True)
            ],
            "to kernel, rtn": [
                value / kernel
                for value, kernel in zip(
                    values, rates["kernel, rtn"], strict=True
                )
            ],
        }
        for name, values in rates.items()
    }


def spread(values: list[float]) -> str:
    """Median, and least to greatest."""
    middle = statistics.median(values)
    return f"{middle:.3g} ({min(values):.3g} to {max(values):.3g})"


def table(found: dict[str, dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        "| arm | rows | GB/s of bfloat16 | of the copy | kernel is faster by |",
        "| --- | --: | --- | --- | --- |",
    ]
    for name, arm in found.items():
        faster = [1 / ratio for ratio in arm["to kernel, rtn"]]
        columns = (arm["GB/s"], arm["of copy"], faster)
        lines.append(
            f"| {name} | {arm['rows']} | "
            + " | ".join(spread(values) for values in columns)
            + " |"
        )
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Versions of what took part."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Runs the turns and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="5376x21504")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    n, k = map(int, options.shape.split("x"))
    w = bfloat16(np.random.default_rng(0).standard_normal((n, k), np.float32))
    found = measure(w, options.turns)
    machine = {
        "shape": [n, k],
        "cores": len(os.sched_getaffinity(0)),
        "turns": options.turns,
        "versions": versions(),
    }
    if options.json:
        text = json.dumps({**machine, "arms": found}, indent=1)
        options.json.write_text(text + "\n")
    named = ", ".join(f"{name} {v}" for name, v in machine["versions"].items())
    print(f"{n}x{k}, {machine['cores']} cores, {options.turns} turns; {named}")
    print("median (least to greatest)\n")
    print(table(found))


if __name__ == "__main__":
    main()
