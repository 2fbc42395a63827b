# SPDX-License-Identifier: Apache-2.0
"""Compares greedy tokens with device graph capture on and off.

Prompts of different lengths are served alone, then several at once: arrivals
are spaced by tokens of the request before, a departure lets the next request
in, and lengths differ, so the batch's size and the order of its rows change
between replays. A captured buffer that is not refreshed shows only then.

A batch of another size may run other kernels, whose last bit differs, and two
logits may lie closer than that. A first difference therefore passes if, and
only if, a server without capture and overlap, asked for the log probabilities
after the common tokens, holds both tokens among its five best and closer than
`--tie` nats. A stale buffer gives a token from elsewhere. Every difference is
listed, and so is the same comparison of each server with itself.

    python -m throughput.capture_equality --patched PYTHON --model DIR \
        --output equality.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from tokenizers import Tokenizer

from throughput.capture import Protocol, machine, ours
from throughput.client import Completion, complete, prompt
from throughput.server import (
    MeasureError,
    Server,
    decode_batch_sizes,
    serve,
)

SLOTS = 8
LOG_EVERY_BATCH = {
    "MAX_SERVE_SCHEDULER_STATS_LOG_INTERVAL_S": "0",
    "MODULAR_DEBUG_CAPTURE_HOST_INPUTS": "report",
}
STALE_HOST_INPUT = "changed since capture"
_WORDS = (1, 3, 8, 15, 16, 31, 33, 64, 90, 110, 127, 128, 200, 255, 300, 490)
_TOKENS = (
    *(100, 140, 60, 180, 120, 80, 160, 70),
    *(200, 90, 130, 110, 150, 64, 170, 190),
)
_TOP = 5


@dataclass(frozen=True)
class Difference:
    """Where one request's tokens first differ between two servers.

    Attributes:
        mode: The arrangement, `alone` or `together`.
        request: Index of the request.
        position: Index of the first token that differs.
        on: That token with capture on.
        off: That token with capture off.
        gap: How far apart their log probabilities are, in nats; None if one
            is not among the five best of the reference.
    """

    mode: str
    request: int
    position: int
    on: int
    off: int
    gap: float | None = None


Requests = Sequence[tuple[str, int]]
"""Content and number of tokens to generate, for each request."""

REQUESTS = tuple(
    (prompt(words, seed), tokens)
    for seed, (words, tokens) in enumerate(zip(_WORDS, _TOKENS, strict=True))
)


async def alone(
    client: httpx.AsyncClient, requests: Requests, extra: dict[str, Any]
) -> list[Completion]:
    """Serves one request after the other."""
    answers = [await complete(client, *r, extra=extra) for r in requests]
    check_lengths(answers, requests)
    return answers


async def together(
    client: httpx.AsyncClient,
    requests: Requests,
    extra: dict[str, Any],
    *,
    spacing: int = 2,
) -> list[Completion]:
    """Serves several requests at once, arriving and leaving one by one.

    A request arrives when the one before it has `spacing` tokens and a slot
    is free, so that arrivals follow decode steps and not the clock.
    """
    free = asyncio.Semaphore(SLOTS)
    under_way = [asyncio.Event() for _ in range(len(requests) + 1)]
    under_way[0].set()

    async def one(index: int) -> Completion:
        def arrived(tokens: int) -> None:
            if tokens >= spacing:
                under_way[index + 1].set()

        await under_way[index].wait()
        async with free:
            return await complete(
                client, *requests[index], extra=extra, on_token=arrived
            )

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i)) for i in range(len(requests))]
    answers = [task.result() for task in tasks]
    check_lengths(answers, requests)
    return answers


def check_lengths(answers: Sequence[Completion], requests: Requests) -> None:
    """Refuses answers that are shorter than what was asked for.

    Raises:
        MeasureError: Naming what was expected and what came.
    """
    for answer, (_, tokens) in zip(answers, requests, strict=True):
        answer.check(tokens)


def check_changes(sizes: Sequence[int]) -> None:
    """Refuses consecutive decode batches that hardly changed in size.

    Raises:
        MeasureError: If the batch never was full, or did not often grow and
            shrink.
    """
    grew = sum(b > a for a, b in pairwise(sizes))
    shrank = sum(b < a for a, b in pairwise(sizes))
    if max(sizes, default=0) != SLOTS or min(grew, shrank) < SLOTS - 1:
        raise MeasureError(
            f"decode batches reached {max(sizes, default=0)} of {SLOTS} "
            f"requests, grew {grew} and shrank {shrank} times: too little to "
            "show a stale buffer"
        )


def check_discriminating(completions: Sequence[Completion]) -> None:
    """Refuses outputs that a stale buffer could give by chance.

    Raises:
        MeasureError: If two requests have the same tokens or the tokens
            repeat themselves.
    """
    outputs = {tuple(c.tokens[:20]) for c in completions}
    tokens = [t for c in completions for t in c.tokens]
    if len(outputs) < len(completions) or len(set(tokens)) < len(tokens) / 4:
        raise MeasureError(
            f"{len(completions)} requests gave {len(outputs)} different "
            f"outputs of {len(tokens)} tokens, {len(set(tokens))} of them "
            "different: the model repeats itself, so equality says nothing"
        )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Returns the first index at which two sequences differ."""
    if a == b:
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def differences(
    mode: str, on: Sequence[Sequence[int]], off: Sequence[Sequence[int]]
) -> list[Difference]:
    """Compares the tokens of each request under one arrangement."""
    found = []
    for i, (a, b) in enumerate(zip(on, off, strict=True)):
        at = first_difference(a, b)
        if at is not None:
            found.append(Difference(mode, i, at, a[at], b[at]))
    return found


