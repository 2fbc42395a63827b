# SPDX-License-Identifier: Apache-2.0
"""Compares the overlay ``fused_token_sampling`` with the op of MAX 26.5.

Needs MAX 26.5, patched or not. From the repository's root, on a GPU::

    MAX_KERNEL_OVERLAYS=0 python -m tests.kernels.check_fused_token_sampling \
        --output sampling.json

One graph is compiled without the overlay and one with it. Every operand is an
input, and batch and vocabulary are symbolic, so that these two serve for all.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import (
    CPU,
    Accelerator,
    Buffer,
    Device,
    DeviceEvent,
)
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.api import AssertLevel
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from tests.kernels.command import Parser, pretend, put
from tests.kernels.sampling_reference import candidates

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "overlay" / "kernels" / "fused_token_sampling"

SETTINGS: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_p": 0.9},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05},
)

Floats = npt.NDArray[np.floating]
Tokens = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Case:
    """A setting of the sampler and the shape that it is used with."""

    k: int
    batch: int
    vocabulary: int
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    mixed: bool = False
    """Whether the rows have a k of their own, from 1 to k."""

    def row_ks(self) -> Tokens:
        """The k of every row."""
        rows = np.arange(self.batch, dtype=np.int64)
        return 1 + rows % self.k if self.mixed else np.full_like(rows, self.k)


def cases(
    ks: Sequence[int], batches: Sequence[int], vocabularies: Sequence[int]
) -> Iterator[Case]:
    """Every setting at every shape, and batches of unequal k."""
    for vocabulary, batch, k in itertools.product(vocabularies, batches, ks):
        for setting in SETTINGS:
            yield Case(k, batch, vocabulary, **setting)
        if batch > 1 and k > 1:
            yield Case(k, batch, vocabulary, top_p=0.95, mixed=True)


def draw_logits(batch: int, vocabulary: int) -> Floats:
    """Logits of which a handful hold most of the probability."""
    random = np.random.default_rng([batch, vocabulary])
    return 3 * random.standard_normal((batch, vocabulary), np.float32)


class Sampler:
    """The op in a graph of its own."""

    def __init__(
        self,
        device: Device,
        overlay: Path | None,
        *,
        rank: int = 2,
        dtype: DType = DType.float32,
        assertions: AssertLevel | None = None,
    ) -> None:
        self.device = device
        place, host = DeviceRef.from_device(device), DeviceRef.CPU()
        # A rank of 3 has a leading 1, a rank of 1 lacks the batch.
        shape = ["one", "batch", "vocabulary"][-rank:]
        operands = {
            "k": TensorType(DType.int64, ["batch"], place),
            "max_k": TensorType(DType.int64, [], host),
            "temperature": TensorType(DType.float32, ["batch"], place),
            "top_p": TensorType(DType.float32, ["batch"], place),
            "min_top_p": TensorType(DType.float32, [], host),
            "min_p": TensorType(DType.float32, ["batch"], place),
            "seed": TensorType(DType.uint64, ["batch"], place),
            "logits": TensorType(DType.float32, shape, place),
        }
        result = TensorType(DType.int64, [*shape[:-1], 1], place)

        def sample(*values: TensorValue) -> TensorValue:
            *rest, logits = values
            [tokens] = ops.custom(
                "sampler.fused_token_sampling",
                place,
                [*rest, ops.cast(logits, dtype)],
                [result],
            )
            return tokens.tensor

        session = InferenceSession(devices=[device])
        if assertions:
            session.set_mojo_assert_level(assertions)
        graph = Graph(
            "sampler",
            sample,
            list(operands.values()),
            custom_extensions=[overlay] if overlay else [],
        )
        start = time.perf_counter()
        self.model = session.load(graph)
        self.compile_s = time.perf_counter() - start

    def inputs(self, case: Case, logits: Buffer, seed: int = 0) -> list[Buffer]:
        """The op's operands; every row has a seed of its own."""

        def each(values: npt.ArrayLike, dtype: npt.DTypeLike) -> Buffer:
            rows = np.empty(case.batch, dtype)
            rows[:] = values
            return Buffer.from_numpy(rows).to(self.device)

        return [
            each(case.row_ks(), np.int64),
            Buffer.from_numpy(np.array(case.k, np.int64)),
            each(case.temperature, np.float32),
            each(case.top_p, np.float32),
            Buffer.from_numpy(np.array(case.top_p, np.float32)),
            each(case.min_p, np.float32),
            each(1000 * seed + np.arange(case.batch), np.uint64),
            logits,
        ]

    def put(self, logits: Floats) -> Buffer:
        """Logits on the device."""
        return Buffer.from_numpy(logits).to(self.device)

    def __call__(self, inputs: Sequence[Buffer]) -> list[int]:
        """The tokens, when the device has them."""
        [tokens] = self.model.execute(*inputs)
        return tokens.to(CPU()).to_numpy().ravel().tolist()


