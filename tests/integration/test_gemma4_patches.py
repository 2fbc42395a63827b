# SPDX-License-Identifier: Apache-2.0
"""Gemma 4's patches are in force: shown by graphs that are only traced."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.architectures.common import BLACKWELL, MATMUL, NVFP4
from tests.toys import gemma4, modelopt

ROOT = Path(__file__).resolve().parents[2]
LAYERS = gemma4.SHAPES["toy"].num_hidden_layers


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, Path]:
    """Checkpoints as ModelOpt exports them, with attention and without."""
    folders = {}
    for attention in (True, False):
        folders[attention] = tmp_path_factory.mktemp("modelopt")
        gemma4.write_checkpoint(folders[attention])
        modelopt.quantize(
            folders[attention],
            LAYERS,
            "model.language_model.layers.",
            attention=attention,
        )
    return folders


@pytest.fixture(scope="module")
def traced(
    patched_env: Path,
    settings: Mapping[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., dict[str, Any]]:
    """Gives what `tests.architectures.trace` records of the text model."""

    @functools.cache
    def call(
        model: Path, devices: str, variables: tuple[tuple[str, str], ...]
    ) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("trace") / "graph"
        done = subprocess.run(
            [
                *(patched_env, "-m", "tests.architectures.trace", out),
                *(*BLACKWELL, devices, "--model", model),
                *("--max-length", "256"),
            ],
            cwd=ROOT,
            env={
                **{k: v for k, v in settings.items() if "ATTNQUANT" not in k},
                **dict(variables),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(out.with_suffix(".json").read_text())
        graph: dict[str, Any] = found["graphs"]["decoder"]
        return graph

    def give(model: Path, devices: str, **variables: str) -> dict[str, Any]:
        return call(model, devices, tuple(variables.items()))

    return give


@pytest.mark.parametrize(
    ("attention", "devices", "matmuls"),
    [(True, "gpu:0", 4), (True, "gpu:0,1", 8), (False, "gpu:0", 2)],
    ids=["all", "all-on-two", "mlp"],
)
def test_quantized_attention_is_served(
    traced: Callable[..., dict[str, Any]],
    quantized: Mapping[bool, Path],
    attention: bool,
    devices: str,
    matmuls: int,
) -> None:
    """MAX's own Gemma 4 multiplies by NVFP4 what the checkpoint has in it.

    Norms and everything else stay in bfloat16.
    """
    graph = traced(quantized[attention], devices)
    assert graph["ops"][MATMUL] == matmuls * LAYERS
    assert {
        dtype
        for name, (dtype, _) in graph["weights"].items()
        if "_proj." not in name
    } == {"bfloat16"}


def test_it_is_the_graph_that_attnquant_serves(
    traced: Callable[..., dict[str, Any]],
    quantized: Mapping[bool, Path],
    tmp_path: Path,
) -> None:
    """Quantized beforehand or at load, graph and weights are the same."""
    gemma4.write_checkpoint(tmp_path)
    beforehand = traced(quantized[True], "gpu:0")
    at_load = traced(tmp_path, "gpu:0", **NVFP4)
    assert beforehand["weights"] == at_load["weights"]
    assert beforehand["digest"] == at_load["digest"]
