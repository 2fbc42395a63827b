# SPDX-License-Identifier: Apache-2.0
"""The toy Gemma 4 and its drafter are what tests rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.toys import gemma4


@pytest.mark.full
def test_the_drafter_agrees_at_times(tmp_path: Path) -> None:
    """transformers' assisted decoding takes drafts, and refuses others.

    It gives the tokens that it gives without.
    """
    import torch
    import transformers

    gemma4.write_checkpoint(
        tmp_path / "target", dtype="float32", sublayer_gain=0.15
    )
    gemma4.write_drafter(tmp_path / "drafter", dtype="float32")
    model, drafter = (
        getattr(transformers, name).from_pretrained(tmp_path / folder)
        for name, folder in (
            ("Gemma4ForConditionalGeneration", "target"),
            ("Gemma4AssistantForCausalLM", "drafter"),
        )
    )
    words = torch.arange(gemma4.FIRST_WORD, gemma4.FIRST_WORD + 24)[None]
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    calls: list[object] = []
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    expected = model.generate(words, **options)
    alone = len(calls)
    found = model.generate(words, assistant_model=drafter, **options)
    assert found.tolist() == expected.tolist()
    assert alone / 8 < len(calls) - alone < alone / 2
