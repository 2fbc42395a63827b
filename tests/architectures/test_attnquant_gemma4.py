# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 with AttnQuant: what MAX is given, alone and with a drafter.

Graphs are only traced, on virtual devices where they are for a GPU.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnquant_common.registration import BYPASSING
from attnquant_common.tensor import TensorSpec
from attnquant_common.traffic import bytes_a_token
from tests.architectures.common import (
    BANDS,
    BLACKWELL,
    BY_MATMULS,
    BY_OP,
    CPU,
    HOPPER,
    MATMUL,
    MTP,
    NO_ATTENTION,
    NVFP4,
    TOLERANCE,
    Float32,
    Generated,
    Run,
    Traced,
    quantized_values,
)
from tests.benchmarks import compile_gemma4
from tests.toys import gemma4, reference
from tests.toys.checkpoint import write_safetensors

LAYERS = gemma4.SHAPES["toy"].num_hidden_layers

PROMPT = *gemma4.CPU_FLAGS, "--prompt", "Why is the sky blue? " * 8

PREFIX = "model.language_model."

SAFETENSORS = {
    "bfloat16": "BF16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
}


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, Path]:
    """The toy, its drafter, and the 31B's header with no bytes behind it."""
    folders = {
        name: tmp_path_factory.mktemp(name)
        for name in ("bfloat16", "float32", "drafter", "31b")
    }
    for dtype in ("bfloat16", "float32"):
        gemma4.write_checkpoint(folders[dtype], dtype=dtype)
    gemma4.write_drafter(folders["drafter"])
    gemma4.write_checkpoint(folders["31b"], size="31b", sparse=True)
    return folders


def test_switched_on_it_stands_under_the_built_in_names(run: Run) -> None:
    """On, both names give ours; off, the very built-in objects."""
    code = (
        "import max.pipelines\n"
        "from max.pipelines.lib.arch_lookup import ARCH_LOOKUP\n"
        "from max.pipelines.architectures import gemma4, unified_mtp_gemma4\n"
        "built_in = {\n"
        "  'Gemma4ForConditionalGeneration': gemma4.gemma4_arch,\n"
        "  'UnifiedMTPGemma4ForCausalLM':\n"
        "    unified_mtp_gemma4.unified_mtp_gemma4_arch}\n"
        "for name, arch in built_in.items():\n"
        "  found = ARCH_LOOKUP.find(name)\n"
        "  print(found is arch, found.pipeline_model.__name__,\n"
        "    found.supports_device_graph_capture,\n"
        "    found.supports_overlap_scheduler)\n"
    )
    on, off = run(NVFP4, "-c", code), run({}, "-c", code)
    assert on.stdout.splitlines() == [
        "False AttnQuantGemma4Model True True",
        "False AttnQuantUnifiedMTPGemma4Model False True",
    ], on.stderr
    assert off.stdout.splitlines() == [
        "True Gemma3_MultiModalModel False True",
        "True UnifiedMTPGemma4Model False True",
    ], off.stderr


@pytest.mark.parametrize(
    "more", [("gpu:0",), ("gpu:0,1",), ("gpu:0", *MTP)], ids=" ".join
)
def test_with_a_band_a_layer_the_graphs_are_the_built_in_ones(
    traced: Traced, more: tuple[str, ...]
) -> None:
    """Without quantization, graphs and weights are the built-in's."""
    built_in = traced("bfloat16", *HOPPER, *more)
    ours = traced("bfloat16", *HOPPER, *more, ATTNQUANT_BLOCKS=str(LAYERS))
    assert not built_in["model"].startswith("AttnQuant")
    assert ours["model"] == (
        "AttnQuantUnifiedMTPGemma4Model"
        if MTP[0] in more
        else "AttnQuantGemma4Model"
    )
    assert ours["graphs"] == built_in["graphs"]
    assert ours["memory"] == built_in["memory"]
    for name, value in built_in["values"].items():
        assert (ours["values"][name] == value).all(), name


