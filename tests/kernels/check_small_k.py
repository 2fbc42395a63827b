# SPDX-License-Identifier: Apache-2.0
"""Compares the overlay ``small_k_sampling`` with the op of MAX 26.7 on a GPU.

Needs MAX 26.7, patched or not, and scipy. From the repository's root::

    MAX_KERNEL_OVERLAYS=0 python -m tests.kernels.check_small_k \
        --output small-k.json

Exit status 1 if what must hold does not; ``failures`` in the JSON names it.

One graph is compiled without the overlay and one with it. Each samples the same
logits several times, by seeds of its own, so that a call draws much, and a
timed call has little overhead. Batch and vocabulary are symbolic.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import (
    CPU,
    Accelerator,
    Buffer,
    Device,
)
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from max.nn.kernels import topk_fused_sampling
from scipy import stats
from tests.kernels.command import Parser, pretend, put
from tests.kernels.timing import race

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "overlay" / "kernels" / "small_k_sampling"

REPEATS = 8
"""Samplings in a call."""

SHAPES = [*itertools.product((1, 8, 64), (32768, 262144))]
KS = (1, 5, 31, 32, 40, -1)

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the rows are sampled: one value for all, or one a row."""

    k: int | Sequence[int] = -1
    p: float | Sequence[float] = 1.0
    min_p: float | Sequence[float] = 0.0
    temperature: float | Sequence[float] = 1.0
    seed: int = 0
    """Rows and repetitions count their seeds on from here."""

    def arrays(self, batch: int) -> dict[str, npt.NDArray[Any]]:
        """The op's operands but the logits, in the graph's order."""

        def rows(
            values: npt.ArrayLike, dtype: npt.DTypeLike
        ) -> npt.NDArray[Any]:
            return np.full(batch, values, dtype)

        k, p = rows(self.k, np.int64), rows(self.p, np.float32)
        seeds = self.seed + np.arange(REPEATS * batch, dtype=np.uint64)
        return {
            "k": k,
            "max_k": np.array(-1 if (k < 1).any() else k.max(), np.int64),
            "temperature": rows(self.temperature, np.float32),
            "p": p,
            "min_p_of_batch": np.array(p.min(), np.float32),
            "min_p": rows(self.min_p, np.float32),
            **{
                f"seed{i}": seeds[i * batch : (i + 1) * batch]
                for i in range(REPEATS)
            },
        }


class Sampler:
    """The op, several times in one graph."""

    def __init__(self, device: Device, overlay: Path | None) -> None:
        self.device = device
        place, host = DeviceRef.from_device(device), DeviceRef.CPU()
        rows = functools.partial(TensorType, shape=["batch"], device=place)

        def sample(
            logits: TensorValue,
            k: TensorValue,
            max_k: TensorValue,
            temperature: TensorValue,
            p: TensorValue,
            least_p: TensorValue,
            min_p: TensorValue,
            *seeds: TensorValue,
        ) -> tuple[TensorValue, ...]:
            return tuple(
                topk_fused_sampling(
                    logits,
                    k,
                    max_k=max_k,
                    temperature=temperature,
                    top_p=p,
                    min_top_p=least_p,
                    min_p=min_p,
                    seed=seed,
                )
                for seed in seeds
            )

        session = InferenceSession(devices=[device])
        start = time.perf_counter()
        self.model = session.load(
            Graph(
                "sampler",
                sample,
                [
                    TensorType(DType.float32, ["batch", "vocabulary"], place),
                    rows(DType.int64),
                    TensorType(DType.int64, [], host),
                    rows(DType.float32),
                    rows(DType.float32),
                    TensorType(DType.float32, [], host),
                    rows(DType.float32),
                    *[rows(DType.uint64)] * REPEATS,
                ],
                custom_extensions=[overlay] if overlay else [],
            )
        )
        self.compile_s = time.perf_counter() - start

    def inputs(self, logits: Buffer, settings: Settings) -> list[Buffer]:
        """The graph's inputs; the scalars stay on the host."""
        arrays = settings.arrays(logits.shape[0])
        return [
            logits,
            *(
                Buffer.from_numpy(values).to(self.device)
                if values.ndim
                else Buffer.from_numpy(values)
                for values in arrays.values()
            ),
        ]

    def __call__(self, logits: Buffer, settings: Settings) -> Tokens:
        """The tokens, [REPEATS, batch]."""
        return fetched(self.model.execute(*self.inputs(logits, settings)))

    def capture(self, key: int, inputs: list[Buffer]) -> list[Buffer]:
        """Captures a device graph that reads these inputs; its outputs."""
        outputs = self.model.capture(key, *inputs)
        self.model._await_device_graphs()
        return outputs

    def put(self, array: Floats) -> Buffer:
        """An array on the device."""
        return Buffer.from_numpy(np.ascontiguousarray(array)).to(self.device)


