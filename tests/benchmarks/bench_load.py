# SPDX-License-Identifier: Apache-2.0
r"""What preparing a checkpoint's weights takes, against reading its files.

Arms, each in a fresh process:

- read: all of the checkpoint's files, by plain reads;
- cold: the weights rewritten as `ATTNQUANT*` ask, into an empty cache, and
  every page of them looked at;
- warm: the same from the cache.

The files are out of the system's file cache before each arm. Arms take turns
and only the ratio within a turn counts, since a shared machine's speed drifts.
Peak memory is that of the arm's own pages (RssAnon): mapped files are not
counted, and what is made is written to one.

    ATTNQUANT_QUANT=nvfp4 python -m tests.benchmarks.bench_load \
        --python ENV/bin/python --size 31b --layers 6 --shards 4

`--model DIR` takes a checkpoint that is there instead of making one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.toys import gemma4

BLOCK, PAGE = 1 << 22, 1 << 12

_CHILD = """
import json, sys
from pathlib import Path
from tests.benchmarks.bench_load import prepare
print(json.dumps(prepare(Path(sys.argv[1]))))
"""


class Peak:
    """The most memory in pages of its own that this process had."""

    def __init__(self) -> None:
        self.before = self.most = _anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, _anonymous())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, _anonymous())

    @property
    def nbytes(self) -> int:
        """What was added to what there was at first."""
        return self.most - self.before


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no RssAnon")


def prepare(folder: Path) -> dict[str, Any]:
    """Gives what an interpreter with MAX takes to load a checkpoint.

    Args:
        folder: A Gemma 4 checkpoint.

    Returns:
        Seconds, the peak of memory in bytes, the bytes of the largest fused
        group, of what was made, and the cache's part in it.
    """
    from max.graph.weights import load_weights
    from max.pipelines.architectures.attnquant_common import (
        layout,
        loading,
        nvfp4,
        plan,
        settings,
        weights,
    )
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    asked = plan.Plan(layout.gemma4(config.text_config), settings.asked())
    paths = sorted(folder.glob("*.safetensors"))
    found = load_weights(paths)
    source = weights.Source({n: w.data for n, w in found.items()})
    # Compiled beforehand: that is MAX's time, and once a machine.
    nvfp4.quantize(source[asked.needed()[0]])
    with Peak() as peak:
        start = time.perf_counter()
        made = loading.load(asked, source, paths, str(folder))
        for tensor in made.values():
            # As a device would, which needs every page of it.
            int(tensor.data.reshape(-1).view(np.uint8)[::PAGE].sum())
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "peak_bytes": peak.nbytes,
        "group_bytes": max(
            sum(2 * p.elements for p in group)
            for group in asked.layout.groups().values()
        ),
        "made_bytes": sum(spec.nbytes for spec in asked.specs(source).values()),
        "cache": made.outcome,
    }


def run(python: Path, path: str, folder: Path, cache: Path) -> dict[str, Any]:
    """Runs `prepare` in a fresh process of another interpreter."""
    root = Path(__file__).resolve().parents[2]
    output = subprocess.check_output(
        [python, "-c", _CHILD, folder],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "ATTNQUANT_CACHE_DIR": str(cache),
            "PYTHONPATH": f"{path}{os.pathsep}{root}",
        },
        text=True,
    )
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def read(paths: Sequence[Path]) -> float:
    """Returns the seconds that plain reads of files take."""
    start = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as opened:
            buffer = bytearray(BLOCK)
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - start


def drop(folder: Path) -> None:
    """Takes a folder's files out of the system's file cache."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def turn(
    python: Path, path: str, checkpoint: Path, folder: Path
) -> dict[str, Any]:
    """Runs each arm once.

    Args:
        python: An interpreter with MAX.
        path: Its PYTHONPATH.
        checkpoint: The checkpoint's folder.
        folder: An empty one, for the cache.
    """
    paths = sorted(checkpoint.glob("*.safetensors"))
    drop(checkpoint)
    found: dict[str, Any] = {"read": read(paths)}
    for arm, outcome in (("cold", "miss"), ("warm", "hit")):
        drop(checkpoint)
        drop(folder)
        found[arm] = run(python, path, checkpoint, folder)
        if found[arm]["cache"] != outcome:
            raise RuntimeError(f"{arm}: the cache's part is {found[arm]}")
    return found


def main() -> None:
    """Runs the turns and prints what they took."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--python", type=Path, default=Path(sys.executable), help="of MAX")
    add("--path", default="", help="its PYTHONPATH")
    add("--model", type=Path, help="a Gemma 4 checkpoint")
    add("--size", choices=gemma4.SHAPES, default="31b")
    add("--layers", type=int, default=6)
    add("--shards", type=int, default=4)
    add("--turns", type=int, default=3)
    add("--folder", type=Path, help="where checkpoint and cache are made")
    add("--json", type=Path, help="where results are written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        checkpoint = options.model or Path(name) / "checkpoint"
        if options.model is None:
            gemma4.write_checkpoint(
                checkpoint,
                size=options.size,
                layers=options.layers,
                shards=options.shards,
            )
        files = list(checkpoint.glob("*.safetensors"))
        stored = sum(file.stat().st_size for file in files)
        turns = []
        for number in range(options.turns):
            folder = Path(name) / f"cache-{number}"
            folder.mkdir()
            turns.append(turn(options.python, options.path, checkpoint, folder))
            print(json.dumps(turns[-1]), file=sys.stderr, flush=True)
    first = turns[0]["cold"]
    print(
        f"{stored / 1e9:.2f} GB in {len(files)} files, "
        f"{first['made_bytes'] / 1e9:.2f} GB made; largest fused group "
        f"{first['group_bytes'] / 1e9:.2f} GB; {os.cpu_count()} cores; "
        f"{options.turns} turns; median (least to greatest)\n"
    )
    print("| arm | GB/s of the checkpoint | time / read | peak, GB |")
    print("| --- | --- | --- | --- |")
    reads = [each["read"] for each in turns]
    print(f"| read | {spread([stored / t / 1e9 for t in reads])} | | |")
    for arm in ("cold", "warm"):
        took = [each[arm]["seconds"] for each in turns]
        rates = [stored / t / 1e9 for t in took]
        ratios = [t / r for t, r in zip(took, reads, strict=True)]
        peaks = [each[arm]["peak_bytes"] / 1e9 for each in turns]
        print(
            f"| {arm} | {spread(rates)} | {spread(ratios)} | {spread(peaks)} |"
        )
    if options.json:
        content = {"bytes": stored, "cores": os.cpu_count(), "turns": turns}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def spread(values: list[float]) -> str:
    """Returns median, least and greatest."""
    return (
        f"{statistics.median(values):.2f} "
        f"({min(values):.2f} to {max(values):.2f})"
    )


if __name__ == "__main__":
    main()
