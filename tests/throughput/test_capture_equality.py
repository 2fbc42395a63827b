# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from throughput import capture_equality
from throughput.capture_equality import (
    REQUESTS,
    agree,
    check_changes,
    check_discriminating,
    histories,
    judge,
    main,
)
from throughput.server import MeasureError


def compare(
    fake_site: Callable[..., str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **settings: object,
) -> tuple[int, dict[str, Any]]:
    """Runs the command on a fake MAX; returns exit code and results."""
    half = [(content, tokens // 2) for content, tokens in REQUESTS]
    monkeypatch.setattr(capture_equality, "REQUESTS", half)
    monkeypatch.setattr(capture_equality, "ENOUGH", 20)
    path = fake_site(
        supports_capture=True, token_s=0.001, neighbour_s=0.001, **settings
    )
    output = folder / "equality.json"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *("capture_equality", "--patched", sys.executable),
            *("--patched-path", path, "--model", str(folder)),
            *("--output", str(output), "--repeats", "1"),
        ],
    )
    return main(), json.loads(output.read_text())


def test_equal_servers_pass_and_one_wrong_token_fails(
    fake_site: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other batches may give other tokens; equal batches may not.

    The fake's tokens depend on batch and row, as rounding does.
    """
    code, result = compare(fake_site, tmp_path, monkeypatch)
    text = capsys.readouterr().out
    assert code == 0, text
    assert text.startswith("PASS: 16 requests")
    assert "- alone: 1007 tokens" in text
    sizes = {n for kind, n in result["on"]["events"][0] if kind == "TG"}
    assert sizes == set(range(1, 9))

    (on,), (events,) = result["on"]["together"], result["on"]["events"]
    lengths = [len(answer) for answer in on]
    request, token = next(
        (i, at)
        for i, history in enumerate(histories(events, lengths))
        for at, (rows, _) in enumerate(history)
        if rows == 8
    )
    result["off"] = json.loads(json.dumps(result["on"]))
    result["on"]["together"][0][request][token] += 1
    passed, text = judge(result)
    assert not passed
    assert f"1 contradictions ({request}, {token})" in text


def test_stale_server_fails(
    fake_site: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A buffer that is stale only in batches of two passes alone."""
    code, _ = compare(fake_site, tmp_path, monkeypatch, stale_rows=2)
    assert code == 1
    text = capsys.readouterr().out
    assert text.startswith("FAIL")
    alone, together, *_ = text.splitlines()[1:]
    assert "0 contradictions" in alone
    assert "0 contradictions" not in together


def test_rows_of_each_step_are_told_from_the_log() -> None:
    """Rows keep their order; an ended request fills one more step.

    Requests 0 and 1 of 3 and 2 tokens; 1 ends first, then 2 arrives.
    """
    events = [("CE", 1), ("CE", 1), ("TG", 2), ("TG", 2), ("CE", 1), ("TG", 1)]
    assert histories(events, [3, 2, 2]) == [
        [(1, 0), (2, 0), (2, 0)],
        [(1, 0), (2, 1)],
        [(1, 0), (1, 0)],
    ]


def test_prefill_of_several_requests_gives_each_a_row() -> None:
    """A prefill batch counts like a decode batch; a step before it does not."""
    assert histories([("TG", 1), ("CE", 2), ("TG", 2)], [2, 2]) == [
        [(2, 0), (2, 0)],
        [(2, 1), (2, 1)],
    ]


def test_batch_that_cannot_be_told_is_an_error() -> None:
    """A size that does not fit is never guessed around."""
    with pytest.raises(MeasureError, match=r"step 1: .* batch of 2 .* 1;"):
        histories([("CE", 1), ("TG", 2)], [3])


def test_only_tokens_of_equal_batches_are_compared() -> None:
    """A difference counts before the batches part, and not after."""
    batches = [[(1, 0), (2, 0), (2, 0)]]
    other = [[(1, 0), (2, 0), (3, 0)]]
    late = agree([[1, 2, 3]], [[1, 2, 9]], batches, other)
    assert (late.compared, late.shared, late.parted) == (2, 1, 1)
    assert late.contradictions == ()
    early = agree([[1, 2, 3]], [[1, 9, 9]], batches, other)
    assert early.contradictions == ((0, 1),)
    row = agree([[1, 2]], [[1, 9]], [[(2, 0), (2, 0)]], [[(2, 0), (2, 1)]])
    assert row.contradictions == ()


def test_too_few_compared_tokens_fail() -> None:
    """Servers whose batches part at once prove nothing."""
    run = {
        "alone": [[1, 2, 3]],
        "together": [[[1, 2, 3]]],
        "events": [[("CE", 1), ("TG", 1), ("TG", 1)]],
    }
    passed, text = judge({"on": run, "off": run})
    assert "0 contradictions" in text
    assert not passed
    assert "too little" in text


def test_batch_that_hardly_changes_is_refused() -> None:
    """A full batch that never shrinks shows no stale buffer."""

    def decode(*sizes: int) -> list[tuple[str, int]]:
        return [("TG", size) for size in sizes]

    check_changes(decode(*range(1, 9), *range(8, 0, -1)))
    for sizes in ([], [8, 8, 8], [*range(1, 9)], [*range(1, 8), *range(7)]):
        with pytest.raises(MeasureError, match="too little"):
            check_changes(decode(*sizes))


def test_output_that_repeats_itself_is_refused() -> None:
    """Equality of one repeated token, or of equal outputs, says nothing."""
    check_discriminating([[1, 2, 3], [4, 5, 6]])
    for answers in ([[1, 2], [1, 2]], [[0] * 9, [1] * 9]):
        with pytest.raises(MeasureError, match="repeats itself"):
            check_discriminating(answers)
