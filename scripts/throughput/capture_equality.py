# SPDX-License-Identifier: Apache-2.0
r"""Compares greedy tokens with device graph capture on and off.

Prompts of different lengths are served alone, then several at once: arrivals
are spaced by tokens of the request before, a departure lets the next request
in, and lengths differ, so the batch's size and the order of its rows change
between replays. A captured buffer that is not refreshed shows only then.

A batch of another size runs other kernels, whose results differ, and a model
of random weights amplifies that to other tokens. Two servers therefore owe a
request equal tokens for as long as its batches are the same on both: the
number of rows and its own row, at every step. The log of each server says what
its batches were. Tokens past the first other batch are not compared, and how
many were compared is part of the result.

    python -m throughput.capture_equality --patched PYTHON --model DIR \
        --output equality.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import httpx

from throughput.capture import Protocol, machine, ours
from throughput.client import Completion, complete, prompt
from throughput.server import MeasureError, Server, batches, serve

SLOTS = 8
ENOUGH = 100
"""Tokens to compare in batches of several rows, at the least."""

_EVERY_BATCH = {"MAX_SERVE_SCHEDULER_STATS_LOG_INTERVAL_S": "0"}
_WORDS = (1, 3, 8, 15, 16, 31, 33, 64, 90, 110, 127, 128, 200, 255, 300, 490)
_TOKENS = (
    *(100, 140, 60, 180, 120, 80, 160, 70),
    *(200, 90, 130, 110, 150, 64, 170, 190),
)
REQUESTS = tuple(
    (prompt(words, seed), tokens)
    for seed, (words, tokens) in enumerate(zip(_WORDS, _TOKENS, strict=True))
)
"""Content and number of tokens to generate, for each request."""

Tokens = Sequence[Sequence[int]]
"""The answer of each request."""

History = list[tuple[int, int]]
"""For each token of a request: rows of the batch that gave it, own row."""


async def alone(client: httpx.AsyncClient) -> list[Completion]:
    """Serves one request after the other."""
    extra = {"return_token_ids": True}
    return [await complete(client, *r, extra=extra) for r in REQUESTS]


async def together(
    client: httpx.AsyncClient, *, spacing: int = 2
) -> list[Completion]:
    """Serves up to eight requests at once, arriving and leaving one by one.

    A request arrives when the one before it has `spacing` tokens and a slot
    is free, so that arrivals follow decode steps and not the clock.
    """
    free = asyncio.Semaphore(SLOTS)
    under_way = [asyncio.Event() for _ in range(len(REQUESTS) + 1)]
    under_way[0].set()
    extra = {"return_token_ids": True}

    async def one(index: int) -> Completion:
        def arrived(tokens: int) -> None:
            if tokens >= spacing:
                under_way[index + 1].set()

        await under_way[index].wait()
        async with free:
            return await complete(
                client, *REQUESTS[index], extra=extra, on_token=arrived
            )

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i)) for i in range(len(REQUESTS))]
    return [task.result() for task in tasks]


def check_changes(events: Sequence[tuple[str, int]]) -> None:
    """Refuses batches whose size hardly changed between decode steps.

    Raises:
        MeasureError: If the batch never was full, or did not often grow and
            shrink.
    """
    sizes = [rows for kind, rows in events if kind == "TG"]
    grew = sum(b > a for a, b in pairwise(sizes))
    shrank = sum(b < a for a, b in pairwise(sizes))
    if max(sizes, default=0) != SLOTS or min(grew, shrank) < SLOTS // 2:
        raise MeasureError(
            f"decode batches reached {max(sizes, default=0)} of {SLOTS} "
            f"requests, grew {grew} and shrank {shrank} times: too little to "
            "show a stale buffer"
        )


def check_discriminating(answers: Tokens) -> None:
    """Refuses outputs that a stale buffer could give by chance.

    Raises:
        MeasureError: If two requests have the same tokens or the tokens
            repeat themselves.
    """
    outputs = {tuple(answer[:20]) for answer in answers}
    tokens = [token for answer in answers for token in answer]
    if len(outputs) < len(answers) or len(set(tokens)) < len(tokens) / 4:
        raise MeasureError(
            f"{len(answers)} requests gave {len(outputs)} different outputs "
            f"of {len(tokens)} tokens, {len(set(tokens))} of them different: "
            "the model repeats itself, so equality says nothing"
        )


def histories(
    events: Sequence[tuple[str, int]], lengths: Sequence[int]
) -> list[History]:
    """Tells which batch gave each token of each request.

    Requests arrive in order and keep their order in the batch. The overlap
    scheduler learns one step late that a request has ended, so an ended
    request fills a row of the next step. Decode steps before the first
    arrival are left from earlier requests.

    Args:
        events: The server's batches in order, as `server.batches` gives them.
        lengths: Tokens of each request.

    Returns:
        A history for each request.

    Raises:
        MeasureError: If a batch has other rows than that.
    """
    found: list[History] = [[] for _ in lengths]
    ended: dict[int, int] = {}
    active: list[int] = []
    arrived = 0
    for step, (kind, size) in enumerate(events):
        if kind == "CE":
            rows = list(range(arrived, min(arrived + size, len(lengths))))
            active += rows
            arrived += size
        elif not arrived:
            continue
        else:
            active = [i for i in active if ended.get(i, step) >= step - 1]
            rows = active
        if len(rows) != size:
            raise MeasureError(
                f"step {step}: the server's log has a {kind} batch of {size} "
                f"requests, expected {len(rows)}; its batches cannot be told"
            )
        for row, i in enumerate(rows):
            if i not in ended:
                found[i].append((size, row))
            if len(found[i]) == lengths[i]:
                ended.setdefault(i, step)
    return found


@dataclass(frozen=True)
class Agreement:
    """What two runs of the requests say about each other.

    Attributes:
        compared: Tokens given by equal batches so far, and so compared.
        shared: Those of them that a batch of several rows gave.
        sizes: The sizes of those batches.
        contradictions: Request and token that differ nevertheless.
        parted: Requests whose tokens differ after their batches did.
    """

    compared: int
    shared: int
    sizes: frozenset[int]
    contradictions: tuple[tuple[int, int], ...]
    parted: int


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Returns the first index at which two sequences differ, or the end."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def agree(
    a: Tokens, b: Tokens, batches_a: list[History], batches_b: list[History]
) -> Agreement:
    """Compares the tokens of two runs while their batches are equal."""
    parted = 0
    sizes: list[int] = []
    contradictions = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        same = first_difference(batches_a[i], batches_b[i])
        at = first_difference(x, y)
        sizes += [rows for rows, _ in batches_a[i][:same]]
        if at < same:
            contradictions.append((i, at))
        elif list(x) != list(y):
            parted += 1
    return Agreement(
        compared=len(sizes),
        shared=sum(rows > 1 for rows in sizes),
        sizes=frozenset(sizes),
        contradictions=tuple(contradictions),
        parted=parted,
    )


async def collect(server: Server, repeats: int) -> dict[str, Any]:
    """Runs both arrangements on one server.

    Returns:
        `alone`: token ids of the answers; `together` and `events`: for each
        repeat, the answers and the server's batches.
    """
    found: dict[str, Any] = {"together": [], "events": []}
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        answers = [await alone(client)]
        for _ in range(repeats):
            seen = server.log.stat().st_size
            answers.append(await together(client))
            log = server.log.read_bytes()[seen:]
            found["events"].append(batches(log.decode(errors="replace")))
            check_changes(found["events"][-1])
    for run in answers:
        for answer, (_, tokens) in zip(run, REQUESTS, strict=True):
            answer.check(tokens)
    found["alone"], *found["together"] = [
        [answer.tokens for answer in run] for run in answers
    ]
    check_discriminating(found["alone"])
    return found


def judge(result: dict[str, Any]) -> tuple[bool, str]:
    """Compares all runs of the two servers.

    Args:
        result: What `main` writes.

    Returns:
        Whether capture changes no token, and what that rests on, as Markdown.
    """
    on, off = result["on"], result["off"]
    lengths = [len(answer) for answer in on["alone"]]
    single = [[(1, 0)] * n for n in lengths]
    runs = {
        (name, i): (answers, histories(events, lengths))
        for name in ("on", "off")
        for i, (answers, events) in enumerate(
            zip(result[name]["together"], result[name]["events"], strict=True)
        )
    }

    def pair(a: tuple[str, int], b: tuple[str, int]) -> Agreement:
        return agree(runs[a][0], runs[b][0], runs[a][1], runs[b][1])

    count = range(len(on["together"]))
    found = {"alone": agree(on["alone"], off["alone"], single, single)}
    for i, j in product(count, count):
        found[f"together, on {i} and off {j}"] = pair(("on", i), ("off", j))
    control = {
        f"control, {name} {i} and {name} {j}": pair((name, i), (name, j))
        for name in ("on", "off")
        for i, j in pairwise(count)
    }
    most = max(a.shared for a in found.values())
    passed = most >= ENOUGH and not any(
        a.contradictions for a in found.values()
    )
    lines = [
        f"{'PASS' if passed else 'FAIL'}: {len(lengths)} requests, "
        "capture on against off"
    ]
    for name, a in (found | control).items():
        lines.append(
            f"- {name}: {a.compared} tokens by equal batches, {a.shared} of "
            f"them by batches of several rows (at most {max(a.sizes)}), "
            f"{len(a.contradictions)} contradictions"
            f"{''.join(f' {c}' for c in a.contradictions[:5])}; "
            f"{a.parted} requests part after their batches do"
        )
    if most < ENOUGH:
        lines.append(f"- too little: fewer than {ENOUGH} tokens by batches")
    return passed, "\n".join(lines)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="throughput.capture_equality",
        description="Compare greedy tokens with capture on and off.",
    )
    add = parser.add_argument
    add("--patched", required=True, help="interpreter of MAX")
    add("--patched-path", default="", help="its PYTHONPATH")
    add("--model", type=Path, required=True, help="checkpoint folder")
    add("--output", type=Path, required=True, help="results file")
    add("--repeats", type=int, default=4, help="runs together, a server")
    add("--serve-flag", action="append", default=[], help="for both servers")
    args = parser.parse_args()
    off, on = ours(args.patched, args.patched_path)
    result: dict[str, Any] = {"machine": machine()}
    try:
        result["max"] = on.versions()
        for name, arm in (("on", on), ("off", off)):
            with serve(
                arm,
                args.model,
                args.output.with_name(f"{args.output.stem}-{name}.log"),
                flags=(*Protocol.flags, *args.serve_flag),
                env=_EVERY_BATCH,
            ) as server:
                result[name] = asyncio.run(collect(server, args.repeats))
        args.output.write_text(json.dumps(result) + "\n")
        passed, text = judge(result)
    except MeasureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
