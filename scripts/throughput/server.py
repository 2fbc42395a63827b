# SPDX-License-Identifier: Apache-2.0
"""One `max serve` process: start it, read its log, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

CAPTURE_OFF = "--no-device-graph-capture"
_SAID = {
    "config": re.compile(r"device_graph_capture\s*:\s*(True|False)\b"),
    "pipeline": re.compile(r"pipeline\s*:\s*\w+"),
    "warmup": re.compile(r"Device graph capture warmup completed in .*"),
    "attnquant": re.compile(r"AttnQuant: \w+, .*"),
    "kv_cache": re.compile(r"cache_memory: .*"),
}
_VERSION = (
    "import json, sys\n"
    "from importlib.metadata import version\n"
    "print(json.dumps({'max': version('max'),"
    " 'python': sys.version.split()[0]}))"
)


class MeasureError(RuntimeError):
    """A measurement that cannot be trusted, and so was not kept."""


@dataclass(frozen=True)
class Arm:
    """One way to serve the model.

    Attributes:
        name: How the table names it.
        python: An interpreter that can import MAX.
        path: PYTHONPATH of that interpreter, or an empty string.
        flags: Flags of `max serve` that only this arm has.
        capture: Whether decode steps must replay captured device graphs.
        variables: Names and values of environment variables that only this
            arm has.
        attnquant: What AttnQuant's line in the log must hold; empty, if there
            must be no such line.
        graphs: Names the compiled graphs that it serves, which arms may share.
    """

    name: str
    python: str
    path: str = ""
    flags: tuple[str, ...] = ()
    capture: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    attnquant: str = ""
    graphs: str = ""

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Returns the process environment of this arm's interpreter."""
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        if self.path:
            env["PYTHONPATH"] = self.path
        return {
            **env,
            "PYTHONUNBUFFERED": "1",
            **dict(self.variables),
            **extra,
        }

    def versions(self) -> dict[str, str]:
        """Returns the versions of MAX and Python that this arm runs.

        Raises:
            MeasureError: If the interpreter has no MAX.
        """
        found: dict[str, str] = json.loads(
            self.asked(_VERSION, "its version of MAX")
        )
        return found

    def asked(self, code: str, what: str) -> str:
        """Returns what this arm's interpreter prints.

        Args:
            code: What it runs.
            what: What that tells, for the error.

        Raises:
            MeasureError: If it fails.
        """
        done = subprocess.run(
            [self.python, "-c", code],
            env=self.environment({}),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise MeasureError(
                f"{self.name}: {self.python} (PYTHONPATH={self.path!r}) "
                f"cannot tell {what}:\n{done.stderr[-500:]}"
            )
        return done.stdout


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: Root of its HTTP API.
        log: File that receives its output.
        startup_s: Seconds from the start of the process to the first
            successful health check.
    """

    url: str
    log: Path
    startup_s: float


def check_log(arm: Arm, log: str) -> dict[str, str]:
    """Reads from a server's log what it serves, and how.

    Args:
        arm: What the log should say.
        log: The server's output up to its first request.

    Returns:
        What it says: `config`, `pipeline`, `kv_cache`, with capture `warmup`,
        and with AttnQuant `attnquant`.

    Raises:
        MeasureError: If the log says nothing or contradicts the arm.
    """
    matches = {key: line.search(log) for key, line in _SAID.items()}
    said = {k: " ".join(m[0].split()) for k, m in matches.items() if m}
    if "config" not in said:
        raise MeasureError(
            f"{arm.name}: the server's log has no device_graph_capture line; "
            "without it the trial does not count"
        )
    on = said["config"].endswith("True")
    if on != arm.capture or ("warmup" in said) != arm.capture:
        raise MeasureError(
            f"{arm.name}: expected device graph capture "
            f"{'on' if arm.capture else 'off'}, but the server's log says:\n"
            f"  {said['config']}\n  {said.get('warmup', 'no capture warm-up')}"
        )
    line = said.get("attnquant", "")
    if bool(line) != bool(arm.attnquant) or arm.attnquant not in line:
        raise MeasureError(
            f"{arm.name}: expected {arm.attnquant or 'no AttnQuant'}, but the "
            f"server's log says:\n  {line or 'nothing of AttnQuant'}"
        )
    return said


def free_port() -> int:
    """Returns a loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serve(
    arm: Arm,
    model: Path,
    log: Path,
    *,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 900,
) -> Iterator[Server]:
    """Runs `max serve` for the duration of a with block.

    Args:
        arm: Interpreter and flags.
        model: Checkpoint folder.
        log: File for the server's output; overwritten.
        flags: Flags that every arm has.
        env: Environment variables beside the inherited ones.
        timeout_s: Seconds until the server must answer; compiling counts.

    Yields:
        The server, ready and with its log checked against the arm.

    Raises:
        MeasureError: If the server ends or is not ready in time, or its log
            contradicts the arm.
    """
    port, metrics_port = free_port(), free_port()
    command = [
        *(arm.python, "-m", "max._entrypoints.pipelines", "serve"),
        *("--model", str(model), "--served-model-name", "model"),
        *("--port", str(port)),
        *flags,
        *arm.flags,
    ]
    environment = arm.environment(
        {
            "HF_HUB_OFFLINE": "1",
            # 26.5 has no --host.
            "MAX_SERVE_HOST": "127.0.0.1",
            "MAX_SERVE_DISABLE_TELEMETRY": "1",
            "MAX_SERVE_METRICS_ENDPOINT_PORT": str(metrics_port),
            **(env or {}),
        }
    )
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _await_ready(arm, process, url, log, start + timeout_s)
        ready = time.monotonic()
        check_log(arm, log.read_text(errors="replace"))
        yield Server(url, log, ready - start)
    finally:
        _stop(process)


def _await_ready(
    arm: Arm,
    process: subprocess.Popen[bytes],
    url: str,
    log: Path,
    deadline: float,
) -> None:
    """Waits for the first successful health check."""
    while True:
        problem = None
        if process.poll() is not None:
            problem = f"ended with exit code {process.returncode}"
        elif time.monotonic() > deadline:
            problem = "was not ready in time"
        if problem:
            tail = log.read_text(errors="replace")[-2000:]
            raise MeasureError(
                f"{arm.name}: the server {problem}; the log {log} ends:\n{tail}"
            )
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes], grace_s: float = 30) -> None:
    """Ends the server and whatever it left in its process group."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
