# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's projections are rewritten as the settings ask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from attnquant_common import layout, loading, nvfp4
from attnquant_common.bundle import Checkpoint
from attnquant_common.cache import DEFAULT_LIMIT, Cache
from attnquant_common.loading import Report
from attnquant_common.plan import CheckpointError, Plan
from attnquant_common.settings import Settings, SettingsError
from attnquant_common.tensor import Tensor, TensorSpec
from tests.toys import gemma3, gemma4, reference

LAYERS = 3
TOY = replace(gemma3.SHAPES["toy"], num_hidden_layers=LAYERS)
LAYOUT = layout.gemma3(TOY)
SIX_LAYERS = layout.gemma3(gemma3.SHAPES["toy"])
NVFP4 = Settings(quant="nvfp4")

FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)

Float32 = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The toy's checkpoint in both types."""
    folders = {
        dtype: tmp_path_factory.mktemp(dtype)
        for dtype in ("bfloat16", "float32")
    }
    for dtype, folder in folders.items():
        gemma3.write_checkpoint(folder, dtype=dtype, layers=LAYERS)
    return folders


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def folder(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path]
) -> Path:
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def source(folder: Path) -> Checkpoint:
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def values(folder: Path) -> dict[str, Float32]:
    """The checkpoint's values, read by other code."""
    return reference.read_safetensors(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("ignore", "count"),
    [
        ((), 42),
        (("self_attn",), 18),
        (("*mlp*",), 24),
        (("o_proj", "model.layers.1.mlp.down_proj"), 35),
        (("self_attn", "mlp"), 0),
    ],
)
def test_ignored_projections_are_not_quantized(
    ignore: tuple[str, ...], count: int
) -> None:
    """Patterns take projections out, one by one and by their module."""
    plan = Plan(SIX_LAYERS, replace(NVFP4, ignore=ignore))
    assert len(plan.quantized) == len(plan.rewritten) == count


def test_a_fused_group_cannot_be_split() -> None:
    """q, k and v are one matrix, so ignoring one of them is an error."""
    with pytest.raises(SettingsError, match="fused") as caught:
        Plan(LAYOUT, replace(NVFP4, ignore=("*.2.self_attn.q_proj",)))
    assert "model.layers.2.self_attn.k_proj" in str(caught.value)
    assert "ATTNQUANT_QUANT_IGNORE" in str(caught.value)


def test_inputs_that_make_no_blocks_are_an_error() -> None:
    """NVFP4 needs a multiple of 16 inputs, unless the module is ignored."""
    odd = replace(TOY, intermediate_size=500)
    with pytest.raises(SettingsError, match=r"down_proj has inputs of 500"):
        Plan(layout.gemma3(odd), NVFP4)
    Plan(layout.gemma3(odd), replace(NVFP4, ignore=("down_proj",)))


@pytest.mark.parametrize("blocks", [None, LAYERS])
def test_without_work_nothing_is_rewritten(
    source: Checkpoint, blocks: int | None
) -> None:
    """With a band a layer and no quantization the checkpoint is served."""
    plan = Plan(LAYOUT, Settings(blocks=blocks, rank=4 if blocks else None))
    assert not plan.rewritten
    assert not plan.specs(source)
    assert not list(plan.rewrite(source))


