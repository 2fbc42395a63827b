# SPDX-License-Identifier: Apache-2.0
"""The kernel overlay ``small_k_sampling`` for MAX 26.7, without a GPU.

The kernels' selection and draw run on the CPU, from the very functions. The
rule in numpy is written from the definition. What needs an NVIDIA GPU is in
``check_small_k.py``. With ``MAXPATCH_TEST_PYTHON`` the tests run in an
environment that has MAX 26.7.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from packaging.version import Version
from tests.conftest import Check

from maxpatch import overlay
from maxpatch.series import State

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "overlay" / "kernels"
PROGRAM = Path(__file__).with_name("check_small_k_cpu.mojo")
LIST = 32

FloatArray = npt.NDArray[np.float32]


@dataclass
class Case:
    """One row and how to sample it."""

    logits: FloatArray
    k: int
    temperature: float = 1.0
    p: float = 1.0
    min_p: float = 0.0
    uniforms: FloatArray = field(
        default_factory=lambda: np.zeros(0, np.float32)
    )


@dataclass
class Answer:
    """What the Mojo code makes of a case."""

    tokens: list[int]
    count: int
    row_weight: float
    places: list[int]


@pytest.fixture
def sample(
    release_env: Callable[[str], Path], tmp_path: Path
) -> Callable[[list[Case]], list[Answer]]:
    """Runs the overlay's functions on the CPU."""
    return functools.partial(_sample, release_env("26.7.0"), tmp_path)


Sample = Callable[[list[Case]], list[Answer]]


