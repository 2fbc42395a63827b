# SPDX-License-Identifier: Apache-2.0
r"""Times and counts decode steps with and without a sampling kernel of ours.

Two arms serve the same checkpoint with the same wheel, device graph capture
on: one with the kernel overlays switched off, one as it comes. First a server
of each arm runs under a library that counts calls of the CUDA driver
(`throughput.driver_calls`); it compiles the graphs, too. Then the arms are
timed without that library, by the rules of `throughput.capture`.

    python -m throughput.sampling --patched PYTHON --model DIR \
        --overlay fused_token_sampling --output results.json

A results file that exists is continued.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from throughput import driver_calls
from throughput.capture import (
    Protocol,
    add_protocol,
    await_idle_gpu,
    measure,
    parse,
    protocol_of,
    query_gpu,
)
from throughput.client import complete, prompt
from throughput.graphs import served
from throughput.report import render
from throughput.server import Arm, MeasureError, serve

SHORT, LONG = 32, 160
"""Tokens of the answers whose calls are compared, a pair a repetition."""

REPETITIONS = 3
_SETTLE_S = 0.5
_LIBRARIES = (
    "import json, max.graph as g\n"
    "print(json.dumps([p.stem for p in g.default_custom_extensions()]))"
)


@dataclass(frozen=True)
class OverlayArm(Arm):
    """An arm that has kernel overlays of ours, or has them switched off.

    Attributes:
        overlays: The kernel overlays that its graphs must have.
    """

    overlays: tuple[str, ...] = ()

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Returns the process environment of this arm's interpreter."""
        switch = str(int(bool(self.overlays)))
        return super().environment({"MAX_KERNEL_OVERLAYS": switch, **extra})

    def versions(self) -> dict[str, str]:
        """Returns the versions, and the overlays that MAX gives to graphs.

        Raises:
            MeasureError: If these are not the arm's.
        """
        printed = self.asked(_LIBRARIES, "its kernel overlays")
        # MAX itself may print before it.
        found = json.loads(printed.splitlines()[-1])
        if found != sorted(self.overlays):
            raise MeasureError(
                f"{self.name}: expected the kernel overlays "
                f"{sorted(self.overlays)}, found {found}; serve a wheel "
                "that carries just these"
            )
        return super().versions() | {"overlays": ", ".join(found)}


def arms(python: str, path: str, overlays: Sequence[str]) -> list[Arm]:
    """Returns the two arms: overlays off, and as the wheel comes."""
    return [
        OverlayArm(
            "overlays off", python, path, capture=True, graphs="overlays-off"
        ),
        OverlayArm(
            "overlays on",
            python,
            path,
            capture=True,
            graphs="overlays-on",
            overlays=tuple(overlays),
        ),
    ]


async def count(server_url: str, counts: Path) -> list[dict[str, Any]]:
    """Counts driver calls of short and of long answers, one at a time.

    Args:
        server_url: Root of a server's HTTP API, which runs under
            `driver_calls.environment`.
        counts: That environment's folder.

    Returns:
        Of each request: the tokens of its answer, its driver calls by
        function, and the MiB of GPU memory that are in use after it.
    """
    samples = []
    async with httpx.AsyncClient(base_url=server_url, timeout=300) as client:
        lengths = [LONG, *(SHORT, LONG) * REPETITIONS]
        for seed, tokens in enumerate(lengths):
            before = driver_calls.read(counts)
            answer = await complete(client, prompt(64, seed), tokens)
            answer.check(tokens)
            # The scheduler may run a step past the last token.
            await asyncio.sleep(_SETTLE_S)
            after = driver_calls.read(counts)
            calls = {name: n - before.get(name, 0) for name, n in after.items()}
            used = query_gpu("memory.used")
            samples.append(
                {"tokens": tokens, "calls": calls, "memory_mib": used}
            )
    return samples[1:]  # The first warms the server up.


def counted(
    arm: Arm,
    model: Path,
    log: Path,
    flags: Sequence[str],
    *,
    launches: bool = False,
) -> list[dict[str, Any]]:
    """Starts a server that counts its driver calls, and stops it.

    Args:
        arm: Interpreter and flags.
        model: Checkpoint folder.
        log: File for the server's output.
        flags: Flags that every arm has.
        launches: Whether launches of kernels are counted, too.

    Returns:
        What `count` returns.
    """
    await_idle_gpu()
    with tempfile.TemporaryDirectory() as scratch:
        library = driver_calls.build(Path(scratch), launches=launches)
        counts = Path(scratch, "counts")
        counts.mkdir()
        env = driver_calls.environment(library, counts)
        with serve(arm, model, log, flags=flags, env=env) as server:
            return asyncio.run(count(server.url, counts))


def count_calls(
    arms: Sequence[Arm], model: Path, protocol: Protocol, output: Path
) -> None:
    """Counts the calls of each arm that the results file has no counts of.

    Args:
        arms: The arms.
        model: Checkpoint folder.
        protocol: Its flags are the servers'.
        output: Results file, written after every arm; server logs go beside
            it.
    """
    results = measure(arms, model, protocol, output, time_limit_s=0)
    done = results.setdefault("driver_calls", {})
    for arm in arms:
        if arm.name in done:
            continue
        log = output.with_name(f"{output.stem}-calls-{len(done)}.log")
        done[arm.name] = counted(arm, model, log, protocol.flags)
        output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{arm.name}: counted", flush=True)


def calls_a_step(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the calls of one decode step, by function.

    A long answer has all the calls of a short one, prefill and end included,
    and those of its further steps.

    Args:
        samples: What `count` returns.
    """
    short = [s for s in samples if s["tokens"] == SHORT]
    long = [s for s in samples if s["tokens"] == LONG]
    steps = (LONG - SHORT) * len(long)
    return {
        name: sum(
            more["calls"][name] - less["calls"].get(name, 0)
            for less, more in zip(short, long, strict=True)
        )
        / steps
        for name in long[0]["calls"]
    }


def render_calls(results: Mapping[str, Any]) -> str:
    """Returns the table of driver calls a decode step as Markdown.

    Args:
        results: What this program writes.
    """
    measured = {
        arm: calls_a_step(samples)
        for arm, samples in results["driver_calls"].items()
    }
    names = sorted({name for calls in measured.values() for name in calls})
    lines = [
        f"| calls a decode step | {' | '.join(names)} |",
        "| --- |" + " --- |" * len(names),
    ]
    for arm, calls in measured.items():
        cells = " | ".join(f"{calls.get(name, 0):.2f}" for name in names)
        lines.append(f"| {arm} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="throughput.sampling",
        description="Time and count decode steps with and without an overlay.",
    )
    add = parser.add_argument
    add("--patched", required=True, help="interpreter of ours")
    add("--patched-path", default="", help="its PYTHONPATH")
    add("--overlay", nargs="+", required=True, help="that the wheel carries")
    add_protocol(parser)
    args = parse(parser)
    protocol = protocol_of(args)
    both = arms(args.patched, args.patched_path, args.overlay)
    try:
        both = served(both, args, protocol.flags)
        count_calls(both, args.model, protocol, args.output)
        results = measure(
            both, args.model, protocol, args.output, args.time_limit
        )
    except MeasureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(render(results), render_calls(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
