# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from throughput.attnquant import arms
from throughput.capture import Protocol, measure
from throughput.server import Arm, MeasureError, check_log

LOG = """
INFO: cache_memory: 1.50 GiB
INFO: device_graph_capture : False
"""
LINE = (
    "INFO: AttnQuant: Gemma3ForCausalLM, blocks 2, rank 4, NVFP4 0 of 182 "
    "projections, runtime by matmuls, cache hit, capture off"
)


def test_every_path_is_an_arm() -> None:
    """Capture is matched on both sides, and each rank has both forms."""
    made = {arm.name: arm for arm in arms("python", "", 2, [4, 32])}
    assert list(made) == [
        *("built-in, capture off", "built-in"),
        *("precompute-outside, capture off", "precompute-outside"),
        *("runtime, rank 4, matmuls", "runtime, rank 4, custom op"),
        *("runtime, rank 32, matmuls", "runtime, rank 32, custom op"),
    ]
    assert made["built-in"].variables == ()
    assert dict(made["runtime, rank 32, custom op"].variables) == {
        "ATTNQUANT_BLOCKS": "2",
        "ATTNQUANT_RANK": "32",
        "ATTNQUANT_PRECOMPUTE_OUTSIDE": "0",
        "ATTNQUANT_GEMM": "0",
    }
    assert [a.capture for a in made.values()] == [False, True] * 2 + [True] * 4


def test_arms_with_other_graphs_have_other_folders() -> None:
    """Capture is no matter of the graph; precompute-outside has the built-in's.

    A compiled graph is found by name and signature, which the others' share.
    """
    made = arms("python", "", 2, [4, 32])
    assert [arm.graphs for arm in made[:4]] == ["built-in"] * 4
    assert len({arm.graphs for arm in made}) == 5


@pytest.mark.parametrize(
    ("expected", "line", "agrees"),
    [
        ("", "", True),
        ("runtime by matmuls", LINE, True),
        ("", LINE, False),
        ("runtime by matmuls", "", False),
        ("runtime by a custom op", LINE, False),
    ],
)
def test_the_log_must_name_the_arms_path(
    expected: str, line: str, agrees: bool
) -> None:
    """A server that serves otherwise than its arm is no trial of it."""
    arm = Arm("arm", "python", attnquant=expected)
    if agrees:
        said = check_log(arm, LOG + line)
        assert said.get("attnquant", "") == line.removeprefix("INFO: ")
        assert said["kv_cache"] == "cache_memory: 1.50 GiB"
    else:
        with pytest.raises(MeasureError, match=r"arm: expected .*AttnQuant|by"):
            check_log(arm, LOG + line)


def test_variables_reach_the_server(
    fake_arm: Callable[..., Arm], tmp_path: Path
) -> None:
    """They are the arm's alone, and the results tell them."""
    plain = fake_arm()
    arm = Arm("b", sys.executable, plain.path, variables=(("FAKE_V", "7"),))
    assert arm.environment({})["FAKE_V"] == "7"
    assert "FAKE_V" not in plain.environment({})
    protocol = Protocol(starts=1, rounds=1, prompt_tokens=20, output_tokens=4)
    results = measure((arm,), tmp_path, protocol, tmp_path / "results.json")
    assert results["arms"]["b"]["variables"] == {"FAKE_V": "7"}
