# SPDX-License-Identifier: Apache-2.0
"""A streaming client of an OpenAI-compatible chat endpoint."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from throughput.server import MeasureError


@dataclass
class Completion:
    """What one request received, and when.

    Times are seconds of `time.perf_counter`.

    Attributes:
        start: When the request was sent.
        end: When its last byte came.
        stamps: When each piece of content came.
        text: The content.
        usage: The server's own count of tokens.
    """

    start: float
    end: float = 0.0
    stamps: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.stamps[0] - self.start

    @property
    def step_s(self) -> float:
        """Mean seconds between tokens after the first."""
        steps = int(self.usage["completion_tokens"]) - 1
        return (self.stamps[-1] - self.stamps[0]) / max(steps, 1)

    def check(self, max_tokens: int, prompt_tokens: int | None = None) -> None:
        """Refuses an answer that is short, cached or of another prompt length.

        Raises:
            MeasureError: Naming what was expected and what came.
        """
        details = self.usage.get("prompt_tokens_details") or {}
        found = {
            "completion_tokens": self.usage.get("completion_tokens"),
            "prompt_tokens": self.usage.get("prompt_tokens"),
            "cached_tokens": details.get("cached_tokens"),
        }
        expected = {
            "completion_tokens": max_tokens,
            "prompt_tokens": prompt_tokens or found["prompt_tokens"],
            "cached_tokens": 0,
        }
        if found != expected:
            raise MeasureError(
                f"a request's usage: expected {expected}, found {found}"
            )


def prompt(words: int, seed: int) -> str:
    """Returns that many random words of the toy vocabulary, a token each.

    Prompts of different seeds share no prefix worth caching.
    """
    rng = random.Random(seed)
    return "".join(f"w{rng.randrange(700)}_" for _ in range(words))


async def complete(
    client: httpx.AsyncClient, content: str, max_tokens: int
) -> Completion:
    """Streams one greedy chat completion to its end.

    Args:
        client: An HTTP client whose base URL is the server's.
        content: The user's message.
        max_tokens: Tokens to generate; the end of sequence is ignored.

    Returns:
        The completion with its times.

    Raises:
        MeasureError: If the server answers with an error or no content.
    """
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    done = Completion(time.perf_counter())
    url = "/v1/chat/completions"
    async with client.stream("POST", url, json=body) as response:
        if not response.is_success:
            text = (await response.aread()).decode(errors="replace")
            raise MeasureError(f"{url}: {response.status_code}: {text[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise MeasureError(f"{url}: {chunk['error']}")
            done.usage = chunk.get("usage") or done.usage
            for choice in chunk["choices"]:
                if content := choice["delta"].get("content"):
                    done.stamps.append(time.perf_counter())
                    done.text += content
    done.end = time.perf_counter()
    if not done.stamps:
        raise MeasureError(f"{url}: the stream ended without any content")
    return done
