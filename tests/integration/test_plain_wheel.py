# SPDX-License-Identifier: Apache-2.0
"""The plain wheel on an untouched MAX, and the patched wheel beside it.

Both compile the same graphs, so they share what the other tests' compile cache
has of them, once the patched wheel leaves its kernel overlays out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from tests.toys import gemma3, gemma4
from uv import find_uv_bin

from maxpatch.build import Inputs, Project, Request, build
from maxpatch.release import fetch
from maxpatch.verify import find_python, install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Project(ROOT)

NVFP4 = {"ATTNQUANT_QUANT": "nvfp4"}
CUSTOM = ("--custom-architectures", "attnquant")
QUESTION = "Why is the sky blue?"

SERVED = "AttnQuant: Gemma3ForCausalLM, blocks 6, rank 0, NVFP4 42 of 42"
HINT = "AttnQuant on an untouched MAX 26.7.0. The patched wheel would add: "
OFF = "AttnQuant is off and MAX's own architectures serve"

FOUND = """\
import logging
import multiprocessing


def found():
    import max.pipelines
    from max.pipelines.lib.arch_lookup import ARCH_LOOKUP

    ARCH_LOOKUP.import_custom_architectures(["attnquant"])
    return ARCH_LOOKUP.find("Gemma3ForCausalLM").pipeline_model.__module__


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child = pool.apply_async(found)
        print(found(), child.get())
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def plain_env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment: MAX as released, the plain wheel."""
    folder = tmp_path_factory.mktemp("plain")
    request = Request(output=ROOT / "dist")
    pin = Inputs.resolve(PROJECT, request).pin
    interpreter, reason = find_python(pin.python, pin.platform)
    assert interpreter is not None, reason
    released = fetch(pin, PROJECT.cache, offline=False)
    python = install(
        released, interpreter, folder / "environment", offline=False
    )
    wheel = build(PROJECT, request, print)["plain"]["path"]
    uv = [find_uv_bin(), "pip"]
    # --no-deps would let a range through that this release is not in.
    words = ["install", "--quiet", "--offline", "--python", python, wheel]
    subprocess.run([*uv, *words], cwd=folder, check=True)
    subprocess.run([*uv, "check", "--python", python], cwd=folder, check=True)
    return python


@pytest.fixture(scope="module")
def run(settings: Mapping[str, str]) -> Run:
    """Runs a command with the AttnQuant variables given, and no other."""
    inherited = {
        name: value
        for name, value in settings.items()
        if not name.startswith(("ATTNQUANT", "MAX_KERNEL"))
    }

    def call(
        *command: str | Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**inherited, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@dataclass(frozen=True)
class Steps:
    """What a model was given and gave, call by call, and what was logged."""

    tokens: list[npt.NDArray[np.int64]]
    logits: list[npt.NDArray[np.float32]]
    log: str
    weights: Path
    """The cache of prepared weights, which it was the first to use."""


@pytest.fixture(scope="module")
def generate(
    run: Run, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Steps]:
    """Generates with the toy in NVFP4 on the CPU, from no weight cache."""

    def call(python: Path, *flags: str, **variables: str) -> Steps:
        folder = tmp_path_factory.mktemp("generate")
        out = folder / "steps.npz"
        weights = folder / "weights"
        done = run(
            *(python, "-m", "tests.toys.probe", "steps", out, "generate"),
            *("--model", checkpoint, *gemma3.CPU_FLAGS, *flags),
            *("--prompt", QUESTION, "--max-new-tokens", "8", "--top-k", "1"),
            **NVFP4,
            **variables,
            ATTNQUANT_CACHE_DIR=str(weights),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with np.load(out) as saved:
            count = len(saved.files) // 2
            return Steps(
                [saved[f"tokens_{i}"] for i in range(count)],
                [saved[f"logits_{i}"] for i in range(count)],
                done.stdout + done.stderr,
                weights,
            )

    return call


@pytest.fixture(scope="module")
def plain(plain_env: Path, generate: Callable[..., Steps]) -> Steps:
    """What the plain wheel generates."""
    return generate(plain_env, *CUSTOM)


@pytest.fixture(scope="module")
def patched(patched_env: Path, generate: Callable[..., Steps]) -> Steps:
    """What the patched wheel generates without its kernel overlays."""
    return generate(patched_env, MAX_KERNEL_OVERLAYS="0")


def test_logits_are_those_of_the_patched_wheel(
    plain: Steps, patched: Steps
) -> None:
    """One source in two wheels: tokens and logits agree bit for bit."""
    assert len(plain.logits) == len(patched.logits) == 8
    for ours, theirs in zip(plain.tokens, patched.tokens, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(plain.logits, patched.logits, strict=True):
        assert ours.dtype == theirs.dtype == np.float32
        np.testing.assert_array_equal(
            ours.view(np.uint32), theirs.view(np.uint32)
        )
    for steps in (plain, patched):
        assert f"{SERVED} projections (dequantized at load)" in steps.log
        assert "cache miss" in steps.log
    assert plain.log.count(HINT) == 1
    assert "untouched" not in patched.log


def test_on_blackwell_it_brings_its_own_capture_inputs(
    plain_env: Path, patched_env: Path, run: Run, tmp_path: Path
) -> None:
    """Inputs have the graph's types, and the graph is the patched wheel's."""
    gemma3.write_checkpoint(tmp_path / "toy", dtype="bfloat16")
    found = []
    for python, flags in ((plain_env, CUSTOM), (patched_env, ())):
        out = tmp_path / f"graph{len(found)}"
        done = run(
            *(python, "-m", "tests.architectures.trace", out, "warm-cache"),
            *("--target", "cuda:sm_100a", "--devices", "gpu:0", *flags),
            *("--model", tmp_path / "toy", "--max-length", "256"),
            **NVFP4,
            MAX_KERNEL_OVERLAYS="0",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "cache unused, capture on" in done.stdout + done.stderr
        found.append(json.loads(out.with_suffix(".json").read_text()))
    ours, theirs = found
    assert ours["model"] == "AttnQuantGemma3Model"
    assert ours["buffers"] == ours["graphs"]["decoder"]["inputs"]
    assert ours == theirs


def test_max_serve_finds_it_in_every_process(
    plain_env: Path,
    patched: Steps,
    settings: Mapping[str, str],
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    """The server logs the hint, its worker what it serves: the same tokens.

    The weights are those that the patched wheel prepared.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "server.log"
    variables = {**NVFP4, "ATTNQUANT_CACHE_DIR": str(patched.weights)}
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [
                *(plain_env.with_name("max"), "serve", "--model", checkpoint),
                *(*gemma3.CPU_FLAGS, *CUSTOM, "--served-model-name", "toy"),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            cwd=tmp_path,
            env={**settings, **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            answer = _answer(process, f"http://127.0.0.1:{port}/v1", log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    tokenizer = gemma3.tokenizer(gemma3.SHAPES["toy"].vocab_size)
    # After the prompt, the model is given its own tokens but the last one.
    given = np.concatenate(patched.tokens[1:]).tolist()
    assert answer.startswith(tokenizer.decode(given))
    text = log.read_text()
    assert text.count(HINT) == 1
    assert text.count(SERVED) == 1
    assert "cache hit" in text


def _answer(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    """Waits for a server and returns its answer to the question."""
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 8,
        "temperature": 0,
    }
    while True:
        try:
            done = httpx.post(f"{url}/chat/completions", json=body, timeout=300)
        except httpx.TransportError:
            assert process.poll() is None, log.read_text()
            time.sleep(0.5)
            continue
        assert done.status_code == 200, done.text
        return str(done.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("variables", "module", "line"),
    [
        (NVFP4, "attnquant.attnquant_gemma3.model", HINT),
        ({}, "max.pipelines.architectures.gemma3.model", OFF),
        (
            {**NVFP4, "ATTNQUANT": "0"},
            "max.pipelines.architectures.gemma3.model",
            OFF,
        ),
    ],
    ids=["on", "unset", "off"],
)
def test_it_stands_under_the_built_in_name_if_on(
    plain_env: Path,
    run: Run,
    tmp_path: Path,
    variables: dict[str, str],
    module: str,
    line: str,
) -> None:
    """In the process and in one it spawns; a line says which it is."""
    script = tmp_path / "found.py"
    script.write_text(FOUND)
    done = run(plain_env, script, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [module, module]
    assert done.stderr.count(line) == 1


def test_a_mistyped_variable_stops_max(plain_env: Path, run: Run) -> None:
    """The error is the one of the patched wheel."""
    code = "import attnquant; attnquant.ARCHITECTURES"
    done = run(plain_env, "-c", code, ATTNQUANT_QUANT="nvfp5")
    assert done.returncode == 1
    assert "ATTNQUANT_QUANT='nvfp5': expected nvfp4" in done.stderr


def test_what_leads_past_it_stops_max(
    plain_env: Path, run: Run, tmp_path: Path
) -> None:
    """The names that the patched wheel refuses are refused here."""
    gemma4.write_checkpoint(tmp_path, sparse=True)
    done = run(
        *(plain_env, "-m", "max._entrypoints.pipelines", "warm-cache"),
        *("--target", "cuda:sm_90a", "--prefer-module-v3"),
        *("--custom-architectures", "attnquant", "--model", tmp_path),
        **NVFP4,
    )
    assert done.returncode == 1
    assert (
        "AttnQuant does not serve Gemma4ForConditionalGeneration_ModuleV3: "
        "--prefer-module-v3 chooses it"
    ) in done.stderr


def test_on_the_patched_wheel_it_has_nothing_to_add(
    patched_env: Path, plain_env: Path, run: Run
) -> None:
    """Its hint is about the MAX that it runs on."""
    shown = run(
        plain_env, "-c", "import attnquant; print(attnquant.__path__[0])"
    )
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO);"
        f"sys.path.append({str(Path(shown.stdout.strip()).parent)!r});"
        "import attnquant;"
        "from attnquant.attnquant_common.registration import TAKEN_OVER;"
        "found = {each.name for each in attnquant.ARCHITECTURES};"
        "print(found == TAKEN_OVER.keys())"
    )
    done = run(patched_env, "-c", code, **NVFP4)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
    assert "AttnQuant" not in done.stderr
