# SPDX-License-Identifier: Apache-2.0
"""Prints the table of a results file as Markdown.

python -m throughput.report results.json
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from math import comb
from pathlib import Path
from statistics import median
from typing import Any


def trial_rates(trials: list[dict[str, Any]], load: str) -> list[float]:
    """Returns each trial's tokens a second: the median over its rounds."""
    return [
        median(r["tokens"] / r["wall_s"] for r in t["loads"][load])
        for t in trials
    ]


def trial_medians(
    trials: list[dict[str, Any]], load: str, key: str
) -> list[float]:
    """Returns each trial's median of a per-request time, in milliseconds."""
    return [
        1e3 * median(x for r in t["loads"][load] for x in r[key])
        for t in trials
    ]


def disjoint(a: list[float], b: list[float]) -> bool:
    """Tells whether the two ranges have no value in common."""
    return max(a) < min(b) or max(b) < min(a)


def compare(slow: list[float], fast: list[float]) -> str:
    """Says how many times the one arm's rate is of the other's.

    When no trial of one arm reaches into the other's range, the exact
    two-sided Mann-Whitney p is two orders among all ways to draw.
    """
    ratio = median(fast) / median(slow)
    text = (
        f"{ratio:.2f}x in medians, {min(fast) / max(slow):.2f}x from the "
        "slower arm's best trial to the faster arm's worst"
    )
    if not disjoint(slow, fast):
        return f"{text}; the ranges overlap"
    p = 2 / comb(len(slow) + len(fast), len(slow))
    return f"{text}; the ranges are disjoint (exact Mann-Whitney p = {p:.3f})"


def _spread(values: list[float], digits: int) -> str:
    """Formats median and range."""
    return (
        f"{median(values):.{digits}f} "
        f"[{min(values):.{digits}f}, {max(values):.{digits}f}]"
    )


def table(results: dict[str, Any], load: str) -> str:
    """Returns the table of one load and the ratios below it.

    Args:
        results: What `throughput.capture` writes.
        load: The load's concurrency, as the results name it.

    Returns:
        Markdown. A cell is the median over an arm's trials and their range.
    """
    by_arm: dict[str, list[dict[str, Any]]] = {a: [] for a in results["arms"]}
    for trial in results["trials"]:
        by_arm[trial["arm"]].append(trial)
    measured = {arm: trials for arm, trials in by_arm.items() if trials}
    lines = [
        "| arm | MAX | starts | tok/s | step, ms | first token, ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rates = {}
    for arm, trials in measured.items():
        rates[arm] = trial_rates(trials, load)
        cells = (
            arm,
            results["arms"][arm]["max"],
            str(len(trials)),
            _spread(rates[arm], 1),
            _spread(trial_medians(trials, load, "step_s"), 2),
            _spread(trial_medians(trials, load, "ttft_s"), 1),
        )
        lines.append(f"| {' | '.join(cells)} |")
    pairs = list(pairwise(rates))
    if len(rates) > 2:
        pairs.append((next(iter(rates)), list(rates)[-1]))
    lines.append("")
    lines += [f"- {b} / {a}: {compare(rates[a], rates[b])}" for a, b in pairs]
    return "\n".join(lines)


def render(results: dict[str, Any]) -> str:
    """Returns the whole report as Markdown.

    Args:
        results: What `throughput.capture` writes.

    Returns:
        One section a load, the machine, and the lines of the servers' logs
        that say whether device graphs were captured.
    """
    protocol, machine = results["protocol"], results["machine"]
    sections = [
        f"Concurrency {c}:\n\n{table(results, str(c))}"
        for c in protocol["concurrency"]
        if results["trials"]
    ]
    gpu = ", ".join(machine["gpu"][:2]) or "no GPU"
    wanted = protocol["starts"] * len(results["arms"])
    proofs = sorted(
        {
            f"- {t['arm']}: `{t['log']['config']}`, `{t['log']['pipeline']}`"
            for t in results["trials"]
        }
    )
    about = (
        f"{gpu}, {machine['cores']} cores; {protocol['prompt_tokens']} tokens "
        f"in, {protocol['output_tokens']} out, {protocol['rounds']} rounds a "
        f"trial after {protocol['warmup']} warm-up rounds; "
        f"{len(results['trials'])} of {wanted} trials."
    )
    return "\n\n".join([*sections, about, "\n".join(proofs)])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="throughput.report")
    parser.add_argument("results", type=Path)
    print(render(json.loads(parser.parse_args().results.read_text())))


if __name__ == "__main__":
    main()