def _sample(python: Path, tmp_path: Path, cases: list[Case]) -> list[Answer]:
    file = tmp_path / "cases"
    with file.open("w") as out:
        for case in cases:
            print(case.k, case.temperature, case.p, case.min_p, file=out)
            print(*case.logits.view(np.uint32), file=out)
            print(*map(repr, map(float, case.uniforms)), file=out)
    code = (
        "import sys; from mojo.run import subprocess_run_mojo as run; "
        "run(sys.argv[1:], check=True)"
    )
    done = subprocess.run(
        [python, "-c", code, "run", "-I", KERNELS, PROGRAM, file],
        # A cache of its own: the shared one does not see that a package that
        # a program imports from source has changed.
        env={**os.environ, "MODULAR_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * len(cases), done.stderr
    answers = []
    for tokens, counted, places in zip(
        lines[::3], lines[1::3], lines[2::3], strict=True
    ):
        count, row_weight = counted.split()
        answers.append(
            Answer(
                list(map(int, tokens.split())),
                int(count),
                float(row_weight),
                list(map(int, places.split())),
            )
        )
    return answers


def weights(case: Case) -> npt.NDArray[np.float64]:
    """Every token's weight in float64; none for NaN and minus infinity."""
    logits = case.logits.astype(np.float64)
    logits[np.isnan(logits)] = -np.inf
    greatest = logits.max()
    if np.isinf(greatest):
        return (logits == np.inf).astype(np.float64)
    return np.exp((logits - greatest) / max(case.temperature, 1e-6))


def may_be_drawn(case: Case) -> npt.NDArray[np.bool_]:
    """The tokens that may be drawn, from the definition, token by token."""
    w = weights(case)
    heavier = np.array([(w > x).sum() for x in w])
    heavier_share = np.array([w[w > x].sum() for x in w]) / max(w.sum(), 1e-300)
    return (
        (w > 0)
        & (heavier < case.k)
        & ((heavier_share <= case.p) | (case.p >= 1))
        & (w >= case.min_p)
    )


def best(logits: FloatArray) -> list[int]:
    """The 32 best tokens by numpy's stable sort."""
    real = np.flatnonzero(logits > -np.inf)
    return real[np.argsort(-logits[real], kind="stable")][:LIST].tolist()


def rows(generator: np.random.Generator) -> list[FloatArray]:
    """Rows that select badly if anything is wrong with order or ties."""
    plain = generator.normal(0, 3, 1000).astype(np.float32)
    return [
        plain,
        np.sort(plain),
        np.sort(plain)[::-1].copy(),
        np.round(plain),  # many ties
        np.round(plain) * np.float32(-0.0),  # zeros of both signs
        np.full(40, -1.5, np.float32),
        np.where(plain > 0, np.float32(np.nan), plain),
        np.where(plain > 0, np.float32(-np.inf), plain),
        np.where(np.arange(1000) % 401 == 7, np.float32(np.inf), plain),
        np.full(64, np.nan, np.float32),
        np.full(64, -np.inf, np.float32),
        plain[:31],
        plain[:1],
        np.array([3e38, -3e38, 1e-45, -1e-45, 0.0, -0.0], np.float32),
    ]


def test_list_is_the_stable_sort(sample: Sample) -> None:
    """The networks find the 32 best tokens, ties by the lower id, no NaN."""
    logits = rows(np.random.default_rng(1))
    answers = sample([Case(row, k=5) for row in logits])
    for row, answer in zip(logits, answers, strict=True):
        assert answer.tokens == best(row)


def test_choice_is_the_definition(sample: Sample) -> None:
    """k, p and min-p leave the tokens that the definition leaves.

    All of them if they fit the list; else the count says that they do not.
    """
    generator = np.random.default_rng(2)
    cases = [
        Case(row, k, temperature, p, min_p)
        for row in rows(generator)
        for k in (1, 2, 5, 31)
        for temperature, p, min_p in (
            (1.0, 1.0, 0.0),
            (0.0, 0.9, 0.1),
            (0.7, 0.613, 0.0),
            (2.5, 0.0, 0.0),
            (1.3, 0.947, 0.0713),
            (1.0, 1.0, 1.5),
        )
    ]
    answers = sample(cases)
    beyond = 0
    for case, answer in zip(cases, answers, strict=True):
        expected = set(np.flatnonzero(may_be_drawn(case)))
        if len(expected) < LIST:
            assert set(answer.tokens[: answer.count]) == expected, case
        else:
            assert answer.count == LIST, case
            beyond += 1
        assert answer.row_weight == pytest.approx(weights(case).sum(), rel=1e-4)
    assert beyond, "no case reaches beyond the list"


def test_draw_is_in_proportion(sample: Sample) -> None:
    """Over a fine grid of numbers in [0, 1) each token gets its share."""
    grid = ((np.arange(20000) + 0.5) / 20000).astype(np.float32)
    generator = np.random.default_rng(3)
    row = generator.normal(0, 2, 500).astype(np.float32)
    cases = [
        Case(row, 5, uniforms=grid),
        Case(row, 31, 0.8, 0.9, 0.02, grid),
        Case(np.round(row), 3, 1.0, 1.0, 0.0, grid),
    ]
    for case, answer in zip(cases, sample(cases), strict=True):
        share = np.where(may_be_drawn(case), weights(case), 0)
        share /= share.sum()
        drawn = np.bincount(answer.places, minlength=LIST)[: answer.count]
        expected = share[answer.tokens[: answer.count]] * len(grid)
        assert abs(drawn - expected).max() <= 2


def test_greatest_uniform_draws_a_token_that_may_be_drawn(
    sample: Sample,
) -> None:
    """A number of 1, and rounding, end at the last token of the choice."""
    row = np.random.default_rng(4).normal(0, 2, 100).astype(np.float32)
    ones = np.array(
        [0.0, 1.0, np.nextafter(np.float32(1), np.float32(0))], np.float32
    )
    [answer] = sample([Case(row, 7, uniforms=ones)])
    assert answer.places[0] == 0
    assert answer.places[1:] == [answer.count - 1] * 2


def test_on_a_cpu_it_is_the_built_in(run_check: Check) -> None:
    """A CPU's tokens are the built-in's, for every k."""
    done = run_check("26.7.0", "check_small_k", "--cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["draws"] > 500


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_compiles_for_gpus(run_check: Check, architecture: str) -> None:
    """A graph with the op compiles for Hopper and Blackwell, without them."""
    done = run_check("26.7.0", "check_small_k", "--compile", architecture)
    assert done.returncode == 0, done.stderr


def test_selected_for_its_release_alone() -> None:
    """26.7 gets the overlay; 26.5 and 26.8 do not."""
    packages = {p.name: p for p in overlay.load(ROOT / "overlay")}
    package = packages["kernels/small_k_sampling"]
    releases = ("26.5.0", "26.6.0", "26.7.0", "26.7.1", "26.8.0")
    taken = [
        release
        for release in releases
        if package.state(Version(release))[0] is State.APPLIED
    ]
    assert taken == ["26.7.0", "26.7.1"]