async def gap_after(
    client: httpx.AsyncClient,
    tokenizer: Tokenizer,
    context: Sequence[int],
    pair: tuple[int, int],
) -> float | None:
    """Returns how far apart two next tokens are, in nats.

    Args:
        client: Of a server that gives log probabilities.
        tokenizer: Turns the two ids into text.
        context: Token ids of prompt and answer so far.
        pair: The two ids.

    Returns:
        The distance of their log probabilities, or None if one of them is
        not among the five best.

    Raises:
        MeasureError: If the server gives none.
    """
    extra = {
        "prompt_tokens": list(context),
        "logprobs": True,
        "top_logprobs": _TOP,
    }
    answer = await complete(client, "", 1, extra=extra)
    if not answer.alternatives:
        raise MeasureError("the reference server gave no log probabilities")
    best = answer.alternatives[0]
    names = [tokenizer.decode([token]) for token in pair]
    if not all(name in best for name in names):
        return None
    return abs(best[names[0]] - best[names[1]])


async def collect(server: Server, repeats: int) -> dict[str, Any]:
    """Runs both arrangements on one server.

    Returns:
        `prompts`, `alone`: token ids of the prompts and of the answers;
        `together`, `batches`: for each repeat, the answers and the decode
        batch sizes; `stale_host_inputs`: what MAX's own guard reports.
    """
    extra = {"return_token_ids": True}
    found: dict[str, Any] = {"together": [], "batches": []}
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        single = await alone(client, REQUESTS, extra)
        check_discriminating(single)
        found["prompts"] = [c.prompt_ids for c in single]
        found["alone"] = [c.tokens for c in single]
        for _ in range(repeats):
            seen = server.log.stat().st_size
            answers = await together(client, REQUESTS, extra)
            log = server.log.read_bytes()
            sizes = decode_batch_sizes(log[seen:].decode(errors="replace"))
            check_changes(sizes)
            found["together"].append([c.tokens for c in answers])
            found["batches"].append(sizes)
    found["stale_host_inputs"] = [
        line
        for line in log.decode(errors="replace").splitlines()
        if STALE_HOST_INPUT in line
    ]
    return found


async def explain(
    server: Server,
    tokenizer: Tokenizer,
    found: Sequence[Difference],
    off: dict[str, Any],
) -> tuple[list[Difference], list[float]]:
    """Asks the reference how close the tokens of each difference are.

    Returns:
        The differences with their gaps, and the distance between the two best
        tokens at every position of the reference's own answers.
    """
    explained = []
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        extra = {"logprobs": True, "top_logprobs": _TOP}
        own = await alone(client, REQUESTS, extra)
        for d in found:
            mode, _, repeat = d.mode.partition(" ")
            answers = off[mode][int(repeat)] if repeat else off[mode]
            context = off["prompts"][d.request] + answers[d.request]
            length = len(off["prompts"][d.request]) + d.position
            pair = (d.on, d.off)
            gap = await gap_after(client, tokenizer, context[:length], pair)
            explained.append(replace(d, gap=gap))
    gaps = []
    for best in (best for answer in own for best in answer.alternatives):
        first, second, *_ = sorted(best.values(), reverse=True)
        gaps.append(first - second)
    return explained, gaps


