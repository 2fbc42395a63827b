# SPDX-License-Identifier: Apache-2.0
"""The published figures are what the programs make of the published samples."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from attnquant_common.settings import Settings
from tests.kernels.report import no_wait, nvfp4, small_k

from throughput import launches
from throughput.capture_equality import judge
from throughput.report import compare, render, trial_medians, trial_rates
from throughput.sampling import calls_a_step, render_calls

FORMS = ("matmuls", "custom op")

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_tables_are_those_of_the_samples() -> None:
    """Each row that the report prints stands in the page, to the letter."""
    samples = DOCS / "results" / "gemma3-1b-capture-h200.json"
    report = render(json.loads(samples.read_text()))
    rows = [line for line in report.splitlines() if line.startswith("| ")]
    assert len(rows) > 6
    page = (DOCS / "throughput.md").read_text()
    assert [row for row in rows if row not in page] == []


def test_equality_is_that_of_the_recorded_run() -> None:
    """The recorded run passes, and its lines stand in the page."""
    recorded = DOCS / "results" / "gemma3-1b-capture-equality-h200.json"
    passed, text = judge(json.loads(recorded.read_text()))
    assert passed
    assert text.strip() in (DOCS / "throughput.md").read_text()


def test_sampling_figures_are_those_of_the_recorded_runs() -> None:
    """No check failed, and every row stands in the page, to the letter."""
    page = (DOCS / "sampling.md").read_text()
    recorded = {
        name: json.loads((DOCS / "results" / f"{name}-h200.json").read_text())
        for name in ("small-k-sampling", "fused-token-sampling")
    }
    assert recorded["small-k-sampling"]["failures"] == []
    tokens = recorded["fused-token-sampling"]["tokens"]
    assert tokens["unequal"] == tokens["not_allowed"] == []
    text = small_k(recorded["small-k-sampling"])
    text += "\n" + no_wait(recorded["fused-token-sampling"])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 50
    assert [row for row in rows if row not in page] == []


def test_sampling_figures_in_sentences_are_those_of_the_runs() -> None:
    """What the pages say between the tables, they say of the same runs."""
    results = DOCS / "results"
    small = json.loads((results / "small-k-sampling-h200.json").read_text())
    fused = json.loads((results / "fused-token-sampling-h200.json").read_text())
    times = small["timing"]["batch=1 vocabulary=262144 k=5"]
    theirs, ours = (times[arm]["median"] for arm in ("builtin", "overlay"))
    other = [
        shape["overlay"]["median"] / shape["builtin"]["median"]
        for name, shape in small["timing"].items()
        if name.split("k=")[1] in {"-1", "32", "40"}
    ]
    large, replay = small["large_k"], small["replay"]
    waits = fused["timing"]["k=5 batch=1 vocabulary=262144"]
    before, after = (
        waits[arm]["device_us"]["median"] for arm in ("builtin", "overlay")
    )
    page = " ".join((DOCS / "sampling.md").read_text().split())
    for said in (
        f"at k = 5: {theirs / ours:.1f} times as fast",
        f"take {min(other):.2f} to {max(other):.2f} of the built-in's time",
        f"{large['unequal']} of {large['draws']} differ",
        f"change between {replay['replays']} replays",
        f"differs in {replay['builtin']['unequal']} of them",
        f"{fused['tokens']['draws']} draws of {fused['tokens']['cases']} cases",
    ):
        assert said in page
    assert replay["overlay"]["unequal"] == 0
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    assert f"{theirs:.0f} us in 26.7.0, {ours:.1f} us with" in readme
    assert (
        f"{before:.0f} us and a wait for the device, {after:.0f} us" in readme
    )


def test_served_steps_are_those_of_the_recorded_run() -> None:
    """Rows and ratio stand in the page; one wait a step is gone."""
    recorded = DOCS / "results" / "gemma3-sampling-26.5-h200.json"
    results = json.loads(recorded.read_text())
    text = f"{render_calls(results)}\n{render(results)}"
    lines = [
        line
        for line in text.splitlines()
        if line.startswith(("| overlays", "- overlays on / "))
    ]
    assert len(lines) == 5
    page = (DOCS / "sampling.md").read_text()
    assert [line for line in lines if line not in page] == []
    waits = {
        arm: calls_a_step(samples)["cuStreamSynchronize"]
        for arm, samples in results["driver_calls"].items()
    }
    assert waits == {"overlays off": 1, "overlays on": 0}


def test_waiting_is_that_of_the_recorded_runs() -> None:
    """What the page says of the rebuilt 26.4.0, it says of those runs."""
    recorded = DOCS / "results" / "waiting-26.4-h200.json"
    results = json.loads(recorded.read_text())
    page = " ".join((DOCS / "concepts.md").read_text().split())
    for arm, said in (
        ("fixed", "returned after {} ms"),
        ("wait", "wait left in, after {} ms"),
        ("untouched", "before the wait, after {} ms"),
    ):
        assert results[arm]["not_among_five_best"] == []
        assert results[arm]["tokens"] == 73
        calls = [turn["call_ms"] for turn in results[arm]["turns"]]
        assert said.format(f"{min(calls):.1f} to {max(calls):.1f}") in page


def attnquant() -> dict[str, list[dict[str, Any]]]:
    """The trials of AttnQuant's paths, by arm."""
    recorded = DOCS / "results" / "gemma3-1b-attnquant-h200.json"
    found: dict[str, list[dict[str, Any]]] = {}
    for trial in json.loads(recorded.read_text())["trials"]:
        found.setdefault(trial["arm"], []).append(trial)
    return found