@pytest.mark.parametrize("more", [(), MTP], ids=["alone", "drafter"])
@pytest.mark.parametrize(
    "variables",
    [NVFP4, BANDS, {**NVFP4, **BANDS}],
    ids=["nvfp4", "bands", "both"],
)
def test_without_a_matmul_for_nvfp4_values_are_served(
    traced: Traced, more: tuple[str, ...], variables: dict[str, str]
) -> None:
    """On Hopper the graphs are the built-in's, and the log marks it."""
    built_in = traced("bfloat16", *HOPPER, "gpu:0", *more)
    found = traced("bfloat16", *HOPPER, "gpu:0", *more, **variables)
    assert found["graphs"] == built_in["graphs"]
    marked = "NVFP4 40 of 40 projections (dequantized at load)" in found["log"]
    assert marked == ("ATTNQUANT_QUANT" in variables)


@pytest.mark.parametrize(
    ("ignore", "count", "matmuls"),
    [
        ("", 40, 24),
        ("self_attn", 18, 12),
        ("mlp", 22, 12),
        ("o_proj,model.language_model.layers.1.mlp.down_proj", 33, 17),
        ("*.layers.2.self_attn.[qk]_proj,gate_proj,up_proj", 26, 17),
        ("self_attn,mlp", 0, 0),
    ],
)
def test_on_blackwell_projections_multiply_by_nvfp4(
    traced: Traced, ignore: str, count: int, matmuls: int
) -> None:
    """A block-scaled matmul a fused group that is not ignored, and no other.

    q, k and v are one, or q and k where keys are values; gate and up are one.
    """
    variables = NVFP4 | ({"ATTNQUANT_QUANT_IGNORE": ignore} if ignore else {})
    found = traced("bfloat16", *BLACKWELL, "gpu:0", **variables)
    graph = found["graphs"]["decoder"]
    assert graph["ops"].get(MATMUL, 0) == matmuls
    # Beside them the groups left, which are four a layer, and the head.
    assert graph["ops"]["rmo.matmul"] == 4 * LAYERS - matmuls + 1
    types = [dtype for dtype, _ in graph["weights"].values()]
    assert types.count("uint8") == types.count("float8_e4m3fn") == count
    assert (
        f"AttnQuant: Gemma4ForConditionalGeneration, blocks {LAYERS}, rank 0, "
        f"NVFP4 {count} of 40 projections, precompute-outside, cache unused, "
        "capture on\n"
    ) in found["log"]


@pytest.mark.parametrize(
    ("variables", "quantized", "unquantized"),
    [(NVFP4, 4, 0), (NO_ATTENTION, 2, 2)],
    ids=["all", "no-attention"],
)
def test_each_layer_multiplies_as_often(
    traced: Traced,
    variables: dict[str, str],
    quantized: int,
    unquantized: int,
) -> None:
    """Of four matmuls a layer, sliding or global, those asked for are NVFP4.

    Unfused, they would be seven or six.
    """
    found = traced("bfloat16", *BLACKWELL, "gpu:0", **variables)
    ops = found["graphs"]["decoder"]["ops"]
    assert ops[MATMUL] == quantized * LAYERS
    assert ops["rmo.matmul"] == unquantized * LAYERS + 1
    by_layer = collections.Counter(
        int(match[1])
        for name, (dtype, _) in found["graphs"]["decoder"]["weights"].items()
        if dtype == "uint8"
        and (match := re.match(r"layers\.(\d+)\.", name)) is not None
    )
    attention = variables is NVFP4
    assert by_layer == {
        layer: 3 + attention * (3 if kind == "full_attention" else 4)
        for layer, kind in enumerate(gemma4.SHAPES["toy"].layer_types)
    }


@pytest.mark.parametrize("more", [(), MTP], ids=["alone", "drafter"])
def test_all_but_projections_stays_bfloat16(
    traced: Traced, more: tuple[str, ...]
) -> None:
    """Embeddings, norms, the vision tower and the whole drafter."""
    found = traced("bfloat16", *BLACKWELL, "gpu:0", *more, **NVFP4)
    projections = re.compile(r"(target\.)?layers\..*_proj\.")
    others = [
        (name, dtype)
        for graph in found["graphs"].values()
        for name, (dtype, _) in graph["weights"].items()
        if not projections.match(name)
    ]
    assert {dtype for _, dtype in others} == {"bfloat16"}
    drafter = [name for name, _ in others if name.startswith("draft.")]
    assert len(drafter) == (26 if more else 0)


