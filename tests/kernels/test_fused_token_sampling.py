# SPDX-License-Identifier: Apache-2.0
"""The kernel overlay ``fused_token_sampling`` for MAX 26.5.

What needs an NVIDIA GPU is in ``check_fused_token_sampling.py``. With
``MAXPATCH_TEST_PYTHON`` the tests run in an environment that has MAX 26.5.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from tests.conftest import Check
from tests.kernels.sampling_reference import candidates

from maxpatch import overlay
from maxpatch.series import State

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "overlay" / "kernels" / "fused_token_sampling"


@pytest.fixture(scope="module")
def check(run_check: Check) -> Check:
    """Runs the check with arguments."""
    return functools.partial(run_check, "26.5.0", "check_fused_token_sampling")


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the check printed."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "kind",
    [
        "float32:2",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("float64:2", "bfloat16:2", "float32:1", "float32:3")
        ),
    ],
)
def test_tokens_of_the_built_in(check: Check, kind: str) -> None:
    """On a CPU the overlay draws MAX's tokens, and none but candidates."""
    compared = report(check("--cpu", kind))
    assert compared["unequal"] == []
    if kind != "bfloat16:2":  # too coarse for the reference
        assert compared["not_allowed"] == []
    assert compared["distinct_tokens"] > 10


def test_overlay_takes_the_place_of_the_built_in(
    check: Check, tmp_path: Path
) -> None:
    """The op that a graph runs is the overlay's, not MAX's."""
    copy = shutil.copytree(SOURCE, tmp_path / SOURCE.name)
    file = copy / f"{SOURCE.name}.mojo"
    body = "        comptime if is_cpu[target]():\n"
    before, after = file.read_text().split(body)
    planted = '        raise Error("planted")\n'
    file.write_text(before + planted + body + after)
    done = check("--cpu", "float32:2", "--overlay", copy)
    assert done.returncode != 0
    assert "planted" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["sm_90a", "sm_100a", "sm_90a:all", "sm_100a:all"]
)
def test_compiles_for_gpus(check: Check, target: str) -> None:
    """It compiles for Hopper and Blackwell, with and without assertions."""
    report(check("--compile", target))


@pytest.mark.parametrize(
    ("release", "state"),
    [
        ("26.5.0", State.APPLIED),
        ("26.6.0", State.NOT_FOR_RELEASE),
        ("26.7.0", State.NOT_FOR_RELEASE),
    ],
)
def test_only_for_the_release_that_waits(release: str, state: State) -> None:
    """A wheel has the overlay only if its MAX waits for the device."""
    packages = {p.name: p for p in overlay.load(ROOT / "overlay")}
    package = packages["kernels/fused_token_sampling"]
    found, reason = package.state(Version(release))
    assert found is state
    if state is not State.APPLIED:
        assert reason.endswith("26.6.0 and later, do not wait")


def test_candidates_of_a_known_row() -> None:
    """Top-k, then min_p, then top_p of what is left, after temperature."""
    row = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    assert candidates(row, 1).tolist() == [1]
    assert candidates(row, 3).tolist() == [1, 3, 2]
    # 0.4 / 0.9 is less than a half, 0.7 / 0.9 more.
    assert candidates(row, 3, top_p=0.5).tolist() == [1, 3]
    # 0.4 / 0.7 is more.
    assert candidates(row, 2, top_p=0.5).tolist() == [1]
    assert candidates(row, 4, min_p=0.6).tolist() == [1, 3]
    # Halving the temperature squares the probabilities: 16, 9, 4, 1.
    assert candidates(row, 4, temperature=0.5, min_p=0.2).tolist() == [1, 3, 2]


@given(
    st.lists(st.integers(-9, 9), min_size=1, max_size=20),
    st.integers(1, 25),
    st.floats(0.1, 1),
    st.floats(0, 0.9),
)
def test_candidates_are_among_the_largest(
    row: list[int], k: int, top_p: float, min_p: float
) -> None:
    """Whatever the setting, the largest logit is in, those past k are out."""
    logits = np.array(row, float)
    found = candidates(logits, k, top_p=top_p, min_p=min_p)
    assert found[0] == logits.argmax()
    larger = [(logits > logits[token]).sum() for token in found]
    assert max(larger) < k
