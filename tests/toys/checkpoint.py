# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

Float32 = npt.NDArray[np.float32]
Draw = Callable[[str, tuple[int, ...]], Iterable[Float32]]
"""Gives consecutive rows of a tensor, by name and shape."""


def word_tokenizer(special_tokens: Sequence[str], vocab_size: int) -> Tokenizer:
    """Makes a tokenizer of words `w0_ w1_ ...` and bytes.

    A word of the vocabulary is one token wherever it stands in a text, so a
    sequence of words survives decoding and encoding. All other text becomes
    one token a byte of its UTF-8 form. Encoding puts `<bos>` first.

    Args:
        special_tokens: The first tokens; `<bos>` is one of them.
        vocab_size: The number of tokens. After the special ones come 256
            bytes, then words.

    Returns:
        The tokenizer, with exactly `vocab_size` tokens.

    Raises:
        ValueError: If special tokens and bytes do not fit.
    """
    words = vocab_size - len(special_tokens) - 256
    if words < 0:
        raise ValueError(
            f"vocab_size {vocab_size}: special tokens and bytes alone "
            f"need {vocab_size - words}"
        )
    letters = sorted(pre.ByteLevel.alphabet())
    names = (*special_tokens, *letters, *(f"w{n}_" for n in range(words)))
    vocab = {name: number for number, name in enumerate(names)}
    # Without merges, a piece is either a token as a whole or split in bytes.
    result = Tokenizer(models.BPE(vocab, merges=[], ignore_merges=True))
    result.pre_tokenizer = pre.Sequence(
        [
            pre.Split(Regex("w[0-9]+_"), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(list(special_tokens))
    result.post_processor = TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A $B",
        special_tokens=[("<bos>", vocab["<bos>"])],
    )
    return result


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    chat_template: str,
    max_length: int,
    *,
    end_of_turn: str,
) -> None:
    """Writes all but the weights.

    Args:
        folder: Where to write; made if missing.
        config: What `config.json` has.
        tokenizer: It has `<bos>`, `<eos>`, `<pad>` and `<unk>`.
        chat_template: Jinja, as transformers takes it.
        max_length: The most tokens of a prompt and its answer.
        end_of_turn: The token that ends an answer, as `<eos>` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "config.json": config,
        "generation_config.json": {
            "bos_token_id": tokenizer.token_to_id("<bos>"),
            "eos_token_id": [
                tokenizer.token_to_id("<eos>"),
                tokenizer.token_to_id(end_of_turn),
            ],
            "pad_token_id": tokenizer.token_to_id("<pad>"),
        },
        "tokenizer_config.json": {
            "add_bos_token": True,
            "bos_token": "<bos>",
            "chat_template": chat_template,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<eos>",
            "model_max_length": max_length,
            "pad_token": "<pad>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
        },
    }
    for name, content in settings.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))


def write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    draw: Draw,
    *,
    shards: int = 1,
    sparse: bool = False,
) -> None:
    """Writes `model.safetensors`, or several files and their index.

    Args:
        folder: Where to write.
        shapes: As in :func:`write_safetensors`, as are the others.
        dtype: Likewise.
        draw: Likewise.
        shards: The number of files. Tensors go to them in turn, so that those
            of a fused group lie in different ones.
        sparse: Likewise.
    """
    if shards == 1:
        file = folder / "model.safetensors"
        write_safetensors(file, shapes, dtype, draw, sparse=sparse)
        return
    homes = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = dict(list(shapes.items())[number::shards])
        write_safetensors(folder / name, mine, dtype, draw, sparse=sparse)
        homes |= dict.fromkeys(mine, name)
    width = {"float32": 4, "bfloat16": 2}[dtype]
    total = width * sum(int(np.prod(dims)) for dims in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": homes}
    text = json.dumps(index, indent=2)
    (folder / "model.safetensors.index.json").write_text(text + "\n")


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    draw: Draw,
    *,
    sparse: bool = False,
) -> None:
    """Streams weights into a safetensors file.

    Args:
        path: The file to write.
        shapes: The tensors' shapes, by name.
        dtype: `float32` or `bfloat16`.
        draw: Gives the weights.
        sparse: Leave the bytes out, so that they read as zeros.
    """
    tag, width = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dims in shapes.items():
        start, end = end, end + width * int(np.prod(dims))
        header[name] = {
            "dtype": tag,
            "shape": dims,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        if sparse:
            file.truncate(file.tell() + end)
            return
        for name, dims in shapes.items():
            for chunk in draw(name, dims):
                data = bfloat16_bits(chunk) if dtype == "bfloat16" else chunk
                file.write(data.tobytes())


def bfloat16_bits(x: Float32) -> npt.NDArray[np.uint16]:
    """Rounds finite float32 values to bfloat16, to nearest, ties to even."""
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    return (rounded >> 16).astype(np.uint16)
