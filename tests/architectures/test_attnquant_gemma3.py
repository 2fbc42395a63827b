# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 with AttnQuant: what MAX is given, and what it computes.

Most graphs are only traced, on virtual devices where they are for a GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.architectures.common import (
    BANDS,
    BLACKWELL,
    BY_MATMULS,
    BY_OP,
    CPU,
    FUSED,
    HOPPER,
    MATMUL,
    NO_ATTENTION,
    NVFP4,
    RUNTIME,
    TOLERANCE,
    Float32,
    Generated,
    Run,
    Traced,
    quantized_values,
)
from tests.toys import gemma3, reference

PROMPT = *gemma3.CPU_FLAGS, "--prompt", "Why is the sky blue?"


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, Path]:
    """The toy Gemma 3: by type, in two files, and with a head of its own."""
    folders = {
        name: tmp_path_factory.mktemp(name)
        for name in ("bfloat16", "float32", "sharded", "untied")
    }
    gemma3.write_checkpoint(folders["bfloat16"], dtype="bfloat16")
    for name in ("float32", "untied"):
        gemma3.write_checkpoint(folders[name])
    # So that no fused group is whole in a file.
    gemma3.write_checkpoint(folders["sharded"], shards=2)
    _untie(folders["untied"])
    return folders


def _untie(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def traced(traced: Traced) -> Traced:
    """Gives the same of the one graph, and what is in `graphs` beside it."""

    def give(*asked: str, **variables: str) -> dict[str, Any]:
        found = traced(*asked, **variables)
        return {**found, **found["graphs"]["decoder"]}

    return give


def test_switched_on_it_stands_under_the_built_in_name(
    run: Run,
) -> None:
    """On, Gemma 3's name gives ours; off, the very built-in object."""
    code = (
        "import max.pipelines;"
        "from max.pipelines.lib.arch_lookup import ARCH_LOOKUP;"
        "from max.pipelines.architectures.gemma3.arch import gemma3_arch;"
        "found = ARCH_LOOKUP.find('Gemma3ForCausalLM');"
        "print(found is gemma3_arch, found.pipeline_model.__name__,"
        "found.supports_device_graph_capture, found.supports_overlap_scheduler)"
    )
    on, off = run(NVFP4, "-c", code), run({}, "-c", code)
    assert on.stdout.split() == [
        "False",
        "AttnQuantGemma3Model",
        "True",
        "True",
    ]
    assert off.stdout.split() == ["True", "Gemma3Model", "True", "True"]


@pytest.mark.parametrize("devices", ["gpu:0", "gpu:0,1"])
def test_with_a_band_a_layer_the_graph_is_the_built_in_one(
    traced: Traced, devices: str
) -> None:
    """Without quantization, graph and weights are the built-in's."""
    built_in = traced("bfloat16", *HOPPER, devices)
    ours = traced("bfloat16", *HOPPER, devices, ATTNQUANT_BLOCKS="6")
    assert built_in["model"] == "Gemma3Model"
    assert ours["model"] == "AttnQuantGemma3Model"
    assert ours["digest"] == built_in["digest"]
    assert ours["weights"] == built_in["weights"]
    for name, value in built_in["values"].items():
        assert (ours["values"][name] == value).all(), name


def test_rebuilt_weights_leave_the_graph_as_it_is(traced: Traced) -> None:
    """Precompute-outside changes weights only."""
    built_in = traced("bfloat16", *HOPPER, "gpu:0")
    ours = traced("bfloat16", *HOPPER, "gpu:0", **BANDS)
    assert ours["digest"] == built_in["digest"]
    assert "blocks 2, rank 8, NVFP4 0 of 42 projections" in ours["log"]


@pytest.mark.parametrize(
    ("variables", "form"),
    [(BY_MATMULS, "matmuls"), (BY_OP, "a custom op")],
    ids=["matmuls", "op"],
)
def test_in_the_graph_a_fused_group_is_rebuilt_and_multiplied(
    traced: Traced, variables: dict[str, str], form: str
) -> None:
    """Eight matrix operations a layer instead of four, and the head's.

    A band's mean is a weight once, of its first layer; each layer has factors.
    """
    found = traced("bfloat16", *HOPPER, "gpu:0", **variables)
    assert found["ops"]["attnquant.rebuild"] == found["ops"]["mo.matmul"] == 24
    assert found["ops"]["rmo.matmul"] == 1
    assert found["buffers"] == found["inputs"]
    names = [n.removeprefix("language_model.layers.") for n in found["weights"]]
    means = [name for name in names if name.endswith(".w0")]
    assert {name[0] for name in means} == {"0", "3"}
    assert len(means) == 2 * 4
    assert sum(name.endswith((".a", ".b")) for name in names) == 6 * 4 * 2
    assert not any("_proj.weight" in name for name in names)
    assert f"runtime by {form}, cache unused, capture on\n" in found["log"]


def test_a_band_of_one_layer_is_not_rebuilt(traced: Traced) -> None:
    """Its layers are the built-in's, with the checkpoint's weights."""
    found = traced(
        "bfloat16", *HOPPER, "gpu:0", **{**BY_MATMULS, "ATTNQUANT_BLOCKS": "5"}
    )
    assert found["ops"]["attnquant.rebuild"] == found["ops"]["mo.matmul"] == 8
    assert found["ops"]["rmo.matmul"] == 4 * 4 + 1


def test_the_means_alone_are_multiplied_by(traced: Traced) -> None:
    """At rank 0 there is nothing to rebuild."""
    found = traced(
        "bfloat16", *HOPPER, "gpu:0", **{**RUNTIME, "ATTNQUANT_RANK": "0"}
    )
    assert "attnquant.rebuild" not in found["ops"]
    assert found["ops"]["rmo.matmul"] == 4 * 6 + 1
    assert sum(name.endswith(".w0") for name in found["weights"]) == 8
    assert "runtime by the means alone, cache unused" in found["log"]


def test_several_devices_cannot_rebuild(
    trace: Run,
    checkpoints: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    """The error names the variable and the path that they can serve."""
    done = trace(
        RUNTIME,
        tmp_path / "graph",
        *(*HOPPER, "gpu:0,1", "--model", checkpoints["bfloat16"]),
    )
    assert done.returncode != 0
    assert "ATTNQUANT_PRECOMPUTE_OUTSIDE=0 serves on one device" in done.stderr


@pytest.fixture(scope="module")
def bundles(
    run: Run,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Mapping[str, Path]:
    """Bundles of two checkpoints with the bands of `BANDS`, served too."""
    for name in ("bfloat16", "float32"):
        folder = tmp_path_factory.mktemp("bundles") / name
        done = run(
            {},
            *("-m", "max.pipelines.architectures.attnquant_common.bundle"),
            *(checkpoints[name], folder, "--blocks", "2", "--rank", "8"),
        )
        assert done.returncode == 0, done.stderr
        checkpoints[f"{name}-bundle"] = folder
    return checkpoints


@pytest.mark.parametrize(
    "variables",
    [{}, NVFP4, {"ATTNQUANT_PRECOMPUTE_OUTSIDE": "0"}],
    ids=["rebuilt", "quantized", "runtime"],
)
@pytest.mark.parametrize("checkpoint", ["bfloat16", "float32"])
def test_a_bundle_is_served_in_its_checkpoints_place(
    traced: Traced,
    bundles: Mapping[str, Path],
    checkpoint: str,
    variables: dict[str, str],
) -> None:
    """Graph and weights are those of the checkpoint with the same bands."""
    assert f"{checkpoint}-bundle" in bundles
    command = CPU if checkpoint == "float32" else (*HOPPER, "gpu:0")
    asked = traced(checkpoint, *command, **BANDS, **variables)
    held = traced(
        f"{checkpoint}-bundle", *command, **{"ATTNQUANT": "1"}, **variables
    )
    assert "blocks 2, rank 8" in held["log"]
    assert held["digest"] == asked["digest"]
    assert held["weights"] == asked["weights"]
    for name, value in asked["values"].items():
        assert (held["values"][name] == value).all(), name


def test_a_bundle_damaged_where_max_reads_it_stops_max(
    trace: Run, bundles: Mapping[str, Path], tmp_path: Path
) -> None:
    """The error names the tensor, which is one that is not decomposed."""
    folder = tmp_path / "bundle"
    shutil.copytree(bundles["float32-bundle"], folder)
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    name = "model.embed_tokens.weight"
    header = json.loads(content[8 : 8 + length])
    content[8 + length + header[name]["data_offsets"][0] + 5] ^= 1
    file.write_bytes(content)
    done = trace(
        {"ATTNQUANT": "1"}, tmp_path / "graph", *CPU, "--model", folder
    )
    assert done.returncode != 0
    assert f"is damaged: in {name}" in done.stderr


@pytest.mark.parametrize("devices", ["gpu:0", "gpu:0,1"])
def test_inputs_are_the_graphs(traced: Traced, devices: str) -> None:
    """The batch processor's inputs have the graph's types and order."""
    found = traced("bfloat16", *BLACKWELL, devices, **NVFP4)
    assert found["buffers"] == found["inputs"]


@pytest.mark.parametrize(
    ("ignore", "count", "matmuls"),
    [
        ("", 42, 24),
        ("self_attn", 18, 12),
        ("mlp", 24, 12),
        ("o_proj,model.layers.1.mlp.down_proj", 35, 17),
        ("model.layers.0.self_attn.[qkv]_proj,gate_proj,up_proj", 27, 17),
        ("self_attn,mlp", 0, 0),
    ],
)
def test_on_blackwell_projections_multiply_by_nvfp4(
    traced: Traced, ignore: str, count: int, matmuls: int
) -> None:
    """A block-scaled matmul a fused group that is not ignored, and no other.

    q, k and v are one, and gate and up are one.
    """
    variables = NVFP4 | ({"ATTNQUANT_QUANT_IGNORE": ignore} if ignore else {})
    found = traced("bfloat16", *BLACKWELL, "gpu:0", **variables)
    assert found["ops"].get(MATMUL, 0) == matmuls
    # Beside them the groups left, which are four a layer, and the head.
    assert found["ops"]["rmo.matmul"] == 4 * 6 - matmuls + 1
    types = [dtype for dtype, _ in found["weights"].values()]
    assert types.count("uint8") == types.count("float8_e4m3fn") == count
    assert (
        "AttnQuant: Gemma3ForCausalLM, blocks 6, rank 0, "
        f"NVFP4 {count} of 42 projections, precompute-outside, cache unused, "
        "capture on\n"
    ) in found["log"]


def test_embeddings_norms_and_head_stay_bfloat16(traced: Traced) -> None:
    """Only projections are quantized."""
    found = traced("bfloat16", *BLACKWELL, "gpu:0", **NVFP4)
    others = {
        dtype
        for name, (dtype, _) in found["weights"].items()
        if "_proj." not in name
    }
    assert others == {"bfloat16"}


def test_without_a_matmul_for_nvfp4_values_are_served(traced: Traced) -> None:
    """On Hopper the graph is the built-in's, and the log marks it."""
    built_in = traced("bfloat16", *HOPPER, "gpu:0")
    found = traced("bfloat16", *HOPPER, "gpu:0", **NVFP4)
    assert found["digest"] == built_in["digest"]
    assert "NVFP4 42 of 42 projections (dequantized at load)" in found["log"]


@pytest.mark.parametrize("checkpoint", ["bfloat16", "float32", "sharded"])
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

    The graph is the one that the built-in architecture has.
    """
    found = traced(checkpoint, *CPU, **variables)
    expected = served_values(checkpoints[checkpoint], variables)
    assert found["weights"].keys() == {map_name(name) for name in expected}
    for name, value in expected.items():
        served = found["values"][map_name(name)].view(np.float32)
        assert (served.reshape(value.shape) == value).all(), name
    built_in = traced("float32", *CPU)
    assert found["digest"] == built_in["digest"]


def test_untied_head_is_not_quantized(traced: Traced) -> None:
    """A head of its own is served as it is."""
    found = traced("untied", *BLACKWELL, "gpu:0", **NVFP4)
    assert found["weights"]["language_model.lm_head.weight"][0] == "bfloat16"
    assert found["ops"][MATMUL] == 24
    on_cpu = traced("untied", *CPU, **NVFP4)
    head = on_cpu["values"]["language_model.lm_head.weight"]
    embedding = on_cpu["values"]["language_model.embed_tokens.weight"]
    width = 4 * gemma3.SHAPES["toy"].hidden_size
    assert (head.reshape(-1, width)[::-1].reshape(-1) == embedding).all()


def test_a_second_start_reads_the_cache(
    trace: Run,
    checkpoints: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    """Cold and warm give the same bytes, and say which they are."""
    values = []
    for start in ("miss", "hit"):
        out = tmp_path / start
        done = trace(
            {**NVFP4, **BANDS, "ATTNQUANT_CACHE_DIR": str(tmp_path / "cache")},
            out,
            *(*CPU, "--model", checkpoints["bfloat16"]),
        )
        assert done.returncode == 0, done.stderr
        assert f"cache {start}, capture off" in done.stdout + done.stderr
        with np.load(out.with_suffix(".npz")) as saved:
            values.append(dict(saved))
    cold, warm = values
    assert cold.keys() == warm.keys()
    assert all((cold[name] == warm[name]).all() for name in cold)


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"ATTNQUANT_BLOCKS": "7"}, "the model has 6 layers"),
        (
            {**NVFP4, "ATTNQUANT_QUANT_IGNORE": "self_atn"},
            "'self_atn' matches none of the 42 projections",
        ),
        ({"ATTNQUANT_QUANT": "nvfp5"}, "expected nvfp4"),
    ],
    ids=["bands", "pattern", "value"],
)
def test_settings_that_cannot_be_followed_stop_max(
    trace: Run,
    checkpoints: Mapping[str, Path],
    tmp_path: Path,
    variables: dict[str, str],
    error: str,
) -> None:
    """MAX does not start as something else than asked."""
    done = trace(
        variables,
        tmp_path / "graph",
        *(*CPU, "--model", checkpoints["float32"]),
    )
    assert done.returncode != 0
    assert error in done.stderr
    assert not (tmp_path / "graph.json").exists()


def test_a_checkpoint_without_a_projection_stops_max(
    trace: Run, tmp_path: Path
) -> None:
    """The error names the tensor that is missing, on virtual devices too."""
    gemma3.write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    missing = "model.layers.4.self_attn.k_proj.weight"
    del tensors[missing]
    save_file(tensors, file)
    for command in ((*BLACKWELL, "gpu:0"), CPU):
        done = trace(
            NVFP4,
            tmp_path / "graph",
            *(*command, "--model", tmp_path),
        )
        assert done.returncode != 0
        assert f"the checkpoint has no {missing}" in done.stderr


SERVED = {
    "nvfp4": NVFP4,
    "no-attention": NO_ATTENTION,
    "bands": BANDS,
    "matmuls": BY_MATMULS,
    "op": BY_OP,
}


@pytest.mark.parametrize("served", SERVED)
def test_logits_are_numpys(
    generated: Callable[..., Generated],
    checkpoints: Mapping[str, Path],
    served: str,
) -> None:
    """`max generate` computes what numpy does with the weights as served."""
    variables = SERVED[served]
    made = generated(*PROMPT, **variables)
    model = reference.Gemma3(checkpoints["float32"])
    model.weights = served_values(checkpoints["float32"], variables)
    expected = model.logits(made.tokens)[made.first :]
    np.testing.assert_allclose(made.logits, expected, rtol=0, atol=TOLERANCE)
    quantized = "ATTNQUANT_QUANT" in variables
    assert ("(dequantized at load)" in made.log) == quantized


@pytest.mark.full
@pytest.mark.parametrize("served", SERVED)
def test_logits_are_transformers(
    generated: Callable[..., Generated],
    checkpoints: Mapping[str, Path],
    served: str,
) -> None:
    """And what transformers' Gemma3ForCausalLM does with them."""
    import torch
    import transformers

    variables = SERVED[served]
    made = generated(*PROMPT, **variables)
    expected = served_values(checkpoints["float32"], variables)
    model = transformers.Gemma3ForCausalLM.from_pretrained(
        checkpoints["float32"], dtype="float32", attn_implementation="eager"
    )
    # Copied: what is mapped from a file is read-only.
    weights = {n: torch.tensor(w) for n, w in expected.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    with torch.no_grad():
        logits = model(torch.tensor([made.tokens])).logits[0, made.first :]
    np.testing.assert_allclose(
        made.logits, logits.numpy(), rtol=0, atol=TOLERANCE
    )


def test_forms_and_paths_compute_the_same(
    generated: Callable[..., Generated],
) -> None:
    """Rebuilt at load, by matmuls or by the op: the logits are equal.

    Within float32's rounding: 1e-3 on logits of a spread of 3.5.
    """
    at_load, *others = (
        generated(*PROMPT, **variables)
        for variables in (BANDS, BY_MATMULS, BY_OP)
    )
    for other in others:
        assert other.tokens == at_load.tokens
        np.testing.assert_allclose(
            other.logits, at_load.logits, rtol=0, atol=1e-3
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "variables"),
    [("sm_100a", NVFP4), ("sm_90a", BY_MATMULS), ("sm_90a", BY_OP)],
    ids=["nvfp4", "matmuls", "op"],
)
def test_graphs_compile_for_a_gpu(
    run: Run,
    checkpoints: Mapping[str, Path],
    tmp_path: Path,
    target: str,
    variables: dict[str, str],
) -> None:
    """MAX makes a compiled graph of each for a GPU that is not there."""
    done = run(
        variables,
        *("-m", "max._entrypoints.pipelines", "warm-cache"),
        *("--target", f"cuda:{target}", "--devices", "gpu:0"),
        *("--model", checkpoints["bfloat16"], "--max-length", "256"),
        *("--export-mefs", tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (graph,) = tmp_path.glob("gemma3_text-*.mef")
    assert target.encode() in graph.read_bytes()


def map_name(name: str) -> str:
    """Returns MAX's name of a tensor in the checkpoint."""
    return f"language_{name}"


def served_values(
    folder: Path, variables: Mapping[str, str]
) -> dict[str, Float32]:
    """Returns a checkpoint's weights as variables have them served."""
    weights: dict[str, Float32] = {}
    for file in folder.glob("*.safetensors"):
        weights |= reference.read_safetensors(file)
    layers = gemma3.SHAPES["toy"].num_hidden_layers
    if "ATTNQUANT_BLOCKS" not in variables:
        return quantized_values(weights, layers, "model.layers.", variables)
    rank = int(variables["ATTNQUANT_RANK"])
    for band in np.split(np.arange(layers), int(variables["ATTNQUANT_BLOCKS"])):
        for projection in (name for fused in FUSED for name in fused):
            names = [f"model.layers.{i}.{projection}.weight" for i in band]
            mean = np.mean([weights[n] for n in names], axis=0, dtype=float)
            for name in names:
                left, sizes, right = np.linalg.svd(
                    weights[name] - mean, full_matrices=False
                )
                best = (left[:, :rank] * sizes[:rank]) @ right[:rank]
                weights[name] = (mean + best).astype(np.float32)
    return weights