def test_attnquant_tables_are_those_of_the_recorded_runs() -> None:
    """Each row stands in the page, to the letter; no code was unequal."""
    timed, counted, quantizer = (
        json.loads((DOCS / "results" / f"{name}-h200.json").read_text())
        for name in (
            "gemma3-1b-attnquant",
            "gemma3-1b-launches",
            "nvfp4-quantize",
        )
    )
    assert quantizer["failures"] == []
    text = "\n".join(
        (render(timed), launches.render(counted), nvfp4(quantizer))
    )
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 15
    page = (DOCS / "attnquant.md").read_text()
    assert [row for row in rows if row not in page] == []
    page = " ".join(page.split())
    said = f"{quantizer['equal']['compared']} comparisons with the numpy form"
    assert said in page
    rates = [
        times["amax and rtn, of copy"]
        for shape, times in quantizer["timing"].items()
        if shape != "6912x1152"
    ]
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    for text in (page, readme):
        assert f"at {min(rates):.2f} to {max(rates):.2f} of the speed" in text


def test_attnquant_figures_in_sentences_are_those_of_the_runs() -> None:
    """What the page says between the tables, it says of the same runs."""
    trials = attnquant()
    assert {len(starts) for starts in trials.values()} == {4}
    rates = {arm: trial_rates(starts, "1") for arm, starts in trials.items()}
    page = " ".join((DOCS / "attnquant.md").read_text().split())
    for said, arm in (
        ("on {} in medians, ranges that overlap", ""),
        ("off {}, likewise", ", capture off"),
    ):
        text = compare(
            rates[f"built-in{arm}"], rates[f"precompute-outside{arm}"]
        )
        assert "overlap" in text
        assert said.format(text.split()[0]) in page
    for rank, ratio in ((4, "1.52x as fast"), (32, "0.79x, both disjoint")):
        text = compare(
            *(rates[f"runtime, rank {rank}, {form}"] for form in FORMS)
        )
        assert "disjoint" in text
        assert text.split()[0] == ratio.split()[0].strip(",")
        assert ratio in page
    slowest, fastest = (
        choose(
            median(rates[f"runtime, rank {rank}, {form}"])
            for rank in (4, 32)
            for form in FORMS
        )
        / median(rates["built-in"])
        for choose in (min, max)
    )
    readme = " ".join((DOCS.parent / "README.md").read_text().split())
    said = f"at {slowest:.2f} to {fastest:.2f} of"
    assert page.count(said) == 2
    assert said in readme


def test_auto_keeps_to_where_the_forms_meet() -> None:
    """The op's step grows with the rank; up to 16 it is below the matmuls'."""
    trials = attnquant()
    op, matmuls = (
        {
            rank: median(
                trial_medians(
                    trials[f"runtime, rank {rank}, {form}"], "1", "step_s"
                )
            )
            for rank in (4, 32)
        }
        for form in ("custom op", "matmuls")
    )
    a_rank = (op[32] - op[4]) / 28
    page = " ".join((DOCS / "attnquant.md").read_text().split())
    assert f"grows by {a_rank:.3f} ms a rank" in page
    meet = 4 + (min(matmuls.values()) - op[4]) / a_rank
    assert 18 < meet < 22
    for rank in (4, 16, 32):
        assert Settings().uses_gemm("sm_90a", rank) == (rank > meet)
