# SPDX-License-Identifier: Apache-2.0
r"""Compares greedy answers with and without speculation, and transformers'.

For a GPU machine, whose Python has torch and transformers; MAX may be in
another interpreter, or on a path of its own:

    python -m tests.toys.gemma4 TARGET --sublayer-gain 0.15
    python -m tests.toys.gemma4 DRAFTER --drafter
    ATTNQUANT_QUANT=nvfp4 python -m tests.architectures.check_speculation \
        --python ENV/bin/python --model TARGET --drafter DRAFTER \
        --output speculation.json

The target serves alone, then with its drafter and 1 and 3 draft tokens a step,
each time one request after the other, under this process's variables
`ATTNQUANT*`. Where two tokens are nearly as likely, rounding decides, and a
step of several rows rounds in another way than one of a single row. So the
requests are chosen among random ones by transformers: at each of their tokens
the best logit is ahead of the next by more than `TIES` times what transformers
itself errs by there in the model's type, in the root of the mean square. And
their answers do not repeat themselves.

Exit status 1 if an answer is not transformers', or with any number of draft
tokens none was accepted or none refused: then equality would say nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

# It adds the folder of the next one.
from tests.architectures.check_logits import reference  # noqa: E402, I001
from attnquant_common.settings import from_environment  # noqa: E402
from throughput.capture import machine  # noqa: E402
from throughput.client import complete  # noqa: E402
from throughput.server import (  # noqa: E402
    CAPTURE_OFF,
    Arm,
    MeasureError,
    Server,
    serve,
)

TIES = 8
FLAGS = (
    *("--max-length", "1024", "--max-batch-size", "1"),
    # MAX captures nothing with a drafter, and alone only with enough memory.
    *("--no-enable-prefix-caching", CAPTURE_OFF),
)

_BATCH = 128
_WORDS = 24
_WORD = re.compile(r"w\d+_")
_DRAFTED = re.compile(
    r"(?:Executed|Completed) TG batch.*?Draft Tokens: (\d+)/(\d+)"
)


@dataclass(frozen=True)
class Request:
    """A prompt, and what is to answer it."""

    content: str
    answer: list[str]
    """The tokens of it."""


def chosen(model: Path, count: int, tokens: int, device: str) -> list[Request]:
    """Returns requests that rounding does not decide.

    Args:
        model: Checkpoint folder.
        count: How many.
        tokens: Tokens of each answer.
        device: torch's.

    Raises:
        MeasureError: If there are too few among `200 * count` random ones.
    """
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    theirs = reference(model)
    rounding = theirs.dtype
    rng = random.Random(0)
    words = [w for w in tokenizer.get_vocab() if _WORD.fullmatch(w)]
    contents = [
        "".join(rng.choices(words, k=_WORDS)) for _ in range(200 * count)
    ]
    prompts = torch.tensor(
        tokenizer.apply_chat_template(
            [[{"role": "user", "content": text}] for text in contents],
            add_generation_prompt=True,
            return_dict=False,
        ),
        device=device,
    )
    theirs = theirs.to(device, torch.float32)
    exact, answers = [], []
    for batch in prompts.split(_BATCH):
        out = theirs.generate(
            batch,
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answers.append(out.sequences[:, batch.shape[1] :])
        exact.append(torch.stack(out.logits, 1))
    theirs = theirs.to(rounding)
    off = []
    for prompt, answer, logits in zip(
        prompts.split(_BATCH), answers, exact, strict=True
    ):
        first = prompt.shape[1] - 1
        with torch.no_grad():
            rounded = theirs(input_ids=torch.hstack([prompt, answer])).logits
        error = rounded[:, first:-1] - logits
        off.append(error.square().mean(dim=2).sqrt())
    best = torch.cat(exact).topk(2, dim=-1).values
    ahead = (best[..., 0] - best[..., 1]) / torch.cat(off)
    found = [
        Request(content, tokenizer.convert_ids_to_tokens(answer))
        for content, answer, least in zip(
            contents,
            torch.cat(answers).tolist(),
            ahead.amin(dim=1).tolist(),
            strict=True,
        )
        if least > TIES and len(set(answer)) > 0.4 * tokens
    ]
    if len(found) < count:
        raise MeasureError(
            f"{len(found)} of {len(contents)} random requests have no ties, "
            f"{count} are needed; give fewer --tokens"
        )
    # The servers plan with what they find free.
    del theirs, exact, off, prompts
    torch.cuda.empty_cache()
    return found[:count]


def ask(server: Server, requests: Sequence[Request]) -> list[str]:
    """Returns the answers to requests, sent one after the other."""

    async def each() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as to:
            texts = []
            for request in requests:
                done = await complete(to, request.content, len(request.answer))
                done.check(len(request.answer))
                texts.append(done.text)
            return texts

    return asyncio.run(each())


def drafted(log: str) -> tuple[int, int]:
    """Returns how many draft tokens were accepted, and how many there were.

    Args:
        log: A server's, with a line a batch.
    """
    found = [tuple(map(int, pair)) for pair in _DRAFTED.findall(log)]
    return sum(a for a, _ in found), sum(b for _, b in found)


def judge(
    requests: Sequence[Request], runs: Sequence[dict[str, Any]]
) -> list[str]:
    """Says what is wrong.

    Args:
        requests: As they were asked.
        runs: Each with `draft_tokens` a step, the `answers`, and `accepted` of
            `drafted`.
    """
    wrong = []
    for run in runs:
        name = f"{run['draft_tokens']} draft tokens a step"
        for i, (request, text) in enumerate(
            zip(requests, run["answers"], strict=True)
        ):
            if text != "".join(request.answer):
                wrong.append(f"{name}: request {i}: {_parted(request, text)}")
        if run["draft_tokens"] and not 0 < run["accepted"] < run["drafted"]:
            wrong.append(
                f"{name}: {run['accepted']} of {run['drafted']} accepted, "
                "which shows nothing"
            )
    return wrong


def _parted(request: Request, text: str) -> str:
    for i, token in enumerate(request.answer):
        if not text.startswith(token):
            return f"token {i} is not {token}, but {text[:12]!r} begins there"
        text = text.removeprefix(token)
    return f"{text[:12]!r} follows its answer"


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--python", default=sys.executable, help="of MAX")
    add("--path", default="", help="its PYTHONPATH")
    add("--model", type=Path, required=True, help="checkpoint folder")
    add("--drafter", type=Path, required=True, help="its drafter's")
    add("--draft-tokens", type=int, nargs="+", default=[1, 3])
    add("--requests", type=int, default=24)
    add("--tokens", type=int, default=12, help="of each answer")
    add("--device", default="cuda", help="torch's, for transformers")
    add(
        "--flag",
        action="append",
        default=[],
        help="for `max serve`; {draft_tokens} stands for their number",
    )
    add("--output", type=Path, required=True, help="JSON; logs go beside it")
    args = parser.parse_args()
    requests = chosen(args.model, args.requests, args.tokens, args.device)
    runs = []
    for count in (0, *args.draft_tokens):
        more = (flag.format(draft_tokens=count) for flag in args.flag)
        flags: tuple[str, ...] = (*FLAGS, *more)
        if count:
            flags += (
                *("--speculative-method", "mtp"),
                *("--draft-model-path", str(args.drafter)),
                *("--num-speculative-tokens", str(count)),
            )
        arm = Arm(
            f"{count} draft tokens",
            args.python,
            args.path,
            flags,
            attnquant="AttnQuant: " if from_environment(os.environ) else "",
        )
        log = args.output.with_name(f"{args.output.stem}-{count}.log")
        with serve(
            arm,
            args.model,
            log,
            env={"MAX_SERVE_SCHEDULER_STATS_LOG_INTERVAL_S": "0"},
        ) as server:
            answers = ask(server, requests)
        accepted, of = drafted(log.read_text(errors="replace"))
        runs.append(
            {
                "draft_tokens": count,
                "versions": arm.versions(),
                "answers": answers,
                "accepted": accepted,
                "drafted": of,
            }
        )
    wrong = judge(requests, runs)
    where = machine()
    result = {
        "machine": {key: where[key] for key in ("gpu", "cores")},
        "variables": {n: v for n, v in os.environ.items() if "ATTNQUANT" in n},
        "requests": len(requests),
        "tokens": args.tokens,
        "runs": [
            {k: v for k, v in run.items() if k != "answers"} for run in runs
        ],
        "wrong": wrong,
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MeasureError as error:
        sys.exit(f"error: {error}")
