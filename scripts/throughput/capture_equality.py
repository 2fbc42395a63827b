# SPDX-License-Identifier: Apache-2.0
r"""Compares greedy tokens with device graph capture on and off.

A captured buffer that replay does not refresh gives wrong tokens, and may do
so only when the batch changes. Sixteen prompts of different lengths are run
alone, then up to eight at once by a plan that fixes the rows of every step:
requests arrive and leave between replays, batches grow and shrink, and rows
move. Two processes, with capture and without, execute that plan
(`throughput.fixed_batches`). Their batches are the same at every step, so
every token has to be.

    python -m throughput.capture_equality --patched PYTHON --model DIR \
        --controls --output equality.json

`--controls` shows that the comparison would notice: the plan is repeated for
each buffer that replay refreshes, with that buffer left stale.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from throughput.capture import Protocol, machine, ours
from throughput.client import prompt
from throughput.server import Arm, MeasureError

ROWS = 8
_WORDS = (1, 3, 8, 15, 16, 31, 33, 64, 90, 110, 127, 128, 200, 255, 300, 490)
_TOKENS = (
    *(100, 140, 60, 180, 120, 80, 160, 70),
    *(200, 90, 130, 110, 150, 64, 170, 190),
)

Steps = Sequence[Sequence[int]]
"""The rows of each step, by request."""

Tokens = Sequence[Sequence[int]]
"""The answer of each request."""


def changing(
    tokens: Sequence[int], rows: int, seed: int = 0
) -> list[list[int]]:
    """Plans steps of up to `rows` requests that arrive and leave.

    A request arrives by a prefill step of its own and then decodes until it
    has its tokens. Arrivals are spaced at random, a new request takes a row at
    random, and now and then all rows change places.

    Args:
        tokens: Tokens of each request, two at the least.
        rows: The most rows of a step.
        seed: Selects the plan.

    Returns:
        The rows of each step, by request.
    """
    rng = random.Random(seed)
    left = list(tokens)
    waiting = list(range(len(tokens)))
    active: list[int] = []
    steps = []
    while waiting or active:
        full = len(active) == rows or not waiting
        if not active or (not full and rng.random() < 0.25):
            step = [waiting.pop(0)]
            active.insert(rng.randint(0, len(active)), step[0])
        else:
            if rng.random() < 0.25:
                rng.shuffle(active)
            step = list(active)
        for request in step:
            left[request] -= 1
        steps.append(step)
        active = [request for request in active if left[request]]
    return steps


def make_plan(
    words: Sequence[int], tokens: Sequence[int], rows: int
) -> dict[str, Any]:
    """Plans the requests alone, then together.

    Args:
        words: Words of each request's prompt.
        tokens: Tokens that each request generates.
        rows: The most requests at once.

    Returns:
        What `throughput.fixed_batches` executes.
    """
    return {
        "requests": [
            {"content": prompt(n, seed), "tokens": count}
            for seed, (n, count) in enumerate(zip(words, tokens, strict=True))
        ],
        "phases": {
            "alone": [[i] for i, n in enumerate(tokens) for _ in range(n)],
            "together": changing(tokens, rows),
        },
    }


def decodes(steps: Steps) -> list[Sequence[int]]:
    """Returns the steps that no request is new to."""
    seen: set[int] = set()
    found = []
    for step in steps:
        if seen.issuperset(step):
            found.append(step)
        seen.update(step)
    return found


def check_changes(steps: Steps, rows: int) -> None:
    """Refuses a plan that would hardly show a stale buffer.

    Raises:
        MeasureError: If a size of batch is missing, or batches do not often
            grow and shrink, or rows do not often move.
    """
    batches = decodes(steps)
    sizes = [len(step) for step in batches]
    grew = sum(b > a for a, b in pairwise(sizes))
    shrank = sum(b < a for a, b in pairwise(sizes))
    moved = sum(
        any(i in a and a.index(i) != row for row, i in enumerate(b))
        for a, b in pairwise(batches)
    )
    missing = set(range(1, rows + 1)) - set(sizes)
    if missing or min(grew, shrank, moved) < rows // 2:
        raise MeasureError(
            f"the plan's batches lack the sizes {sorted(missing)}, grow "
            f"{grew} and shrink {shrank} times and move rows {moved} times: "
            "too little to show a stale buffer"
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


def differences(steps: Steps, on: Tokens, off: Tokens) -> list[str]:
    """Describes the first token of each request that differs."""
    found = []
    for request, (a, b) in enumerate(zip(on, off, strict=True)):
        pairs = enumerate(zip(a, b, strict=True))
        at = next((i for i, (x, y) in pairs if x != y), None)
        if at is not None:
            own = [i for i, step in enumerate(steps) if request in step]
            found.append(
                f"request {request}, token {at}, step {own[at]} of rows "
                f"{list(steps[own[at]])}: {a[at]} with capture, {b[at]} without"
            )
    return found


def check_runs(
    plan: dict[str, Any], on: dict[str, Any], off: dict[str, Any]
) -> None:
    """Refuses runs that do not differ in capture, or differ in more.

    Raises:
        MeasureError: If capture was not on in one run and off in the other,
            if a decode step was not replayed, or if pipelines, versions or
            prompts differ.
    """
    steps = {name: len(decodes(s)) for name, s in plan["phases"].items()}
    for name, run, expected in (
        ("on", on, steps),
        ("off", off, dict.fromkeys(steps, 0)),
    ):
        replays = {k: phase["replays"] for k, phase in run["phases"].items()}
        if run["capture"] != (name == "on") or replays != expected:
            raise MeasureError(
                f"capture {name}: the pipeline says {run['capture']} and "
                f"replayed {replays} steps, expected {expected}"
            )
    for key in ("pipeline", "versions", "prompts"):
        if on[key] != off[key]:
            raise MeasureError(
                f"{key}: {on[key]} with capture, {off[key]} without"
            )
    for phase in (*on["phases"].values(), *off["phases"].values()):
        check_discriminating(phase["tokens"])


def judge_controls(steps: Steps, on: dict[str, Any]) -> tuple[bool, list[str]]:
    """Tells which stale buffers the comparison notices.

    Args:
        steps: The last phase of the plan.
        on: The run with capture, and with controls.

    Returns:
        Whether tokens differ for each buffer that was stale and for nothing
        else; and a line a control.
    """
    expected = list(on["phases"].values())[-1]["tokens"]
    good, lines = True, []
    for control in on["controls"]:
        buffer = control["buffer"]
        about = "nothing" if buffer is None else on["buffers"][buffer]
        title = f"- control, stale {about} ({buffer}):"
        if "tokens" not in control:
            good = False
            lines.append(f"{title} ended the process; no later one was tried")
            continue
        parted = len(differences(steps, control["tokens"], expected))
        good &= bool(parted) == bool(control["changed"])
        lines.append(
            f"{title} other values in {control['changed']} of "
            f"{control['replays']} replays, {parted} requests differ"
        )
    return good and any(c.get("changed") for c in on["controls"]), lines


def judge(result: dict[str, Any]) -> tuple[bool, str]:
    """Compares the two runs.

    Args:
        result: What `main` writes.

    Returns:
        Whether capture changes no token, and if controls were run, that each
        stale buffer does; and what that rests on, as Markdown.

    Raises:
        MeasureError: If the runs cannot be compared.
    """
    plan, on, off = result["plan"], result["on"], result["off"]
    check_runs(plan, on, off)
    passed = True
    lines = []
    for name, steps in plan["phases"].items():
        a, b = (run["phases"][name]["tokens"] for run in (on, off))
        found = differences(steps, a, b)
        passed &= not found
        sizes = [len(step) for step in decodes(steps)]
        lines.append(
            f"- {name}: {sum(map(len, a))} tokens of {len(a)} requests, "
            f"{len(sizes)} replays of {min(sizes)} to {max(sizes)} rows, "
            f"{len(found)} requests differ"
        )
        lines += [f"  - {line}" for line in found]
    if on["controls"]:
        good, more = judge_controls(steps, on)
        passed &= good
        lines += more
    title = "PASS" if passed else "FAIL"
    return passed, "\n".join([f"{title}: capture on against off", *lines])


def drive(
    arm: Arm, model: Path, plan: Path, output: Path, flags: Sequence[str]
) -> dict[str, Any]:
    """Executes a plan in a process of its own.

    Args:
        arm: Interpreter and flags.
        model: Checkpoint folder.
        plan: The plan's file.
        output: Where the process writes; its log goes beside it.
        flags: Flags that every arm has.

    Returns:
        What the process found.

    Raises:
        MeasureError: If it failed, other than by a stale buffer.
    """
    scripts = str(Path(__file__).resolve().parents[1])
    log = output.with_suffix(".log")
    output.unlink(missing_ok=True)
    with log.open("wb") as file:
        done = subprocess.run(
            [
                *(arm.python, "-m", "throughput.fixed_batches"),
                *("--plan", str(plan), "--output", str(output)),
                *("--model", str(model), *flags, *arm.flags),
            ],
            env=arm.environment(
                {
                    "HF_HUB_OFFLINE": "1",
                    "MAX_SERVE_DISABLE_TELEMETRY": "1",
                    "PYTHONPATH": os.pathsep.join(
                        filter(None, (scripts, arm.path))
                    ),
                }
            ),
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    found: dict[str, Any] = {}
    if output.exists():
        found = json.loads(output.read_text())
    controls = found.get("controls")
    by_control = controls and controls[-1]["buffer"] is not None
    if done.returncode and not by_control:
        raise MeasureError(
            f"{arm.name}: ended with exit code {done.returncode}; the log "
            f"{log} ends:\n{log.read_text(errors='replace')[-2000:]}"
        )
    return found


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
    add("--controls", action="store_true", help="also leave buffers stale")
    add("--serve-flag", action="append", default=[], help="for both runs")
    args = parser.parse_args()
    flags = (*Protocol.flags, *args.serve_flag)
    off, on = ours(args.patched, args.patched_path)
    plan = make_plan(_WORDS, _TOKENS, ROWS)
    file = args.output.with_name(f"{args.output.stem}-plan.json")
    file.write_text(json.dumps(plan) + "\n")

    def run(name: str, arm: Arm, *more: str) -> dict[str, Any]:
        output = args.output.with_name(f"{args.output.stem}-{name}.json")
        return drive(arm, args.model, file, output, (*flags, *more))

    try:
        check_changes(plan["phases"]["together"], ROWS)
        result: dict[str, Any] = {
            "machine": machine(),
            "flags": flags,
            "plan": plan,
            "off": run("off", off),
            "on": run("on", on, *(("--stale", "0") if args.controls else ())),
        }
        args.output.write_text(json.dumps(result) + "\n")
        passed, text = judge(result)
    except MeasureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
