# SPDX-License-Identifier: Apache-2.0
r"""Runs a model over batches that a plan fixes, step by step.

For the interpreter of an environment that holds MAX. The pipeline is loaded
by MAX's own code and driven as its scheduler drives it, but which rows a step
has is the plan's choice and not the clock's: two processes with one plan
execute the same batches, so they owe each other equal tokens.

    python -m throughput.fixed_batches --plan PLAN.json --output OUT.json \
        --model DIR [any other flag of `max serve` for the model]

A plan is JSON: `requests`, each with `content` and `tokens` to generate, and
`phases`, each a name and its steps. A step lists its rows by request; a
request is prefilled by its first step and gets one token by every step.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from max._entrypoints.allocator import reexec_with_jemalloc
from max._entrypoints.pipelines import WithLazyPipelineOptions
from max.driver import Buffer
from max.pipelines import (
    PIPELINE_REGISTRY,
    PipelineArgs,
    PipelineConfig,
    TextGenerationPipelineInterface,
)
from max.pipelines.context import SamplingParams, TextContext
from max.pipelines.lib import OverlapTextGenerationPipeline, graph_capture
from max.pipelines.modeling.types import (
    RequestID,
    TextGenerationInputs,
    TextGenerationRequest,
    TextGenerationRequestMessage,
)

Pipeline = TextGenerationPipelineInterface[TextContext]
Buffers = Sequence[Buffer]
Steps = Sequence[Sequence[int]]

_KEPT_BYTES = 2**20


@dataclass
class Replays:
    """What the replays of captured graphs did, seen from outside MAX.

    Attributes:
        count: Replays so far.
        stale: Position of a buffer that each captured graph must go on
            reading as its first replay left it, if any. Larger ones than a
            MiB, such as the cache's pages, are the model's own memory.
        changed: Replays for which that buffer should have held other values.
        kept: What those graphs read instead, by the buffer's place.
        buffers: Types of the buffers that replay refreshes, in its order.
    """

    count: int = 0
    stale: int | None = None
    changed: int = 0
    kept: dict[Hashable, npt.NDArray[Any]] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Wraps MAX's replay and its copy into captured buffers."""
        runner = graph_capture.ServeGraphCaptureRunner
        replay, copy = runner.replay, graph_capture.batch_inplace_copy

        @functools.wraps(replay)
        def counted(own: object, **options: object) -> object:
            self.count += 1
            return replay(own, **options)

        def refresh(captured: Buffers, current: Buffers) -> None:
            self.buffers = self.buffers or [
                f"{item.dtype.name}{list(item.shape)}" for item in captured
            ]
            copy(captured, current)
            if self.stale is None:
                return
            buffer = captured[self.stale]
            if buffer.num_elements * buffer.dtype.size_in_bytes > _KEPT_BYTES:
                return
            now = np.array(buffer.to_numpy())
            place = (buffer._data_ptr(), *buffer.shape)
            kept = self.kept.setdefault(place, now)
            if not np.array_equal(kept, now):
                self.changed += 1
                stale = Buffer.from_numpy(kept).to(buffer.device)
                buffer.inplace_copy_from(stale)

        runner.replay = counted
        graph_capture.batch_inplace_copy = refresh


def load(flags: dict[str, object]) -> Pipeline:
    """Loads a pipeline as `max serve` does, and captures its decode graphs."""
    config = PipelineConfig.from_args(PipelineArgs.from_flat_kwargs(**flags))
    pipeline = PIPELINE_REGISTRY.retrieve_factory(config).factory()
    assert isinstance(pipeline, TextGenerationPipelineInterface)
    if config.runtime.device_graph_capture:
        assert isinstance(pipeline, OverlapTextGenerationPipeline)
        pipeline.warmup_graph_capture()
    return pipeline


