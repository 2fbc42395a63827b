# SPDX-License-Identifier: Apache-2.0
"""Writes Gemma 4 checkpoints with random weights, and drafters for them.

A checkpoint is a folder as `tests.toys.gemma3` makes one. The text model's
configuration lies inside the multimodal one, and a vision tower's weights
beside the text's, as in the published repositories. The same arguments always
give the same bytes. A sparse checkpoint has a header and no bytes, so that the
31B's takes no room on a disk: it reads as zeros.

    python -m tests.toys.gemma4 DIR --size toy --dtype bfloat16
    python -m tests.toys.gemma4 DIR --size 31b --sparse

The 31B's sizes are those of MAX's defaults and of the published counts of its
projections and bytes; its vision tower's are not known to be the real ones.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tests.toys.checkpoint import (
    Draw,
    Float32,
    word_tokenizer,
    write_folder,
    write_weights,
)

SPECIAL_TOKENS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"),
    *("<|channel>", "<channel|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *('<|"|>', "<|think|>", "<|image>", "<|image|>", "<image|>", "<|video|>"),
)
FIRST_WORD = len(SPECIAL_TOKENS) + 256
"""The lowest token id that stands for a word; bytes lie below."""

_SLIDING, _GLOBAL = "sliding_attention", "full_attention"
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|turn>{{ message.role }}\n{{ message.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)

CPU_FLAGS = (
    *("--devices", "cpu", "--quantization-encoding", "float32"),
    *("--max-length", "1024", "--max-batch-size", "1"),
    "--no-enable-prefix-caching",
)
"""MAX's flags for the toy on a CPU. MAX plans 7 GiB for images."""

_ROWS_A_CHUNK = 16384
_SUBLAYER_GAIN = 12.0
_DRAFTER_GAIN = 0.1
_ATTENTION_GAIN = 2.0
_LOGIT_GAIN = 4.0
_SILENT = 0.25


