# SPDX-License-Identifier: Apache-2.0
"""Rebuilding a weight, by our op and by MAX's matmul, without a GPU.

The oracle is numpy in float64. What needs a GPU is in ``check_rebuild.py``.
With ``MAXPATCH_TEST_PYTHON`` the tests run in an environment that has
MAX 26.7.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tests.conftest import Check

CHECK = "check_rebuild"


@pytest.fixture(scope="module")
def found(run_check: Check) -> dict[str, Any]:
    """What the check finds on a CPU, with the ops as MAX precompiles them."""
    done = run_check("26.7.0", CHECK, "--cpu", MAX_KERNEL_OVERLAYS="1")
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_weights_and_products_are_numpys(found: dict[str, Any]) -> None:
    """In both types, of any shape, no error is beyond its roundings."""
    assert found["failures"] == []
    assert found["odd"]["compared"] >= 48


def test_the_bounds_are_close(found: dict[str, Any]) -> None:
    """The worst errors come near what is allowed, so less is a failure."""
    worst = found["odd"]["worst"]
    for form in ("custom op", "matmul"):
        once, twice = worst[form]
        assert max(s for s in (once, twice) if s <= 1) > 0.9


def test_our_op_rounds_once(found: dict[str, Any]) -> None:
    """Our op's sum is rounded once; the matmul's product also."""
    worst = found["odd"]["worst"]
    assert worst["custom op"][0] <= 1 < worst["matmul"][0]
    assert math.isfinite(worst["matmul"][0])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_compiles_for_gpus(run_check: Check, architecture: str) -> None:
    """Both forms, and a product, compile for Hopper and Blackwell."""
    done = run_check("26.7.0", CHECK, "--compile", architecture)
    assert done.returncode == 0, done.stderr