def new_context(pipeline: Pipeline, request: dict[str, Any]) -> TextContext:
    """Makes the context of a greedy chat without an early end."""
    text = request["content"]
    message = TextGenerationRequestMessage(role="user", content=text)
    params = SamplingParams(
        temperature=0, seed=0, max_new_tokens=request["tokens"], ignore_eos=True
    )
    return asyncio.run(
        pipeline.tokenizer.new_context(
            TextGenerationRequest(
                request_id=RequestID(),
                model_name="model",
                messages=[message],
                sampling_params=params,
            )
        )
    )


def run(
    pipeline: Pipeline, contexts: Sequence[TextContext], steps: Steps
) -> list[list[int]]:
    """Executes the steps in order.

    The overlap pipeline returns a step's tokens from the call after it. As
    under MAX's scheduler, a request's cache is therefore released when its
    last token comes back, while the step after it is under way.

    Returns:
        The tokens of each context; steps give their rows as its index.
    """
    cache = pipeline.kv_manager
    index = {context.request_id: i for i, context in enumerate(contexts)}
    tokens: list[list[int]] = [[] for _ in contexts]

    def execute(rows: Sequence[int]) -> None:
        batch = [contexts[i] for i in rows]
        for context in batch:
            if not cache.contains(context):
                cache.claim(context)
            cache.alloc(context).synchronize()
        outputs = pipeline.execute(TextGenerationInputs(batches=[batch]))
        for request_id, output in outputs.items():
            i = index[request_id]
            tokens[i] += [int(token) for token in output.tokens]
            if output.is_done:
                cache.release(contexts[i])
                pipeline.release(request_id)

    for rows in steps:
        execute(rows)
    overlap = isinstance(pipeline, OverlapTextGenerationPipeline)
    while overlap and pipeline.has_pending_outputs():
        execute([])
    return tokens


def check(found: list[int], planned: list[int]) -> None:
    """Refuses other numbers of tokens than each request's.

    Raises:
        RuntimeError: Naming both.
    """
    if found != planned:
        raise RuntimeError(
            f"the plan's steps give its requests {found} tokens, expected "
            f"{planned}: a request needs as many steps as tokens"
        )


@click.command(cls=WithLazyPipelineOptions)
@click.option("--plan", type=click.Path(path_type=Path), required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option(
    "--stale",
    "first_stale",
    type=int,
    help="Repeat the last phase as it is and, from this buffer on, once for "
    "each that replay refreshes, left stale.",
)
def main(
    plan: Path, output: Path, first_stale: int | None, **flags: object
) -> None:
    """Runs a plan's batches and writes the tokens of each request."""
    work = json.loads(plan.read_text())
    planned = [request["tokens"] for request in work["requests"]]
    for steps in work["phases"].values():
        rows = [row for step in steps for row in step]
        check([rows.count(i) for i in range(len(planned))], planned)
    replays = Replays()
    replays.watch()
    pipeline = load(flags)
    result: dict[str, Any] = {
        "pipeline": type(pipeline).__name__,
        "capture": pipeline.pipeline_config.runtime.device_graph_capture,
        "versions": {name: version(name) for name in ("max", "max-core")},
        "phases": {},
        "controls": [],
    }

    def phase(steps: Steps) -> dict[str, Any]:
        contexts = [new_context(pipeline, r) for r in work["requests"]]
        result["prompts"] = [c.tokens.prompt.tolist() for c in contexts]
        before = replays.count
        tokens = run(pipeline, contexts, steps)
        check([len(answer) for answer in tokens], planned)
        return {"tokens": tokens, "replays": replays.count - before}

    def save() -> None:
        output.write_text(json.dumps(result) + "\n")

    for name, steps in work["phases"].items():
        result["phases"][name] = phase(steps)
    result["buffers"] = replays.buffers
    save()
    if first_stale is None:
        return
    stale = range(first_stale, len(replays.buffers))
    for replays.stale in (None, *stale):
        replays.changed = 0
        replays.kept.clear()
        # Said before the run, which a stale buffer may end.
        result["controls"].append({"buffer": replays.stale})
        save()
        result["controls"][-1] |= phase(steps) | {"changed": replays.changed}
        save()


if __name__ == "__main__":
    # As MAX's own commands do: under another allocator its model can crash.
    reexec_with_jemalloc()
    main()
