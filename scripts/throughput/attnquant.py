# SPDX-License-Identifier: Apache-2.0
r"""Times decoding with AttnQuant's paths against the built-in architecture.

All arms serve the same checkpoint with the same wheel: the built-in Gemma 3
and precompute-outside, each with capture on and off, and the runtime path by
matmuls and by the custom op at each rank, capture on. They are timed by the
rules of `throughput.capture`.

    python -m throughput.attnquant --patched PYTHON --model DIR \
        --blocks 2 --ranks 4 32 --output results.json

A results file that exists is continued.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from throughput.capture import add_protocol, parse, run
from throughput.server import CAPTURE_OFF, Arm

_FORMS = {"matmuls": "1", "a custom op": "0"}


def arms(
    python: str, path: str, blocks: int, ranks: Sequence[int]
) -> list[Arm]:
    """Returns the arms.

    Args:
        python: Interpreter of a MAX that carries AttnQuant.
        path: Its PYTHONPATH, or an empty string.
        blocks: Bands of the decomposed arms.
        ranks: Their ranks. Precompute-outside has the first: its graph and
            its weights' shapes are the same at any.
    """
    built_in = Arm("built-in", python, path, capture=True, graphs="built-in")
    bands = _variables(blocks, ranks[0])
    rebuilt = replace(
        built_in,
        name="precompute-outside",
        variables=bands,
        attnquant=f"rank {ranks[0]}, NVFP4 0 of",
    )
    found = []
    for arm in (built_in, rebuilt):
        off = {"name": f"{arm.name}, capture off", "flags": (CAPTURE_OFF,)}
        found += [replace(arm, **off, capture=False), arm]
    for rank in ranks:
        for said, gemm in _FORMS.items():
            found.append(
                replace(
                    built_in,
                    name=f"runtime, rank {rank}, {said.removeprefix('a ')}",
                    variables=(
                        *_variables(blocks, rank),
                        ("ATTNQUANT_PRECOMPUTE_OUTSIDE", "0"),
                        ("ATTNQUANT_GEMM", gemm),
                    ),
                    attnquant=f"runtime by {said}",
                    graphs=f"rank-{rank}-{said.split()[-1]}",
                )
            )
    return found


def _variables(blocks: int, rank: int) -> tuple[tuple[str, str], ...]:
    return (
        ("ATTNQUANT_BLOCKS", str(blocks)),
        ("ATTNQUANT_RANK", str(rank)),
    )


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="throughput.attnquant",
        description="Time AttnQuant's paths against the built-in architecture.",
    )
    add = parser.add_argument
    add("--patched", required=True, help="interpreter of ours")
    add("--patched-path", default="", help="its PYTHONPATH")
    add("--blocks", type=int, required=True, help="bands")
    add("--ranks", type=int, nargs="+", default=[4, 32])
    add_protocol(parser)
    args = parse(parser)
    found = arms(args.patched, args.patched_path, args.blocks, args.ranks)
    return run(found, args)


if __name__ == "__main__":
    sys.exit(main())
