# SPDX-License-Identifier: Apache-2.0
"""The layouts of the models' projections, and what follows from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attnquant_common import bundle, layout, loading
from attnquant_common.bundle import Bundle, Checkpoint
from attnquant_common.layout import Layout
from attnquant_common.plan import CheckpointError, Plan
from attnquant_common.projections import group
from attnquant_common.settings import Settings, SettingsError
from attnquant_common.tensor import TensorSpec
from attnquant_common.traffic import bytes_a_token
from tests.toys import gemma3, gemma4

PREFIX = "model.language_model."

MLP = {
    "gate_up": ["gate_proj", "up_proj"],
    "down": ["down_proj"],
}
SLIDING = {"qkv": ["q_proj", "k_proj", "v_proj"], "o": ["o_proj"]}
GLOBAL = {"qk": ["q_proj", "k_proj"], "o": ["o_proj"]}


@pytest.mark.parametrize("size", gemma3.SHAPES)
def test_gemma3_has_the_checkpoints_matrices(size: str) -> None:
    """The layout is every matrix of the layers, by name and shape."""
    shape = gemma3.SHAPES[size]
    found = layout.gemma3(shape)
    tensors = gemma3.tensors(shape)
    assert matrices(found) == layer_matrices(tensors, "model.layers.")
    assert len(found) == 7 * shape.num_hidden_layers


@pytest.mark.parametrize(("size", "count"), [("toy", 40), ("31b", 410)])
def test_gemma4_has_the_text_models_matrices(size: str, count: int) -> None:
    """Likewise, without the vision tower's; 410 of them in the 31B."""
    shape = gemma4.SHAPES[size]
    found = layout.gemma4(shape)
    tensors = gemma4.tensors(shape)
    assert matrices(found) == layer_matrices(tensors, f"{PREFIX}layers.")
    assert len(found) == len(list(found)) == count


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_k_eq_v": False},
        {"num_global_key_value_heads": None},
        {"layer_types": ("full_attention",) * 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_gemma4_follows_its_configuration(changes: dict[str, Any]) -> None:
    """Values of their own, heads that are not given, layers of one kind."""
    shape = replace(gemma4.SHAPES["toy"], **changes)
    tensors = gemma4.tensors(shape)
    expected = layer_matrices(tensors, f"{PREFIX}layers.")
    assert matrices(layout.gemma4(shape)) == expected


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"enable_moe_block": True}, "enable_moe_block True"),
        (
            {"hidden_size_per_layer_input": 256},
            "hidden_size_per_layer_input 256",
        ),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers 2"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp True"),
        ({"layer_types": ("chunked_attention",) * 6}, "chunked_attention"),
    ],
)
def test_a_gemma4_of_another_kind_is_an_error(
    changes: dict[str, Any], error: str
) -> None:
    """What has weights that are not served is not served as something else."""
    with pytest.raises(ValueError, match=error):
        layout.gemma4(replace(gemma4.SHAPES["toy"], **changes))


def test_groups_share_input_and_layers() -> None:
    """Fused are q, k and v, and gate and up, of the layers that have them.

    Where keys are used as values there is no v, and the group is named `qk`.
    """
    everywhere = tuple(range(6))
    assert named(layout.gemma3(gemma3.SHAPES["toy"])) == [
        (everywhere, SLIDING | MLP)
    ]
    assert named(layout.gemma4(gemma4.SHAPES["toy"])) == [
        ((0, 1, 3, 4), SLIDING),
        ((2, 5), GLOBAL),
        (everywhere, MLP),
    ]


@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_bands_are_of_layers_of_one_shape(blocks: int) -> None:
    """They are those of a bundle, which knows names and shapes alone.

    Of four layers with sliding windows and two without, in as many bands as
    there should be or one a layer.
    """
    shape = gemma4.SHAPES["toy"]
    specs = {
        name: TensorSpec("BF16", dims)
        for name, dims in gemma4.tensors(shape).items()
    }
    expected = {
        band.modules: band.shape
        for band in bundle.shared_bands(group(specs), blocks, rank=1)
    }
    settings = Settings(blocks=blocks, rank=1, precompute_outside=False)
    plan = Plan(layout.gemma4(shape), settings)
    found = {
        tuple(f"{plan.layout.module(i, p)}" for i in fused.layers): p.shape
        for fused in plan.fused
        for p in fused.members
    }
    assert found == expected
    sizes = {len(modules) for modules in found}
    assert sizes == {1: {2, 4, 6}, 2: {2, 3}, 3: {2}, 5: {2}}[blocks]