def test_several_devices_multiply_by_nvfp4(traced: Traced) -> None:
    """Each of two GPUs has its part of every projection."""
    found = traced("bfloat16", *BLACKWELL, "gpu:0,1", **NVFP4)
    assert found["graphs"]["decoder"]["ops"][MATMUL] == 2 * 4 * LAYERS


def test_devices_that_cannot_share_the_scales_stop_max(
    trace: Run, tmp_path: Path
) -> None:
    """Before a weight is looked at."""
    gemma4.write_checkpoint(tmp_path, sparse=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 528
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = trace(
        NVFP4,
        tmp_path / "graph",
        *(*BLACKWELL, "gpu:0,1", "--model", tmp_path),
    )
    assert done.returncode != 0
    assert "has 33 blocks of 16 inputs, which 2 devices cannot" in done.stderr


@pytest.mark.parametrize(
    ("variables", "count", "matmuls", "published"),
    [(NVFP4, 410, 240, 19.295e9), (NO_ATTENTION, 180, 120, 31.482e9)],
    ids=["all", "no-attention"],
)
def test_the_31b_as_it_is_traced(
    traced: Traced,
    variables: dict[str, str],
    count: int,
    matmuls: int,
    published: float,
) -> None:
    """All 60 layers, and the bytes that a token reads of what MAX was given.

    The published numbers are text only, with the head in bfloat16.
    """
    found = traced("31b", *BLACKWELL, "gpu:0", **variables)
    graph = found["graphs"]["decoder"]
    assert graph["ops"][MATMUL] == matmuls
    assert graph["ops"]["rmo.matmul"] == 240 - matmuls + 1
    manifest = {
        name: TensorSpec(SAFETENSORS[dtype], tuple(dims))
        for name, (dtype, dims) in graph["weights"].items()
    }
    types = collections.Counter(spec.dtype for spec in manifest.values())
    assert types["U8"] == types["F8_E4M3"] == count
    read = bytes_a_token(manifest)
    assert read == pytest.approx(published, rel=0.01)
    vision = sum(
        TensorSpec(SAFETENSORS[dtype], tuple(dims)).nbytes
        for dtype, dims in found["graphs"]["vision"]["weights"].values()
    )
    # MAX reserves what is served; the checkpoint's header is counted too.
    assert found["memory"] == pytest.approx(read + vision, rel=1e-4)
    assert found["log"].count(f"NVFP4 {count} of 410 projections") == 1


@pytest.mark.parametrize("checkpoint", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "variables", [NVFP4, NO_ATTENTION], ids=["all", "no-attention"]
)
def test_cpu_serves_the_values_of_the_codes(
    traced: Traced,
    checkpoints: Mapping[str, Path],
    checkpoint: str,
    variables: dict[str, str],
) -> None:
    """On the CPU weights are float32 and NVFP4's values, others as they were.

    It serves the text model; the graph is that of unquantized weights.
    """
    found = traced(checkpoint, *CPU, **variables)
    assert found["graphs"].keys() == {"decoder"}
    expected = served_values(checkpoints[checkpoint], variables)
    assert found["values"].keys() == {
        name.removeprefix(PREFIX) for name in expected
    }
    for name, value in expected.items():
        served = found["values"][name.removeprefix(PREFIX)].view(np.float32)
        assert (served.reshape(value.shape) == value).all(), name
    unquantized = traced(checkpoint, *CPU, ATTNQUANT="1")
    assert found["graphs"] == unquantized["graphs"]


def test_a_bundle_is_served_in_its_checkpoints_place(
    run: Run,
    trace: Run,
    traced: Traced,
    checkpoints: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    """Graph and weights are those of the checkpoint with the same bands.

    In two bands the two global layers keep their attention, and their MLPs
    share a band with others.
    """
    done = run(
        {},
        *("-m", "max.pipelines.architectures.attnquant_common.bundle"),
        *(checkpoints["float32"], tmp_path / "bundle"),
        *("--blocks", "2", "--rank", "8"),
    )
    assert done.returncode == 0, done.stderr
    asked = traced("float32", *CPU, **BANDS)
    done = trace(
        {"ATTNQUANT": "1"},
        tmp_path / "graph",
        *(*CPU, "--model", tmp_path / "bundle"),
    )
    assert done.returncode == 0, done.stderr
    held = json.loads((tmp_path / "graph.json").read_text())
    assert held["graphs"] == asked["graphs"]
    with np.load(tmp_path / "graph.npz") as values:
        for name, value in asked["values"].items():
            assert (values[name] == value).all(), name
    plain = traced("float32", *CPU, ATTNQUANT="1")
    kept = {
        name
        for name, value in plain["values"].items()
        if "_proj." in name and (value == asked["values"][name]).all()
    }
    assert kept == {
        f"layers.{layer}.self_attn.{projection}_proj.weight"
        for layer in (2, 5)
        for projection in "qko"
    }


@pytest.mark.parametrize("more", [(), MTP], ids=["alone", "drafter"])
@pytest.mark.parametrize(
    "variables", [BY_MATMULS, BY_OP], ids=["matmuls", "op"]
)
def test_in_the_graph_a_fused_group_is_rebuilt_and_multiplied(
    traced: Traced, variables: dict[str, str], more: tuple[str, ...]
) -> None:
    """Eight matrix operations a layer instead of four, and the head's.

    In two bands each of the two global layers has a band of its own, so that
    its attention is the built-in one.
    """
    role = "spec_decoder" if more else "decoder"
    built_in = traced("bfloat16", *HOPPER, "gpu:0", *more)["graphs"][role]
    found = traced("bfloat16", *HOPPER, "gpu:0", *more, **variables)
    graph = found["graphs"][role]
    rebuilt = 4 * LAYERS - 2 * 2
    assert graph["ops"]["attnquant.rebuild"] == rebuilt
    assert graph["ops"]["mo.matmul"] == rebuilt
    others = built_in["ops"]["rmo.matmul"] - rebuilt
    assert graph["ops"]["rmo.matmul"] == others
    means = [name for name in graph["weights"] if name.endswith(".w0")]
    assert len(means) == 2 * 4
    kept = {
        match[1]
        for name in graph["weights"]
        if (
            match := re.search(r"^(?:target\.)?layers\.(.*_proj)\.weight", name)
        )
    }
    assert kept == {f"{i}.self_attn.{p}_proj" for i in (2, 5) for p in "qko"}
    form = "matmuls" if variables is BY_MATMULS else "a custom op"
    assert f"runtime by {form}, cache unused" in found["log"]


def test_with_a_drafter_ours_is_resolved(traced: Traced) -> None:
    """MAX renames the target where there is a drafter; the name is ours too.

    The target is quantized, and the drafter's matmuls are as they were.
    """
    built_in = traced("bfloat16", *HOPPER, "gpu:0", *MTP)
    found = traced("bfloat16", *BLACKWELL, "gpu:0", *MTP, **NVFP4)
    assert found["architecture"] == "UnifiedMTPGemma4ForCausalLM"
    assert found["model"] == "AttnQuantUnifiedMTPGemma4Model"
    ops = found["graphs"]["spec_decoder"]["ops"]
    assert ops[MATMUL] == 4 * LAYERS
    unquantized = built_in["graphs"]["spec_decoder"]["ops"]["rmo.matmul"]
    assert ops["rmo.matmul"] == unquantized - 4 * LAYERS
    assert (
        f"AttnQuant: UnifiedMTPGemma4ForCausalLM, blocks {LAYERS}, rank 0, "
        "NVFP4 40 of 40 projections, precompute-outside, cache unused, "
        "capture off\n"
    ) in found["log"]


@pytest.mark.parametrize(
    ("model", "name", "missing"),
    [
        ("target", "model.language_model.layers.3.input_layernorm.weight", 1),
        ("target", "model.language_model.layers.3.self_attn.bias", 0),
        ("draft", "model.layers.1.mlp.up_proj.weight", 1),
        ("draft", "masked_embedding.centroids.weight", 0),
    ],
)
def test_a_weight_too_few_or_too_many_is_an_error(
    trace: Run, tmp_path: Path, model: str, name: str, missing: int
) -> None:
    """Of target or drafter; the built-in model serves zeros for a missing."""
    folders = {"target": tmp_path / "target", "draft": tmp_path / "draft"}
    gemma4.write_checkpoint(folders["target"])
    gemma4.write_drafter(folders["draft"])
    file = folders[model] / "model.safetensors"
    alter(file, name, missing=bool(missing))
    done = trace(
        NVFP4,
        tmp_path / "graph",
        *(*BLACKWELL, "gpu:0", "--model", folders["target"]),
        *(*MTP, "--draft-model-path", folders["draft"]),
    )
    assert done.returncode != 0
    served = name.removeprefix(PREFIX).removeprefix("model.")
    what = "missing from its" if missing else "in its"
    assert f"{model} model: {served} is {what} checkpoint" in done.stderr


def test_names_that_lead_past_attnquant_are_refused(run: Run) -> None:
    """On, each is found and listed, and says what leads to it; off, built in.

    All of them are names that MAX has.
    """
    code = (
        "import max.pipelines\n"
        "from max.pipelines.architectures.attnquant_common.registration "
        "import BYPASSING\n"
        "from max.pipelines.lib.arch_lookup import ARCH_LOOKUP\n"
        "listed = {arch.name for arch in ARCH_LOOKUP.all_architectures()}\n"
        "assert BYPASSING.keys() <= listed, BYPASSING.keys() - listed\n"
        "for name in BYPASSING:\n"
        "  try:\n"
        "    ARCH_LOOKUP.find(name).config.calculate_max_seq_len(None, None)\n"
        "  except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    on, off = run(NVFP4, "-c", code), run({}, "-c", code)
    assert on.stdout.splitlines() == [
        f"SettingsError AttnQuant does not serve {name}: {cause}. "
        "ATTNQUANT=0 switches AttnQuant off"
        for name, cause in BYPASSING.items()
    ], on.stderr
    assert off.returncode == 0, off.stderr
    assert "SettingsError" not in off.stdout


@pytest.mark.parametrize(
    ("flags", "drafter", "error"),
    [
        (
            ("--prefer-module-v3",),
            None,
            "Gemma4ForConditionalGeneration_ModuleV3: --prefer-module-v3",
        ),
        (
            ("--speculative-method", "dflash"),
            "DFlashDraftModel",
            "UnifiedDflashGemma4_31BForCausalLM: --speculative-method",
        ),
    ],
    ids=["module-v3", "dflash"],
)
def test_what_leads_past_attnquant_stops_max(
    trace: Run,
    checkpoints: Mapping[str, Path],
    tmp_path: Path,
    flags: tuple[str, ...],
    drafter: str | None,
    error: str,
) -> None:
    """The error names the flag."""
    if drafter is not None:
        folder = tmp_path / "draft"
        gemma4.write_drafter(folder)
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = [drafter]
        (folder / "config.json").write_text(json.dumps(config))
        flags += ("--draft-model-path", str(folder))
    done = trace(
        NVFP4,
        tmp_path / "graph",
        *(*BLACKWELL, "gpu:0", "--model", checkpoints["bfloat16"], *flags),
    )
    assert done.returncode != 0
    assert f"AttnQuant does not serve {error}" in done.stderr


@pytest.mark.parametrize(
    ("variables", "changes", "error"),
    [
        (
            {**NVFP4, "ATTNQUANT_QUANT_IGNORE": "self_atn"},
            {},
            "'self_atn' matches none of the 40 projections",
        ),
        (
            NVFP4,
            {"enable_moe_block": True},
            "AttnQuant serves the dense Gemma 4; config.json has "
            "enable_moe_block True",
        ),
    ],
    ids=["pattern", "experts"],
)
def test_what_cannot_be_followed_stops_max(
    trace: Run,
    tmp_path: Path,
    variables: dict[str, str],
    changes: dict[str, Any],
    error: str,
) -> None:
    """MAX does not start as something else than asked."""
    gemma4.write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = trace(
        variables,
        tmp_path / "graph",
        *(*BLACKWELL, "gpu:0", "--model", tmp_path),
    )
    assert done.returncode != 0
    assert error in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "variables",
    [NVFP4, NO_ATTENTION, BANDS, BY_OP],
    ids=["nvfp4", "no-attention", "bands", "op"],
)
def test_logits_are_transformers(
    generated: Callable[..., Generated],
    traced: Traced,
    checkpoints: Mapping[str, Path],
    variables: dict[str, str],
) -> None:
    """`max generate` computes what transformers does with the weights served.

    The prompt is longer than the window of the sliding layers.
    """
    import torch
    import transformers

    made = generated(*PROMPT, **variables)
    assert made.first > gemma4.SHAPES["toy"].sliding_window
    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        checkpoints["float32"], dtype="float32", attn_implementation="eager"
    )
    at_load = BANDS if variables is BY_OP else variables
    served = traced("float32", *CPU, **at_load)
    weights = {
        PREFIX + name: torch.tensor(
            value.view(np.float32).reshape(
                served["graphs"]["decoder"]["weights"][name][1]
            )
        )
        for name, value in served["values"].items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert not [name for name in missing if name.startswith(PREFIX)]
    with torch.no_grad():
        tokens = torch.tensor([made.tokens])
        logits = model(input_ids=tokens).logits[0, made.first :]
    np.testing.assert_allclose(
        made.logits, logits.numpy(), rtol=0, atol=TOLERANCE
    )


def test_forms_and_paths_compute_the_same(
    generated: Callable[..., Generated],
) -> None:
    """Rebuilt at load or by the op: the logits are equal.

    Within float32's rounding: 1e-3 on logits of a spread of 4.
    """
    at_load, op = (generated(*PROMPT, **each) for each in (BANDS, BY_OP))
    assert op.tokens == at_load.tokens
    np.testing.assert_allclose(op.logits, at_load.logits, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "drafter"), [("toy", True), ("31b", False)], ids=["mtp", "31b"]
)
def test_graphs_compile_for_blackwell(
    patched_env: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: str,
    drafter: bool,
) -> None:
    """MAX compiles all layers in NVFP4, with the vision tower, or a drafter.

    No GPU is there. The 31B's checkpoint is a header with no bytes.
    """
    for name, value in NVFP4.items():
        monkeypatch.setenv(name, value)
    found = compile_gemma4.compile_graphs(
        patched_env, size, "cuda:sm_100a", tmp_path, drafter=drafter
    )
    count = 410 if size == "31b" else 40
    assert f"NVFP4 {count} of {count} projections" in found["attnquant"]
    # 9.4 and 16.6 were seen.
    assert found["peak_gb"] < (20 if drafter else 12)


@pytest.mark.full
@pytest.mark.parametrize("size", gemma4.SHAPES)
def test_the_toys_are_what_transformers_has(size: str, tmp_path: Path) -> None:
    """Names and shapes are transformers', which also has the tied head."""
    import torch
    import transformers

    shape, drafter = gemma4.SHAPES[size], gemma4.DRAFTERS[size]
    gemma4.write_checkpoint(tmp_path / "target", size=size, sparse=True)
    gemma4.write_drafter(tmp_path / "draft", size=size, sparse=True)
    for folder, ours in (
        ("target", gemma4.tensors(shape)),
        ("draft", gemma4.drafter_tensors(shape, drafter)),
    ):
        config = transformers.AutoConfig.from_pretrained(tmp_path / folder)
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
        theirs = {n: tuple(v.shape) for n, v in model.state_dict().items()}
        del theirs["lm_head.weight"]
        assert ours == theirs


def alter(file: Path, name: str, *, missing: bool) -> None:
    """Takes a tensor out of a safetensors file, or adds one."""
    tensors = reference.read_safetensors(file)
    if missing:
        del tensors[name]
    else:
        tensors[name] = np.zeros(8, np.float32)
    shapes = {n: t.shape for n, t in tensors.items()}
    write_safetensors(
        file, shapes, "bfloat16", lambda name, dims: (), sparse=True
    )


def served_values(
    folder: Path, variables: Mapping[str, str]
) -> dict[str, Float32]:
    """Returns a text model's weights as variables have them served."""
    weights = {
        name: value
        for name, value in reference.read_safetensors(
            folder / "model.safetensors"
        ).items()
        if name.startswith(PREFIX)
    }
    return quantized_values(weights, LAYERS, f"{PREFIX}layers.", variables)
