# SPDX-License-Identifier: Apache-2.0
"""The layout of Gemma 3's projections."""

from __future__ import annotations

import pytest
from attnquant_common import layout
from tests.toys import gemma3


@pytest.mark.parametrize("size", gemma3.SHAPES)
def test_gemma3_has_the_checkpoints_matrices(size: str) -> None:
    """The layout is every matrix of the layers, by name and shape."""
    shape = gemma3.SHAPES[size]
    found = layout.gemma3(shape)
    expected = {
        name: dims
        for name, dims in gemma3.tensors(shape).items()
        if name.startswith("model.layers.") and len(dims) == 2
    }
    assert {
        f"{found.module(layer, projection)}.weight": projection.shape
        for layer, projection in found
    } == expected
    assert len(found) == len(expected) == 7 * shape.num_hidden_layers
    assert sum(p.elements for _, p in found) == sum(
        rows * columns for rows, columns in expected.values()
    )


def test_groups_share_their_input() -> None:
    """Fused are q, k and v, and gate and up, which take the same input."""
    groups = layout.gemma3(gemma3.SHAPES["toy"]).groups()
    names = {
        group: [p.name.rpartition(".")[2] for p in members]
        for group, members in groups.items()
    }
    assert names == {
        "qkv": ["q_proj", "k_proj", "v_proj"],
        "o": ["o_proj"],
        "gate_up": ["gate_proj", "up_proj"],
        "down": ["down_proj"],
    }
    for members in groups.values():
        assert len({p.columns for p in members}) == 1
