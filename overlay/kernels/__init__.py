# SPDX-License-Identifier: Apache-2.0
"""Kernel overlays: the Mojo packages that MAX loads into every graph.

Each folder beside this file is one overlay: a Mojo source package
(``__init__.mojo``) or a precompiled library (``*.mojoc``). A kernel that
registers a new name adds an op; one that registers the name of a built-in op
takes its place. The environment variable ``MAX_KERNEL_OVERLAYS=0`` starts MAX
without them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from max._core.engine import max_cache_dir
from mojo.run import subprocess_run_mojo

_TOOLCHAIN = ("mojo-compiler", "max-mojo-libs")


def libraries(root: Path = Path(__file__).parent) -> tuple[Path, ...]:
    """Returns the overlays as precompiled Mojo libraries, sorted by name.

    Args:
        root: The folder that holds one folder per overlay.

    Raises:
        RuntimeError: If an overlay cannot be precompiled.
    """
    if os.environ.get("MAX_KERNEL_OVERLAYS") == "0":
        return ()
    sources = [init.parent for init in root.glob("*/__init__.mojo")]
    built = [*map(_precompile, sources), *root.glob("*/*.mojoc")]
    return tuple(sorted(built, key=lambda library: library.name))


def _precompile(source: Path) -> Path:
    """Returns the library of a source package, built at most once a content.

    MAX's own route builds a source package again for every graph. Content and
    path of a library are part of the key of MAX's compile cache, so both
    depend on the sources and the toolchain alone, not on where the package is
    installed or when it was built.
    """
    library = _cache() / _digest(source) / f"{source.name}.mojoc"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as staging:
            # The compiler takes the library's name from the file's.
            staged = Path(staging, library.name)
            # It also writes down the path it was given: keep that relative.
            subprocess_run_mojo(
                ["precompile", source.name, "-o", str(staged)],
                cwd=source.parent,
                capture_output=True,
                text=True,
                check=True,
            )
            staged.replace(library)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(
            f"cannot precompile the kernel overlay {source} to {library}: "
            f"{getattr(error, 'stderr', None) or error}\n"
            "MAX_KERNEL_OVERLAYS=0 starts MAX without kernel overlays"
        ) from error
    return library


def _cache() -> Path:
    directory = max_cache_dir()
    if directory is None:
        raise RuntimeError(
            "MAX has no cache directory to precompile kernel overlays in; "
            "set MODULAR_CACHE_DIR, or MAX_KERNEL_OVERLAYS=0 to leave them out"
        )
    return directory / "kernel_overlays"


def _digest(source: Path) -> str:
    digest = hashlib.sha256()
    for name in _TOOLCHAIN:
        digest.update(f"{name}=={version(name)}\n".encode())
    for file in sorted(source.rglob("*.mojo")):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        name = file.relative_to(source).as_posix()
        digest.update(f"{content} {name}\n".encode())
    return digest.hexdigest()[:16]
