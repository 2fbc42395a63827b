# SPDX-License-Identifier: Apache-2.0
"""How much of a model's weights a decoded token needs."""

from __future__ import annotations

from collections.abc import Mapping

from .tensor import TensorSpec

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def bytes_a_token(manifest: Mapping[str, TensorSpec]) -> int:
    """Returns the bytes of weights that a token reads, decoded alone.

    Every weight is read whole, scales too. Of a table of embeddings it is one
    row, unless the table is the head as well.

    Args:
        manifest: A text model's weights as they are served, by name; each of
            them once.
    """
    total = sum(spec.nbytes for spec in manifest.values())
    if any(name.endswith(_HEAD) for name in manifest):
        for name, spec in manifest.items():
            if name.endswith(_EMBEDDING):
                total -= spec.nbytes - spec.nbytes // spec.shape[0]
    return total
