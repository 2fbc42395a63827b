# SPDX-License-Identifier: Apache-2.0
"""Runs MAX with AttnQuant, and traces the graphs that it would compile.

A module of tests has a fixture `checkpoints`: folders by name.
"""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.architectures.common import MTP, Generated, Run, Traced

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(
    patched_env: Path,
    settings: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Runs that Python with the AttnQuant variables given, and no other."""
    inherited = {
        name: value
        for name, value in settings.items()
        if not name.startswith("ATTNQUANT")
    }
    # Alone, it does not switch AttnQuant off where ATTNQUANT=0 is given.
    cache = str(tmp_path_factory.mktemp("weights"))

    def call(
        variables: Mapping[str, str], *arguments: str | Path
    ) -> subprocess.CompletedProcess[str]:
        if variables:
            variables = {"ATTNQUANT_CACHE_DIR": cache, **variables}
        return subprocess.run(
            [patched_env, *arguments],
            cwd=ROOT,
            env={**inherited, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.fixture(scope="module")
def trace(run: Run) -> Run:
    """Traces a checkpoint's graphs, into `OUT` of the call's arguments."""

    def call(
        variables: Mapping[str, str], out: Path, *arguments: str | Path
    ) -> subprocess.CompletedProcess[str]:
        return run(
            variables,
            *("-m", "tests.architectures.trace", out, *arguments),
            *("--max-length", "256"),
        )

    return call


@pytest.fixture(scope="module")
def traced(
    trace: Run,
    checkpoints: Mapping[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Traced:
    """Gives what MAX's command line traces for a checkpoint.

    That is what `tests.architectures.trace` records, with the `log` and, of a
    small model, the weights' bytes by name in `values`. With `MTP` among the
    arguments the drafter is there too.
    """

    @functools.cache
    def call(
        checkpoint: str,
        command: tuple[str, ...],
        variables: tuple[tuple[str, str], ...],
    ) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("trace") / "graph"
        if MTP[0] in command:
            command += ("--draft-model-path", str(checkpoints["drafter"]))
        done = trace(
            dict(variables), out, *command, "--model", checkpoints[checkpoint]
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
        if out.with_suffix(".npz").exists():
            with np.load(out.with_suffix(".npz")) as values:
                found["values"] = dict(values)
        found["log"] = done.stdout + done.stderr
        return found

    def give(
        checkpoint: str, *command: str, **variables: str
    ) -> dict[str, Any]:
        return call(checkpoint, command, tuple(sorted(variables.items())))

    return give


@pytest.fixture(scope="module")
def generated(
    run: Run,
    checkpoints: Mapping[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Generated]:
    """Gives what `max generate` computes of the float32 toy, on the CPU."""

    @functools.cache
    def generate(
        command: tuple[str, ...], variables: tuple[tuple[str, str], ...]
    ) -> Generated:
        out = tmp_path_factory.mktemp("generated") / "steps.npz"
        done = run(
            dict(variables),
            *("-m", "tests.toys.probe", "steps", out, "generate"),
            *("--model", checkpoints["float32"], *command),
            *("--max-new-tokens", "8", "--top-k", "1"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with np.load(out) as saved:
            steps = range(len(saved.files) // 2)
            tokens = [saved[f"tokens_{i}"] for i in steps]
            logits = np.concatenate([saved[f"logits_{i}"] for i in steps])
        return Generated(
            np.concatenate(tokens).tolist(),
            logits,
            len(tokens[0]) - 1,
            done.stdout + done.stderr,
        )

    def give(*command: str, **variables: str) -> Generated:
        return generate(command, tuple(sorted(variables.items())))

    return give
