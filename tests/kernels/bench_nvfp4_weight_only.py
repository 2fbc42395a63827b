# SPDX-License-Identifier: Apache-2.0
"""Times the overlay ``nvfp4_weight_only`` beside what else multiplies.

For an NVIDIA GPU, with MAX 26.7 and torch, which brings Triton. From the
repository's root::

    MAX_KERNEL_OVERLAYS=0 python -m tests.kernels.bench_nvfp4_weight_only \
        --output weight-only-times.json

Arms, which take turns: the overlay, torch's linear layer in bfloat16, a plain
Triton kernel that decodes NVFP4 and multiplies, and a copy of the machine's
memory. Each is a captured graph of calls on weights that follow each other,
together far larger than the GPU's cache. Microseconds are a call's, median and
range of the turns; bandwidths count the bytes of weight and scales once.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from max.driver import Accelerator, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from tests.kernels.check_nvfp4_weight_only import OP, OVERLAY, bfloat16
from tests.kernels.command import Parser, pretend, put

SHAPES = (
    *((43008, 5376), (5376, 21504), (18432, 5376), (8192, 5376)),
    *((5376, 8192), (5376, 16384), (13824, 1152), (1152, 6912)),
)
ROWS = (1, 4, 16, 64, 128, 512, 4096)
WEIGHTS = 16
ENOUGH = 1 << 28
"""Bytes of weights to go through in turn, far more than a GPU's cache."""

TURNS = 7
LEAST_S = 4e-3
"""How long an arm's part of a turn takes, at least."""


def graph() -> Graph:
    """`WEIGHTS` products of the same activations; all sizes are symbolic."""
    gpu = DeviceRef.GPU()

    def forward(
        x: TensorValue, scale_2: TensorValue, *weights: TensorValue
    ) -> tuple[TensorValue, ...]:
        return tuple(
            ops.custom(
                OP,
                device=gpu,
                values=[x, w, s, scale_2],
                out_types=[
                    TensorType(DType.bfloat16, [x.shape[0], w.shape[0]], gpu)
                ],
            )[0].tensor
            for w, s in zip(weights[::2], weights[1::2], strict=True)
        )

    return Graph(
        "weight_only_times",
        forward=forward,
        input_types=[
            TensorType(DType.bfloat16, ["m", "k"], gpu),
            TensorType(DType.float32, [1], gpu),
            *(
                [
                    TensorType(DType.uint8, ["n", "bytes"], gpu),
                    TensorType(DType.float8_e4m3fn, ["n", "blocks"], gpu),
                ]
                * WEIGHTS
            ),
        ],
        custom_extensions=[OVERLAY],
    )


def race(
    arms: Mapping[str, tuple[Callable[[], object], int]],
    synchronize: Callable[[], object],
) -> dict[str, dict[str, Any]]:
    """Times arms by the clock of the wall, each for some milliseconds a turn.

    Args:
        arms: By name what enqueues work, and the calls in it.
        synchronize: Returns when all is done.
    """
    runs = {}
    for name, (run, _) in arms.items():
        for _ in range(2):
            run()
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        took = time.perf_counter() - begin
        runs[name] = max(1, round(LEAST_S / took))
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(TURNS):
        for name, (run, calls) in arms.items():
            synchronize()
            begin = time.perf_counter()
            for _ in range(runs[name]):
                run()
            synchronize()
            took = time.perf_counter() - begin
            times[name].append(1e6 * took / (runs[name] * calls))
    return {
        name: {
            "median": statistics.median(values),
            "range": [min(values), max(values)],
        }
        for name, values in times.items()
    }


def peers(
    x: Any,  # noqa: ANN401
    codes: Any,  # noqa: ANN401
    scales: Any,  # noqa: ANN401
) -> dict[str, tuple[Callable[[], object], int]]:
    """Returns torch's arms, as `race` takes them.

    Args:
        x: [M, K] in bfloat16, on the GPU.
        codes: [weights, N, K / 2].
        scales: [weights, N, K / 16].
    """
    import torch
    from tests.kernels.triton_weight_only import multiply

    count, n, half = codes.shape
    wide = [
        torch.randn(n, 2 * half, dtype=torch.bfloat16, device="cuda")
        for _ in range(max(2, min(count, ENOUGH // (n * half * 4))))
    ]
    source = torch.empty(ENOUGH, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {
        "torch bfloat16": (
            _captured(lambda: [torch.nn.functional.linear(x, w) for w in wide]),
            len(wide),
        ),
        "Triton": (
            _captured(
                lambda: [multiply(x, codes[i], scales[i]) for i in range(count)]
            ),
            count,
        ),
        "copy": (_captured(lambda: target.copy_(source)), 1),
    }


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        kept = run()
    return lambda: (captured.replay(), kept)[0]


def measure() -> list[dict[str, Any]]:
    """Returns, for each shape and number of rows, what the arms took."""
    import torch

    device = Accelerator()
    model = InferenceSession(devices=[device]).load(graph())
    rng = np.random.default_rng(0)
    found = []
    for n, k in SHAPES:
        codes = torch.randint(
            0, 256, (WEIGHTS, n, k // 2), dtype=torch.uint8, device="cuda"
        )
        scales = torch.randint(
            32, 96, (WEIGHTS, n, k // 16), dtype=torch.uint8, device="cuda"
        )
        weights = []
        for i in range(WEIGHTS):
            weights.append(Buffer.from_dlpack(codes[i]))
            weights.append(
                Buffer.from_dlpack(scales[i]).view(
                    DType.float8_e4m3fn, [n, k // 16]
                )
            )
        for m in ROWS:
            bits = bfloat16(rng.standard_normal((m, k), np.float32))
            x = torch.tensor(bits.view(np.int16), device="cuda")
            inputs = [
                Buffer.from_dlpack(x).view(DType.bfloat16, [m, k]),
                Buffer.from_numpy(np.array([0.01], np.float32)).to(device),
                *weights,
            ]
            key = len(found)
            kept = model.capture(key, *inputs)

            def ours(key: int = key, inputs: list[Buffer] = inputs) -> object:
                return model.replay(key, *inputs)

            def synchronize() -> None:
                device.synchronize()
                torch.cuda.synchronize()

            times = race(
                {
                    "overlay": (ours, WEIGHTS),
                    **peers(x.view(torch.bfloat16), codes, scales),
                },
                synchronize,
            )
            del kept
            model.release_captured_graph(key)
            packed = n * k // 2 + n * k // 16
            copy = 2 * ENOUGH / times["copy"]["median"]
            took = times["overlay"]["median"]
            found.append(
                {
                    "n": n,
                    "k": k,
                    "m": m,
                    "times": times,
                    "of copy": packed / took / copy,
                    "over bfloat16": times["torch bfloat16"]["median"] / took,
                    "over Triton": times["Triton"]["median"] / took,
                }
            )
            torch.cuda.empty_cache()
    return found


def main() -> int:
    """Runs the command line."""
    arguments = Parser(__doc__, action="store_true").arguments()
    if arguments.cpu:
        sys.exit("this is for a GPU; --compile needs none")
    if arguments.compile:
        pretend(arguments.compile)
        InferenceSession(devices=[Accelerator()]).load(graph())
        return 0
    import torch

    put(
        {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "shapes": measure(),
        },
        arguments.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
