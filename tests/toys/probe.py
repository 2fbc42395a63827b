# SPDX-License-Identifier: Apache-2.0
"""Runs MAX's command line and records what it does with a Gemma.

For the interpreter of an environment that holds MAX, of any release:

    python -m tests.toys.probe steps OUT.npz generate --model DIR ...
    python -m tests.toys.probe graph OUT.json warm-cache --model DIR ...

`steps` lets the command run and saves, for each call of the model, the tokens
it was given and the logits it gave. `graph` stops the command as soon as the
model's graph is traced, so nothing is compiled, and saves the graph.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from max.engine import InferenceSession, Model
    from max.graph import DeviceRef, Graph, TensorType
    from max.nn.kv_cache import KVCacheParamInterface
    from max.pipelines.architectures.gemma3.gemma3 import Gemma3
    from max.pipelines.architectures.gemma3.model import (
        Gemma3Model,
    )
    from max.pipelines.lib import ModelOutputs


_MODELS = ("gemma3", "Gemma3Model"), ("gemma4", "Gemma3_MultiModalModel")


def record_steps(out: Path) -> Callable[[], None]:
    """Makes the Gemma models keep their tokens and logits.

    Returns:
        What saves them in `out`, a `.npz` file: `tokens_0`, `logits_0` and so
        on, a pair a call, with shapes `[tokens]` and `[sequences, vocabulary]`.
    """
    steps: dict[str, npt.NDArray[Any]] = {}
    for module, name in _MODELS:
        found = import_module(f"max.pipelines.architectures.{module}.model")
        _record(getattr(found, name), steps)

    def save() -> None:
        np.savez(out, **steps)

    return save


def _record(model: type[Any], steps: dict[str, npt.NDArray[Any]]) -> None:
    from max.driver import CPU

    execute = model.execute

    @functools.wraps(execute)
    def recording(self: object, model_inputs: Any) -> ModelOutputs:  # noqa: ANN401
        outputs = execute(self, model_inputs)
        count = len(steps) // 2
        for name, buffer in (
            ("tokens", model_inputs.tokens),
            ("logits", outputs.next_token_logits),
        ):
            values = buffer.to(CPU()).to_numpy()
            steps[f"{name}_{count}"] = np.array(values)
        return outputs

    model.execute = recording


@dataclass
class OnDevice:
    """Stands for a buffer of which only the type matters."""

    type: TensorType

    def to(self, device: DeviceRef) -> TensorType:
        return type(self.type)(self.type.dtype, self.type.shape, device)


def describe(
    graph: Graph, kv_inputs: object, devices: int
) -> dict[str, object]:
    """Describes a traced graph beside the inputs that MAX would give it.

    Args:
        graph: A Gemma 3 decoder graph.
        kv_inputs: The symbolic inputs of its key-value cache.
        devices: The number of devices it runs on.

    Returns:
        `inputs`: the types of the graph's inputs, in order; `buffers`: the
        types of `Gemma3Inputs.buffers`, when that is given a single row
        offset buffer; `digest`: a hash of the graph's text; `bfloat16`:
        whether that text names the type.
    """
    from max.pipelines.architectures.gemma3.model import Gemma3Inputs

    types = [value.type for value in graph.inputs]
    tokens, return_n_logits, row_offsets = types[:3]
    model_inputs = Gemma3Inputs(
        tokens=tokens,
        return_n_logits=return_n_logits,
        input_row_offsets=OnDevice(row_offsets),
        signal_buffers=types[2 + devices : 2 + 2 * devices],
        kv_cache_inputs=kv_inputs,
    )
    try:
        buffers = [str(item) for item in model_inputs.buffers]
    except NotImplementedError as error:
        buffers = [repr(error)]
    text = str(graph._mlir_op)
    return {
        "inputs": [str(item) for item in types],
        "buffers": buffers,
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "bfloat16": "bf16" in text,
    }


def stop_at_graph(out: Path) -> None:
    """Makes the Gemma 3 model end the process once its graph is traced."""
    from max.engine import InferenceSession
    from max.pipelines.architectures.gemma3.gemma3 import Gemma3
    from max.pipelines.architectures.gemma3.model import Gemma3Model

    # Other graphs can come before the model's. Of those only the cast of the
    # weights is run here.
    load = InferenceSession.load

    @functools.wraps(load)
    def loaded(
        self: InferenceSession,
        graph: Graph,
        *args: object,
        **options: object,
    ) -> Model:
        if graph.name == "cast":
            return load(self, graph, *args, **options)
        return MagicMock()

    InferenceSession.load = loaded

    def stop(
        graph: Graph, kv_params: KVCacheParamInterface, devices: int
    ) -> None:
        kv_inputs = kv_params.get_symbolic_inputs()
        found = describe(graph, kv_inputs, devices)
        out.write_text(json.dumps(found, indent=2))
        raise SystemExit(0)

    if hasattr(Gemma3, "trace"):
        trace = Gemma3.trace

        @functools.wraps(trace)
        def traced(self: Gemma3, *args: object, **options: object) -> None:
            graph = trace(self, *args, **options)
            model = self.language_model
            stop(graph, model.kv_params, len(model.devices))

        Gemma3.trace = traced
        return

    build = Gemma3Model._build_graph_for_compile

    @functools.wraps(build)
    def built(self: Gemma3Model, *args: object, **options: object) -> None:
        graph, _ = build(self, *args, **options)
        stop(graph, self.kv_params, len(self.devices))

    Gemma3Model._build_graph_for_compile = built


def main() -> None:
    """Runs the command line."""
    if len(sys.argv) < 4 or sys.argv[1] not in ("steps", "graph"):
        raise SystemExit(f"usage: {sys.argv[0]} steps|graph OUT COMMAND ...")
    mode, out = sys.argv[1], Path(sys.argv[2]).absolute()
    sys.argv = ["max", *sys.argv[3:]]
    from max._entrypoints.pipelines import main as max_main

    if mode == "graph":
        stop_at_graph(out)
        max_main()
        raise SystemExit("no Gemma 3 graph was traced")
    save = record_steps(out)
    try:
        max_main()
    finally:
        save()


if __name__ == "__main__":
    main()
