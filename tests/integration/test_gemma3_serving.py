# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 served by the built wheel, on the CPU in float32, end to end.

A six-layer Gemma 3 with random weights is generated with, compared with other
implementations by its logits, and served. All tests of a release give MAX the
same graph, which is compiled once and kept in the compile cache.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openai
import pytest
from tests.toys import gemma3, reference

ROOT = Path(__file__).resolve().parents[2]

QUESTION = "Why is the sky blue?"

LONGER_THAN_THE_WINDOW = "".join(f"w{37 * i % 700}_" for i in range(160))

TOLERANCE = 2e-3
"""On logits of a spread of 3.5: between MAX and numpy 6e-4 was seen, and a
sliding window that is one token too short moves logits by 7."""

Steps = tuple[list[int], npt.NDArray[np.float32]]


def chat(message: str) -> list[int]:
    """Returns the tokens of a chat's first message, as its template says."""
    text = (
        f"<bos><start_of_turn>user\n{message}<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    tokenizer = gemma3.tokenizer(gemma3.SHAPES["toy"].vocab_size)
    return tokenizer.encode(text, add_special_tokens=False).ids


def decode(tokens: Sequence[int]) -> str:
    """Returns the text of tokens."""
    vocab_size = gemma3.SHAPES["toy"].vocab_size
    return gemma3.tokenizer(vocab_size).decode(tokens)


@pytest.fixture(scope="module")
def numpy_model(checkpoint: Path) -> reference.Gemma3:
    """The toy Gemma 3 in numpy."""
    return reference.Gemma3(checkpoint)


def run(settings: Mapping[str, str], *command: str | Path) -> str:
    """Runs a command to its end and returns what it printed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def generate(
    python: Path, settings: Mapping[str, str], checkpoint: Path
) -> str:
    """Returns what `max generate` prints for the question."""
    return run(
        settings,
        python.with_name("max"),
        *("generate", "--model", checkpoint, *gemma3.CPU_FLAGS),
        *("--prompt", QUESTION, "--max-new-tokens", "12", "--top-k", "1"),
    )


@pytest.fixture(scope="module")
def steps(
    served_env: Path,
    settings: Mapping[str, str],
    checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Steps:
    """What `max generate` computes for a prompt longer than the window.

    The tokens that the model was given, and its logits after the prompt and
    after each further token, `[steps, vocab_size]`.
    """
    out = tmp_path_factory.mktemp("steps") / "steps.npz"
    run(
        settings,
        served_env,
        *("-m", "tests.toys.probe", "steps", out),
        *("generate", "--model", checkpoint, *gemma3.CPU_FLAGS),
        *("--prompt", LONGER_THAN_THE_WINDOW),
        *("--max-new-tokens", "8", "--top-k", "1"),
    )
    with np.load(out) as saved:
        count = len(saved.files) // 2
        tokens = [saved[f"tokens_{i}"] for i in range(count)]
        logits = [saved[f"logits_{i}"] for i in range(count)]
    assert [len(t) for t in tokens[1:]] == [1] * 7
    return np.concatenate(tokens).tolist(), np.concatenate(logits)


def test_generate_prints_the_reference_tokens(
    served_env: Path,
    settings: Mapping[str, str],
    checkpoint: Path,
    numpy_model: reference.Gemma3,
) -> None:
    """`max generate` prints the tokens that numpy finds by greedy decoding."""
    expected = decode(numpy_model.generate(chat(QUESTION), 12))
    assert expected in generate(served_env, settings, checkpoint).split("\n")


def test_logits_equal_the_reference(
    steps: Steps, numpy_model: reference.Gemma3
) -> None:
    """MAX's logits are numpy's, for the prompt and for each decoded token."""
    tokens, logits = steps
    prompt = chat(LONGER_THAN_THE_WINDOW)
    assert len(prompt) > gemma3.SHAPES["toy"].sliding_window
    assert tokens[: len(prompt)] == prompt
    expected = numpy_model.logits(tokens)[len(prompt) - 1 :]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.full
def test_logits_equal_transformers(steps: Steps, checkpoint: Path) -> None:
    """MAX's logits are those of transformers' Gemma3ForCausalLM."""
    import torch
    import transformers

    tokens, logits = steps
    model = transformers.Gemma3ForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        output = model(torch.tensor([tokens])).logits[0]
    expected = output[-len(logits) :].numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


def is_open(port: int) -> bool:
    """Tells whether a local port accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def members(group: int) -> list[str]:
    """Returns the living processes of a process group, for error messages."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        name, _, rest = text.rpartition(")")
        state, _, process_group = rest.split()[:3]
        if int(process_group) == group and state != "Z":
            found.append(f"{name}) {state}")
    return found


@pytest.fixture
def server(
    served_env: Path,
    settings: Mapping[str, str],
    checkpoint: Path,
    tmp_path: Path,
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server of the toy that answers, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (
        *(
            served_env.with_name("max"),
            "serve",
            "--model",
            checkpoint,
            *gemma3.CPU_FLAGS,
        ),
        *("--served-model-name", "toy"),
        *("--host", "127.0.0.1", "--port", str(port)),
    )
    log = tmp_path / "server.log"
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=settings,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            while not is_open(port):
                assert process.poll() is None, log.read_text()
                time.sleep(0.5)
            yield process, port
        finally:
            if members(process.pid):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)]
)
def test_serve_streams_and_stops(
    server: tuple[subprocess.Popen[bytes], int],
    numpy_model: reference.Gemma3,
    number: signal.Signals,
    code: int,
) -> None:
    """A chat comes in pieces; a signal leaves neither port nor process."""
    process, port = server
    with (
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none"
        ) as client,
        client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=12,
            temperature=0,
            stream=True,
        ) as stream,
    ):
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in stream
            if chunk.choices
        ]
    assert len([piece for piece in pieces if piece]) > 1
    expected = decode(numpy_model.generate(chat(QUESTION), 12))
    assert "".join(pieces) == expected

    process.send_signal(number)
    assert process.wait(timeout=60) == code
    assert not is_open(port)
    deadline = time.monotonic() + 30
    while left := members(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_100a"])
def test_warm_cache_compiles_for_a_gpu(
    served_env: Path,
    settings: Mapping[str, str],
    tmp_path: Path,
    target: str,
) -> None:
    """`max warm-cache` compiles the toy in bfloat16 for an absent GPU."""
    gemma3.write_checkpoint(tmp_path / "toy", dtype="bfloat16")
    cache = tmp_path / "cache"
    run(
        {**settings, "MODULAR_MAX_CACHE_DIR": str(cache)},
        served_env.with_name("max"),
        *("warm-cache", "--target", target, "--devices", "gpu:0"),
        *("--model", tmp_path / "toy", "--max-length", "1024"),
    )
    assert sum(f.stat().st_size for f in cache.rglob("*") if f.is_file()) > 1e6


@pytest.mark.slow
def test_other_release_generates(
    environment: Callable[[str], Path],
    settings: Mapping[str, str],
    compile_cache: Path,
    checkpoint: Path,
    numpy_model: reference.Gemma3,
) -> None:
    """The wheel of 26.5.0 prints the same tokens."""
    expected = decode(numpy_model.generate(chat(QUESTION), 12))
    python = environment("26.5.0")
    cache = compile_cache.with_name("26.5.0")
    settings = {**settings, "MODULAR_MAX_CACHE_DIR": str(cache)}
    assert expected in generate(python, settings, checkpoint).split("\n")
