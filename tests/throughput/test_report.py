# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

from throughput.report import compare, disjoint, table


def trial(arm: str, *rates: float) -> dict[str, Any]:
    """Returns a trial whose rounds ran at the given tokens a second."""
    rounds = [
        {"tokens": 100, "wall_s": 100 / r, "ttft_s": [0.01], "step_s": [1 / r]}
        for r in rates
    ]
    return {"arm": arm, "loads": {"1": rounds}}


def test_cell_is_median_and_range_over_trials() -> None:
    """A trial counts once, by its median, however many rounds it has."""
    results = {
        "arms": {"a": {"max": "1"}, "b": {"max": "2"}},
        "trials": [
            trial("a", 90, 100, 500),
            trial("a", 110),
            trial("a", 120),
            trial("b", 200),
            trial("b", 250, 250),
            trial("b", 210),
        ],
    }
    lines = table(results, "1").splitlines()
    assert lines[2] == (
        "| a | 1 | 3 | 110.0 [100.0, 120.0] | 9.09 [8.33, 10.00] "
        "| 10.0 [10.0, 10.0] |"
    )
    assert lines[3].startswith("| b | 2 | 3 | 210.0 [200.0, 250.0] |")
    assert lines[5] == (
        "- b / a: 1.91x in medians, 1.67x from the slower arm's best trial to "
        "the faster arm's worst; the ranges are disjoint "
        "(exact Mann-Whitney p = 0.100)"
    )


def test_ranges_that_touch_are_not_disjoint() -> None:
    """A shared end is an overlap; order of the arms does not matter."""
    assert disjoint([1, 2], [3, 4]) and disjoint([3, 4], [1, 2])
    assert not disjoint([1, 3], [3, 4])
    assert not disjoint([1, 9], [3, 4])


def test_overlap_is_said() -> None:
    """No p is claimed for ranges that overlap."""
    text = compare([1.0, 3.0], [2.0, 4.0])
    assert text.startswith("1.50x in medians")
    assert text.endswith("the ranges overlap")
    assert "p =" not in text
