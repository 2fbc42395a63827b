# SPDX-License-Identifier: Apache-2.0
"""What a warm load from AttnQuant's weight cache takes, against reading it.

Every arm ends with all of the entry's bytes in one buffer that is allocated
before, as when weights go to a device:

- read: the file, by plain reads;
- warm: a load, then a copy of each tensor from the mapped file;
- copied: the same of an entry whose stamps are unknown, as after a copy from
  another machine, so that its contents are read and verified first;
- digests: those of all tensors, as of a checkpoint that was never seen.

Each is measured with the file in the system's file cache and without. The
arms take turns and only the ratio within a turn counts, since the machine's
own speed drifts.

    python -m tests.benchmarks.bench_cache [--gigabytes N] [--turns N]
        [--folder DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "overlay" / "pipelines" / "architectures"))

from attnquant_common.cache import Cache  # noqa: E402
from attnquant_common.digests import file_digests, threads  # noqa: E402
from attnquant_common.tensor import Tensor, TensorSpec  # noqa: E402

KEY = "0" * 64
BLOCK = 1 << 20

# A feed-forward projection of Gemma 4 31B in NVFP4.
PROJECTION = {
    "weight": TensorSpec("U8", (5376, 21504 // 2)),
    "weight_scale": TensorSpec("F8_E4M3", (5376, 21504 // 16)),
    "weight_scale_2": TensorSpec("F32", ()),
}


def plan(size: int) -> dict[str, TensorSpec]:
    """Returns as many projections as come to a number of bytes."""
    one = sum(spec.nbytes for spec in PROJECTION.values())
    return {
        f"layers.{number}.{name}": spec
        for number in range(max(size // one, 1))
        for name, spec in PROJECTION.items()
    }


def produce(specs: dict[str, TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Makes the tensors, of bytes that do not compress."""
    random = np.random.default_rng(0)
    for name, spec in specs.items():
        if spec.dtype == "F32":
            yield name, Tensor(np.ones(spec.shape, np.float32), spec.dtype)
        else:
            data = random.integers(0, 256, spec.shape, np.uint8)
            yield name, Tensor(data, spec.dtype)


def read(file: Path, target: np.ndarray) -> None:
    """Reads a file into an array."""
    view = memoryview(target)
    with file.open("rb", buffering=0) as opened:
        done = 0
        while count := opened.readinto(view[done : done + BLOCK]):
            done += count


def copy(
    cache: Cache, specs: dict[str, TensorSpec], target: np.ndarray
) -> None:
    """Loads an entry and copies its tensors into an array."""

    def refuse() -> Iterator[tuple[str, Tensor]]:
        raise RuntimeError("the entry was not found")

    done = 0
    for tensor in cache.load(KEY, specs, refuse, {}).values():
        flat = tensor.data.reshape(-1).view(np.uint8)
        target[done : done + flat.size] = flat
        done += flat.size


def drop(file: Path) -> None:
    """Takes a file out of the system's file cache."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Runs the turns and prints times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the cache is made")
    parser.add_argument("--json", type=Path, help="where results are written")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        cache = Cache(Path(folder))
        specs = plan(int(options.gigabytes * 1e9))
        cache.load(KEY, specs, lambda: produce(specs), {})
        file = cache.folder / KEY / "tensors.safetensors"
        verified = file.with_name("verified.json")
        size = file.stat().st_size
        target = np.zeros(size, np.uint8)

        def copied() -> None:
            verified.unlink()
            copy(cache, specs, target)

        arms: dict[str, Callable[[], object]] = {
            "read": lambda: read(file, target),
            "warm": lambda: copy(cache, specs, target),
            "copied": copied,
            "digests": lambda: file_digests(file),
        }
        results = {}
        for where in ("in the file cache", "not in the file cache"):
            turns = []
            for turn in range(options.turns + 1):
                took = {}
                for name, arm in arms.items():
                    if where.startswith("not"):
                        drop(file)
                    start = time.perf_counter()
                    arm()
                    took[name] = time.perf_counter() - start
                if turn:  # the first one warms up
                    turns.append(took)
            results[where] = turns

    print(
        f"{size / 1e9:.2f} GB in {len(specs)} tensors, {threads()} cores, "
        f"Python {platform.python_version()}, {options.turns} turns; "
        "median (least to greatest)\n"
    )
    print("| file | arm | GB/s | time / read |\n|---|---|---|---|")
    for where, turns in results.items():
        for name in arms:
            rates = [size / took[name] / 1e9 for took in turns]
            ratios = [took[name] / took["read"] for took in turns]
            print(f"| {where} | {name} | {spread(rates)} | {spread(ratios)} |")
    if options.json:
        content = {"bytes": size, "cores": threads(), "seconds": results}
        options.json.write_text(json.dumps(content, indent=1))


def spread(values: list[float]) -> str:
    """Returns median, least and greatest."""
    return (
        f"{statistics.median(values):.2f} "
        f"({min(values):.2f} to {max(values):.2f})"
    )


if __name__ == "__main__":
    main()