@dataclass(frozen=True)
class Vision:
    """The sizes of a vision tower, named as in `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    position_embedding_size: int
    patch_size: int = 16
    pooling_kernel_size: int = 3


@dataclass(frozen=True)
class Shape:
    """The sizes of a Gemma 4 text model, named as in `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_global_key_value_heads: int | None
    head_dim: int
    global_head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int
    max_position_embeddings: int
    vision: Vision
    attention_k_eq_v: bool = True
    enable_moe_block: bool = False
    hidden_size_per_layer_input: int = 0
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False

    @property
    def num_hidden_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layer_types)


@dataclass(frozen=True)
class Drafter:
    """The sizes of a drafter, which reads its target's keys and values."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]


SHAPES = {
    "toy": Shape(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        head_dim=64,
        global_head_dim=128,
        layer_types=(_SLIDING, _SLIDING, _GLOBAL) * 2,
        sliding_window=128,
        max_position_embeddings=2048,
        vision=Vision(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=64,
            position_embedding_size=1024,
        ),
    ),
    "31b": Shape(
        vocab_size=262144,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
        layer_types=((_SLIDING,) * 5 + (_GLOBAL,)) * 10,
        sliding_window=1024,
        max_position_embeddings=262144,
        vision=Vision(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            head_dim=72,
            position_embedding_size=10240,
        ),
    ),
}

DRAFTERS = {
    "toy": Drafter(192, 256, (_SLIDING, _GLOBAL)),
    "31b": Drafter(1024, 8192, (_SLIDING,) * 3 + (_GLOBAL,)),
}


def text_config(shape: Shape, dtype: str) -> dict[str, Any]:
    """Returns the text model's part of `config.json`."""
    return {
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": shape.attention_k_eq_v,
        "bos_token_id": SPECIAL_TOKENS.index("<bos>"),
        "dtype": dtype,
        "enable_moe_block": shape.enable_moe_block,
        "eos_token_id": SPECIAL_TOKENS.index("<eos>"),
        "final_logit_softcapping": 30.0,
        "global_head_dim": shape.global_head_dim,
        "head_dim": shape.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": shape.hidden_size,
        "hidden_size_per_layer_input": shape.hidden_size_per_layer_input,
        "intermediate_size": shape.intermediate_size,
        "layer_types": list(shape.layer_types),
        "max_position_embeddings": shape.max_position_embeddings,
        "moe_intermediate_size": None,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts": None,
        "num_global_key_value_heads": shape.num_global_key_value_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "num_kv_shared_layers": shape.num_kv_shared_layers,
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            _GLOBAL: {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
                "rope_type": "proportional",
            },
            _SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": shape.sliding_window,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": shape.use_double_wide_mlp,
        "vocab_size": shape.vocab_size,
        "vocab_size_per_layer_input": shape.vocab_size,
    }


def config(shape: Shape, dtype: str) -> dict[str, Any]:
    """Returns the content of `config.json`."""
    vision = shape.vision
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "boi_token_id": SPECIAL_TOKENS.index("<|image>"),
        "dtype": dtype,
        "eoi_token_id": SPECIAL_TOKENS.index("<image|>"),
        "eos_token_id": [
            SPECIAL_TOKENS.index("<eos>"),
            SPECIAL_TOKENS.index("<turn|>"),
        ],
        "image_token_id": SPECIAL_TOKENS.index("<|image|>"),
        "model_type": "gemma4",
        "text_config": text_config(shape, dtype),
        "tie_word_embeddings": True,
        "video_token_id": SPECIAL_TOKENS.index("<|video|>"),
        "vision_config": {
            "model_type": "gemma4_vision",
            "dtype": dtype,
            "head_dim": vision.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "max_position_embeddings": 131072,
            "num_attention_heads": vision.num_attention_heads,
            "num_hidden_layers": vision.num_hidden_layers,
            "num_key_value_heads": vision.num_attention_heads,
            "patch_size": vision.patch_size,
            "pooling_kernel_size": vision.pooling_kernel_size,
            "position_embedding_size": vision.position_embedding_size,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
            "standardize": True,
            "use_clipped_linears": False,
        },
    }


def drafter_config(
    target: Shape, drafter: Drafter, dtype: str
) -> dict[str, Any]:
    """Returns the content of a drafter's `config.json`."""
    shape = replace(
        target,
        hidden_size=drafter.hidden_size,
        intermediate_size=drafter.intermediate_size,
        layer_types=drafter.layer_types,
        num_kv_shared_layers=len(drafter.layer_types),
    )
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": target.hidden_size,
        "dtype": dtype,
        "model_type": "gemma4_assistant",
        "text_config": text_config(shape, dtype)
        | {"vocab_size_per_layer_input": 0},
        "tie_word_embeddings": True,
        "use_ordered_embeddings": False,
    }


def tokenizer(vocab_size: int) -> Tokenizer:
    """Makes the tokenizer of :func:`.checkpoint.word_tokenizer`."""
    return word_tokenizer(SPECIAL_TOKENS, vocab_size)


def tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor under its Hugging Face name."""
    hidden = shape.hidden_size
    prefix = "model.language_model."
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}embed_tokens.weight": (shape.vocab_size, hidden)
    }
    for number, kind in enumerate(shape.layer_types):
        size, keys = shape.head_dim, shape.num_key_value_heads
        if kind == _GLOBAL:
            size = shape.global_head_dim
            if shape.num_global_key_value_heads is not None:
                keys = shape.num_global_key_value_heads
        q, kv = shape.num_attention_heads * size, keys * size
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.q_norm.weight": (size,),
            "self_attn.k_norm.weight": (size,),
            "self_attn.o_proj.weight": (hidden, q),
            **_feed_forward(hidden, shape.intermediate_size),
        }
        if kind == _GLOBAL and shape.attention_k_eq_v:
            del layer["self_attn.v_proj.weight"]
        for name, dims in layer.items():
            found[f"{prefix}layers.{number}.{name}"] = dims
    found[f"{prefix}norm.weight"] = (hidden,)
    return found | _vision_tensors(shape)


def drafter_tensors(
    target: Shape, drafter: Drafter
) -> dict[str, tuple[int, ...]]:
    """Returns the same of a drafter, which has no keys and values."""
    hidden = drafter.hidden_size
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (target.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * target.hidden_size),
        "post_projection.weight": (target.hidden_size, hidden),
    }
    for number, kind in enumerate(drafter.layer_types):
        size = target.head_dim if kind == _SLIDING else target.global_head_dim
        q = target.num_attention_heads * size
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.q_norm.weight": (size,),
            "self_attn.o_proj.weight": (hidden, q),
            **_feed_forward(hidden, drafter.intermediate_size),
        }
        for name, dims in layer.items():
            found[f"model.layers.{number}.{name}"] = dims
    return found


def _feed_forward(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_feedforward_layernorm.weight": (hidden,),
        "layer_scalar": (1,),
    }


def _vision_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    vision, prefix = shape.vision, "model.vision_tower."
    hidden, inner = vision.hidden_size, vision.intermediate_size
    heads = vision.num_attention_heads * vision.head_dim
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}patch_embedder.input_proj.weight": (
            hidden,
            3 * vision.patch_size**2,
        ),
        f"{prefix}patch_embedder.position_embedding_table": (
            2,
            vision.position_embedding_size,
            hidden,
        ),
        f"{prefix}std_bias": (hidden,),
        f"{prefix}std_scale": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.linear.weight": (heads, hidden),
        "self_attn.k_proj.linear.weight": (heads, hidden),
        "self_attn.v_proj.linear.weight": (heads, hidden),
        "self_attn.q_norm.weight": (vision.head_dim,),
        "self_attn.k_norm.weight": (vision.head_dim,),
        "self_attn.o_proj.linear.weight": (hidden, heads),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "mlp.gate_proj.linear.weight": (inner, hidden),
        "mlp.up_proj.linear.weight": (inner, hidden),
        "mlp.down_proj.linear.weight": (hidden, inner),
        "post_feedforward_layernorm.weight": (hidden,),
    }
    for number in range(vision.num_hidden_layers):
        for name, dims in layer.items():
            found[f"{prefix}encoder.layers.{number}.{name}"] = dims
    found["model.embed_vision.embedding_projection.weight"] = (
        shape.hidden_size,
        hidden,
    )
    return found


def values(
    name: str,
    dims: tuple[int, ...],
    seed: int,
    sublayer_gain: float = _SUBLAYER_GAIN,
) -> Iterator[Float32]:
    """Draws one tensor, some rows at a time.

    Args:
        name: The tensor's Hugging Face name; it selects the random stream.
        dims: The tensor's shape.
        seed: The seed of the whole checkpoint.
        sublayer_gain: What attention and MLPs add to the residual stream,
            where the embedding is 1. The less it is, the more a token depends
            on none but the token before it.

    Yields:
        Consecutive rows as float32 arrays.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if len(dims) == 1:
        # The model multiplies by the weight itself, unlike Gemma 3.
        gain: float | Float32 = 1.0
        noise = rng.standard_normal(dims, dtype=np.float32)
        if name.endswith(("model.norm.weight", "language_model.norm.weight")):
            # With one sign, a token's own embedding would fit it best.
            gain = _LOGIT_GAIN * rng.choice(np.float32([-1, 1]), dims)
        elif "post_" in name:
            gain = sublayer_gain
        elif "q_norm" in name or "k_norm" in name:
            # Scores are not scaled by the size of a head.
            gain = _ATTENTION_GAIN * dims[0] ** -0.25
        yield gain * (1 + np.float32(0.1) * noise)
        return
    rows, columns = int(np.prod(dims[:-1])), dims[-1]
    for start in range(0, rows, _ROWS_A_CHUNK):
        count = min(_ROWS_A_CHUNK, rows - start)
        chunk = rng.standard_normal((count, columns), dtype=np.float32)
        chunk *= np.float32(columns**-0.5)
        if start == 0 and "embed_tokens" in name:
            # Only words are ever the most likely next token: no early end,
            # and every generated token can be decoded by itself.
            chunk[:FIRST_WORD] *= np.float32(_SILENT)
        yield chunk


def drafter_values(
    name: str, dims: tuple[int, ...], seed: int, target: Shape, target_seed: int
) -> Iterator[Float32]:
    """Draws one tensor of a drafter that agrees with its target at times.

    Where the target's layers add nothing, its logits are `E (g * e)`, of its
    embeddings, its last norm's gains and a token's embedding. The drafter
    reads `P e`, of random orthonormal rows `P`, and has the embeddings
    `(E * g) P^T`, so that its logits come as near to them as its fewer
    dimensions let it.
    """
    if name == "pre_projection.weight":
        rows = _orthonormal(dims[0], target.hidden_size, seed)
        (states,) = values(name, (dims[0], target.hidden_size), seed)
        # Of the target's hidden state it takes little.
        yield np.hstack([rows, np.float32(0.05) * states])
    elif name == "model.embed_tokens.weight":
        rows = _orthonormal(dims[1], target.hidden_size, seed)
        shapes = tensors(target)
        prefix = "model.language_model."
        norm = f"{prefix}norm.weight"
        (gains,) = values(norm, shapes[norm], target_seed)
        embeddings = f"{prefix}embed_tokens.weight"
        for chunk in values(embeddings, shapes[embeddings], target_seed):
            yield (chunk * gains) @ rows.T
    elif name == "model.norm.weight":
        yield np.ones(dims, np.float32)
    else:
        yield from values(name, dims, seed, _DRAFTER_GAIN)


def _orthonormal(rows: int, columns: int, seed: int) -> Float32:
    random = np.random.default_rng(seed).standard_normal((columns, rows))
    return np.linalg.qr(random)[0].T.astype(np.float32)


def write_checkpoint(
    folder: Path,
    *,
    size: str = "toy",
    dtype: str = "bfloat16",
    layers: int | None = None,
    intermediate_size: int | None = None,
    shards: int = 1,
    seed: int = 0,
    sublayer_gain: float = _SUBLAYER_GAIN,
    sparse: bool = False,
) -> Shape:
    """Writes a checkpoint folder.

    Args:
        folder: Where to write; made if missing.
        size: A key of `SHAPES`.
        dtype: `float32` or `bfloat16`.
        layers: How many of the size's layers, the last ones, if not all. The
            last of them is global, as it must be for transformers.
        intermediate_size: The MLPs' width, if not the size's.
        shards: The number of files with weights.
        seed: Selects the random weights.
        sublayer_gain: As in :func:`values`.
        sparse: As in :func:`.checkpoint.write_safetensors`.

    Returns:
        The sizes of the model written.
    """
    shape = SHAPES[size]
    if layers is not None:
        shape = replace(shape, layer_types=shape.layer_types[-layers:])
    if intermediate_size is not None:
        shape = replace(shape, intermediate_size=intermediate_size)
    _write_folder(
        folder,
        config(shape, dtype),
        tensors(shape),
        dtype,
        lambda name, dims: values(name, dims, seed, sublayer_gain),
        shards,
        sparse,
    )
    return shape


def write_drafter(
    folder: Path,
    *,
    size: str = "toy",
    dtype: str = "bfloat16",
    seed: int = 1,
    target_seed: int = 0,
    sparse: bool = False,
) -> Drafter:
    """Writes the folder of a drafter for a checkpoint of that size and seed."""
    target, drafter = SHAPES[size], DRAFTERS[size]
    _write_folder(
        folder,
        drafter_config(target, drafter, dtype),
        drafter_tensors(target, drafter),
        dtype,
        lambda name, dims: drafter_values(
            name, dims, seed, target, target_seed
        ),
        1,
        sparse,
    )
    return drafter


def _write_folder(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    draw: Draw,
    shards: int,
    sparse: bool,
) -> None:
    write_folder(
        folder,
        config,
        tokenizer(config["text_config"]["vocab_size"]),
        _CHAT_TEMPLATE,
        2048,
        end_of_turn="<turn|>",
    )
    write_weights(folder, shapes, dtype, draw, shards=shards, sparse=sparse)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Write a Gemma 4 checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SHAPES, default="toy")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16"
    )
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument(
        "--intermediate-size", type=int, help="another width of the MLPs"
    )
    parser.add_argument("--shards", type=int, default=1, help="files")
    parser.add_argument("--seed", type=int, default=0, help="the target's")
    parser.add_argument(
        "--sublayer-gain",
        type=float,
        default=_SUBLAYER_GAIN,
        help="what layers add to the residual stream, for the embedding's 1",
    )
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument(
        "--drafter", action="store_true", help="write its drafter instead"
    )
    args = parser.parse_args()
    if args.drafter:
        if args.layers is not None or args.intermediate_size is not None:
            parser.error("--drafter: it has the layers and width of its size")
        write_drafter(
            args.folder,
            size=args.size,
            dtype=args.dtype,
            target_seed=args.seed,
            sparse=args.sparse,
        )
        return
    write_checkpoint(
        args.folder,
        size=args.size,
        dtype=args.dtype,
        layers=args.layers,
        intermediate_size=args.intermediate_size,
        shards=args.shards,
        seed=args.seed,
        sublayer_gain=args.sublayer_gain,
        sparse=args.sparse,
    )


if __name__ == "__main__":
    main()
