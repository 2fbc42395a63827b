# SPDX-License-Identifier: Apache-2.0
"""The kernel overlay ``nvfp4_weight_only``, without a GPU.

``check_nvfp4_weight_only.py`` has the oracle, and on a GPU the rest.
"""

from __future__ import annotations

import pytest
from tests.conftest import Check

MODULE = "check_nvfp4_weight_only"


def test_products_on_a_cpu_are_float64s(run_check: Check) -> None:
    """For any shape, in float32 and bfloat16; no shape that fits ill."""
    done = run_check("26.7.0", MODULE, "--cpu")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "target",
    [
        "sm_90a",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("sm_80", "sm_86", "sm_89", "sm_100a")
        ),
    ],
)
def test_kernels_compile(run_check: Check, target: str) -> None:
    """To machine code for each generation of NVIDIA's GPUs."""
    done = run_check("26.7.0", MODULE, "--compile", target)
    assert done.returncode == 0, done.stdout + done.stderr
