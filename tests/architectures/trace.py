# SPDX-License-Identifier: Apache-2.0
"""Runs MAX's command line until a model's graphs are traced, and records them.

For the interpreter of an environment that holds MAX:

    python -m tests.architectures.trace OUT warm-cache --model DIR ...

Nothing of the model is compiled. `OUT.json` then has

- `architecture`: the name that MAX resolved,
- `model`: the class of the pipeline model,
- `memory`: the bytes that MAX plans for its weights,
- by a graph's role in `graphs`:
    - `digest`: a hash of the graph's text,
    - `ops`: how often the graph has each custom op and `rmo.matmul`,
    - `inputs`: the types of its inputs,
    - `weights`: each weight's type and shape,
- `buffers`, of a Gemma 3: the types of the inputs that its batch processor
  would make,

and `OUT.npz`, unless the model is large, each weight's bytes by name: so a
sparse checkpoint can be as large as it likes.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np
from tests.toys.probe import OnDevice

if TYPE_CHECKING:
    from max.driver import Buffer
    from max.engine import InferenceSession, Model
    from max.graph import Graph
    from max.pipelines.architectures.gemma3.model import Gemma3Model
    from max.pipelines.lib import PipelineConfig, PipelineModel
    from max.pipelines.lib.graph_specs import GraphSpec

_LARGE = 1 << 26
"""Bytes of a model's weights, from which on they are not saved."""

_OP = re.compile(r'symbol = "([^"]+)"|(rmo\.matmul)\b')


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
        input_row_offsets=OnDevice(types[2]),
        signal_buffers=types[2 + devices : 2 + 2 * devices],
        kv_cache_inputs=model.kv_params.get_symbolic_inputs(),
    )
    try:
        return [str(item) for item in made.buffers]
    except NotImplementedError as error:
        return [repr(error)]


def describe(spec: GraphSpec, graph: Graph) -> dict[str, Any]:
    """Says what there is to say of a traced graph."""
    text = str(graph._mlir_op)
    ops = collections.Counter("".join(found) for found in _OP.findall(text))
    return {
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "ops": dict(ops),
        "inputs": [str(value.type) for value in graph.inputs],
        "weights": {
            name: [buffer.dtype.name, list(buffer.shape)]
            for name, buffer in weights(spec).items()
        },
    }


def weights(spec: GraphSpec) -> dict[str, Buffer]:
    """Returns a graph's weights, by name."""
    from max.driver import Buffer

    return {
        name: value if isinstance(value, Buffer) else Buffer.from_dlpack(value)
        for name, value in spec.weights_registry().items()
    }


def save(out: Path, specs: Iterable[GraphSpec]) -> None:
    """Saves the bytes of the graphs' weights, if they are few."""
    from max.dtype import DType

    found = {n: b for spec in specs for n, b in weights(spec).items()}
    sizes = {
        n: b.num_elements * b.dtype.size_in_bytes for n, b in found.items()
    }
    if sum(sizes.values()) > _LARGE:
        return
    arrays = {
        name: np.frombuffer(
            buffer.view(DType.uint8, [sizes[name]]).to_numpy(), np.uint8
        )
        for name, buffer in found.items()
    }
    np.savez(out, **arrays)


def stop_at_graphs(out: Path) -> None:
    """Makes the pipeline model end the process once its graphs are traced."""
    from max.engine import InferenceSession
    from max.pipelines.architectures.gemma3.model import Gemma3Model
    from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner
    from max.pipelines.lib.arch_lookup import ARCH_LOOKUP
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
    def traced(self: PipelineModel[Any], session: InferenceSession) -> None:
        def stop(_: InferenceSession, specs: Mapping[str, GraphSpec]) -> None:
            name = self.pipeline_config.model.huggingface_config.architectures
            architecture = ARCH_LOOKUP.find(name[0])
            planner = architecture.memory_planner or PagedMemoryPlanner
            # A second trace of one fails.
            graphs = {
                str(getattr(role, "value", role)): (spec, spec.trace())
                for role, spec in specs.items()
            }
            found = {
                "architecture": architecture.name,
                "model": type(self).__name__,
                "memory": _planned(planner, self.pipeline_config),
                "graphs": {
                    role: describe(spec, graph)
                    for role, (spec, graph) in graphs.items()
                },
            }
            if isinstance(self, Gemma3Model):
                found["buffers"] = made_inputs(self, graphs["decoder"][1])
            out.with_suffix(".json").write_text(json.dumps(found, indent=2))
            save(out.with_suffix(".npz"), specs.values())
            raise SystemExit(0)

        pipeline_model.compile_graphs = stop
        load_graphs(self, session)

    pipeline_model.PipelineModel.load_graphs = traced


def _planned(planner: type[Any], config: PipelineConfig) -> int:
    # Its configuration is for the key-value cache alone.
    return planner.__new__(planner).estimate_weights_size(config)


def main() -> None:
    """Runs the command line."""
    if len(sys.argv) < 3:
        raise SystemExit(f"usage: {sys.argv[0]} OUT COMMAND ...")
    out = Path(sys.argv[1]).absolute()
    sys.argv = ["max", *sys.argv[2:]]
    from max._entrypoints.pipelines import main as max_main

    stop_at_graphs(out)
    max_main()
    raise SystemExit("no graph was traced")


if __name__ == "__main__":
    main()
