# SPDX-License-Identifier: Apache-2.0
"""The driver of fixed batches, with the built wheel on the CPU.

The model and the flags are those of the serving tests, so that both give MAX
the same graph.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.toys import gemma3, reference

from throughput.capture_equality import (
    check_changes,
    check_discriminating,
    make_plan,
)

ROOT = Path(__file__).resolve().parents[2]
ROWS = 4
WORDS = (1, 3, 16, 33, 110, 255)
TOKENS = (7, 9, 12, 8, 14, 10)
TOLERANCE = 2e-3
"""On logits of a spread of 3.5, as in the serving tests."""


def drive(
    python: Path,
    settings: Mapping[str, str],
    model: Path,
    plan: Path,
    output: Path,
) -> subprocess.CompletedProcess[str]:
    """Executes a plan."""
    return subprocess.run(
        [
            *(python, "-m", "throughput.fixed_batches"),
            *("--plan", plan, "--output", output, "--model", model),
            *gemma3.CPU_FLAGS,
        ],
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def result(
    served_env: Path,
    settings: Mapping[str, str],
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What the driver finds for six requests, alone and up to four at once."""
    folder = tmp_path_factory.mktemp("plan")
    plan = make_plan(WORDS, TOKENS, ROWS)
    check_changes(plan["phases"]["together"], ROWS)
    (folder / "plan.json").write_text(json.dumps(plan))
    output = folder / "output.json"
    done = drive(served_env, settings, checkpoint, folder / "plan.json", output)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("phase", ["alone", "together"])
def test_tokens_are_the_references(
    result: dict[str, Any], checkpoint: Path, phase: str
) -> None:
    """In any batch, each token is the best by numpy's logits.

    Two logits closer than the tolerance may change places.
    """
    model = reference.Gemma3(checkpoint)
    answers = result["phases"][phase]["tokens"]
    assert [len(answer) for answer in answers] == list(TOKENS)
    check_discriminating(answers)
    for prompt, answer in zip(result["prompts"], answers, strict=True):
        logits = model.logits(prompt + answer)[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(logits, np.array(answer)[:, None], 1)
        assert (logits.max(axis=1) - chosen[:, 0]).max() < 2 * TOLERANCE


def test_result_says_that_nothing_was_replayed(result: dict[str, Any]) -> None:
    """Without a GPU there is no capture, and the result does not claim it."""
    assert result["capture"] is False
    assert result["buffers"] == result["controls"] == []
    replays = {n: p["replays"] for n, p in result["phases"].items()}
    assert replays == {"alone": 0, "together": 0}


def test_plan_with_a_step_too_many_is_an_error(
    served_env: Path,
    settings: Mapping[str, str],
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    """A request that ended cannot be run on unnoticed."""
    plan = make_plan((1, 2), (2, 2), 1)
    plan["phases"] = {"alone": [[0], [0], [1], [1], [1]]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    output = tmp_path / "output.json"
    done = drive(
        served_env, settings, checkpoint, tmp_path / "plan.json", output
    )
    assert done.returncode == 1
    assert "[2, 3] tokens, expected [2, 2]" in done.stderr
    assert not output.exists()
