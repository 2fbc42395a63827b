# SPDX-License-Identifier: Apache-2.0
"""Stands in for `max._entrypoints.pipelines`: a server with known times.

`settings.json` two folders up says how it behaves. It runs as a process of
its own and imports nothing of ours.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "supports_capture": False,
    "log_says": None,
    "first_s": 0.0,
    "token_s": 0.0,
    "short_by": 0,
    "status": 200,
    "exit_code": None,
} | json.loads(Path(__file__).parents[2].joinpath("settings.json").read_text())
CAPTURE = (
    SETTINGS["supports_capture"] and "--no-device-graph-capture" not in sys.argv
)
PREFIX_CACHING = "--no-enable-prefix-caching" not in sys.argv
TEMPLATE_TOKENS = 4
SEEN: set[str] = set()
ARRIVED: queue.Queue[Request] = queue.Queue()


@dataclass
class Request:
    """A request under way: its tokens so far, and where to send new ones."""

    context: list[int]
    count: int
    tokens: queue.Queue[int] = field(default_factory=queue.Queue)
    given: int = 0

    def step(self, rows: int, row: int) -> None:
        """Gives one token, which depends on the batch as rounding does."""
        c = self.context
        token = (sum(c) * 7919 + len(c) * 104729 + rows * 31 + row) % 4001
        c.append(token)
        self.tokens.put(token)
        self.given += 1


def say(line: str) -> None:
    """Writes one line of the log."""
    print(f"00:00:00.000 INFO: {line}", flush=True)


def schedule() -> None:
    """Batches what has arrived; an ended request stays one step longer."""
    active: list[Request] = []
    while True:
        if not active or not ARRIVED.empty():
            request = ARRIVED.get()
            time.sleep(SETTINGS["first_s"])
            say("Enqueued CE batch with 1 reqs | Pending: 0 reqs")
            active = [r for r in active if r.given < r.count]
            request.step(1, 0)
            active.append(request)
            continue
        rows = len(active)
        time.sleep(SETTINGS["token_s"])
        say(f"Enqueued TG batch with {rows} reqs | Pending: 0 reqs")
        running = [r for r in active if r.given < r.count]
        for row, request in enumerate(active):
            if request.given < request.count:
                request.step(rows, row)
        active = running


class Handler(BaseHTTPRequestHandler):
    """Answers health checks and chat completions."""

    def log_message(self, *_: object) -> None:
        """Says nothing of requests."""

    def do_GET(self) -> None:
        """Is healthy."""
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        """Streams a completion."""
        size = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(size))
        self.send_response(SETTINGS["status"])
        self.end_headers()
        if SETTINGS["status"] != 200:
            self.wfile.write(b"no such luck")
            return
        self.stream(body)

    def event(self, chunk: dict[str, Any]) -> None:
        """Sends one server-sent event."""
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def stream(self, body: dict[str, Any]) -> None:
        """Sends the tokens one by one, then the usage."""
        text = body["messages"][0]["content"]
        words = [int(word[1:]) for word in text.split("_") if word]
        prompt = [0] * TEMPLATE_TOKENS + words
        count = body["max_tokens"] - SETTINGS["short_by"]
        hit = PREFIX_CACHING and text in SEEN
        SEEN.add(text)
        request = Request(list(prompt), count)
        ARRIVED.put(request)
        for _ in range(count):
            token = request.tokens.get()
            self.event({"choices": [{"delta": {"content": f"t{token}"}}]})
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": len(prompt) * hit},
        }
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")


def warm_cache() -> None:
    """Writes a file for what it would compile, and its arguments."""
    folder = Path(sys.argv[sys.argv.index("--export-mefs") + 1])
    (folder / "graph.mef").write_text(json.dumps(sys.argv[1:]))


def main() -> None:
    """Serves until told to stop, or compiles."""
    if SETTINGS["exit_code"] is not None:
        print("cannot allocate", flush=True)
        sys.exit(SETTINGS["exit_code"])
    if "warm-cache" in sys.argv:
        warm_cache()
        return
    says = CAPTURE if SETTINGS["log_says"] is None else SETTINGS["log_says"]
    say("    pipeline             : FakePipeline")
    say(f"    device_graph_capture : {says}")
    if CAPTURE:
        say("Device graph capture warmup completed in 0.10s (model=fake).")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    threading.Thread(target=schedule, daemon=True).start()
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
