# SPDX-License-Identifier: Apache-2.0
"""The check for GPU machines passes what is right, and nothing else."""

from __future__ import annotations

import numpy as np
from tests.architectures.check_logits import compare

EXACT = 4 * np.random.default_rng(0).standard_normal((3, 100))
ROUNDED = EXACT + 0.01 * np.random.default_rng(1).standard_normal((3, 100))
BEST = EXACT[:2, :90].argmax(axis=1).tolist()


def test_as_far_off_as_transformers_in_the_type_is_right() -> None:
    """MAX may round as much, and take the best token that there is."""
    noise = 0.01 * np.random.default_rng(2).standard_normal((3, 100))
    found = (EXACT + noise).astype(np.float32)
    assert compare(found, EXACT, ROUNDED, BEST, 90)["failures"] == []


def test_one_step_farther_off_is_wrong() -> None:
    """Steps are judged each by itself."""
    found = EXACT.astype(np.float32)
    found[1] += 0.05
    (failure,) = compare(found, EXACT, ROUNDED, BEST, 90)["failures"]
    assert failure.startswith("step 1: off by 0.05")


def test_float32_must_be_close() -> None:
    """Where transformers errs by nothing, 2e-3 are allowed."""
    found = EXACT.astype(np.float32)
    assert compare(found, EXACT, EXACT, BEST, 90)["failures"] == []
    found += 3e-3
    assert len(compare(found, EXACT, EXACT, BEST, 90)["failures"]) == 3


def test_another_token_than_the_best_is_wrong() -> None:
    """A sampled one, or one that the tokenizer does not have."""
    worst = [int(EXACT[0].argmin()), BEST[1]]
    (failure,) = compare(EXACT, EXACT, ROUNDED, worst, 90)["failures"]
    assert failure.startswith(f"step 0: token {worst[0]} is ")


def test_nan_is_wrong() -> None:
    """It is not smaller than what is allowed."""
    found = EXACT.astype(np.float32)
    found[2, 0] = np.nan
    (failure,) = compare(found, EXACT, ROUNDED, BEST, 90)["failures"]
    assert failure.startswith("step 2: off by nan")
