# SPDX-License-Identifier: Apache-2.0
"""What a graph is given that rebuilds weights, and bundles in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from attnquant_common import bundle, layout, loading
from attnquant_common.bundle import Bundle, Checkpoint
from attnquant_common.loading import Report
from attnquant_common.plan import CheckpointError, Plan
from attnquant_common.settings import Settings, SettingsError
from attnquant_common.tensor import Tensor
from tests.toys import gemma3

LAYERS = 3
TOY = replace(gemma3.SHAPES["toy"], num_hidden_layers=LAYERS)
LAYOUT = layout.gemma3(TOY)
BANDS = Settings(blocks=2, rank=3)
RUNTIME = replace(BANDS, precompute_outside=False)

GROUPS = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The toy's checkpoint in both types."""
    made = tmp_path_factory.mktemp(request.param)
    gemma3.write_checkpoint(made, dtype=request.param, layers=LAYERS)
    return made


@pytest.fixture(scope="module")
def source(folder: Path) -> Checkpoint:
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def bundled(folder: Path) -> Path:
    """The same checkpoint as a bundle with the bands of `BANDS`."""
    made = folder / "bundle"
    bundle.create(folder, made, blocks=2, rank=3)
    return made / bundle.FILE


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("rank", [0, 3, 200])
def test_the_graphs_weights_make_the_projections(
    source: Checkpoint, blocks: int, rank: int
) -> None:
    """`w0 + b @ a` is what precompute-outside serves, before its rounding."""
    settings = Settings(blocks=blocks, rank=rank)
    rebuilt = dict(Plan(LAYOUT, settings).rewrite(source))
    plan = Plan(LAYOUT, replace(settings, precompute_outside=False))
    made = dict(loading.in_graph(plan, dict(plan.rewrite(source)), "F32"))
    for band in np.array_split(np.arange(LAYERS), blocks):
        if len(band) == 1:
            continue
        for group, members in GROUPS.items():
            w0 = made.pop(f"model.layers.{band[0]}.{group}.w0").float32()
            part = group.partition(".")[0]
            for layer in band:
                weight = w0
                if rank:
                    b = made.pop(f"model.layers.{layer}.{group}.b").float32()
                    a = made.pop(f"model.layers.{layer}.{group}.a").float32()
                    weight = w0 + b @ a
                    assert b.shape[1] % 8 == 0
                    assert b.shape[1] < rank * len(members) + 8
                expected = np.concatenate(
                    [
                        rebuilt[
                            f"model.layers.{layer}.{part}.{member}.weight"
                        ].float32()
                        for member in members
                    ]
                )
                one = f"model.layers.0.{part}.{members[0]}.weight"
                np.testing.assert_allclose(
                    weight,
                    expected,
                    rtol=2**-8 if rebuilt[one].dtype == "BF16" else 1e-5,
                    atol=1e-6,
                )
    assert not made


@pytest.mark.parametrize("rank", [0, 3])
def test_what_the_graph_needs_is_what_is_made(
    source: Checkpoint, rank: int
) -> None:
    """Names, types and shapes are known before the work."""
    plan = Plan(LAYOUT, replace(RUNTIME, rank=rank))
    parts = dict(plan.rewrite(source))
    assert {n: t.spec for n, t in parts.items()} == plan.specs(source)
    weights = dict(loading.in_graph(plan, parts, "BF16"))
    needed = loading.served(plan, "BF16", native=False)
    alone = {f"{m}.weight" for m in LAYOUT.modules() if ".2." in m}
    assert needed.keys() - weights.keys() == alone
    assert {n: t.spec for n, t in weights.items()} == {
        n: s for n, s in needed.items() if n not in alone
    }


def test_memory_is_planned_by_means_and_factors() -> None:
    """In the graph a band has one mean, and factors a layer."""
    size = 4
    projections = sum(p.elements for _, p in LAYOUT)
    each = projections // LAYERS
    # Rank 3 of three, of two and of one are 9, 6 and 3: to eights, 16, 8, 8.
    padded = {3: 16, 2: 8, 1: 8}
    factors = 2 * sum(
        padded[len(members)]
        * (sum(p.rows for p in members) + members[0].columns)
        for members in LAYOUT.groups().values()
    )
    found = loading.served_size(
        Plan(LAYOUT, RUNTIME), size * projections, size, "F32", native=False
    )
    assert found == size * (2 * each + factors)


