# SPDX-License-Identifier: Apache-2.0
"""Compares both ways to rebuild a weight with numpy, and times them.

Needs MAX 26.7, patched or not. On a GPU, from the repository's root::

    MAX_KERNEL_OVERLAYS=0 python -m tests.kernels.check_rebuild \
        --output rebuild.json

Exit status 1 if what must hold does not; ``failures`` in the JSON names it.

The op of ours is compiled once, for any shape. MAX's matmul is compiled for
each shape and rank by itself, as models have them, in as many processes, or
beforehand by ``--compile sm_90a --mefs DIR``.
Several weights are rebuilt in a captured graph, and as many graphs replayed in
turn as have more bytes together than the GPU's cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import (
    CPU,
    Accelerator,
    Buffer,
    Device,
    accelerator_architecture_name,
)
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight
from tests.attnquant.nvfp4_cases import bfloat16, float32
from tests.kernels.command import Parser, pretend, put
from tests.kernels.timing import race

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "overlay" / "pipelines" / "architectures"))

from attnquant_common.kernels import libraries  # noqa: E402
from attnquant_common.kernels.rebuild import (  # noqa: E402
    by_custom_op,
    by_matmul,
    project,
)

FORMS = {"custom op": by_custom_op, "matmul": by_matmul}

Shape = tuple[int, int]
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float64]

GEMMA3_1B = {
    "1b qkv": (1536, 1152),
    "1b o": (1152, 1024),
    "1b gate_up": (13824, 1152),
    "1b down": (1152, 6912),
}
SHAPES = {
    **GEMMA3_1B,
    "27b gate_up": (43008, 5376),
    "27b down": (5376, 21504),
}
RANKS = (4, 12, 16, 32, 96)

MATMULS = [
    *(((13824, 1152), r) for r in (8, 16, 32, 64, 96, 128)),
    *itertools.product([(1536, 1152), (1152, 1024), (1152, 6912)], (16, 32)),
    *itertools.product([(43008, 5376), (5376, 21504)], (16, 32)),
]
"""Shapes and ranks by MAX's matmul: a compile each.

For a GPU it does not compile with ranks that are no multiple of 8; a model's
would be padded.
"""

ODD = [
    (1, 1, 1),
    (2, 3, 5),
    (7, 33, 4),
    (9, 8, 31),
    (63, 1023, 33),
    (64, 256, 32),
    (65, 264, 12),
    (130, 1000, 65),
    (200, 136, 100),
    (257, 24, 512),
    # More rows than the GPU has blocks for, by single columns and by many.
    (131200, 3, 2),
    (131142, 8, 5),
]
"""N, K and R that no part of a kernel divides."""

REPEATS = 8
"""Weights that a captured graph rebuilds."""

ENOUGH = 1 << 29
"""Bytes to go through in turn, far more than a GPU's cache."""

BITS = {DType.bfloat16: 8, DType.float32: 24}
"""Of a significand."""


def stored(values: npt.ArrayLike, dtype: DType) -> Buffer:
    """The values on the host, in a type; those of bfloat16 must be exact."""
    array = np.ascontiguousarray(values, np.float32)
    if dtype == DType.float32:
        return Buffer.from_numpy(array)
    return Buffer.from_numpy(bfloat16(array)).view(dtype, array.shape)


def fetched(buffer: Buffer) -> Floats:
    """The numbers in a buffer."""
    host = buffer.to(CPU())
    if host.dtype == DType.float32:
        return host.to_numpy()
    return float32(host.view(DType.uint16, host.shape).to_numpy())


def drawn(
    shape: Sequence[int], dtype: DType, scale: float = 1.0, seed: int = 0
) -> Floats:
    """Gaussian numbers of a type; a great matrix repeats a run of them."""
    size = int(np.prod(shape))
    random = np.random.default_rng(seed)
    run = random.standard_normal(min(size, 999_983), np.float32)
    run *= np.float32(scale)
    if dtype == DType.bfloat16:
        run = float32(bfloat16(run))
    return np.resize(run, shape)