def test_a_gemma4_bundle_stands_for_its_checkpoint(tmp_path: Path) -> None:
    """Its weights are those of the checkpoint with the same bands, bit for bit.

    A bundle with other bands than the model's configuration gives is an error.
    """
    shape = gemma4.SHAPES["toy"]
    folder = tmp_path / "checkpoint"
    gemma4.write_checkpoint(folder)
    bundle.create(folder, tmp_path / "bundle", blocks=2, rank=3)
    opened = Bundle(tmp_path / "bundle" / bundle.FILE)
    where = layout.gemma4(shape)

    asked = dict(
        Plan(where, Settings(blocks=2, rank=3)).rewrite(Checkpoint(folder))
    )
    plan = Plan(where, Settings(), opened)
    held = dict(plan.rewrite(Checkpoint(tmp_path / "bundle")))
    # Each of the two global layers is a band of its own in attention.
    alone = {
        f"{where.prefix}{layer}.self_attn.{name}_proj.weight"
        for layer in (2, 5)
        for name in "qko"
    }
    weights = {f"{module}.weight" for module in where.modules()}
    assert held.keys() == asked.keys() == weights - alone
    for name, tensor in asked.items():
        assert (held[name].data == tensor.data).all(), name

    other = layout.gemma4(replace(shape, layer_types=shape.layer_types[::-1]))
    with pytest.raises(CheckpointError, match="bands of other modules"):
        Plan(other, Settings(), opened)


@pytest.mark.parametrize(
    ("ignore", "count"),
    [
        ((), 410),
        (("self_attn",), 180),
        (("mlp",), 230),
        (("*.layers.5.self_attn.[qk]_proj",), 408),
    ],
)
def test_what_is_quantized_of_the_31b(
    ignore: tuple[str, ...], count: int
) -> None:
    """Counted on the real shapes; 410 of them, 180 in the MLPs."""
    settings = Settings(quant="nvfp4", ignore=ignore)
    plan = Plan(layout.gemma4(gemma4.SHAPES["31b"]), settings)
    assert len(plan.quantized) == len(plan.rewritten) == count


def test_keys_that_are_values_are_fused_with_queries() -> None:
    """Of a global layer's q and k, both or none are quantized."""
    settings = Settings(quant="nvfp4", ignore=("*.layers.5.self_attn.k_proj",))
    with pytest.raises(SettingsError, match=r"fused .*q_proj, .*k_proj;"):
        Plan(layout.gemma4(gemma4.SHAPES["31b"]), settings)


@pytest.mark.parametrize(
    ("ignore", "published"),
    [((), 19.295e9), (("self_attn",), 31.482e9)],
    ids=["all", "mlp"],
)
def test_bytes_a_token_of_the_31b(
    ignore: tuple[str, ...], published: float
) -> None:
    """Text only, with the head in bfloat16: what is published, within 1 %.

    Within 0.01 % in fact: the rest are roundings of the published numbers.
    """
    shape = gemma4.SHAPES["31b"]
    plan = Plan(layout.gemma4(shape), Settings(quant="nvfp4", ignore=ignore))
    projections = {f"{module}.weight" for module in plan.layout.modules()}
    manifest = {
        name: TensorSpec("BF16", dims)
        for name, dims in gemma4.tensors(shape).items()
        if name.startswith(PREFIX) and name not in projections
    } | loading.served(plan, "BF16", native=True)
    assert bytes_a_token(manifest) == pytest.approx(published, rel=1e-4)


def test_of_embeddings_a_token_reads_a_row() -> None:
    """Unless they are the head too; then all rows are read."""
    table = TensorSpec("BF16", (1000, 8))
    norm = TensorSpec("F32", (8,))
    tied = {"embed_tokens.weight": table, "norm.weight": norm}
    assert bytes_a_token(tied) == 2 * 8000 + 4 * 8
    head = {"lm_head.weight": table}
    assert bytes_a_token(tied | head) == 2 * 8000 + 4 * 8 + 2 * 8


def matrices(found: Layout) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layout's weights, by name."""
    return {f"{found.module(i, p)}.weight": p.shape for i, p in found}


def layer_matrices(
    tensors: dict[str, tuple[int, ...]], prefix: str
) -> dict[str, tuple[int, ...]]:
    """Returns those of a checkpoint's matrices whose names begin so."""
    return {
        name: dims
        for name, dims in tensors.items()
        if name.startswith(prefix) and len(dims) == 2
    }


def named(found: Layout) -> list[tuple[Any, dict[str, list[str]]]]:
    """Returns the projections' names by layers and group."""
    result: dict[Any, dict[str, list[str]]] = {}
    for (key, layers), members in found.groups().items():
        assert len({p.columns for p in members}) == 1
        names = [p.name.rpartition(".")[2] for p in members]
        result.setdefault(layers, {})[key] = names
    return list(result.items())