@pytest.mark.parametrize("scales", ["rtn", "sweep"])
def test_quantized_as_each_fused_group_asks(
    source: Checkpoint, values: dict[str, Float32], scales: nvfp4.Scales
) -> None:
    """Each weight is quantized by its group's greatest magnitude."""
    plan = Plan(LAYOUT, replace(NVFP4, scales=scales))
    made = dict(plan.rewrite(source))
    for layer in range(LAYERS):
        for fused in FUSED:
            modules = [f"model.layers.{layer}.{name}" for name in fused]
            greatest = max(
                np.abs(values[f"{module}.weight"]).max() for module in modules
            )
            scale_2 = np.float32(greatest) / np.float32(6 * 448)
            for module in modules:
                expected = nvfp4.quantize_numpy(
                    values[f"{module}.weight"],
                    scales=scales,
                    weight_scale_2=scale_2,
                )
                weight = made.pop(f"{module}.weight")
                scale = made.pop(f"{module}.weight_scale")
                assert (weight.dtype, scale.dtype) == ("U8", "F8_E4M3")
                assert (weight.data == expected.weight).all()
                assert (scale.data == expected.weight_scale).all()
                assert made.pop(f"{module}.weight_scale_2").data == scale_2
                assert made.pop(f"{module}.input_scale").data == 1
    assert not made


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("blocks", [1, 2])
def test_rebuilt_from_bands(
    source: Checkpoint, values: dict[str, Float32], blocks: int, rank: int
) -> None:
    """A weight is its band's mean and the best rank r of what it differs by.

    It is rounded to the checkpoint's type; a band of one layer is left alone.
    """
    plan = Plan(LAYOUT, Settings(blocks=blocks, rank=rank))
    made = dict(plan.rewrite(source))
    for band in np.array_split(np.arange(LAYERS), blocks):
        for projection in LAYOUT.projections:
            names = [f"model.layers.{i}.{projection.name}.weight" for i in band]
            mean = np.mean([values[n] for n in names], axis=0, dtype=float)
            for name in names:
                if len(names) == 1:
                    assert name not in made
                    continue
                left, sizes, right = np.linalg.svd(
                    values[name] - mean, full_matrices=False
                )
                best = mean + (left[:, :rank] * sizes[:rank]) @ right[:rank]
                assert made[name].dtype == source[name].dtype
                np.testing.assert_allclose(
                    made[name].float32(),
                    best,
                    rtol=2**-8 if made[name].dtype == "BF16" else 1e-4,
                    atol=1e-6,
                )
    assert made.keys() == set(plan.needed())


@pytest.mark.parametrize(
    ("ignore", "count", "native", "error"),
    [
        ((), 1, True, None),
        ((), 2, True, None),
        ((), 4, True, None),
        ((), 3, True, r"layers\.0\.self_attn\.q_proj has 256 outputs, which 3"),
        ((), 3, False, None),
        (
            ("[qkv]_proj",),
            32,
            True,
            "o_proj has 16 blocks of 16 inputs, which 32",
        ),
    ],
)
def test_scales_that_devices_cannot_share_are_an_error(
    ignore: tuple[str, ...], count: int, native: bool, error: str | None
) -> None:
    """Before the work, with what is shared and how it can be left out."""
    plan = Plan(LAYOUT, replace(NVFP4, ignore=ignore))
    if error is None:
        plan.check_devices(count, native=native)
        return
    with pytest.raises(SettingsError, match=error):
        plan.check_devices(count, native=native)


def test_what_a_graph_rebuilds_leaves_single_layers_alone() -> None:
    """What is taken out of a checkpoint is what the graph's parts replace."""
    where = layout.gemma4(gemma4.SHAPES["toy"])
    settings = Settings(blocks=2, rank=3, precompute_outside=False)
    plan = Plan(where, settings)
    rebuilt = {
        f"{where.module(layer, p)}.weight"
        for fused in plan.fused
        for layer in fused.layers
        for p in fused.members
    }
    assert set(plan.needed()) == rebuilt
    assert len(rebuilt) == len(where) - 2 * 3


def test_quantizing_rebuilt_weights_is_quantizing_their_checkpoint(
    source: Checkpoint,
) -> None:
    """Both at once give the bytes of one after the other."""
    bands = Settings(blocks=2, rank=3)
    rebuilt = dict(Plan(LAYOUT, bands).rewrite(source))
    weights = {name: source[name] for name in source} | rebuilt
    expected = dict(Plan(LAYOUT, NVFP4).rewrite(weights))
    both = dict(Plan(LAYOUT, replace(bands, quant="nvfp4")).rewrite(source))
    assert same(both, expected)


