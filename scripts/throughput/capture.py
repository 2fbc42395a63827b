# SPDX-License-Identifier: Apache-2.0
"""Times decoding with and without device graph capture.

Three arms serve the same checkpoint: the untouched MAX, ours with capture
off, and ours as it comes, with capture on. Every trial is a fresh server. The
arms are interleaved, each trial's log must agree with its arm, no prompt is
repeated to a server, and the first rounds of a server are never kept.

    python -m throughput.capture --baseline PYTHON --patched PYTHON \
        --model DIR --output results.json

A results file that exists is continued, on the same machine and with the same
protocol only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from throughput import graphs
from throughput.client import complete, prompt
from throughput.report import render
from throughput.server import (
    CAPTURE_OFF,
    Arm,
    MeasureError,
    Server,
    check_log,
    serve,
)

_BUSY_MIB = 2048


@dataclass(frozen=True)
class Protocol:
    """What every trial does.

    Attributes:
        starts: Server starts an arm.
        concurrency: Requests in flight; each value is a load of its own.
        rounds: Measured rounds of each load; in a round every request starts
            at once and the next round waits for the last.
        warmup: Rounds before them that are not kept.
        prompt_tokens: Length of every prompt, chat template included.
        output_tokens: Generated tokens a request.
        flags: Flags of `max serve` that every arm has.
    """

    starts: int = 4
    concurrency: tuple[int, ...] = (1,)
    rounds: int = 10
    warmup: int = 2
    prompt_tokens: int = 128
    output_tokens: int = 128
    flags: tuple[str, ...] = (
        *("--max-length", "1024", "--max-batch-size", "8"),
        "--no-enable-prefix-caching",
    )


def plan(arms: Sequence[Arm], starts: int) -> list[Arm]:
    """Returns the order of trials: all arms once, then again rotated by one.

    Slow drift of the machine so falls on every arm alike.
    """
    turns = [i % len(arms) for i in range(starts)]
    return [arm for i in turns for arm in (*arms[i:], *arms[:i])]


def ours(python: str, path: str) -> tuple[Arm, Arm]:
    """Returns the arms of the patched MAX: capture off, and as it comes."""
    return (
        Arm(
            "patched, capture off", python, path, (CAPTURE_OFF,), graphs="ours"
        ),
        Arm("patched, capture on", python, path, capture=True, graphs="ours"),
    )


def query_gpu(fields: str) -> list[str]:
    """Returns fields of the first GPU from nvidia-smi; empty without one."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ("--query-gpu=" + fields, "--format=csv,noheader,nounits")
    text = subprocess.check_output(["nvidia-smi", *query], text=True)
    return [x.strip() for x in text.splitlines()[0].split(",")]


def machine() -> dict[str, Any]:
    """Returns what identifies this machine."""
    return {
        "host": platform.node(),
        "gpu": query_gpu("name,driver_version,memory.total"),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }


def await_idle_gpu(timeout_s: float = 60) -> list[str]:
    """Waits until no other process holds memory of the GPU.

    Returns:
        Used memory in MiB, SM clock in MHz and temperature in degrees C;
        empty without a GPU.

    Raises:
        MeasureError: If more than 2 GiB stay in use.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        state = query_gpu("memory.used,clocks.sm,temperature.gpu")
        if not state or int(state[0]) < _BUSY_MIB:
            return state
        if time.monotonic() > deadline:
            raise MeasureError(
                f"the GPU is not idle: {state[0]} MiB are in use before a "
                "trial; end what holds them and run the command again"
            )
        time.sleep(1)


async def load(
    server: Server, protocol: Protocol, concurrency: int, seed: int
) -> list[dict[str, Any]]:
    """Puts one load on a server.

    Args:
        server: A ready server.
        protocol: Rounds and lengths.
        concurrency: Requests a round.
        seed: Of the first prompt; each request takes the next.

    Returns:
        The measured rounds: generated tokens, wall seconds, and each
        request's seconds to the first token and seconds a step.

    Raises:
        MeasureError: If an answer is short, cached or of another length.
    """
    limits = httpx.Limits(max_connections=concurrency)
    client = httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits)
    kept = []
    async with client:
        probe = await complete(client, prompt(8, seed), 2)
        words = protocol.prompt_tokens - (probe.usage["prompt_tokens"] - 8)
        for i in range(protocol.warmup + protocol.rounds):
            first = seed + 1 + i * concurrency
            answers = await asyncio.gather(
                *(
                    complete(client, prompt(words, s), protocol.output_tokens)
                    for s in range(first, first + concurrency)
                )
            )
            for answer in answers:
                answer.check(protocol.output_tokens, protocol.prompt_tokens)
            if i < protocol.warmup:
                continue
            start = min(a.start for a in answers)
            kept.append(
                {
                    "tokens": concurrency * protocol.output_tokens,
                    "wall_s": max(a.end for a in answers) - start,
                    "ttft_s": [a.ttft_s for a in answers],
                    "step_s": [a.step_s for a in answers],
                }
            )
    return kept


def trial(
    arm: Arm, model: Path, log: Path, protocol: Protocol
) -> dict[str, Any]:
    """Starts a server, loads it, stops it.

    Returns:
        The trial's raw samples, with the lines of the log that prove its arm.
    """
    gpu = await_idle_gpu()
    with serve(arm, model, log, flags=protocol.flags) as server:
        loads = {
            str(c): asyncio.run(load(server, protocol, c, seed=c * 1_000_000))
            for c in protocol.concurrency
        }
    return {
        "arm": arm.name,
        "gpu_before": gpu,
        "startup_s": server.startup_s,
        "log": check_log(arm, log.read_text(errors="replace")),
        "loads": loads,
    }


def resume(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Returns the results so far, or an empty set of them.

    Raises:
        MeasureError: If the file's machine, arms or protocol are others.
    """
    header = json.loads(json.dumps(header))
    if not path.exists():
        return header | {"trials": []}
    results: dict[str, Any] = json.loads(path.read_text())
    other = [key for key in header if results.get(key) != header[key]]
    if other:
        raise MeasureError(
            f"{path} was measured with another {', '.join(other)}: "
            f"expected {[header[k] for k in other]}, found "
            f"{[results.get(k) for k in other]}; give another --output"
        )
    return results