def compare(
    builtin: Sampler, overlay: Sampler, what: Sequence[Case], rank: int = 2
) -> dict[str, Any]:
    """Counts the cases, the unequal tokens, and those never to be drawn.

    A token that a case must not draw is looked for where MAX samples from the
    k largest alone: on a CPU, and on a GPU for k below 10.
    """
    on_host = builtin.device.is_host
    draws, distinct, unequal, foreign = 0, set(), [], []
    for shape, group in itertools.groupby(
        what, lambda case: (case.batch, case.vocabulary)
    ):
        logits = draw_logits(*shape)
        buffer = builtin.put(logits.reshape((1, *shape)[-rank:]))
        for case in group:
            for seed in range(3):
                ours = overlay(overlay.inputs(case, buffer, seed))
                theirs = builtin(builtin.inputs(case, buffer, seed))
                draws += len(ours)
                distinct |= set(ours)
                if ours != theirs:
                    unequal.append([dataclasses.asdict(case), ours, theirs])
                if seed or not (on_host or case.k < 10):
                    continue
                for row, k, token in zip(
                    logits, case.row_ks(), ours, strict=True
                ):
                    allowed = candidates(
                        row,
                        k,
                        case.temperature,
                        case.top_p,
                        # MAX has no min_p on a CPU.
                        0 if on_host else case.min_p,
                    )
                    if token not in allowed:
                        foreign.append([dataclasses.asdict(case), token])
    return {
        "cases": len(what),
        "draws": draws,
        "distinct_tokens": len(distinct),
        "unequal": unequal,
        "not_allowed": foreign,
    }


def outcome(sampler: Sampler, inputs: Sequence[Buffer]) -> list[int] | str:
    """The tokens, or the error."""
    try:
        return sampler(inputs)
    except (RuntimeError, ValueError) as error:
        return str(error).strip()


def without_maximum(builtin: Sampler, overlay: Sampler) -> list[dict[str, Any]]:
    """What rows of NaN and of -inf give, and the sound rows beside them."""
    found = []
    for k, vocabulary in itertools.product((1, 5, 9), (1000, 262144)):
        case = Case(k, 4, vocabulary)
        logits = draw_logits(4, vocabulary)
        sound = overlay(overlay.inputs(case, overlay.put(logits)))
        for value, columns in (
            (np.nan, slice(None)),
            (-np.inf, slice(None)),
            # Part of a row is for MAX's kernel to decide.
            (np.nan, slice(None, None, 3)),
        ):
            spoilt = logits.copy()
            spoilt[::2, columns] = value
            inputs = overlay.inputs(case, overlay.put(spoilt))
            tokens = overlay(inputs)
            found.append(
                {
                    "k": k,
                    "vocabulary": vocabulary,
                    "value": str(value),
                    "whole_row": columns == slice(None),
                    "tokens": tokens[::2],
                    "in_range": all(
                        0 <= token < vocabulary for token in tokens
                    ),
                    "others_unmoved": tokens[1::2] == sound[1::2],
                    "builtin": outcome(builtin, inputs),
                }
            )
    return found


def waiting(sampler: Sampler, busy: Sampler) -> dict[str, float]:
    """Whether a call comes back while the device is still at earlier work.

    The earlier work is sampling by rejection, which never waits.
    """
    case = Case(40, 64, 262144, top_p=0.9)
    logits = draw_logits(case.batch, case.vocabulary)
    queue = busy.inputs(case, busy.put(logits))
    one = dataclasses.replace(case, k=5)
    inputs = sampler.inputs(one, queue[-1])
    for model, values in ((busy.model, queue), (sampler.model, inputs)):
        model.execute(*values)
    sampler.device.synchronize()
    start = time.perf_counter()
    kept = [busy.model.execute(*queue) for _ in range(40)]
    enqueued = time.perf_counter()
    kept.append(sampler.model.execute(*inputs))
    returned = time.perf_counter()
    sampler.device.synchronize()
    done = time.perf_counter()
    return {
        "queue_ms": 1e3 * (enqueued - start),
        "call_ms": 1e3 * (returned - enqueued),
        "rest_ms": 1e3 * (done - returned),
    }