@pytest.mark.parametrize(
    "settings",
    [
        NVFP4,
        replace(NVFP4, ignore=("self_attn",)),
        Settings(blocks=2, rank=1),
        Settings(blocks=1, rank=0, quant="nvfp4", ignore=("mlp",)),
    ],
)
def test_what_is_made_is_what_was_announced(
    source: Checkpoint, settings: Settings
) -> None:
    """Names, types and shapes are known before the work."""
    plan = Plan(LAYOUT, settings)
    made = {
        name: TensorSpec(tensor.dtype, tensor.shape)
        for name, tensor in plan.rewrite(source)
    }
    assert made == plan.specs(source)


@dataclass
class Changed(Mapping[str, Tensor]):
    """A checkpoint with one tensor changed, or without it."""

    source: Mapping[str, Tensor]
    name: str
    tensor: Tensor | None

    def __getitem__(self, name: str) -> Tensor:
        if name != self.name:
            return self.source[name]
        if self.tensor is None:
            raise KeyError(name)
        return self.tensor

    def __iter__(self):  # noqa: ANN204
        return (
            name
            for name in self.source
            if name != self.name or self.tensor is not None
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


NAME = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (None, f"the checkpoint has no {NAME}"),
        (
            Tensor(np.zeros((512, 128), np.uint8), "U8"),
            f"{NAME} is U8.*already quantized",
        ),
        (
            Tensor(np.zeros((512, 128), np.float32), "F32"),
            rf"{NAME} has shape \[512, 128\].*\[512, 256\]",
        ),
    ],
    ids=["missing", "quantized", "shape"],
)
def test_a_checkpoint_that_does_not_fit_is_an_error(
    source: Checkpoint, tensor: Tensor | None, error: str
) -> None:
    """It names the tensor, and says what was found and what is needed."""
    changed = Changed(source, NAME, tensor)
    with pytest.raises(CheckpointError, match=error):
        Plan(LAYOUT, NVFP4).specs(changed)


@pytest.mark.parametrize(
    "settings", [NVFP4, Settings(blocks=1, rank=1)], ids=["nvfp4", "bands"]
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_an_error(
    source: Checkpoint, settings: Settings, value: float
) -> None:
    """NaN or infinity in a weight is an error that names the tensor."""
    weight = source[NAME].float32().copy()
    weight[7, 11] = value
    changed = Changed(source, NAME, Tensor(weight, "F32"))
    with pytest.raises(ValueError, match=NAME):
        list(Plan(LAYOUT, settings).rewrite(changed))


def test_a_state_dict_that_does_not_fit_is_an_error() -> None:
    """A missing key, a packed shape and a scale too many are found."""
    plan = Plan(LAYOUT, replace(NVFP4, ignore=("self_attn",)))
    needed = loading.served(plan, "BF16", native=True)
    assert len(needed) == LAYERS * (3 * 4 + 4)
    others = {"model.norm.weight": TensorSpec("BF16", (256,))}
    loading.check_served(needed, {**needed, **others})

    for name in needed:
        rest = {n: s for n, s in needed.items() if n != name}
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            loading.check_served(needed, rest)

    unpacked = needed | {NAME: TensorSpec("U8", (512, 256))}
    with pytest.raises(CheckpointError, match=rf"{NAME} is U8 \[512, 256\]"):
        loading.check_served(needed, unpacked)

    scale = "model.layers.0.self_attn.q_proj.weight_scale"
    extra = needed | {scale: TensorSpec("F8_E4M3", (256, 16))}
    with pytest.raises(CheckpointError, match=f"{scale} has no place"):
        loading.check_served(needed, extra)


def test_dequantized_weights_are_what_the_codes_mean(
    source: Checkpoint,
) -> None:
    """Without a matmul for NVFP4, its values are served in float32."""
    plan = Plan(LAYOUT, replace(NVFP4, ignore=("self_attn",)))
    made = dict(plan.rewrite(source))
    served = dict(loading.dequantized(plan, made))
    assert served.keys() == {f"{m}.weight" for m in plan.quantized}
    # By the format's definition, element by element.
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = made[NAME].data[5, 9] & 15, made[NAME].data[5, 9] >> 4
    scale = made[NAME.removesuffix("weight") + "weight_scale"].data[5, 1]
    exponent, fraction = (scale >> 3) & 15, scale & 7
    block = (1 + fraction / 8) * 2.0 ** (int(exponent) - 7)
    scale_2 = made[NAME.removesuffix("weight") + "weight_scale_2"].data
    for column, code in zip((18, 19), codes, strict=True):
        sign = -1 if code & 8 else 1
        expected = sign * values[code & 7] * block * scale_2
        assert served[NAME].data[5, column] == pytest.approx(expected, 1e-6)


def test_cold_and_warm_loads_give_the_same_bytes(
    folder: Path, source: Checkpoint, tmp_path: Path
) -> None:
    """The second load is a hit with equal tensors; other settings are not."""
    paths = [folder / "model.safetensors"]

    def load(settings: Settings) -> loading.Weights:
        settings = replace(settings, cache_dir=tmp_path)
        return loading.load(Plan(LAYOUT, settings), source, paths, "toy")

    cold, warm = load(NVFP4), load(NVFP4)
    assert (cold.outcome, warm.outcome) == ("miss", "hit")
    assert same(cold, warm)
    assert same(cold, dict(Plan(LAYOUT, NVFP4).rewrite(source)))
    other = load(replace(NVFP4, scales="sweep"))
    assert other.outcome == "miss"
    assert not same(cold, other)


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, DEFAULT_LIMIT), (3, 3_000_000_000)]
)
def test_the_cache_gets_the_limit_asked_for(
    folder: Path,
    source: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: int | None,
    expected: int,
) -> None:
    """In gigabytes, 10^9 bytes each."""
    limits = []

    class Recorded(Cache):
        def __init__(self, folder: Path, limit_bytes: int) -> None:
            limits.append(limit_bytes)
            super().__init__(folder, limit_bytes)

    monkeypatch.setattr(loading, "Cache", Recorded)
    settings = replace(NVFP4, cache_dir=tmp_path, cache_limit=asked)
    paths = [folder / "model.safetensors"]
    loading.load(Plan(LAYOUT, settings), source, paths, "toy")
    assert limits == [expected]