def test_a_bundle_is_served_as_its_checkpoint_with_those_bands(
    source: Checkpoint, bundled: Path
) -> None:
    """Bit for bit: rebuilt, quantized too, and in the graph."""
    held = Checkpoint(bundled.parent)
    found = bundle.find_bundle([bundled])
    for settings in (
        BANDS,
        replace(BANDS, quant="nvfp4", ignore=("o_proj",)),
        RUNTIME,
    ):
        by_hand = Plan(LAYOUT, settings)
        plan = Plan(LAYOUT, replace(settings, blocks=None, rank=None), found)
        assert (plan.blocks, plan.rank) == (2, 3)
        made = dict(plan.rewrite(held))
        assert same(made, dict(by_hand.rewrite(source)))
        assert {n: t.spec for n, t in made.items()} == plan.specs(held)


def test_a_bundle_is_cached_by_its_own_tensors(
    folder: Path, bundled: Path, tmp_path: Path
) -> None:
    """A start from a bundle finds what the one before it made."""
    settings = Settings(quant="nvfp4", cache_dir=tmp_path)
    plan = Plan(LAYOUT, settings, Bundle(bundled))
    held = Checkpoint(bundled.parent)
    assert set(plan.needed()) <= held.keys()
    outcomes = [
        loading.load(plan, held, [bundled], "toy").outcome for _ in range(2)
    ]
    assert outcomes == ["miss", "hit"]


def test_memory_for_a_bundle_is_that_of_its_checkpoint(
    source: Checkpoint, bundled: Path
) -> None:
    """What the bundle was made from has the checkpoint's bytes."""
    assert Bundle(bundled).source_nbytes == sum(
        tensor.nbytes for tensor in source.values()
    )


def test_other_files_are_no_bundle(folder: Path, tmp_path: Path) -> None:
    """A checkpoint, several files, or a file MAX cannot read either."""
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes(b"no safetensors")
    checkpoint = folder / "model.safetensors"
    for paths in ([checkpoint], [checkpoint, checkpoint], [], [damaged]):
        assert bundle.find_bundle(paths) is None


@pytest.mark.parametrize(
    ("settings", "variable"),
    [
        (Settings(blocks=1), "ATTNQUANT_BLOCKS=1"),
        (Settings(blocks=2, rank=4), "ATTNQUANT_RANK=4"),
    ],
)
def test_a_bundle_keeps_its_bands(
    bundled: Path, settings: Settings, variable: str
) -> None:
    """Asking for others is an error that says what there is."""
    with pytest.raises(SettingsError, match=f"{variable}.*decomposed already"):
        Plan(LAYOUT, settings, Bundle(bundled))


def test_a_bundle_of_another_model_is_an_error(bundled: Path) -> None:
    """Its modules and shapes are the configuration's, or it is not served."""
    wide = layout.gemma3(replace(TOY, intermediate_size=1024))
    with pytest.raises(CheckpointError, match="other modules or shapes"):
        Plan(wide, Settings(), Bundle(bundled))


def test_weights_are_rebuilt_on_one_device(source: Checkpoint) -> None:
    """More devices are an error that names the other path."""
    plan = Plan(LAYOUT, RUNTIME)
    plan.check_devices(1, native=False)
    with pytest.raises(SettingsError, match="ATTNQUANT_PRECOMPUTE_OUTSIDE"):
        plan.check_devices(2, native=False)
    Plan(LAYOUT, BANDS).check_devices(2, native=False)


def test_nothing_to_rebuild_is_an_error() -> None:
    """A server must not start as something else than asked."""
    with pytest.raises(SettingsError, match="is a band of its own"):
        Plan(LAYOUT, replace(RUNTIME, blocks=LAYERS))


def test_the_line_names_the_path() -> None:
    """It says by what the graph rebuilds weights."""
    report = Report(Plan(LAYOUT, RUNTIME), "hit", native=True, form="matmuls")
    line = report.line("Gemma3ForCausalLM", capture=True)
    assert "blocks 2, rank 3, NVFP4 0 of 21 projections" in line
    assert "runtime by matmuls, cache hit, capture on" in line


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Says whether two mappings hold the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(
        first[name].spec == second[name].spec
        and first[name].data.tobytes() == second[name].data.tobytes()
        for name in first
    )
