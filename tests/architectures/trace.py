# SPDX-License-Identifier: Apache-2.0
"""Runs MAX's command line until the model's graph is traced, and records it.

For the interpreter of an environment that holds MAX:

    python -m tests.architectures.trace OUT warm-cache --model DIR ...

Nothing of the model is compiled. `OUT.json` then has

- `model`: the class of the pipeline model,
- `digest`: a hash of the graph's text,
- `ops`: how often the graph has each custom op and `rmo.matmul`,
- `inputs`, `buffers`: the types of the graph's inputs, and of the inputs that
  the batch processor would make,
- `weights`: each weight's type and shape,

and `OUT.npz` each weight's bytes, by name.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import numpy as np

if TYPE_CHECKING:
    from max.engine import InferenceSession, Model
    from max.graph import DeviceRef, Graph, TensorType
    from max.pipelines.architectures.gemma3.model import Gemma3Model
    from max.pipelines.lib.graph_specs import GraphSpec

_OP = re.compile(r'symbol = "([^"]+)"|(rmo\.matmul)\b')


@dataclass
class _OnDevice:
    """Stands for a buffer of which only the type matters."""

    type: TensorType

    def to(self, device: DeviceRef) -> TensorType:
        return type(self.type)(self.type.dtype, self.type.shape, device)


def made_inputs(model: Gemma3Model, graph: Graph) -> list[str]:
    """Returns the types of what a model's batch processor makes, in order.

    Args:
        model: A Gemma 3 pipeline model.
        graph: Its decoder graph.
    """
    devices = len(model.devices)
    types = [value.type for value in graph.inputs]
    make = model.batch_processor_cls._make_inputs
    made = make(
        None,
        tokens=types[0],
        return_n_logits=types[1],
        input_row_offsets=_OnDevice(types[2]),
        signal_buffers=types[2 + devices : 2 + 2 * devices],
        kv_cache_inputs=model.kv_params.get_symbolic_inputs(),
    )
    try:
        return [str(item) for item in made.buffers]
    except NotImplementedError as error:
        return [repr(error)]


def record(out: Path, model: Gemma3Model, spec: GraphSpec) -> None:
    """Traces a graph and saves what there is to say of it."""
    from max.driver import Buffer
    from max.dtype import DType

    graph = spec.trace()
    text = str(graph._mlir_op)
    ops = collections.Counter("".join(found) for found in _OP.findall(text))
    buffers = {
        name: Buffer.from_dlpack(value)
        if not isinstance(value, Buffer)
        else value
        for name, value in spec.weights_registry().items()
    }
    found = {
        "model": type(model).__name__,
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "ops": dict(ops),
        "inputs": [str(value.type) for value in graph.inputs],
        "buffers": made_inputs(model, graph),
        "weights": {
            name: [buffer.dtype.name, list(buffer.shape)]
            for name, buffer in buffers.items()
        },
    }
    out.with_suffix(".json").write_text(json.dumps(found, indent=2))
    arrays = {
        name: np.frombuffer(
            buffer.view(DType.uint8, [buffer.num_elements * width]).to_numpy(),
            np.uint8,
        )
        for name, buffer in buffers.items()
        for width in [buffer.dtype.size_in_bytes]
    }
    np.savez(out.with_suffix(".npz"), **arrays)


def stop_at_graph(out: Path) -> None:
    """Makes the pipeline model end the process once its graph is traced."""
    from max.engine import InferenceSession
    from max.pipelines.lib.interfaces import pipeline_model

    # Other graphs can come before the model's. Of those only the ones that
    # make weights are run here.
    load = InferenceSession.load

    @functools.wraps(load)
    def loaded(
        self: InferenceSession, graph: Graph, *args: object, **options: object
    ) -> Model:
        if graph.name == "cast" or graph.name.startswith("attnquant"):
            return load(self, graph, *args, **options)
        return MagicMock()

    InferenceSession.load = loaded
    load_graphs = pipeline_model.PipelineModel.load_graphs

    @functools.wraps(load_graphs)
    def traced(self: Gemma3Model, session: InferenceSession) -> None:
        def stop(_: InferenceSession, specs: Mapping[str, GraphSpec]) -> None:
            record(out, self, specs["decoder"])
            raise SystemExit(0)

        pipeline_model.compile_graphs = stop
        load_graphs(self, session)

    pipeline_model.PipelineModel.load_graphs = traced


def main() -> None:
    """Runs the command line."""
    if len(sys.argv) < 3:
        raise SystemExit(f"usage: {sys.argv[0]} OUT COMMAND ...")
    out = Path(sys.argv[1]).absolute()
    sys.argv = ["max", *sys.argv[2:]]
    from max._entrypoints.pipelines import main as max_main

    stop_at_graph(out)
    max_main()
    raise SystemExit("no graph was traced")


if __name__ == "__main__":
    main()