def compare_servers(
    on: dict[str, Any], off: dict[str, Any]
) -> list[Difference]:
    """Compares all arrangements of two servers."""
    found = differences("alone", on["alone"], off["alone"])
    pairs = zip(on["together"], off["together"], strict=True)
    for i, (a, b) in enumerate(pairs):
        found += differences(f"together {i}", a, b)
    return found


def unexplained(found: Sequence[Difference], tie: float) -> list[Difference]:
    """Returns the differences that no near-tie of two logits explains."""
    return [d for d in found if d.gap is None or d.gap > tie]


def summary(result: dict[str, Any], tie: float) -> str:
    """Returns the verdict and what it rests on, as Markdown.

    Args:
        result: What `main` writes.
        tie: The largest gap that explains a difference, in nats.
    """
    found = [Difference(**d) for d in result["differences"]]
    bad = unexplained(found, tie)
    repeats = len(result["on"]["together"])
    count = len(REQUESTS)
    gaps = sorted(result["gaps"])
    close = sum(gap <= tie for gap in gaps)
    lines = [
        f"{'PASS' if not bad else 'FAIL'}: capture on against off, "
        f"{count} requests.",
        "",
    ]
    for mode in ("alone", *(f"together {i}" for i in range(repeats))):
        here = [d for d in found if d.mode == mode]
        lines.append(
            f"- {mode}: {count - len(here)} of {count} equal, "
            f"{len(here) - len(unexplained(here, tie))} differ at a near-tie, "
            f"{len(unexplained(here, tie))} differ otherwise"
        )
    for name in ("on", "off"):
        runs = [result[name]["alone"], *result[name]["together"]]
        same = [count - len(differences("", runs[0], run)) for run in runs[1:]]
        sizes = [n for run in result[name]["batches"] for n in run]
        lines.append(
            f"- {name} against itself, alone and together: {same} of {count} "
            f"equal; decode batches of {min(sizes)} to {max(sizes)} requests"
        )
    lines += [
        f"- near-tie: at most {tie} nats; the two best tokens of "
        f"{len(gaps)} positions are {median(gaps):.2f} nats apart in the "
        f"median, {close} of them a near-tie",
        f"- host inputs that changed since capture: "
        f"{len(result['on']['stale_host_inputs'])}",
        *(
            f"- {d.mode}, request {d.request}, token {d.position}: {d.on} "
            f"with capture, {d.off} without, gap {d.gap}"
            for d in found
        ),
    ]
    return "\n".join(lines)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Serves the requests with capture on, off, and for the gaps."""
    flags = (*Protocol.flags, *args.serve_flag)
    off, on = ours(args.patched, args.patched_path)
    reference = (*off.flags, "--no-enable-overlap-scheduler")
    result: dict[str, Any] = {
        "machine": machine(),
        "max": on.versions(),
    }
    for name, arm in (("on", on), ("off", off)):
        log = args.output.with_name(f"{args.output.stem}-{name}.log")
        with serve(
            arm, args.model, log, flags=flags, env=LOG_EVERY_BATCH
        ) as server:
            result[name] = asyncio.run(collect(server, args.repeats))
        args.output.write_text(json.dumps(result) + "\n")
    found = compare_servers(result["on"], result["off"])
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    log = args.output.with_name(f"{args.output.stem}-reference.log")
    plain = replace(off, name="reference", flags=reference)
    with serve(plain, args.model, log, flags=flags) as server:
        explained, gaps = asyncio.run(
            explain(server, tokenizer, found, result["off"])
        )
    result["differences"] = [asdict(d) for d in explained]
    result["gaps"] = gaps
    args.output.write_text(json.dumps(result) + "\n")
    return result


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="throughput.capture_equality",
        description="Compare greedy tokens with capture on and off.",
    )
    parser.add_argument("--patched", required=True, help="interpreter of MAX")
    parser.add_argument("--patched-path", default="", help="its PYTHONPATH")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--tie", type=float, default=0.25, help="near-tie, in nats"
    )
    parser.add_argument("--serve-flag", action="append", default=[])
    args = parser.parse_args()
    try:
        result = run(args)
    except MeasureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary(result, args.tie))
    found = [Difference(**d) for d in result["differences"]]
    return 1 if unexplained(found, args.tie) else 0


if __name__ == "__main__":
    sys.exit(main())
