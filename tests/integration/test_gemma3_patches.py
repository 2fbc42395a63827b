# SPDX-License-Identifier: Apache-2.0
"""Gemma 3's patches are in force: shown by graphs that are only traced.

The graphs are traced by MAX's own command line on virtual devices, so no GPU
is needed and nothing is compiled.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

GPU = ("warm-cache", "--target", "cuda:sm_90a", "--devices")
CPU = ("generate", "--quantization-encoding", "float32", "--devices", "cpu")

UNTOUCHED = {
    ("26.5.0", "gpu:0"): (
        "39671fb38815876d594f22111c95d8b950e61b2544058a3d50bf382576077129"
    ),
    ("26.5.0", "gpu:0,1"): (
        "9aed8fecce67ea5e8cf716f7a39bc52f4abe7df082484a5b2043966d22052c62"
    ),
    ("26.7.0", "gpu:0"): (
        "0de35e8f9b19d64e4b01f27fc8df5a9c9cd67f3bb0165790807d724f533581f1"
    ),
    ("26.7.0", "gpu:0,1"): (
        "73059476294d103ef7c9b0ac510f252068edf0c334268fefe9ccd4356d7af705"
    ),
}
"""The digests of the graphs that the untouched releases trace.

To make them: run `python -m tests.toys.probe graph` as `graph` below does,
with the interpreter of an environment that holds `max[serve]` of the release.
"""

Graph = dict[str, Any]


@pytest.fixture(scope="module")
def run(patched_env: Path) -> Callable[..., str]:
    """Runs the patched environment's Python at the root of the repository."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        # Graphs name the kernel overlays, which the patches do not bring.
        "MAX_KERNEL_OVERLAYS": "0",
        "MAX_SERVE_DISABLE_TELEMETRY": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(ROOT),
    }

    def call(*arguments: str | Path) -> str:
        done = subprocess.run(
            [patched_env, *arguments],
            cwd=ROOT,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


@pytest.fixture(scope="module")
def checkpoint(
    run: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Gives, for a dtype, a checkpoint of the toy Gemma 3."""

    @functools.cache
    def make(dtype: str) -> Path:
        folder = tmp_path_factory.mktemp(dtype)
        run("-m", "tests.toys.gemma3", folder, "--dtype", dtype)
        return folder

    return make


@pytest.fixture(scope="module")
def graph(
    run: Callable[..., str],
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Graph]:
    """Gives what the probe finds when a command of MAX traces the toy."""

    @functools.cache
    def trace(dtype: str, *command: str) -> Graph:
        out = tmp_path_factory.mktemp("graph") / "graph.json"
        probe = ("-m", "tests.toys.probe", "graph", out)
        model = ("--model", checkpoint(dtype), "--max-length", "256")
        run(*probe, *command, *model)
        return json.loads(out.read_text())

    return trace


@pytest.fixture(scope="module")
def release(run: Callable[..., str]) -> str:
    """The release of MAX that is patched."""
    code = "import importlib.metadata as m; print(m.version('max'))"
    return run("-c", code).partition("+")[0].strip()


@pytest.mark.parametrize("devices", ["gpu:0", "gpu:0,1"])
def test_buffers_are_the_graph_inputs(
    graph: Callable[..., Graph], devices: str
) -> None:
    """`buffers` has the types of the graph's inputs, in their order."""
    found = graph("bfloat16", *GPU, devices)
    assert found["buffers"] == found["inputs"]
    offsets = [t for t in found["inputs"] if "input_row_offsets" in t]
    assert len(offsets) == len(devices.split(","))


def test_capture_and_overlap_are_declared(run: Callable[..., str]) -> None:
    """The architecture lets MAX capture device graphs and overlap steps."""
    code = (
        "from max.pipelines.architectures.gemma3.arch import gemma3_arch as a;"
        "print(a.supports_overlap_scheduler, a.supports_device_graph_capture)"
    )
    assert run("-c", code).split() == ["True", "True"]


def test_signal_buffer_of_a_cpu_is_zero(run: Callable[..., str]) -> None:
    """A CPU gets a zeroed signal buffer, under the system's allocator too.

    Only `max` itself moves to jemalloc, which hides the untouched release's
    crash.
    """
    code = (
        "from max.driver import CPU;"
        "from max.nn.comm.allreduce import Signals;"
        "(buffer,) = Signals.allocate([CPU()]);"
        "print(buffer.to_numpy().any())"
    )
    assert run("-c", code).split() == ["False"]


@pytest.mark.parametrize("devices", ["gpu:0", "gpu:0,1"])
def test_gpu_graph_is_unchanged(
    graph: Callable[..., Graph], release: str, devices: str
) -> None:
    """A bfloat16 graph for GPUs is, to the letter, the untouched release's."""
    found = graph("bfloat16", *GPU, devices)
    assert found["digest"] == UNTOUCHED[release, devices]


def test_cpu_graph_is_float32(graph: Callable[..., Graph]) -> None:
    """On the CPU the model loads, and its graph is float32 throughout."""
    found = graph("float32", *CPU)
    assert found["buffers"] == found["inputs"]
    assert not found["bfloat16"]


def test_bfloat16_checkpoint_is_cast(
    graph: Callable[..., Graph], release: str
) -> None:
    """A bfloat16 checkpoint gives the same CPU graph as a float32 one."""
    if release == "26.5.0":
        pytest.skip("26.5.0 casts no checkpoint for the CPU")
    found = graph("bfloat16", *CPU)
    assert found["digest"] == graph("float32", *CPU)["digest"]