def timing(
    samplers: dict[str, Sampler], case: Case, rounds: int = 15, calls: int = 50
) -> dict[str, Any]:
    """Microseconds a call, on the device's clock and on the host's.

    The samplers take turns. Each turn is a run of calls without a wait of
    ours between them.
    """
    device = samplers["builtin"].device
    stream = device.default_stream
    buffer = samplers["builtin"].put(draw_logits(case.batch, case.vocabulary))
    took: dict[str, dict[str, list[float]]] = {
        name: {"device_us": [], "host_us": []} for name in samplers
    }
    inputs = {name: s.inputs(case, buffer) for name, s in samplers.items()}
    for turn in range(rounds + 1):
        for name, sampler in samplers.items():
            begin = DeviceEvent(device, enable_timing=True)
            end = DeviceEvent(device, enable_timing=True)
            device.synchronize()
            start = time.perf_counter()
            stream.record_event(begin)
            for _ in range(calls):
                sampler.model.execute(*inputs[name])
            stream.record_event(end)
            host = time.perf_counter() - start
            end.synchronize()
            if turn:  # the first warms up
                took[name]["host_us"].append(1e6 * host / calls)
                took[name]["device_us"].append(
                    1e3 * begin.elapsed_time(end) / calls
                )
    return {
        name: {
            unit: {
                "median": statistics.median(values),
                "range": [min(values), max(values)],
            }
            for unit, values in units.items()
        }
        for name, units in took.items()
    }


def assertions(overlay: Path) -> None:
    """Samples 2 rows of NaN among 4 with the device's assertions printed."""
    sampler = Sampler(Accelerator(), overlay, assertions=AssertLevel.WARN)
    logits = draw_logits(4, 1000)
    logits[[0, 2]] = np.nan
    inputs = sampler.inputs(Case(5, 4, 1000), sampler.put(logits))
    print(sampler(inputs))


def check(overlay: Path) -> Iterator[tuple[str, Any]]:
    """All of it, on a GPU, a part at a time."""
    # A process of its own, as what the device prints goes to its output.
    command = [sys.executable, "-m", __spec__.name, "--assertions"]
    shown = subprocess.run(
        [*command, "--overlay", os.fspath(overlay)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    yield (
        "assertions",
        {"exit": shown.returncode, "output": shown.stdout + shown.stderr},
    )
    device = Accelerator()
    builtin, ours = Sampler(device, None), Sampler(device, overlay)
    both = {"builtin": builtin, "overlay": ours}
    yield "compile_s", {name: s.compile_s for name, s in both.items()}
    sizes = 32768, 262144
    matrix = list(cases((1, 5, 9, 10, 31, 40), (1, 8, 64), sizes))
    yield "tokens", compare(builtin, ours, matrix)
    yield "without_maximum", without_maximum(builtin, ours)
    yield (
        "waiting",
        {
            name: [waiting(sampler, ours) for _ in range(3)]
            for name, sampler in both.items()
        },
    )
    shapes = [*itertools.product((1, 5, 9, 40), (1,), sizes)]
    shapes += [(5, 8, 262144), (5, 64, 262144)]
    yield (
        "timing",
        {
            f"k={k} batch={batch} vocabulary={size}": timing(
                both, Case(k, batch, size)
            )
            for k, batch, size in shapes
        },
    )


def main() -> None:
    """Does what the arguments say, and prints or writes JSON."""
    parser = Parser(__doc__, metavar="DTYPE:RANK")
    parser.add_argument(
        "--overlay", type=Path, default=OVERLAY, help="folder or .mojoc"
    )
    parser.other.add_argument(
        "--assertions", action="store_true", help=argparse.SUPPRESS
    )
    chosen = parser.parse_args()
    if chosen.assertions:
        assertions(chosen.overlay)
        return
    if chosen.cpu:
        dtype, rank = chosen.cpu.split(":")
        pair = [
            Sampler(CPU(), path, rank=int(rank), dtype=DType[dtype])
            for path in (None, chosen.overlay)
        ]
        batches = [1] if rank == "1" else [1, 8, 64]
        what = list(cases((1, 5, 31, 40), batches, [32768]))
        what += cases((1, 5, 31, 40), [1], [262144])
        report = compare(*pair, what, int(rank))
    elif chosen.compile:
        arch, _, level = chosen.compile.partition(":")
        pretend(arch)
        sampler = Sampler(
            Accelerator(),
            chosen.overlay,
            assertions=AssertLevel(level) if level else None,
        )
        report = {"compile_s": sampler.compile_s}
    else:
        report = {}
        for name, part in check(chosen.overlay):
            report[name] = part
            if chosen.output:
                put(report, chosen.output)
    put(report, chosen.output)


if __name__ == "__main__":
    main()
