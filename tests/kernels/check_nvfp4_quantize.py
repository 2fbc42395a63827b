# SPDX-License-Identifier: Apache-2.0
"""Compares the NVFP4 kernels with their numpy form, and times them.

Needs MAX 26.7, patched or not. On a GPU, from the repository's root::

    python -m tests.kernels.check_nvfp4_quantize --output nvfp4.json

Exit status 1 if what must hold does not; ``failures`` in the JSON names it.
Times are of the device, of calls on inputs that follow each other, which are
together larger than its cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import (
    CPU,
    Accelerator,
    Buffer,
    Device,
)
from max.dtype import DType
from tests.attnquant.nvfp4_cases import bfloat16, cases, float32, tiny
from tests.kernels.command import Parser, pretend, put
from tests.kernels.timing import race

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "overlay" / "pipelines" / "architectures"))

from attnquant_common import nvfp4  # noqa: E402
from attnquant_common.kernels.nvfp4 import (  # noqa: E402
    NVFP4Kernels,
    kernels_of,
)
from attnquant_common.tensor import Tensor  # noqa: E402

SHAPES = [(5376, 21504), (43008, 5376), (8192, 5376), (6912, 1152)]
ENOUGH = 1 << 29
"""Bytes of input to go through in turn, far more than a GPU's cache."""


@dataclasses.dataclass
class Check:
    """A device, and what was found that must not be."""

    device: Device
    failures: list[str] = dataclasses.field(default_factory=list)

    @property
    def kernels(self) -> NVFP4Kernels:
        """The device's kernels."""
        return kernels_of(self.device)

    def equal(self) -> dict[str, int]:
        """Codes, scales and scale of scales are numpy's, to the bit."""
        compared = unequal = 0
        for name, bits in [*cases(), *tiny()]:
            values = float32(bits)
            if abs(values).max() < 1e38:
                values = values * np.float32(1.1)
            for w, scales, factor in itertools.product(
                (Tensor(bits, "BF16"), Tensor(values, "F32")),
                ("rtn", "sweep"),
                # Beyond 2^50 the GPU divides in another way.
                (None, 1e-3, 7.0, 2.0**55),
            ):
                ours = nvfp4.quantize(
                    w, scales=scales, weight_scale_2=factor, device=self.device
                )
                theirs = nvfp4.quantize_numpy(
                    w, scales=scales, weight_scale_2=factor
                )
                compared += 1
                if (
                    ours.weight_scale_2 != theirs.weight_scale_2
                    or (ours.weight_scale != theirs.weight_scale).any()
                    or (ours.weight != theirs.weight).any()
                ):
                    unequal += 1
                    self.failures.append(
                        f"equal: {name}, {w.dtype}, {scales}, {factor}"
                    )
        return {"compared": compared, "unequal": unequal}

    def not_finite(self) -> dict[str, int]:
        """NaN and infinity are errors at any place, and of either sign."""
        raised = silent = 0
        for bits, place, factor in itertools.product(
            (0x7F80, 0xFF80, 0x7FC0, 0xFF81), (0, 700, 1039), (None, 1.0)
        ):
            w = bfloat16(np.ones((5, 1040)))
            w[3, place] = bits
            try:
                nvfp4.quantize(
                    Tensor(w, "BF16"), weight_scale_2=factor, device=self.device
                )
            except ValueError as error:
                raised += f"[3, {place}]" in str(error)
            else:
                silent += 1
        if silent or raised != 24:
            self.failures.append("not finite: no error, or of another place")
        return {"raised": raised, "silent": silent}

    def timing(self) -> dict[str, Any]:
        """Microseconds a matrix, and bandwidth against a copy's.

        A copy reads the matrix and writes it; quantizing, with the search for
        the greatest weight, reads it twice and writes 9/32 of a bfloat16
        matrix. Bandwidths count the bytes of the matrix once.
        """
        found: dict[str, Any] = {}
        for n, k in SHAPES:
            count = max(2, ENOUGH // (n * k * 2))
            host = bfloat16(
                np.random.default_rng(0).standard_normal((n, k), np.float32)
            )
            inputs = [
                Buffer.from_numpy(host)
                .view(DType.bfloat16, (n, k))
                .to(self.device)
                for _ in range(count)
            ]
            target = Buffer(DType.bfloat16, (n, k), self.device)
            factor = nvfp4.scale_2(self.kernels.amax(inputs[0]))
            amax = self.kernels._compiled("amax", DType.bfloat16)
            arms: dict[str, Callable[[Buffer], object]] = {
                "copy": target.inplace_copy_from,
                "amax": amax.execute,
            } | {
                scales: functools.partial(
                    self.kernels.quantize,
                    scale_2=factor,
                    sweep=scales == "sweep",
                )
                for scales in ("rtn", "sweep")
            }
            found[f"{n}x{k}"] = took = race(
                self.device,
                {
                    name: functools.partial(_each, call, inputs)
                    for name, call in arms.items()
                },
                calls=count,
            )
            size = n * k * 2
            for arm in took.values():
                arm["GB/s"] = size / arm["median"] / 1e3
            total = took["amax"]["median"] + took["rtn"]["median"]
            took["amax and rtn, of copy"] = took["copy"]["median"] / total
            took["rtn, of copy"] = (
                took["copy"]["median"] / took["rtn"]["median"]
            )
        share = found["5376x21504"]["amax and rtn, of copy"]
        if share < 0.5:
            self.failures.append(f"timing: {share:.2f} of a copy, below 0.5")
        return found


def _each(call: Callable[[Buffer], object], inputs: list[Buffer]) -> None:
    for each in inputs:
        call(each)


def main() -> int:
    """Checks, and writes or prints JSON."""
    arguments = Parser(__doc__, action="store_true").arguments()
    if arguments.compile:
        pretend(arguments.compile)
        kernels = NVFP4Kernels(Accelerator())
        for dtype in (DType.bfloat16, DType.float32):
            kernels._compiled("amax", dtype)
            for sweep in (False, True):
                kernels._compiled("quantize", dtype, sweep)
        return 0
    check = Check(CPU() if arguments.cpu else Accelerator())
    parts = [check.equal, check.not_finite]
    if not arguments.cpu:
        # First, because numpy's part of the comparison takes minutes.
        parts.insert(0, check.timing)
    result: dict[str, Any] = {"failures": check.failures, "seconds": {}}
    for part in parts:
        start = time.perf_counter()
        result[part.__name__] = part()
        result["seconds"][part.__name__] = time.perf_counter() - start
        if arguments.output:
            put(result, arguments.output)
    put(result, arguments.output)
    print(*check.failures, sep="\n", file=sys.stderr)
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main())
