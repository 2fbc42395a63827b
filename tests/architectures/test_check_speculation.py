# SPDX-License-Identifier: Apache-2.0
"""The check for GPU machines passes equal answers, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.architectures.check_speculation import Request, drafted, judge

REQUESTS = [Request("w1_", ["w5_", "w6_", "w5_"]), Request("w2_", ["w7_"] * 3)]
ANSWERS = ["w5_w6_w5_", "w7_w7_w7_"]


def run(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """A run that is right, with changes."""
    right = {"draft_tokens": 3, "answers": ANSWERS, "accepted": 4}
    return {**right, "drafted": 9, **changes}


def test_equal_answers_are_right() -> None:
    """With drafts of which some were accepted, and without any."""
    alone = run(draft_tokens=0, accepted=0, drafted=0)
    assert judge(REQUESTS, [alone, run()]) == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("w5_w7_w5_", "token 1 is not w6_, but 'w7_w5_' begins there"),
        ("w5_w6_", "token 2 is not w5_, but '' begins there"),
        ("w5_w6_w5_w5_", "'w5_' follows its answer"),
    ],
    ids=["other", "short", "long"],
)
def test_another_answer_is_wrong(answer: str, said: str) -> None:
    """The first token that differs is named."""
    (wrong,) = judge(REQUESTS, [run(answers=[answer, ANSWERS[1]])])
    assert wrong == f"3 draft tokens a step: request 0: {said}"


@pytest.mark.parametrize("accepted", [0, 9])
def test_drafts_all_refused_or_all_accepted_show_nothing(accepted: int) -> None:
    """Either way one of the two paths was never taken."""
    (wrong,) = judge(REQUESTS, [run(accepted=accepted)])
    assert wrong.endswith(f"{accepted} of 9 accepted, which shows nothing")


def test_drafts_are_counted_in_decode_batches() -> None:
    """A prefill's line repeats the numbers of the decode before it."""
    log = (
        "INFO: Executed CE batch with 1 reqs | Draft Tokens: 2/3 (66%) ...\n"
        "INFO: Completed TG batch with 1 reqs | Draft Tokens: 2/3 (66%) ...\n"
        "INFO: Executed TG batch with 1 reqs | Draft Tokens: 0/3 (0%) ...\n"
    )
    assert drafted(log) == (2, 6)
