# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from throughput.capture_equality import (
    Difference,
    check_changes,
    check_discriminating,
    differences,
    main,
    summary,
    unexplained,
)
from throughput.client import Completion
from throughput.server import MeasureError

GAP = 5.0


def compare(
    fake_site: Callable[..., str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **settings: object,
) -> tuple[int, dict[str, Any]]:
    """Runs the command on a fake MAX; returns exit code and results."""
    vocab = {f"t{i}": i for i in range(4010)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(
        str(folder / "tokenizer.json")
    )
    path = fake_site(
        supports_capture=True, neighbour_s=0.001, gap=GAP, **settings
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


def test_equal_servers_pass(
    fake_site: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All requests equal, alone and in batches that grow and shrink."""
    code, result = compare(fake_site, tmp_path, monkeypatch)
    assert (code, result["differences"]) == (0, [])
    assert set(result["on"]["batches"][0]) == set(range(1, 9))
    text = capsys.readouterr().out
    assert text.startswith("PASS")
    assert "- together 0: 16 of 16 equal" in text


def test_stale_buffer_fails(
    fake_site: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong token that shows only in a full batch is found.

    It would pass, and be listed, if the two logits lay closer than a tie.
    """
    code, result = compare(fake_site, tmp_path, monkeypatch, stale=True)
    assert code == 1
    modes = {d["mode"] for d in result["differences"]}
    assert modes == {"together 0"}
    text = capsys.readouterr().out
    assert text.startswith("FAIL")
    assert "- alone: 16 of 16 equal" in text
    assert {d["gap"] for d in result["differences"]} == {GAP}
    assert summary(result, GAP).startswith("PASS")
    assert f"gap {GAP}" in summary(result, GAP)


def test_first_difference_is_where_tokens_part() -> None:
    """Later tokens do not count; equal requests give nothing."""
    found = differences("alone", [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 9]])
    assert found == [Difference("alone", 1, 1, 5, 9)]


def test_only_a_close_pair_explains_a_difference() -> None:
    """A token outside the five best is never explained."""
    near = Difference("alone", 0, 0, 1, 2, 0.1)
    far = Difference("alone", 0, 0, 1, 2, 0.3)
    elsewhere = Difference("alone", 0, 0, 1, 2, None)
    assert unexplained([near, far, elsewhere], 0.25) == [far, elsewhere]


def test_batch_that_hardly_changes_is_refused() -> None:
    """A full batch that never shrinks shows no stale buffer."""
    check_changes([*range(1, 9), *range(8, 0, -1)])
    for sizes in ([], [8, 8, 8], [*range(1, 9)], [*range(1, 8), *range(7)]):
        with pytest.raises(MeasureError, match="too little"):
            check_changes(sizes)


def test_output_that_repeats_itself_is_refused() -> None:
    """Equality of one repeated token, or of equal outputs, says nothing."""
    good = [Completion(0, tokens=[1, 2, 3]), Completion(0, tokens=[4, 5, 6])]
    check_discriminating(good)
    with pytest.raises(MeasureError, match="repeats itself"):
        check_discriminating([good[0], good[0]])
    with pytest.raises(MeasureError, match="repeats itself"):
        check_discriminating([Completion(0, tokens=[n] * 9) for n in range(2)])
