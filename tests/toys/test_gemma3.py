# SPDX-License-Identifier: Apache-2.0
"""The toy Gemma 3 is what a loader expects and what the tests rely on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tests.toys import checkpoint, gemma3, reference

SHAPE = gemma3.SHAPES["toy"]
TOKENIZER = gemma3.tokenizer(SHAPE.vocab_size)

word_ids = st.integers(gemma3.FIRST_WORD, SHAPE.vocab_size - 1)


def encode(text: str) -> list[int]:
    """Returns the tokens of a text, without `<bos>`."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@given(st.text())
def test_text_survives_the_tokenizer(text: str) -> None:
    """Decoding what was encoded gives the text back, whatever it is."""
    ids = encode(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


@given(st.lists(word_ids))
def test_words_survive_the_tokenizer(ids: list[int]) -> None:
    """Encoding what was decoded gives any sequence of words back."""
    assert encode(TOKENIZER.decode(ids)) == ids


def test_vocabulary_is_full() -> None:
    """Each id below the vocabulary's size is a token, and none above."""
    size = TOKENIZER.get_vocab_size()
    assert size == SHAPE.vocab_size
    assert all(TOKENIZER.id_to_token(i) is not None for i in range(size))


def test_too_small_a_vocabulary_is_an_error() -> None:
    """A vocabulary without room for all bytes is refused."""
    with pytest.raises(ValueError, match="alone need 262"):
        gemma3.tokenizer(261)


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    """A checkpoint is a function of its arguments, the seed among them."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        gemma3.write_checkpoint(tmp_path / name, layers=1, seed=seed)
    a, b, c = (
        {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()}
        for name in "abc"
    )
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {"model.safetensors"}


def test_fewer_layers_are_the_first_ones(tmp_path: Path) -> None:
    """The number of layers does not change the weights of a layer."""
    for layers in (1, 2):
        gemma3.write_checkpoint(tmp_path / str(layers), layers=layers)
    one, two = (
        reference.read_safetensors(tmp_path / name / "model.safetensors")
        for name in "12"
    )
    assert set(one) < set(two)
    for name, weight in one.items():
        np.testing.assert_array_equal(weight, two[name])


def test_library_reads_the_same_weights(tmp_path: Path) -> None:
    """The safetensors library finds the tensors that our reader finds."""
    gemma3.write_checkpoint(tmp_path, layers=1)
    path = tmp_path / "model.safetensors"
    ours = reference.read_safetensors(path)
    with safetensors.safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(ours)
        for name, weight in ours.items():
            np.testing.assert_array_equal(file.get_tensor(name), weight)


def test_bfloat16_rounds_to_nearest_even() -> None:
    """Halfway cases go to the even neighbour, others to the nearest."""
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -1.005], np.float32)
    bits = checkpoint.bfloat16_bits(values).astype(np.uint32) << 16
    expected = np.array([1, 1, 1 + 2**-6, -1.0078125], np.float32)
    np.testing.assert_array_equal(bits.view(np.float32), expected)


def test_decoding_is_not_degenerate(tmp_path: Path) -> None:
    """Greedy decoding gives many different words and no end of text."""
    gemma3.write_checkpoint(tmp_path)
    model = reference.Gemma3(tmp_path)
    tokens = model.generate([gemma3.BOS, *encode("Why is the sky blue?")], 60)
    assert min(tokens) >= gemma3.FIRST_WORD
    assert len(set(tokens)) > 30
