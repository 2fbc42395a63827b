# SPDX-License-Identifier: Apache-2.0
"""Writes Gemma 3 text checkpoints with random weights.

A checkpoint is a folder that any Hugging Face loader accepts: `config.json`,
`generation_config.json`, `model.safetensors`, `tokenizer.json` and
`tokenizer_config.json`. The same arguments always give the same bytes.

    python -m tests.toys.gemma3 DIR --size toy --dtype float32

A random transformer with tied embeddings tends to repeat its last token, and
its best logits lie close together. The gains of the norms that close each
sub-layer therefore outweigh the embedding in the residual stream, those of
queries and keys make attention choose, and that of the last norm spreads the
logits.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tests.toys.checkpoint import word_tokenizer, write_folder, write_weights

SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<start_of_turn>",
    "<end_of_turn>",
)
PAD, EOS, BOS, UNK, START_OF_TURN, END_OF_TURN = range(len(SPECIAL_TOKENS))
CPU_FLAGS = (
    *("--devices", "cpu", "--quantization-encoding", "float32"),
    *("--max-length", "1024", "--max-batch-size", "4"),
    *("--device-memory-utilization", "0.1", "--no-enable-prefix-caching"),
)
"""MAX's flags under which all tests give it the toy's one graph."""

FIRST_WORD = len(SPECIAL_TOKENS) + 256
"""The lowest token id that stands for a word; bytes lie below."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}"
    "{% endif %}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

_ROWS_A_CHUNK = 16384
_SUBLAYER_GAIN = 12.0
_ATTENTION_GAIN = 2.0
_LOGIT_GAIN = 4.0
_SILENT = 0.05


@dataclass(frozen=True)
class Shape:
    """The sizes of a Gemma 3 text model, named as in `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    max_position_embeddings: int
    sliding_window_pattern: int = 6
    rope_theta: float = 1e6
    rope_local_base_freq: float = 1e4
    rms_norm_eps: float = 1e-6


SHAPES = {
    "toy": Shape(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=128,
        max_position_embeddings=2048,
    ),
    "1b": Shape(
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32768,
    ),
}


def config(shape: Shape, dtype: str) -> dict[str, Any]:
    """Returns the content of `config.json`."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, END_OF_TURN],
        "final_logit_softcapping": None,
        "head_dim": shape.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "model_type": "gemma3_text",
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "pad_token_id": PAD,
        "query_pre_attn_scalar": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_local_base_freq": shape.rope_local_base_freq,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "sliding_window": shape.sliding_window,
        "sliding_window_pattern": shape.sliding_window_pattern,
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def tokenizer(vocab_size: int) -> Tokenizer:
    """Makes the tokenizer of :func:`.checkpoint.word_tokenizer`."""
    return word_tokenizer(SPECIAL_TOKENS, vocab_size)


def tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor under its Hugging Face name."""
    hidden = shape.hidden_size
    q = shape.num_attention_heads * shape.head_dim
    kv = shape.num_key_value_heads * shape.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "pre_feedforward_layernorm": (hidden,),
        "mlp.gate_proj": (shape.intermediate_size, hidden),
        "mlp.up_proj": (shape.intermediate_size, hidden),
        "mlp.down_proj": (hidden, shape.intermediate_size),
        "post_feedforward_layernorm": (hidden,),
    }
    return {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        **{
            f"model.layers.{i}.{name}.weight": dims
            for i in range(shape.num_hidden_layers)
            for name, dims in layer.items()
        },
        "model.norm.weight": (hidden,),
    }


def values(
    name: str, dims: tuple[int, ...], seed: int
) -> Iterator[npt.NDArray[np.float32]]:
    """Draws one tensor, some rows at a time.

    Args:
        name: The tensor's Hugging Face name; it selects the random stream, so
            a tensor does not depend on the number of layers.
        dims: The tensor's shape, `[dim]` or `[rows, columns]`.
        seed: The seed of the whole checkpoint.

    Yields:
        Consecutive rows as float32 arrays.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if len(dims) == 1:
        gain = 1.0
        if name == "model.norm.weight":
            gain = _LOGIT_GAIN
        elif "post_" in name:
            gain = _SUBLAYER_GAIN
        elif "q_norm" in name or "k_norm" in name:
            gain = _ATTENTION_GAIN
        noise = rng.standard_normal(dims, dtype=np.float32)
        # The model multiplies by one plus the weight.
        yield gain * (1 + np.float32(0.1) * noise) - 1
        return
    rows, columns = dims
    for start in range(0, rows, _ROWS_A_CHUNK):
        count = min(_ROWS_A_CHUNK, rows - start)
        chunk = rng.standard_normal((count, columns), dtype=np.float32)
        chunk *= np.float32(columns**-0.5)
        if start == 0 and "embed_tokens" in name:
            # Only words are ever the most likely next token: no early end,
            # and every generated token can be decoded by itself.
            chunk[:FIRST_WORD] *= np.float32(_SILENT)
        yield chunk


def write_checkpoint(
    folder: Path,
    *,
    size: str = "toy",
    dtype: str = "float32",
    layers: int | None = None,
    head_dim: int | None = None,
    shards: int = 1,
    seed: int = 0,
) -> Shape:
    """Writes a checkpoint folder.

    Args:
        folder: Where to write; made if missing.
        size: A key of `SHAPES`.
        dtype: `float32` or `bfloat16`.
        layers: The number of layers, when not the size's own.
        head_dim: The width of a head, likewise. MAX's attention in float32
            takes up to 128 on a GPU.
        shards: The number of files with weights.
        seed: Selects the random weights.

    Returns:
        The sizes of the model written.
    """
    shape = SHAPES[size]
    if layers is not None:
        shape = replace(shape, num_hidden_layers=layers)
    if head_dim is not None:
        shape = replace(shape, head_dim=head_dim)
    write_folder(
        folder,
        config(shape, dtype),
        tokenizer(shape.vocab_size),
        CHAT_TEMPLATE,
        shape.max_position_embeddings,
        end_of_turn=SPECIAL_TOKENS[END_OF_TURN],
    )
    write_weights(
        folder,
        tensors(shape),
        dtype,
        lambda name, dims: values(name, dims, seed),
        shards=shards,
    )
    return shape


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Write a Gemma 3 checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SHAPES, default="toy")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32"
    )
    parser.add_argument("--layers", type=int)
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_checkpoint(
        args.folder,
        size=args.size,
        dtype=args.dtype,
        layers=args.layers,
        head_dim=args.head_dim,
        seed=args.seed,
    )


if __name__ == "__main__":
    main()
