# SPDX-License-Identifier: Apache-2.0
"""Stands in for `max._entrypoints.pipelines`: a server with known times.

`settings.json` two folders up says how it behaves. It runs as a process of
its own and imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "supports_capture": False,
    "log_says": None,
    "first_s": 0.0,
    "token_s": 0.0,
    "neighbour_s": 0.0,
    "short_by": 0,
    "status": 200,
    "stale": False,
    "gap": 5.0,
    "exit_code": None,
} | json.loads(Path(__file__).parents[2].joinpath("settings.json").read_text())
CAPTURE = (
    SETTINGS["supports_capture"] and "--no-device-graph-capture" not in sys.argv
)
PREFIX_CACHING = "--no-enable-prefix-caching" not in sys.argv
TEMPLATE_TOKENS = 4
LOCK = threading.Lock()
SEEN: set[str] = set()
ACTIVE = 0


def say(line: str) -> None:
    """Writes one line of the log."""
    print(f"00:00:00.000 INFO: {line}", flush=True)


def next_token(context: list[int], active: int) -> int:
    """Continues a context; a stale buffer shows only in a batch."""
    token = (sum(context) * 7919 + len(context) * 104729) % 4001
    if SETTINGS["stale"] and CAPTURE and active == 8:
        return token + 1
    return token


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
        global ACTIVE
        with LOCK:
            ACTIVE += 1
        try:
            self.stream(body)
        finally:
            with LOCK:
                ACTIVE -= 1

    def event(self, chunk: dict[str, Any]) -> None:
        """Sends one server-sent event."""
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def stream(self, body: dict[str, Any]) -> None:
        """Sends the tokens one by one, then the usage."""
        text = body["messages"][0]["content"]
        words = [int(word[1:]) for word in text.split("_") if word]
        context = body.get("prompt_tokens") or [0] * TEMPLATE_TOKENS + words
        prompt_tokens = len(context)
        count = body["max_tokens"] - SETTINGS["short_by"]
        with LOCK:
            hit = PREFIX_CACHING and text in SEEN
            SEEN.add(text)
        time.sleep(SETTINGS["first_s"])
        for i in range(count):
            if i:
                wait = SETTINGS["neighbour_s"] * (ACTIVE - 1)
                time.sleep(SETTINGS["token_s"] + wait)
            with LOCK:
                say(f"Enqueued TG batch with {ACTIVE} reqs | Pending: 0 reqs")
                token = next_token(context, ACTIVE)
            choice: dict[str, Any] = {"delta": {"content": f"t{token}"}}
            if body.get("return_token_ids"):
                choice["token_ids"] = [token]
                if i == 0:
                    choice["prompt_token_ids"] = list(context)
            if body.get("logprobs"):
                best = [
                    {"token": f"t{token + k}", "logprob": -k * SETTINGS["gap"]}
                    for k in range(5)
                ]
                choice["logprobs"] = {"content": [{"top_logprobs": best}]}
            self.event({"choices": [choice]})
            context.append(token)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens * hit},
        }
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")


def main() -> None:
    """Serves until told to stop."""
    if SETTINGS["exit_code"] is not None:
        print("cannot allocate", flush=True)
        sys.exit(SETTINGS["exit_code"])
    says = CAPTURE if SETTINGS["log_says"] is None else SETTINGS["log_says"]
    say("    pipeline             : FakePipeline")
    say(f"    device_graph_capture : {says}")
    if CAPTURE:
        say("Device graph capture warmup completed in 0.10s (model=fake).")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
