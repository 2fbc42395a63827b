# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from throughput.capture import Protocol, measure, plan
from throughput.report import disjoint, render, trial_rates
from throughput.server import CAPTURE_OFF, Arm, MeasureError

SMALL = Protocol(
    starts=2, concurrency=(1, 4), rounds=2, prompt_tokens=20, output_tokens=6
)


@pytest.fixture
def arms(fake_arm: Callable[..., Arm]) -> tuple[Arm, ...]:
    """Three arms; the built-in one takes three times as long a token."""
    on = fake_arm("patched", capture=True, supports_capture=True, token_s=0.01)
    return (
        fake_arm("built-in", token_s=0.03),
        replace(on, name="patched off", flags=(CAPTURE_OFF,), capture=False),
        replace(on, name="patched on"),
    )


def test_each_arm_has_each_place_equally_often(
    arms: tuple[Arm, ...],
) -> None:
    """Drift of the machine falls on all arms alike."""
    order = [arm.name for arm in plan(arms, 6)]
    assert order[:6] == [
        *("built-in", "patched off", "patched on"),
        *("patched off", "patched on", "built-in"),
    ]
    places = Counter((i % 3, name) for i, name in enumerate(order))
    assert set(places.values()) == {2}
    assert len(places) == 9


def test_all_trials_of_all_loads_are_kept(
    arms: tuple[Arm, ...], tmp_path: Path
) -> None:
    """The file holds raw samples; the report finds the known speeds."""
    output = tmp_path / "results.json"
    results = measure(arms, tmp_path, SMALL, output)
    assert json.loads(output.read_text()) == json.loads(json.dumps(results))
    trials = results["trials"]
    assert [t["arm"] for t in trials] == [a.name for a in plan(arms, 2)]
    for trial in trials:
        assert [len(trial["loads"][c]) for c in ("1", "4")] == [2, 2]
        assert len(trial["loads"]["4"][0]["step_s"]) == 4
    slow = trial_rates([t for t in trials if t["arm"] == "built-in"], "1")
    fast = trial_rates([t for t in trials if t["arm"] == "patched on"], "1")
    assert disjoint(slow, fast)
    assert 6 / 0.15 * 0.4 < slow[0] < 6 / 0.15
    text = render(results)
    assert "| built-in | 1.0+built-in | 2 |" in text
    assert "`device_graph_capture : True`" in text
    assert "6 of 6 trials" in text


def test_arm_that_did_not_capture_is_refused(
    arms: tuple[Arm, ...], fake_arm: Callable[..., Arm], tmp_path: Path
) -> None:
    """A server that quietly left capture off ends the measurement."""
    liar = fake_arm("liar", capture=True, supports_capture=False)
    output = tmp_path / "results.json"
    with pytest.raises(MeasureError, match=r"liar: expected .* capture on"):
        measure((arms[0], liar), tmp_path, SMALL, output)
    kept = json.loads(output.read_text())["trials"]
    assert [t["arm"] for t in kept] == ["built-in"]


def test_results_are_continued(arms: tuple[Arm, ...], tmp_path: Path) -> None:
    """A time limit ends between trials; the next call makes the rest."""
    output = tmp_path / "results.json"
    protocol = replace(SMALL, starts=1, concurrency=(1,))
    first = measure(arms, tmp_path, protocol, output, time_limit_s=0)
    assert first["trials"] == []
    measure(arms[:1], tmp_path, protocol, tmp_path / "other.json")
    half = measure(arms, tmp_path, protocol, output, time_limit_s=0.01)
    whole = measure(arms, tmp_path, protocol, output)
    assert whole["trials"][: len(half["trials"])] == half["trials"]
    assert len(whole["trials"]) == 3
    with pytest.raises(MeasureError, match="another protocol"):
        measure(arms, tmp_path, SMALL, output)
    with pytest.raises(MeasureError, match="another arms"):
        measure(arms[:1], tmp_path, protocol, output)
