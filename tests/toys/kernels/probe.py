# SPDX-License-Identifier: Apache-2.0
"""Shows, as JSON, what graphs built without extensions do with kernels.

Run by the Python of an environment with MAX: ``probe.py paths|graph|group``.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import (
    DeviceRef,
    Graph,
    TensorType,
    TensorValue,
    default_custom_extensions,
    ops,
)
from max.graph import Module as GraphModule
from max.nn import Module

VECTOR = TensorType(DType.float32, ["n"], DeviceRef.CPU())


def sums(x: TensorValue) -> TensorValue:
    """Reaches the built-in op."""
    return ops.cumsum(x)


def sevens(x: TensorValue) -> TensorValue:
    """Reaches the op that only the overlay registers."""
    [y] = ops.custom("overlay_toy.sevens", x.device, [x], [x.type])
    return y.tensor


class Decoder(Module):
    """A tower that holds both ops."""

    def __call__(self, x: TensorValue) -> TensorValue:
        return ops.concat([sums(x), sevens(x)])


class Vision(Module):
    """A tower that holds the built-in op."""

    def __call__(self, x: TensorValue) -> TensorValue:
        return sums(x)


class Recorded(Exception):
    """The recorder has what it is there for."""


class Recorder(InferenceSession):
    """Keeps the kernel libraries that go to the compiler, and stops there."""

    libraries: list[str]

    def _compile_module(
        self, module: GraphModule, extensions: list[Path], *_: object
    ) -> NoReturn:
        self.libraries = list(map(str, extensions))
        raise Recorded


def paths() -> dict[str, list[str]]:
    """The kernel libraries that MAX hands out and that graphs take."""
    from max.pipelines.lib import SamplingConfig
    from max.pipelines.sampling.sampling import token_sampler

    sampler = token_sampler(SamplingConfig(), DeviceRef.CPU())
    plain = Graph("plain", input_types=[VECTOR])
    session = Recorder(devices=[CPU()])
    with contextlib.suppress(Recorded):
        group(session)
    return {
        "default": list(map(str, default_custom_extensions())),
        "graph": list(map(str, plain.kernel_libraries_paths)),
        "sampler": list(map(str, sampler.kernel_libraries_paths)),
        "group": session.libraries,
    }


def graph(session: InferenceSession) -> Mapping[str, Model]:
    """One graph, compiled on its own."""
    return session.load_all(Graph("alone", Decoder(), [VECTOR]))


def group(session: InferenceSession) -> Mapping[str, Model]:
    """Decoder and vision tower, compiled as pipelines of MAX do it."""
    towers = {"decoder": Decoder(), "vision": Vision()}
    try:
        from max.pipelines.lib import graph_specs
    except ImportError:  # MAX 26.5 compiles the module of graphs directly
        module = GraphModule()
        for name, tower in towers.items():
            Graph(name, tower, [VECTOR], module=module)
        return session.load_all(module)
    specs = {
        name: graph_specs.GraphSpec(tower, name, [VECTOR], group="towers")
        for name, tower in towers.items()
    }
    compiled = graph_specs.compile_graphs(session, specs)
    return graph_specs.init_graphs(session, compiled, specs)


def run(models: Mapping[str, Model]) -> dict[str, list[float]]:
    """Every model's output for the input 1, 2, 3."""
    x = np.array([1, 2, 3], np.float32)
    return {
        name: model.execute(x)[0].to_numpy().tolist()
        for name, model in models.items()
    }


def main(what: str) -> None:
    """Prints what was asked for."""
    if what == "paths":
        print(json.dumps(paths()))
        return
    session = InferenceSession(devices=[CPU()])
    build = {"graph": graph, "group": group}[what]
    print(json.dumps(run(build(session))))


if __name__ == "__main__":
    main(*sys.argv[1:])
