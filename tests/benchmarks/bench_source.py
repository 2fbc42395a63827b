# SPDX-License-Identifier: Apache-2.0
"""What a source build takes beyond the bare ``mojo precompile`` calls.

Both compile the same two packages of the default release, of which the second
imports the first, with the same compiler. One makes the two calls alone, with
everything laid out for them. The other is the builder, from the checkout to
the packed wheel of all the release's Mojo packages, with nothing kept from
before. Left out are downloads, the wheel of ``max`` and the verification. The
arms take turns and only the ratio within a turn counts, since the machine's
own speed drifts.

    PYTHONPATH=scripts python -m tests.benchmarks.bench_source [--turns N]
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from maxpatch.build import (
    CACHE_VARIABLE,
    Inputs,
    Project,
    Request,
    Steps,
    pack_libraries,
)
from maxpatch.checkout import apply_source
from maxpatch.compiler import Compiler, members
from maxpatch.mojo import Tree
from maxpatch.release import fetch
from maxpatch.wheel import Wheel
from tests.maxpatch.toy import KERNELS, make_diff, make_patch, write_tree

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kda", "msa")
"""Names of packages of the release; what is in them here is made up."""

_FUNCTION = """
def f{number}[n: Int](x: SIMD[DType.float32, n]) -> SIMD[DType.float32, n]:
    var y = x * {number}
    for i in range(n):
        if y[i] > x[i]:
            y[i] = y[i] * y[i] - x[i]
        else:
            y[i] = x[i] / (y[i] + 1)
    return y
"""


def sources(functions: int) -> dict[str, bytes]:
    """Returns the packages' files, by path in MAX's source tree.

    Args:
        functions: How many functions a package has, in files of a hundred.
    """
    files = {}
    for name in PACKAGES:
        others = [f"import {PACKAGES[0]}\n"] if name != PACKAGES[0] else []
        modules = range(0, functions, 100)
        own = [f"from .m{first} import *\n" for first in modules]
        files[f"{KERNELS}{name}/__init__.mojo"] = "".join([*others, *own])
        for first in modules:
            files[f"{KERNELS}{name}/m{first}.mojo"] = "\n".join(
                _FUNCTION.format(number=number)
                for number in range(first, min(first + 100, functions))
            )
    return {path: text.encode() for path, text in files.items()}


def write_project(root: Path, functions: int) -> None:
    """Writes a project with a patch of a body in each package.

    Args:
        root: The folder to write it in, with the checkout in ``source``.
        functions: How many functions a package has.
    """
    before = sources(functions)
    write_tree(root / "source", before)
    patches = {}
    for name in PACKAGES:
        path = f"{KERNELS}{name}/m0.mojo"
        old = before[path]
        diff = make_diff(
            root / f"diff-{name}",
            {path: old},
            {path: old.replace(b"y[i] + 1", b"y[i] + 2", 1)},
        )
        patches[name] = make_patch(f"[Kernels] {name}", diff, Touches_Mojo=name)
    write_tree(
        root,
        {
            "pyproject.toml": (ROOT / "pyproject.toml").read_bytes(),
            "build/releases.toml": (ROOT / "build/releases.toml").read_bytes(),
            "patches/max/series": "\n".join(PACKAGES).encode(),
            **{f"patches/max/{n}.patch": data for n, data in patches.items()},
        },
    )


def ours(project: Project, request: Request, inputs: Inputs) -> float:
    """Returns the builder's seconds."""
    for folder in (project.work / "mojo").glob("*"):
        if not folder.name.startswith("compiler-"):
            shutil.rmtree(folder)
    assert request.source is not None
    with tempfile.TemporaryDirectory(dir=project.work) as scratch:
        start = time.perf_counter()
        patched = apply_source(
            request.source, inputs.mojo_patches, Path(scratch, "source")
        )
        pack_libraries(
            project,
            request,
            inputs,
            Steps(lambda line: None),
            Path(scratch),
            Tree(request.source, patched),
        )
        return time.perf_counter() - start


def bare(compiler: Compiler, inputs: Inputs, project: Project) -> float:
    """Returns the seconds of the compiler's calls."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "path"
        path.mkdir()
        wheel = project.cache / inputs.release.mojo_libs.filename
        with Wheel(wheel) as base:
            for package, member in members(base).items():
                if package not in PACKAGES:
                    file = path / f"{package}.mojoc"
                    file.write_bytes(base.read(member))
        for file in compiler.libraries:
            (path / file.name).symlink_to(file)
        for package in PACKAGES:
            shutil.copytree(
                project.root / "source" / KERNELS / package, folder / package
            )
        start = time.perf_counter()
        for package in PACKAGES:
            output = folder / f"{package}.mojoc"
            compiler.precompile(package, output, path)
            (path / output.name).symlink_to(output)
        return time.perf_counter() - start


def main() -> None:
    """Runs the turns and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    # With as many, the calls take as long as that for MAX's `nn` alone.
    parser.add_argument("--functions", type=int, default=6000)
    options = parser.parse_args()
    os.environ.setdefault(CACHE_VARIABLE, str(Project(ROOT).cache))
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder))
        write_project(project.root, options.functions)
        request = Request(source=project.root / "source", inexact=True)
        inputs = Inputs.resolve(project, request)
        for pin in (inputs.pin, inputs.release.mojo_libs):
            fetch(pin, project.cache, offline=False)
        version = inputs.release.mojo_compiler
        compiler = Compiler.install(
            version,
            project.work / "mojo" / f"compiler-{version}",
            scratch=project.root,
            offline=False,
        )
        bare(compiler, inputs, project)  # warms the file cache
        turns = []
        for _ in range(options.turns):
            alone = bare(compiler, inputs, project)
            turns.append((ours(project, request, inputs), alone))
    ratios = [whole / alone for whole, alone in turns]
    alone = statistics.median(seconds for _, seconds in turns)
    print(
        f"MAX {inputs.release.version}, Mojo {version}, Python "
        f"{platform.python_version()}, {len(turns)} turns, bare calls "
        f"{alone:.1f} s"
    )
    print(
        "source build / bare calls, median (least to greatest): "
        f"{statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