@dataclasses.dataclass
class Parts:
    """What a weight is rebuilt from."""

    w0: Floats
    b: Floats
    a: Floats

    @classmethod
    def draw(
        cls, shape: Shape, rank: int, dtype: DType, w0: Floats | None = None
    ) -> Parts:
        """Draws parts of which neither w0 nor b a is small."""
        (n, k), scale = shape, rank**-0.25
        return cls(
            drawn((n, k), dtype) if w0 is None else w0,
            drawn((n, rank), dtype, scale, 1),
            drawn((rank, k), dtype, scale, 2),
        )

    def errors(self, found: Floats, rows: slice, dtype: DType) -> list[float]:
        """The worst error, as a share of what roundings may amount to.

        The sum is of float32, and rounded once; or the product was too.
        """
        w0, b, a = (
            part.astype(np.float64)
            for part in (self.w0[rows], self.b[rows], self.a)
        )
        product = b @ a
        exact = w0 + product
        unit = 2.0 ** -BITS[dtype]
        terms = abs(w0) + abs(b) @ abs(a)
        allowed = unit * abs(exact) + (len(a) + 2) * 2.0**-24 * terms
        error = abs(found - exact)
        return [
            float((error / (allowed + more)).max())
            for more in (0, unit * abs(product))
        ]


class Rebuilder:
    """A compiled graph that rebuilds weights from a common b and a."""

    def __init__(
        self,
        device: Device,
        forms: Sequence[str],
        dtype: DType = DType.bfloat16,
        shape: Shape | None = None,
        rank: int | None = None,
        *,
        repeats: int = 1,
        projects: bool = False,
    ) -> None:
        """Traces the graph.

        Args:
            device: Where it runs.
            forms: How each weight is rebuilt, of ``FORMS``.
            dtype: Of the weights.
            shape: [N, K], or any.
            rank: R, or any. If not, ``a`` is a weight of the graph.
            repeats: How many weights are rebuilt.
            projects: Whether twice the product by the first is an output too.
        """
        self.device = device
        self.dtype = dtype
        n, k = shape or ("n", "k")
        r = rank or "r"
        place = DeviceRef.from_device(device)
        kind = functools.partial(TensorType, dtype, device=place)
        self._inputs = [
            kind(shape=["m", k]),
            *([] if rank else [kind(shape=[r, k])]),
            kind(shape=[n, r]),
            *[kind(shape=[n, k])] * repeats,
        ]

        def rebuild(*inputs: TensorValue) -> tuple[TensorValue, ...]:
            x, *others = inputs
            if rank:
                a: TensorValue = Weight("a", dtype, [rank, k], place)
            else:
                a, *others = others
            b, *shared = others
            weights = [
                FORMS[form](w0, b, a, x) for w0 in shared for form in forms
            ]
            if projects:
                weights.append(project(x, weights[0]) * 2)
            return tuple(weights)

        self.graph = Graph(
            f"rebuild_{len(forms)}_{n}_{k}_{r}",
            rebuild,
            self._inputs,
            custom_extensions=list(libraries()),
        )
        self.has_weight = rank is not None

    def compile(self) -> None:
        """Compiles the graph, into the cache or a folder."""
        session = InferenceSession(devices=[self.device])
        session.compile_reusing_mefs(self.graph)

    def load(self, a: Floats | None = None) -> Model:
        """Compiles and loads the graph.

        Args:
            a: The weight, if the graph has it.
        """
        session = InferenceSession(devices=[self.device])
        registry = {} if a is None else {"a": stored(a, self.dtype)}
        return session.load(self.graph, weights_registry=registry)

    def inputs(
        self, parts: Parts, w0: Sequence[Buffer], x: Floats | None = None
    ) -> list[Buffer]:
        """The graph's inputs.

        Args:
            parts: Their b and a are taken.
            w0: Matrices on the device.
            x: What is multiplied, if that is of interest.
        """
        if x is None:
            x = np.zeros((1, parts.a.shape[1]), np.float32)
        small = [x, *([] if self.has_weight else [parts.a]), parts.b]
        return [
            *(stored(array, self.dtype).to(self.device) for array in small),
            *w0,
        ]


