# SPDX-License-Identifier: Apache-2.0
"""Samples with the fused op of an installed MAX, and tells whether it waits.

Of any release, on a GPU or, without the waiting, on a CPU:

    python -m tests.kernels.check_waiting --output waiting.json

Each token has to be among its row's five best. On a GPU a call then stands
behind long work, and either returns at once or waits for it. Exit status 1 if a
token is not; whether a call waits is a finding, not a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Accelerator, Buffer, Device, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType
from max.nn.kernels import topk_fused_sampling

ROWS, VOCABULARY = 64, 262144
CALLS, TURNS = 40, 5
SHAPES = ((8, 512), (1, VOCABULARY), (ROWS, 32768))
LEAST_MS = 3.0
"""What must be left to wait for, or a turn tells nothing."""


def sampler(session: InferenceSession, device: Device, k: int) -> Model:
    """Compiles a graph that samples from the k best of each row."""
    place = DeviceRef.from_device(device)
    logits = TensorType(DType.float32, ["batch", "vocab"], place)
    graph = Graph(f"sample_{k}", lambda x: topk_fused_sampling(x, k), [logits])
    return session.load(graph)


def normal(rows: int, size: int) -> npt.NDArray[np.float32]:
    """Returns logits, [rows, size]."""
    random = np.random.default_rng(rows)
    return random.standard_normal((rows, size), np.float32)


def foreign(model: Model, device: Device) -> list[tuple[int, int, int]]:
    """Returns the tokens that are not among their row's five best.

    Each by vocabulary, row and token.
    """
    found = []
    for rows, size in SHAPES:
        values = normal(rows, size)
        (drawn,) = model.execute(Buffer.from_numpy(values).to(device))
        tokens = drawn.to(CPU()).to_numpy().ravel().tolist()
        best = np.argsort(values)[:, -5:]
        found += [
            (size, row, token)
            for row, (token, allowed) in enumerate(
                zip(tokens, best, strict=True)
            )
            if token not in allowed
        ]
    return found


def waits(model: Model, busy: Model, device: Device) -> list[dict[str, float]]:
    """Calls a model behind another's work, by turns.

    Returns:
        Of each turn: milliseconds until the call returned, and from then until
        the device was done.

    Raises:
        RuntimeError: If a turn left nothing to wait for.
    """
    logits = Buffer.from_numpy(3 * normal(ROWS, VOCABULARY)).to(device)
    for each in (busy, model):
        each.execute(logits)
    device.synchronize()
    turns = []
    for _ in range(TURNS):
        kept = [busy.execute(logits) for _ in range(CALLS)]
        queued = time.perf_counter()
        kept.append(model.execute(logits))
        returned = time.perf_counter()
        device.synchronize()
        done = time.perf_counter()
        if 1e3 * (done - queued) < LEAST_MS:
            raise RuntimeError(
                f"only {1e3 * (done - queued):.1f} ms of work were left"
            )
        turns.append(
            {
                "call_ms": 1e3 * (returned - queued),
                "rest_ms": 1e3 * (done - returned),
            }
        )
    return turns


def run() -> dict[str, Any]:
    """Runs the check."""
    device = Accelerator() if accelerator_count() else CPU()
    session = InferenceSession(devices=[device])
    model = sampler(session, device, 5)
    result: dict[str, Any] = {
        "max": version("max"),
        "max_mojo_libs": version("max-mojo-libs"),
        "device": str(device),
        "tokens": sum(rows for rows, _ in SHAPES),
        "not_among_five_best": foreign(model, device),
    }
    if not device.is_host:
        # Sampling from 40 is by rejection, which never waits.
        result["turns"] = waits(model, sampler(session, device, 40), device)
    return result


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    # 26.4.0's compile cache takes a changed library for the old one.
    with tempfile.TemporaryDirectory() as cache:
        for name in ("MODULAR_MAX_CACHE_DIR", "MODULAR_CACHE_DIR"):
            os.environ[name] = cache
        result = run()
    text = json.dumps(result, indent=1)
    if args.output:
        args.output.write_text(text + "\n")
    print(text)
    return 1 if result["not_among_five_best"] else 0


if __name__ == "__main__":
    sys.exit(main())
