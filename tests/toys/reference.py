# SPDX-License-Identifier: Apache-2.0
"""Gemma 3's text model in plain numpy, in float32.

Written from the Gemma 3 report (arXiv:2503.19786) and the model's
documentation: RMSNorm scales by one plus its weight, queries and keys are
normalised per head, every sixth layer attends to all earlier tokens and the
others to a sliding window, with a rotary base of their own; embeddings are
scaled by the root of the hidden size and tied to the head.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def read_safetensors(path: Path) -> dict[str, Array]:
    """Reads the float32 and bfloat16 tensors of a file as float32."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    result = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            bits = np.frombuffer(data[start:end], np.uint16)
            flat = (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            flat = np.frombuffer(data[start:end], np.float32)
        result[name] = flat.reshape(entry["shape"])
    return result


class Gemma3:
    """A Gemma 3 text model that reads its whole prompt at each step."""

    def __init__(self, folder: Path) -> None:
        """Loads a checkpoint folder.

        Args:
            folder: Holds `config.json` and `model.safetensors`.
        """
        self.config: dict[str, Any] = json.loads(
            (folder / "config.json").read_text()
        )
        self.weights = read_safetensors(folder / "model.safetensors")

    def logits(self, tokens: list[int]) -> Array:
        """Returns the logits after each token, `[len(tokens), vocab_size]`."""
        embedding = self.weights["model.embed_tokens.weight"]
        scale = np.float32(self.config["hidden_size"] ** 0.5)
        x = embedding[tokens] * scale
        for i in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{i}."
            h = self._norm(x, prefix + "input_layernorm")
            h = self._attention(h, i)
            x = x + self._norm(h, prefix + "post_attention_layernorm")
            h = self._norm(x, prefix + "pre_feedforward_layernorm")
            h = self._mlp(h, prefix + "mlp.")
            x = x + self._norm(h, prefix + "post_feedforward_layernorm")
        return self._norm(x, "model.norm") @ embedding.T

    def generate(self, tokens: list[int], count: int) -> list[int]:
        """Returns the `count` tokens that greedy decoding adds."""
        result = list(tokens)
        for _ in range(count):
            result.append(int(self.logits(result)[-1].argmax()))
        return result[len(tokens) :]

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[name + ".weight"].T

    def _norm(self, x: Array, name: str) -> Array:
        eps = np.float32(self.config["rms_norm_eps"])
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        return x / np.sqrt(mean + eps) * (1 + self.weights[name + ".weight"])

    def _mlp(self, x: Array, prefix: str) -> Array:
        gate = self._linear(x, prefix + "gate_proj")
        inner = np.float32((2 / np.pi) ** 0.5) * (
            gate + np.float32(0.044715) * gate**3
        )
        gelu = np.float32(0.5) * gate * (1 + np.tanh(inner))
        up = self._linear(x, prefix + "up_proj")
        return self._linear(gelu * up, prefix + "down_proj")

    def _attention(self, x: Array, layer: int) -> Array:
        c = self.config
        prefix = f"model.layers.{layer}.self_attn."
        local = (layer + 1) % c["sliding_window_pattern"] != 0
        n, d, groups = len(x), c["head_dim"], c["num_key_value_heads"]

        def heads(name: str) -> Array:
            return self._linear(x, prefix + name).reshape(n, -1, d)

        base = c["rope_local_base_freq"] if local else c["rope_theta"]
        q = _rotate(self._norm(heads("q_proj"), prefix + "q_norm"), base)
        k = _rotate(self._norm(heads("k_proj"), prefix + "k_norm"), base)
        v = heads("v_proj")
        scale = np.float32(c["query_pre_attn_scalar"] ** -0.5)
        # [groups, heads of a group, queries, keys]
        q = q.reshape(n, groups, -1, d)
        scores = np.einsum("qghd,kgd->ghqk", q, k) * scale
        distance = np.arange(n)[:, None] - np.arange(n)[None, :]
        visible = distance >= 0
        if local:
            visible &= distance < c["sliding_window"]
        scores = np.where(visible, scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("ghqk,kgd->qghd", weights, v)
        return self._linear(mixed.reshape(n, -1), prefix + "o_proj")


def _rotate(x: Array, base: float) -> Array:
    """Applies rotary embeddings to `[tokens, heads, head_dim]`."""
    half = x.shape[-1] // 2
    frequency = base ** -(np.arange(half) / half)
    angle = np.arange(len(x))[:, None, None] * frequency
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., :half], x[..., half:]
    rotated = np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
    return rotated.astype(np.float32)
