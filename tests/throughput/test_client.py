# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from throughput.client import Completion, complete, prompt
from throughput.server import Arm, MeasureError, serve


def request(arm: Arm, folder: Path, *contents: str, **kw: object) -> Completion:
    """Sends the contents one after the other; returns the last answer."""

    async def send(url: str) -> Completion:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            return [await complete(client, x, **kw) for x in contents][-1]

    with serve(arm, folder, folder / "log") as server:
        return asyncio.run(send(server.url))


def test_times_are_the_servers(
    fake_arm: Callable[..., Arm], tmp_path: Path
) -> None:
    """First token and step come out as the server spaces them."""
    arm = fake_arm(first_s=0.2, token_s=0.02)
    runs = []
    for seed in range(3):
        done = request(arm, tmp_path, prompt(5, seed), max_tokens=11)
        assert done.end - done.start >= 0.4
        assert len(done.stamps) == 11
        done.check(11, prompt_tokens=9)
        runs.append(done)
    # A busy machine makes one late, but none early.
    assert 0.2 <= min(run.ttft_s for run in runs) < 0.4
    assert 0.02 <= min(run.step_s for run in runs) < 0.04


@pytest.mark.parametrize(
    ("settings", "contents", "prompt_tokens", "reason"),
    [
        ({"short_by": 2}, ["w1_"], 5, "'completion_tokens': 6"),
        ({}, ["w1_", "w1_"], 5, "'cached_tokens': 5"),
        ({}, ["w1_w2_"], 5, "'prompt_tokens': 6"),
    ],
)
def test_answer_that_flatters_is_refused(
    fake_arm: Callable[..., Arm],
    tmp_path: Path,
    settings: dict[str, Any],
    contents: list[str],
    prompt_tokens: int,
    reason: str,
) -> None:
    """Short answers, cached prefixes and other prompt lengths do not count."""
    done = request(fake_arm(**settings), tmp_path, *contents, max_tokens=8)
    with pytest.raises(MeasureError, match=reason):
        done.check(8, prompt_tokens)


def test_error_status_is_an_error(
    fake_arm: Callable[..., Arm], tmp_path: Path
) -> None:
    """The server's own words are passed on."""
    with pytest.raises(MeasureError, match="503: no such luck"):
        request(fake_arm(status=503), tmp_path, "w1_", max_tokens=1)


def test_prompts_share_no_prefix() -> None:
    """Prompts of different seeds differ early, equal seeds agree."""
    heads = {prompt(128, seed)[:12] for seed in range(200)}
    assert len(heads) == 200
    assert prompt(128, 7) == prompt(128, 7)
    assert prompt(128, 7).count("_") == 128