def measure(
    arms: Sequence[Arm],
    model: Path,
    protocol: Protocol,
    output: Path,
    time_limit_s: float = float("inf"),
) -> dict[str, Any]:
    """Runs the trials that the results file does not hold yet.

    Args:
        arms: The arms, in the order of the first round.
        model: Checkpoint folder.
        protocol: What every trial does.
        output: Results file, written after every trial; server logs go beside
            it.
        time_limit_s: Seconds after which no further trial starts.

    Returns:
        The results.
    """
    began = time.monotonic()
    results = resume(
        output,
        {
            "machine": machine(),
            "protocol": asdict(protocol),
            "arms": {
                a.name: a.versions()
                | {"flags": a.flags, "variables": dict(a.variables)}
                for a in arms
            },
        },
    )
    order = plan(arms, protocol.starts)
    for i in range(len(results["trials"]), len(order)):
        if time.monotonic() - began > time_limit_s:
            break
        log = output.with_name(f"{output.stem}-{i:02d}.log")
        done = trial(order[i], model, log, protocol)
        results["trials"].append(done)
        output.write_text(json.dumps(results, indent=1) + "\n")
        print(
            f"{i + 1}/{len(order)} {done['arm']}: {done['log']['config']}; "
            f"ready after {done['startup_s']:.0f} s",
            flush=True,
        )
    return results


def add_protocol(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of every timed measurement."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="checkpoint folder")
    add("--output", type=Path, help="results file")
    add("--starts", type=int, default=Protocol.starts, help="servers an arm")
    add("--rounds", type=int, default=Protocol.rounds)
    add("--concurrency", type=int, nargs="+", default=[1])
    add(
        "--time-limit",
        type=float,
        default=float("inf"),
        help="seconds after which no timed trial starts; run again for the "
        "rest",
    )
    add("--serve-flag", action="append", default=[], help="for every server")
    graphs.add_arguments(parser)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses a command line that has those arguments."""
    args = parser.parse_args()
    if not (args.output or args.compile_for):
        parser.error("the following arguments are required: --output")
    return args


def protocol_of(args: argparse.Namespace) -> Protocol:
    """Returns the protocol that arguments ask for."""
    return Protocol(
        starts=args.starts,
        concurrency=tuple(args.concurrency),
        rounds=args.rounds,
        flags=(*Protocol.flags, *args.serve_flag),
    )


def run(arms: Sequence[Arm], args: argparse.Namespace) -> int:
    """Times arms as a command line asks, and prints the report.

    Args:
        arms: The arms.
        args: Parsed, with the arguments of `add_protocol`.

    Returns:
        The exit status.
    """
    protocol = protocol_of(args)
    try:
        results = measure(
            graphs.served(arms, args, protocol.flags),
            args.model,
            protocol,
            args.output,
            args.time_limit,
        )
    except MeasureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(render(results))
    return 0


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="throughput.capture",
        description="Time decoding with and without device graph capture.",
    )
    add = parser.add_argument
    add("--baseline", required=True, help="interpreter of the untouched MAX")
    add("--baseline-path", default="", help="its PYTHONPATH")
    add("--patched", required=True, help="interpreter of ours")
    add("--patched-path", default="", help="its PYTHONPATH")
    add_protocol(parser)
    args = parse(parser)
    built_in = Arm(
        "built-in", args.baseline, args.baseline_path, graphs="built-in"
    )
    return run([built_in, *ours(args.patched, args.patched_path)], args)


if __name__ == "__main__":
    sys.exit(main())