def fetched(outputs: Sequence[Buffer]) -> Tokens:
    """The tokens in a call's outputs, [REPEATS, batch]."""
    return np.stack([out.to(CPU()).to_numpy().ravel() for out in outputs])


@dataclasses.dataclass
class Check:
    """Two samplers, what was found, and what of it must not be."""

    builtin: Sampler
    overlay: Sampler
    failures: list[str] = dataclasses.field(default_factory=list)
    made: dict[tuple[int, int], tuple[Floats, Buffer]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def both(self) -> dict[str, Sampler]:
        """The samplers by name."""
        return {"builtin": self.builtin, "overlay": self.overlay}

    def hold(self, holds: bool, what: str) -> None:
        """Notes a failure unless it holds."""
        if not holds:
            self.failures.append(what)

    def logits(self, batch: int, vocabulary: int) -> tuple[Floats, Buffer]:
        """Logits of which a handful hold most of the probability."""
        shape = batch, vocabulary
        if shape not in self.made:
            random = np.random.default_rng(shape)
            array = 3 * random.standard_normal(shape, np.float32)
            self.made[shape] = array, self.overlay.put(array)
        return self.made[shape]

    def same_tokens(
        self, shapes: Sequence[tuple[int, int]], ks: Sequence[int]
    ) -> dict[str, int]:
        """The overlay's tokens are the built-in's."""
        draws = unequal = 0
        for shape, k in itertools.product(shapes, ks):
            _, logits = self.logits(*shape)
            for p, min_p, temperature in (
                (1.0, 0.0, 1.0),
                (0.9, 0.0, 0.7),
                (1.0, 0.01, 1.5),
            ):
                settings = Settings(k, p, min_p, temperature, seed=17)
                ours = self.overlay(logits, settings)
                theirs = self.builtin(logits, settings)
                draws += ours.size
                unequal += int((ours != theirs).sum())
        self.hold(unequal == 0, "tokens differ from the built-in's")
        return {"draws": draws, "unequal": unequal}

    def large_k(self) -> dict[str, int]:
        """Rows whose k is not small get the built-in's tokens."""
        return self.same_tokens(SHAPES, (32, 40, 1000, -1))

    def greedy(self) -> dict[str, Any]:
        """With k = 1 the token is numpy's argmax, NaN aside."""
        found: dict[str, Any] = {}
        for batch, vocabulary in (*SHAPES, (8, 1), (8, 31), (8, 2049)):
            plain, _ = self.logits(batch, vocabulary)
            ties = np.round(plain)
            zeros = np.select(
                [plain > 3, plain > 2], [np.float32(-0.0), np.float32(0)], -1
            ).astype(np.float32)
            holes = np.where(plain > 6, np.float32(np.nan), plain)
            for name, array in {
                "plain": plain,
                "ties": ties,
                "zeros": zeros,
                "some NaN": holes,
            }.items():
                real = np.where(np.isnan(array), -np.inf, array)
                expected = real.argmax(axis=1)
                buffer = self.overlay.put(array)
                for temperature, p in ((0.0, 1.0), (1.0, 0.5)):
                    settings = Settings(1, p, 0.1, temperature)
                    for arm, sampler in self.both.items():
                        wrong = int(
                            (sampler(buffer, settings) != expected).sum()
                        )
                        counts = found.setdefault(name, {}).setdefault(
                            arm, {"draws": 0, "wrong": 0}
                        )
                        counts["draws"] += REPEATS * batch
                        counts["wrong"] += wrong
            for name, arms in found.items():
                self.hold(
                    arms["overlay"]["wrong"] == 0, f"greedy, {name}: not argmax"
                )
        return found

    def distribution(self) -> list[dict[str, Any]]:
        """Draws over many seeds follow the definition, in both arms.

        The built-in is only recorded: with min-p its first try takes the
        unmasked weight for its range, so the last token kept is drawn too
        often.
        """
        found = []
        batch, vocabulary = 64, 32768
        row = self.logits(1, vocabulary)[0][0]
        for name, logits, settings in (
            ("k", row, Settings(5)),
            ("k, cold", row, Settings(31, temperature=0.8)),
            ("k, hot", row, Settings(31, temperature=1.5)),
            ("k, p", row, Settings(31, 0.1, temperature=1.5)),
            ("k, min-p", row, Settings(25, min_p=0.2, temperature=2.0)),
            ("all", row, Settings(20, 0.018, 0.2, 2.0)),
            ("ties", np.round(row), Settings(3)),
            ("ties beyond the list", np.round(row / 6), Settings(5)),
        ):
            expected = shares(logits, settings)
            buffer = self.overlay.put(np.tile(logits, (batch, 1)))
            entry: dict[str, Any] = {
                "case": name,
                "tokens": int((expected > 0).sum()),
            }
            for arm, sampler in self.both.items():
                counts = np.zeros(vocabulary, np.int64)
                for call in range(40):
                    seeded = dataclasses.replace(
                        settings, seed=call * REPEATS * batch
                    )
                    tokens = sampler(buffer, seeded).ravel()
                    counts += np.bincount(tokens, minlength=vocabulary)
                entry[arm] = fit(counts, expected)
            self.hold(
                entry["overlay"]["foreign"] == 0,
                f"distribution, {name}: a token that must not be drawn",
            )
            self.hold(
                entry["overlay"]["p_value"] > 1e-4,
                f"distribution, {name}: chi-squared",
            )
            found.append(entry)
        return found

    def nothing_to_draw(self) -> list[dict[str, Any]]:
        """Rows without a number, or with infinite ones, give tokens in range.

        And they leave the rows beside them alone.
        """
        found = []
        for k, vocabulary in itertools.product((1, 5, 31), (1000, 262144)):
            plain, buffer = self.logits(4, vocabulary)
            sound = self.overlay(buffer, Settings(k))
            for name, value, columns in (
                ("all NaN", np.nan, slice(None)),
                ("all -inf", -np.inf, slice(None)),
                ("some NaN", np.nan, slice(None, None, 3)),
                ("some inf", np.inf, slice(5, 3000, 300)),
            ):
                spoilt = plain.copy()
                spoilt[::2, columns] = value
                tokens = {
                    arm: sampler(self.overlay.put(spoilt), Settings(k))
                    for arm, sampler in self.both.items()
                }
                ours = tokens["overlay"]
                what = f"{name}, k={k}, {vocabulary}"
                self.hold(
                    bool(((ours >= 0) & (ours < vocabulary)).all()),
                    f"{what}: out of range",
                )
                self.hold(
                    bool((ours[:, 1::2] == sound[:, 1::2]).all()),
                    f"{what}: a sound row changed",
                )
                if name.startswith("all"):
                    self.hold(not ours[:, ::2].any(), f"{what}: not token 0")
                else:
                    drawn = spoilt[np.arange(0, 4, 2)[None, :], ours[:, ::2]]
                    self.hold(
                        not np.isnan(drawn).any()
                        and (name != "some inf" or bool(np.isinf(drawn).all())),
                        f"{what}: drew what cannot be drawn",
                    )
                found.append(
                    {
                        "case": what,
                        **{
                            arm: sorted(set(drawn[:, ::2].ravel().tolist()))
                            for arm, drawn in tokens.items()
                        },
                    }
                )
        return found

    def mixed(self) -> dict[str, int]:
        """In a batch of unequal k each row is sampled as by itself."""
        ks = [1, 5, 31, 32, 40, -1, 2, 0]
        array, buffer = self.logits(8, 262144)
        together = self.overlay(buffer, Settings(ks, seed=5))
        theirs = self.builtin(buffer, Settings(ks, seed=5))
        large = [i for i, k in enumerate(ks) if not 1 <= k < 32]
        unequal = int((together[:, large] != theirs[:, large]).sum())
        self.hold(unequal == 0, "mixed: a large k differs from the built-in's")
        alone = 0
        for i, k in enumerate(ks):
            # The repetition r of row i has the seed 5 + 8 r + i.
            single = self.overlay.put(array[i : i + 1])
            for r in range(REPEATS):
                one = Settings(k, seed=5 + 8 * r + i)
                alone += int(self.overlay(single, one)[0, 0] != together[r, i])
        self.hold(alone == 0, "mixed: a row differs from itself alone")
        return {"large_unequal": unequal, "alone_unequal": alone}

    def replay(self) -> dict[str, Any]:
        """A captured graph follows k, p, min-p, temperature and seeds."""
        random = np.random.default_rng(7)
        changes = [Settings(k, seed=k + 9) for k in (1, 40, 5, -1, 31, 32, 1)]
        changes += [
            Settings(
                random.choice([-1, 1, 2, 5, 20, 31, 32, 64], 8).tolist(),
                random.uniform(0.2, 1, 8).tolist(),
                random.choice([0.0, 0.05, 0.3], 8).tolist(),
                random.uniform(0.2, 2, 8).tolist(),
                seed=int(random.integers(1 << 40)),
            )
            for _ in range(20)
        ]
        found: dict[str, Any] = {"replays": len(changes)}
        _, logits = self.logits(8, 262144)
        for arm, sampler in self.both.items():
            inputs = sampler.inputs(logits, Settings(5, 0.9))
            outputs = sampler.capture(1, inputs)
            unequal = 0
            for settings in changes:
                fresh = sampler.inputs(logits, settings)
                expected = fetched(sampler.model.execute(*fresh))
                for old, new in zip(inputs[1:], fresh[1:], strict=True):
                    if not old.device.is_host:  # a replay reads no host value
                        old.inplace_copy_from(new)
                sampler.model.replay(1, *inputs)
                unequal += int((fetched(outputs) != expected).any())
            found[arm] = {"unequal": unequal}
            del outputs
            sampler.model.release_captured_graph(1)
        self.hold(
            found["overlay"]["unequal"] == 0, "replay: differs from eager"
        )
        return found

    def timing(self) -> dict[str, Any]:
        """Microseconds a sampling takes the device, replayed and called."""
        found: dict[str, Any] = {}
        for key, shape in enumerate(SHAPES, 2):
            _, logits = self.logits(*shape)
            calls: dict[str, Callable[[], object]] = {}
            captured: dict[str, list[Buffer]] = {}
            kept = []
            for arm, sampler in self.both.items():
                # A max_k of -1 lets the built-in serve every k in a replay.
                inputs = captured[arm] = sampler.inputs(logits, Settings(-1))
                kept.append(sampler.capture(key, inputs))
                model = sampler.model
                calls[arm] = functools.partial(model.replay, key, *inputs)
                calls[f"{arm}, called"] = functools.partial(
                    model.execute, *inputs
                )
            for k in KS:
                for arm, sampler in self.both.items():
                    fresh = sampler.inputs(logits, Settings(k))
                    captured[arm][1].inplace_copy_from(fresh[1])
                found["batch={} vocabulary={} k={}".format(*shape, k)] = race(
                    self.overlay.device, calls, calls=REPEATS, runs=12
                )
            kept.clear()
            for sampler in self.both.values():
                sampler.model.release_captured_graph(key)
        ours = found["batch=1 vocabulary=262144 k=5"]["overlay"]["median"]
        self.hold(ours <= 70, f"timing: {ours:.1f} us for k=5, more than 70")
        for case, arms in found.items():
            ratio = arms["overlay"]["median"] / arms["builtin"]["median"]
            if not 1 <= int(case.rpartition("=")[2]) < 32:
                self.hold(ratio <= 1.1, f"timing, {case}: {ratio:.2f} times")
        return found


def shares(logits: Floats, settings: Settings) -> npt.NDArray[np.float64]:
    """Every token's probability, from the definition, in float64.

    Not for settings at an edge: there float32 may decide the other way.
    """
    weights = np.exp(
        (logits.astype(np.float64) - logits.max()) / settings.temperature
    )
    values, place, counts = np.unique(
        -weights, return_inverse=True, return_counts=True
    )
    heavier = np.cumsum(counts) - counts
    mass = np.cumsum(-values * counts) + values * counts
    kept = (
        (heavier < settings.k)
        & (mass <= settings.p * weights.sum())
        & (-values >= settings.min_p)
    )[place]
    weights[~kept] = 0
    return weights / weights.sum()


def fit(
    counts: npt.NDArray[np.int64], shares: npt.NDArray[np.float64]
) -> dict[str, float]:
    """Chi-squared of counts against shares; rare tokens make one class."""
    draws = counts.sum()
    expected = draws * shares
    frequent = expected >= 5
    seen, due = counts[frequent], expected[frequent]
    rare = (~frequent) & (shares > 0)
    if expected[rare].sum() >= 5:
        seen = np.append(seen, counts[rare].sum())
        due = np.append(due, expected[rare].sum())
    due *= seen.sum() / due.sum()
    p_value = stats.chisquare(seen, due).pvalue if len(seen) > 1 else 1.0
    return {
        "draws": int(draws),
        "foreign": int(counts[shares == 0].sum()),
        "p_value": float(p_value),
    }


def parts(check: Check) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is checked, in order."""
    for part in (
        check.greedy,
        check.large_k,
        check.distribution,
        check.mixed,
        check.replay,
        check.timing,
        # Last, as the built-in's loop may not end on every such row.
        check.nothing_to_draw,
    ):
        yield part.__name__, part


def main() -> int:
    """Checks, and writes or prints JSON."""
    parser = Parser(__doc__, action="store_true")
    parser.add_argument(
        "--overlay", type=Path, default=OVERLAY, help="folder or .mojoc"
    )
    arguments = parser.parse_args()

    if arguments.compile:
        pretend(arguments.compile)
        Sampler(Accelerator(), arguments.overlay)
        return 0
    device = CPU() if arguments.cpu else Accelerator()
    check = Check(Sampler(device, None), Sampler(device, arguments.overlay))
    if arguments.cpu:
        shapes = [(1, 1), (3, 100), (2, 5000)]
        print(json.dumps(check.same_tokens(shapes, (1, 5, 40, -1))))
        return 1 if check.failures else 0
    result: dict[str, Any] = {
        "compile_s": {n: s.compile_s for n, s in check.both.items()},
        "failures": check.failures,
        "seconds": {},
    }
    for name, part in parts(check):
        start = time.perf_counter()
        try:
            result[name] = part()
        except Exception as error:  # the other parts still tell something
            check.failures.append(f"{name}: {error!r}")
        result["seconds"][name] = time.perf_counter() - start
        if arguments.output:
            put(result, arguments.output)
    put(result, arguments.output)
    print(*check.failures, sep="\n", file=sys.stderr)
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main())
