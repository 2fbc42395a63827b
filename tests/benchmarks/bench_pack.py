# SPDX-License-Identifier: Apache-2.0
"""How long packing takes, against `wheel unpack` + `wheel pack`.

Both start from the same cached MAX wheel and end with a packed one. Ours also
hashes the base, applies the series, adds the overlay and writes provenance;
environments and verification are left out on both sides. Against `wheel`, the
times are of whole processes, Python's start included. A rebuild with nothing
changed is compared with packing inside the process, since most of it would
otherwise be Python's start. The arms take turns and only the ratio within a
turn counts, since the machine's own speed drifts.

    PYTHONPATH=scripts python -m tests.benchmarks.bench_pack [--turns N]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from maxpatch.build import Inputs, Project, Request, Steps, build, pack
from maxpatch.release import fetch

ROOT = Path(__file__).resolve().parents[2]


def pack_once(request: Request, folder: Path) -> None:
    """Packs a patched wheel into a folder, from the cached base."""
    project = Project(ROOT)
    inputs = Inputs.resolve(project, request)
    pack(project, request, inputs, Steps(lambda line: None), folder)


def rebuild(request: Request, _: Path) -> None:
    """Builds what ``dist/`` has already."""
    report = build(Project(ROOT), request, lambda line: None)
    if not report["reused"]:
        raise RuntimeError("the wheel in dist/ changed during the measurement")


WORKERS = {"pack": pack_once, "rebuild": rebuild}


def work(name: str, request: Request) -> None:
    """Runs a worker in this process and prints its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        WORKERS[name](request, Path(folder))
        print(time.perf_counter() - start)


def measure(request: Request, base: Path) -> dict[str, float]:
    """Runs every arm once and returns its seconds."""
    took = {}
    module = [sys.executable, "-m", "tests.benchmarks.bench_pack"]
    for name in WORKERS:
        command = [*module, "--release", str(request.release), "--work", name]
        start = time.perf_counter()
        inside = subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        took[f"{name} process"] = time.perf_counter() - start
        took[name] = float(inside)
    with tempfile.TemporaryDirectory() as folder:
        wheel = [sys.executable, "-m", "wheel"]
        start = time.perf_counter()
        _quietly(*wheel, "unpack", "-d", folder, str(base))
        (tree,) = Path(folder).iterdir()
        _quietly(*wheel, "pack", "-d", folder, str(tree))
        took["wheel process"] = time.perf_counter() - start
    return took


def _quietly(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Runs the turns and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--work", choices=WORKERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    project = Project(ROOT)
    request = Request(
        release=str(project.releases().get(options.release).version),
        output=ROOT / "dist",
    )
    if options.work:
        return work(options.work, request)

    build(project, request, print)
    base = fetch(
        Inputs.resolve(project, request).pin, project.cache, offline=True
    )
    measure(request, base)  # warms the file cache
    turns = [measure(request, base) for _ in range(options.turns)]
    print(
        f"{base.name}, Python {platform.python_version()}, "
        f"{len(turns)} turns, ratio: median (least to greatest)"
    )
    for title, above, below in (
        ("pack / wheel unpack + pack", "pack process", "wheel process"),
        ("rebuild / pack", "rebuild", "pack"),
        ("rebuild / pack, whole processes", "rebuild process", "pack process"),
    ):
        ratios = [took[above] / took[below] for took in turns]
        print(
            f"{title}: {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