@pytest.mark.parametrize(
    ("settings", "native", "capture", "line"),
    [
        (
            NVFP4,
            True,
            True,
            "AttnQuant: Gemma3ForCausalLM, blocks 6, rank 0, NVFP4 42 of 42 "
            "projections, precompute-outside, cache miss, capture on",
        ),
        (
            Settings("nvfp4", ("self_attn",), blocks=2, rank=8),
            False,
            False,
            "AttnQuant: Gemma3ForCausalLM, blocks 2, rank 8, NVFP4 18 of 42 "
            "projections (dequantized at load), precompute-outside, "
            "cache miss, capture off",
        ),
    ],
)
def test_the_line_that_a_start_logs(
    settings: Settings, native: bool, capture: bool, line: str
) -> None:
    """It says what is served, and marks what the device cannot multiply."""
    report = Report(Plan(SIX_LAYERS, settings), "miss", native)
    assert report.line("Gemma3ForCausalLM", capture=capture) == line


def test_the_size_that_memory_is_planned_by(
    checkpoints: dict[str, Path],
) -> None:
    """It is the served weights' and not more than a header above it."""
    elements = sum(math.prod(d) for d in gemma3.tensors(TOY).values())
    projections = sum(p.elements for _, p in LAYOUT)

    def size(settings: Settings, dtype: str, width: int, native: bool) -> int:
        stored = checkpoints[dtype] / "model.safetensors"
        return loading.served_size(
            Plan(LAYOUT, settings),
            stored.stat().st_size,
            4 if dtype == "float32" else 2,
            {2: "BF16", 4: "F32"}[width],
            native=native,
        )

    for dtype in checkpoints:
        for settings, width, native, expected in (
            (Settings(), 2, True, 2 * elements),
            (Settings(), 4, False, 4 * elements),
            (NVFP4, 4, False, 4 * elements),
            (
                NVFP4,
                2,
                True,
                2 * (elements - projections) + 9 * projections // 16,
            ),
        ):
            found = size(settings, dtype, width, native)
            assert expected <= found < expected + 20_000


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Says whether two mappings hold the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and first[name].data.tobytes() == second[name].data.tobytes()
        for name in first
    )