@dataclasses.dataclass
class Check:
    """A device, and what was found that must not be."""

    device: Device
    keep: Callable[[str, object], None] = lambda part, found: None
    failures: list[str] = dataclasses.field(default_factory=list)
    worst: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def put(self, values: Floats, dtype: DType) -> Buffer:
        """The values on the device."""
        return stored(values, dtype).to(self.device)

    def judge(
        self, form: str, case: str, parts: Parts, out: Buffer, dtype: DType
    ) -> None:
        """Notes the worst errors of a form, and a failure."""
        n = len(parts.w0)
        for first in range(0, n, max(48, n // 3) if n > 512 else n):
            rows = slice(first, min(n, first + (48 if n > 512 else n)))
            found = fetched(out[rows, :])
            once, twice = parts.errors(found, rows, dtype)
            worst = self.worst.setdefault(form, [0.0, 0.0])
            worst[:] = max(worst[0], once), max(worst[1], twice)
            share = twice if form == "matmul" else once
            if not share <= 1:
                self.failures.append(f"{form}, {case}: {share:.3g} of allowed")

    def odd(self) -> dict[str, Any]:
        """Of any shape a weight is what numpy says.

        On a CPU by both forms, and a product by it too.
        """
        compared = 0
        is_cpu = self.device.is_host
        forms = list(FORMS) if is_cpu else ["custom op"]
        for dtype in BITS:
            projects = is_cpu and dtype == DType.float32
            maker = Rebuilder(self.device, forms, dtype, projects=projects)
            model = maker.load()
            for n, k, r in ODD:
                parts = Parts.draw((n, k), r, dtype)
                x = drawn((3, k), dtype, seed=3)
                outputs = model.execute(
                    *maker.inputs(parts, [self.put(parts.w0, dtype)], x)
                )
                case = f"{dtype.name} {n}x{k}, rank {r}"
                for form, out in zip(forms, outputs, strict=not projects):
                    self.judge(form, case, parts, out, dtype)
                    compared += 1
                if projects:
                    self.judge_product(case, x, outputs[0], outputs[-1], dtype)
        return {"compared": compared, "worst": dict(self.worst)}

    def judge_product(
        self, case: str, x: Floats, weight: Buffer, out: Buffer, dtype: DType
    ) -> None:
        """Notes a failure unless it is twice x times the weight."""
        wide = fetched(weight).astype(np.float64)
        exact = 2 * (x @ wide.T)
        terms = 2 * (abs(x) @ abs(wide).T)
        unit = 2.0 ** -BITS[dtype]
        allowed = unit * abs(exact) + (x.shape[1] + 2) * 2.0**-24 * terms
        share = float((abs(fetched(out) - exact) / allowed).max())
        worst = self.worst.setdefault("product", [0.0])
        worst[:] = [max(worst[0], share)]
        if not share <= 1:
            self.failures.append(f"product, {case}: {share:.3g} of allowed")

    def products(self) -> dict[str, Any]:
        """Products by a weight that is rebuilt are numpy's."""
        dtype, shape = DType.bfloat16, GEMMA3_1B["1b qkv"]
        parts = Parts.draw(shape, 16, dtype)
        maker = self.projecting()
        model = maker.load(parts.a)
        for m in (1, 3, 64, 257):
            x = drawn((m, shape[1]), dtype, seed=m)
            weight, product = model.execute(
                *maker.inputs(parts, [self.put(parts.w0, dtype)], x)
            )
            self.judge_product(f"{m} rows", x, weight, product, dtype)
        return {"worst": dict(self.worst)}

    def copy(self) -> dict[str, float]:
        """How fast the GPU copies, all matrices being as large as any."""
        n, k = SHAPES["27b gate_up"]
        source, *targets = (
            Buffer(DType.bfloat16, (n, k), self.device) for _ in range(4)
        )
        took = race(
            self.device,
            {
                "copy": lambda: [
                    target.inplace_copy_from(source) for target in targets
                ]
            },
            calls=len(targets),
            runs=4,
        )["copy"]
        took["GB/s"] = 4 * n * k / took["median"] / 1e3
        return took

    def timing(self) -> dict[str, Any]:
        """Right weights of models' shapes, and microseconds a weight.

        ``GB/s`` counts w0, read, and the weight, written.
        """
        dtype = DType.bfloat16
        rate = self.copy()["GB/s"]
        found: dict[str, Any] = {"copy GB/s": rate}
        any_shape = self.any_shape()
        any_model = any_shape.load()
        for key, (name, (n, k)) in enumerate(SHAPES.items()):
            sets = max(1, ENOUGH // (4 * n * k * REPEATS))
            w0 = drawn((n, k), dtype)
            first = self.put(w0, dtype)
            w0s = [first]
            while len(w0s) < sets * REPEATS:
                w0s.append(Buffer(dtype, (n, k), self.device))
                w0s[-1].inplace_copy_from(first)
            arms: list[tuple[str, int, Rebuilder, Model | None]] = [
                ("custom op", rank, any_shape, any_model) for rank in RANKS
            ]
            arms += [
                ("matmul", rank, self.by_matmul((n, k), rank), None)
                for shape, rank in MATMULS
                if shape == (n, k)
            ]
            for form, rank, maker, model in arms:
                case = f"{name}, rank {rank}"
                parts = Parts.draw((n, k), rank, dtype, w0)
                try:
                    model = model or maker.load(parts.a)
                except RuntimeError as error:
                    found.setdefault(case, {})[form] = {"error": str(error)}
                    continue
                took = self.time(
                    model,
                    [
                        maker.inputs(parts, w0s[i * REPEATS :][:REPEATS])
                        for i in range(sets)
                    ],
                    lambda out, form=form, case=case, parts=parts: self.judge(
                        form, case, parts, out, dtype
                    ),
                    first_key=1000 * key + 1,
                )
                took["GB/s"] = 4 * n * k / took["median"] / 1e3
                took["of copy"] = took["GB/s"] / rate
                found.setdefault(case, {})[form] = took
                self.keep("timing", found)
        found["worst"] = dict(self.worst)
        return found

    def projecting(self) -> Rebuilder:
        """The graph whose product is looked at."""
        return Rebuilder(
            self.device,
            ["matmul"],
            shape=GEMMA3_1B["1b qkv"],
            rank=16,
            projects=True,
        )

    def any_shape(self) -> Rebuilder:
        """The graph that the op of ours is timed by."""
        return Rebuilder(self.device, ["custom op"], repeats=REPEATS)

    def by_matmul(self, shape: Shape, rank: int) -> Rebuilder:
        """The graph that MAX's matmul is timed by."""
        return Rebuilder(
            self.device, ["matmul"], shape=shape, rank=rank, repeats=REPEATS
        )

    def time(
        self,
        model: Model,
        sets: Sequence[list[Buffer]],
        judge: Callable[[Buffer], None],
        first_key: int,
    ) -> dict[str, Any]:
        """Microseconds a weight, replayed; the last one is judged."""
        keys = range(first_key, first_key + len(sets))
        outputs = [
            model.capture(key, *inputs)
            for key, inputs in zip(keys, sets, strict=True)
        ]
        model._await_device_graphs()

        def replay() -> None:
            for key, inputs in zip(keys, sets, strict=True):
                model.replay(key, *inputs)

        took = race(
            self.device, {"": replay}, calls=len(sets) * REPEATS, runs=2
        )[""]
        judge(outputs[-1][-1])
        del outputs
        for key in keys:
            model.release_captured_graph(key)
        return took


def compile_one(architecture: str, case: tuple[Shape, int] | None) -> float:
    """Compiles what a matmul is in, without the GPU; seconds."""
    pretend(architecture)
    start = time.perf_counter()
    check = Check(Accelerator())
    try:
        (check.by_matmul(*case) if case else check.projecting()).compile()
    except RuntimeError as error:  # found out again, and told, by timing
        print(case, error, file=sys.stderr)
    return time.perf_counter() - start


def compile_all() -> dict[str, float]:
    """Compiles all that a matmul is in, into the cache; seconds."""
    architecture = accelerator_architecture_name()
    context = multiprocessing.get_context("spawn")
    cases: list[tuple[Shape, int] | None] = [None, *MATMULS]
    with context.Pool(len(cases)) as pool:
        took = pool.starmap(
            compile_one, [(architecture, case) for case in cases], chunksize=1
        )
    return {str(case): s for case, s in zip(cases, took, strict=True)}


def main() -> int:
    """Checks, and writes or prints JSON."""
    arguments = Parser(__doc__, action="store_true").arguments()
    if arguments.compile:
        pretend(arguments.compile)
        for dtype in BITS:
            Rebuilder(Accelerator(), ["custom op"], dtype).compile()
        check = Check(Accelerator())
        check.projecting().compile()
        if arguments.mefs:
            check.any_shape().compile()
            for case in MATMULS:
                check.by_matmul(*case).compile()
        return 0
    result: dict[str, Any] = {}

    def keep(part: str, found: object) -> None:
        result[part] = found
        if arguments.output:
            put(result, arguments.output)

    check = Check(CPU() if arguments.cpu else Accelerator(), keep)
    parts: list[Callable[[], Any]] = [check.odd]
    if not arguments.cpu:
        parts += [check.products, check.timing]
    if not arguments.cpu and not arguments.mefs:
        parts.insert(0, compile_all)
    seconds: dict[str, float] = {}
    result |= {"failures": check.failures, "seconds": seconds}
    for part in parts:
        start = time.perf_counter()
        try:
            keep(part.__name__, part())
        except Exception as error:  # the other parts still tell something
            check.failures.append(f"{part.__name__}: {error!r}")
        seconds[part.__name__] = time.perf_counter() - start
    put(result, arguments.output)
    print(*check.failures, sep="\n", file=sys.stderr)
    return 1 if check.failures else 0


if __name__ == "__main__":
    sys.exit(main())
