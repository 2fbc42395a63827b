# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's patches are in force: shown by graphs that are only traced."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MATMUL = "mo.matmul.dynamic.block.scaled"
WEIGHT_ONLY = "nvfp4.weight_only_matmul"

Run = Callable[..., None]
Traced = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(patched_env: Path, settings: Mapping[str, str]) -> Run:
    """Runs Python with the patched MAX, and AttnQuant off if not asked for."""
    # A proof runs where the toys' libraries aren't installed, MAX's has them.
    path = os.pathsep.join(
        [settings["PYTHONPATH"], str(ROOT / "overlay/pipelines/architectures")]
    )

    def call(*arguments: str | Path, **variables: str) -> None:
        done = subprocess.run(
            [patched_env, *arguments],
            cwd=ROOT,
            env={
                **{k: v for k, v in settings.items() if "ATTNQUANT" not in k},
                "PYTHONPATH": path,
                **variables,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return call


@pytest.fixture(scope="module")
def checkpoint(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Gives the toy, with what of it ModelOpt's options quantize."""

    @functools.cache
    def make(*options: str, quantized: bool = True) -> Path:
        folder = tmp_path_factory.mktemp("gemma4")
        run("-m", "tests.toys.gemma4", folder)
        if quantized:
            run("-m", "tests.toys.modelopt", folder, *options)
        return folder

    return make


@pytest.fixture(scope="module")
def traced(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Gives what `tests.architectures.trace` records of the text model."""

    @functools.cache
    def call(
        model: Path,
        devices: str,
        target: str,
        variables: tuple[tuple[str, str], ...],
    ) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("trace") / "graph"
        run(
            *("-m", "tests.architectures.trace", out, "warm-cache"),
            *("--target", f"cuda:{target}", "--devices", devices),
            *("--model", model, "--max-length", "256"),
            **dict(variables),
        )
        found = json.loads(out.with_suffix(".json").read_text())
        graph: dict[str, Any] = found["graphs"]["decoder"]
        return graph

    def give(
        model: Path,
        devices: str = "gpu:0",
        target: str = "sm_100a",
        **variables: str,
    ) -> dict[str, Any]:
        return call(model, devices, target, tuple(variables.items()))

    return give


@pytest.mark.parametrize(
    ("options", "devices", "matmuls"),
    [((), "gpu:0", 4), ((), "gpu:0,1", 8), (("--no-attention",), "gpu:0", 2)],
    ids=["all", "all-on-two", "mlp"],
)
def test_quantized_attention_is_served(
    traced: Traced,
    checkpoint: Callable[..., Path],
    options: tuple[str, ...],
    devices: str,
    matmuls: int,
) -> None:
    """MAX's own Gemma 4 multiplies by NVFP4 what the checkpoint has in it.

    Norms and everything else stay in bfloat16.
    """
    model = checkpoint(*options)
    config = json.loads((model / "config.json").read_text())
    graph = traced(model, devices)
    layers = config["text_config"]["num_hidden_layers"]
    assert graph["ops"][MATMUL] == matmuls * layers
    assert WEIGHT_ONLY not in graph["ops"]
    assert {
        dtype
        for name, (dtype, _) in graph["weights"].items()
        if "_proj." not in name
    } == {"bfloat16"}


def test_it_is_the_graph_that_attnquant_serves(
    traced: Traced, checkpoint: Callable[..., Path]
) -> None:
    """Quantized beforehand or at load, graph and weights are the same."""
    beforehand = traced(checkpoint())
    at_load = traced(checkpoint(quantized=False), ATTNQUANT_QUANT="nvfp4")
    assert beforehand["weights"] == at_load["weights"]
    assert beforehand["digest"] == at_load["digest"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_without_fp4_units_weights_stay_packed(
    traced: Traced, checkpoint: Callable[..., Path], target: str
) -> None:
    """What Blackwell multiplies by NVFP4, older GPUs do with one op each.

    The weights are the same, as the checkpoint has them.
    """
    on_blackwell = traced(checkpoint())
    found = traced(checkpoint(), target=target)
    assert found["weights"] == on_blackwell["weights"]
    assert found["ops"][WEIGHT_ONLY] == on_blackwell["ops"][MATMUL]
    assert not any("block.scale" in op for op in found["ops"])
