# SPDX-License-Identifier: Apache-2.0
"""What a decomposition loses and saves, by number of bands and rank.

``python -m max.pipelines.architectures.attnquant_common.report CHECKPOINT
--blocks 1 2 13 26 --ranks 4 32`` prints it as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from . import bundle
from .decomposition import decompose_band
from .projections import group, layers
from .tensor import Tensor


@dataclass(frozen=True)
class Row:
    """One choice of bands and rank."""

    blocks: int
    rank: int

    error: float
    """``|W - W'| / |W|``, Frobenius norms over all projections, before ``W'``
    is rounded to the checkpoint's type."""

    worst_error: float
    """The largest such quotient of one weight."""

    worst: str
    """That weight's module; empty if nothing is lost."""

    bundle_bytes: int
    """The bytes of all the bundle's tensors."""

    checkpoint_bytes: int
    """The bytes of all the checkpoint's tensors."""


def report(
    checkpoint: Mapping[str, Tensor],
    blocks: Sequence[int],
    ranks: Sequence[int],
    seed: int = 0,
) -> list[Row]:
    """Decomposes a checkpoint for each number of bands and each rank.

    Args:
        checkpoint: Its tensors, by name.
        blocks: Numbers of bands.
        ranks: Ranks.
        seed: As in :func:`.decomposition.decompose`.

    Raises:
        ValueError: As in :func:`.bundle.write`.
    """
    specs = {name: tensor.spec for name, tensor in checkpoint.items()}
    bundle.check_checkpoint(specs)
    for rank in ranks:
        bundle.check_rank(rank)
    groups = group(specs)
    count = layers(specs)
    for number in blocks:
        if not 1 <= number <= count:
            raise ValueError(f"{count} layers cannot make {number} bands")
    total = sum(
        _square(checkpoint[f"{module}.weight"].float32())
        for one in groups
        for module in one.modules
    )
    rows = []
    for number in blocks:
        for rank in ranks:
            bands = bundle.shared_bands(groups, number, rank)
            lost, worst_error, worst = 0.0, 0.0, ""
            for shared in bands:
                names = [f"{module}.weight" for module in shared.modules]
                weights = bundle.Widened(checkpoint, names)
                band = decompose_band(weights, shared.rank, seed, names)
                for layer, module in enumerate(shared.modules):
                    weight = weights[layer]
                    square = _square(weight - band.reconstruct(layer))
                    lost += square
                    error = _quotient(square, _square(weight))
                    if error > worst_error:
                        worst_error, worst = error, module
            rows.append(
                Row(
                    blocks=number,
                    rank=rank,
                    error=_quotient(lost, total),
                    worst_error=worst_error,
                    worst=worst,
                    bundle_bytes=sum(
                        spec.nbytes
                        for spec in bundle.bundle_specs(specs, bands).values()
                    ),
                    checkpoint_bytes=sum(s.nbytes for s in specs.values()),
                )
            )
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Returns the rows as a table."""
    lines = [
        "| bands | rank | error | worst weight | bytes | of checkpoint's |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.blocks} | {row.rank} | {row.error:.4g} "
        f"| {row.worst_error:.4g} | {row.bundle_bytes} "
        f"| {row.bundle_bytes / row.checkpoint_bytes:.3f} |"
        for row in rows
    ]
    return "\n".join(lines)


def to_json(rows: Sequence[Row]) -> str:
    """Returns the rows as a JSON list of objects."""
    return json.dumps([asdict(row) for row in rows], indent=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of a checkpoint folder."""
    parser = argparse.ArgumentParser(
        prog="report", description="What a decomposition loses and saves."
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parsed = parser.parse_args(arguments)
    try:
        checkpoint = bundle.Checkpoint(parsed.checkpoint)
        rows = report(checkpoint, parsed.blocks, parsed.ranks, parsed.seed)
        if parsed.json:
            parsed.json.write_text(to_json(rows) + "\n")
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(markdown(rows))  # noqa: T201
    return 0


def _square(matrix: np.ndarray) -> float:
    return float(np.sum(np.square(matrix, dtype=np.float64)))


def _quotient(lost: float, whole: float) -> float:
    return (lost / whole) ** 0.5 if lost else 0.0


if __name__ == "__main__":
    sys.exit(main())
