# SPDX-License-Identifier: Apache-2.0
r"""Counts the kernels that a layer launches in a decode step.

Two checkpoints of one model that differ in their number of layers are served
with capture off, so that MAX launches each kernel of a step by itself, under
the library that counts calls of the CUDA driver (`throughput.driver_calls`).
The difference of their launches a step, over that of their layers, is a
layer's. What of the GPU's memory the key-value cache leaves is told, too: with
capture on MAX takes all there is, so that it would not show. Arms are told
apart by environment variables.

    python -m throughput.launches --patched PYTHON --model DIR4 DIR8 \
        --arm built-in \
        --arm bands ATTNQUANT_BLOCKS@4=2 ATTNQUANT_BLOCKS@8=4 ATTNQUANT_RANK=4 \
        --output results.json

A variable with `@N` is set for the checkpoint of N layers alone. A results
file that exists is continued.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from throughput import driver_calls, sampling
from throughput.capture import Protocol, machine, resume
from throughput.sampling import calls_a_step
from throughput.server import CAPTURE_OFF, Arm, MeasureError, check_log

_MIB = {"KiB": 1 / (1 << 10), "MiB": 1, "GiB": 1 << 10, "TiB": 1 << 20}
_VARIABLE = re.compile(
    r"(?P<variable>\w+)(@(?P<layers>\d+))?=(?P<value>.*)", re.DOTALL
)


def arms(
    python: str, path: str, words: Sequence[str], numbers: Sequence[int]
) -> dict[int, Arm]:
    """Returns the arm that the words of one `--arm` ask for.

    Args:
        python: An interpreter that can import MAX.
        path: Its PYTHONPATH, or an empty string.
        words: The name, then variables as `VARIABLE=VALUE`, or as
            `VARIABLE@N=VALUE` for the checkpoint of N layers alone.
        numbers: The layers of the checkpoints.

    Returns:
        The arm as it serves each checkpoint, by layers.

    Raises:
        ValueError: If a word is no variable, or for no checkpoint.
    """
    name, *rest = words
    variables: dict[int, list[tuple[str, str]]] = {n: [] for n in numbers}
    for word in rest:
        match = _VARIABLE.fullmatch(word)
        number = match and match["layers"]
        if not match or (number and int(number) not in numbers):
            raise ValueError(
                f"arm {name}: {word!r} is no environment variable; give "
                "VARIABLE=VALUE, or VARIABLE@N=VALUE for the checkpoint of N "
                f"layers, which are {' and '.join(map(str, numbers))}"
            )
        for n in [int(number)] if number else numbers:
            variables[n].append((match["variable"], match["value"]))
    on = any(
        name.startswith("ATTNQUANT")
        for v in variables.values()
        for name, _ in v
    )
    return {
        n: Arm(
            name,
            python,
            path,
            (CAPTURE_OFF,),
            variables=tuple(v),
            attnquant="AttnQuant" if on else "",
        )
        for n, v in variables.items()
    }


def layers(model: Path) -> int:
    """Returns a checkpoint's number of text layers.

    Args:
        model: A folder with a `config.json`.
    """
    config = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["num_hidden_layers"])


def counted(
    arm: Arm, model: Path, number: int, log: Path, flags: Sequence[str]
) -> dict[str, Any]:
    """Starts a server that counts its launches, and stops it.

    Args:
        arm: Interpreter, variables and flags.
        model: Checkpoint folder.
        number: Its layers.
        log: File for the server's output.
        flags: Flags that every arm has; `{arm}` and `{layers}` in one stand
            for the arm's name and the checkpoint's layers.

    Returns:
        As `samples` what `throughput.sampling.counted` returns, and as
        `kv_cache` what the log says of the key-value cache.

    Raises:
        MeasureError: If a step launches no kernel, or captured graphs, whose
            kernels the driver's calls do not show.
    """
    for mark, value in (("{arm}", arm.name), ("{layers}", str(number))):
        flags = [flag.replace(mark, value) for flag in flags]
    samples = sampling.counted(arm, model, log, flags, launches=True)
    calls = calls_a_step(samples)
    if calls["cuGraphLaunch"] or not launches_a_step(samples):
        raise MeasureError(
            f"{arm.name}: a step of {model} makes the calls {calls}: "
            "expected kernels and no captured graph, whose kernels do not show"
        )
    said = check_log(arm, log.read_text(errors="replace"))
    return {"samples": samples, "kv_cache": said.get("kv_cache", "")}


def launches_a_step(samples: Sequence[Mapping[str, Any]]) -> float:
    """Returns the kernels that one decode step launches.

    Args:
        samples: Of `counted`.
    """
    calls = calls_a_step(samples)
    return sum(calls[name] for name in driver_calls.LAUNCHES)


def measure(
    arms: Sequence[Mapping[int, Arm]],
    models: Mapping[int, Path],
    flags: Sequence[str],
    output: Path,
) -> dict[str, Any]:
    """Counts what the results file does not hold yet.

    Args:
        arms: The arms, each by layers.
        models: The two checkpoints by layers, the smaller first.
        flags: Flags of every server.
        output: Results file, written after every server; server logs go beside
            it.

    Returns:
        The results.
    """
    first = next(iter(models))
    results = resume(
        output,
        {
            "machine": machine(),
            "models": [
                [n, str(model.resolve())] for n, model in models.items()
            ],
            "flags": flags,
            "arms": {
                arm[first].name: arm[first].versions()
                | {"variables": {str(n): arm[n].variables for n in models}}
                for arm in arms
            },
        },
    )
    done = results.setdefault("driver_calls", {})
    for number, arm in enumerate(arms):
        by_layers = done.setdefault(arm[first].name, {})
        for n, model in models.items():
            if str(n) in by_layers:
                continue
            log = output.with_name(f"{output.stem}-{number}-{n}.log")
            by_layers[str(n)] = counted(arm[n], model, n, log, flags)
            output.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{arm[n].name}, {n} layers: counted", flush=True)
    return results


def render(results: Mapping[str, Any]) -> str:
    """Returns the table of launches a layer as Markdown.

    Args:
        results: What this program writes.
    """
    few, many = (number for number, _ in results["models"])
    lines = [
        f"| kernels launched | a step, {few} layers | a step, {many} layers "
        f"| a layer | beside the layers | MiB, {many} layers |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, by_layers in results["driver_calls"].items():
        less, more = (
            launches_a_step(by_layers[str(n)]["samples"]) for n in (few, many)
        )
        a_layer = (more - less) / (many - few)
        counts = (less, more, a_layer, less - few * a_layer)
        cells = [f"{count:.2f}" for count in counts]
        cells.append(memory(by_layers[str(many)]))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def memory(counted: Mapping[str, Any]) -> str:
    """Returns the most MiB in use beside the key-value cache, or a dash.

    The cache takes what the plan for the weights leaves, so it is no part of
    what an arm needs.

    Args:
        counted: What `counted` returns.
    """
    used = [float(n) for s in counted["samples"] for n in s["memory_mib"]]
    if not used or not counted["kv_cache"]:
        return "-"
    _, size, unit = counted["kv_cache"].split()
    return f"{max(used) - float(size) * _MIB[unit]:.0f}"


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="throughput.launches",
        description="Count the kernels that a layer launches a decode step.",
    )
    add = parser.add_argument
    add("--patched", required=True, help="interpreter of ours")
    add("--patched-path", default="", help="its PYTHONPATH")
    add(
        "--model",
        type=Path,
        nargs=2,
        required=True,
        metavar="DIR",
        help="checkpoints of one model, with different numbers of layers",
    )
    add(
        "--arm",
        nargs="+",
        action="append",
        required=True,
        metavar=("NAME", "VARIABLE=VALUE"),
        help="an arm and its environment variables",
    )
    add("--output", type=Path, required=True, help="results file")
    add(
        "--serve-flag",
        action="append",
        default=[],
        help="for every server; {arm} and {layers} in it are filled in",
    )
    args = parser.parse_args()
    models = {layers(model): model for model in sorted(args.model, key=layers)}
    if len(models) < 2:
        parser.error(f"both models have {next(iter(models))} layers")
    try:
        asked = [
            arms(args.patched, args.patched_path, words, list(models))
            for words in args.arm
        ]
    except ValueError as error:
        parser.error(str(error))
    if len({words[0] for words in args.arm}) < len(asked):
        parser.error("two arms have one name")
    flags = [*Protocol.flags, *args.serve_flag]
    try:
        results = measure(asked, models, flags, args.output)
    except MeasureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
