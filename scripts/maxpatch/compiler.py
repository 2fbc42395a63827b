# SPDX-License-Identifier: Apache-2.0
"""Mojo packages compiled with the release's own compiler, and kept.

Old code must not mix with new, and Mojo has three ways to mix them:

- A package that is rebuilt could find the released form of one that it imports
  and that is rebuilt too.
- Mojo takes a package's name from the file it writes. Where that has another
  name, a package that imports a module of its own by its full name gets the
  installed package's (1.0.0b2; 1.0.0 and 1.2.0 stop).
- A compiled package remembers the path that its sources were given by. Where
  something is there, its dependents take that (1.0.0b2 and 1.0.0).

So each package is compiled against a folder made for it, which has of the
packages that are rebuilt only the new ones that it imports; the file has the
package's name; and the path is a relative one, of a folder that goes.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from time import perf_counter

from uv import find_uv_bin

from .errors import CompileError, MaxPatchError, ProcessError
from .mojo import INIT, Package, Step, sha256
from .process import install_hint, kill_running, run
from .release import Release
from .series import Patch
from .wheel import Wheel

_SUFFIX = ".mojoc"
_LAYOUT = 1
"""Raised when the same inputs are compiled in another way."""

_SHOWN = 5
"""How many of the compiler's errors a message shows."""

_ERROR = re.compile(
    r"^(?P<file>[^\s:][^\n:]*\.mojo)(?P<place>:\d+:\d+): error: (?P<text>.*)$",
    re.MULTILINE,
)
_UNLOCATED = re.compile(r"unable to locate module '(\w+)'")
_VERSIONS = "bazel/mojo.MODULE.bazel"
_VERSION = re.compile(r'^(MAX|MOJO)_PACKAGE_VERSION = "([^"]+)"', re.MULTILINE)
_BUILD = re.compile(rb"[0-9a-f]{64}")
"""What a compiled package's head has of the compiler that wrote it."""


class Compiler:
    """A release's Mojo compiler, in a folder of its own."""

    def __init__(self, version: str, folder: Path) -> None:
        """Takes a compiler that is there.

        Args:
            version: Its version, as ``mojo-compiler`` has it.
            folder: The folder that it was installed in.

        Raises:
            CompileError: It isn't that version, or isn't whole.
        """
        self.version = version
        self._root = folder / "modular"
        hint = f"delete {shlex.quote(str(folder))} and run again"
        if damaged := _damaged(folder):
            raise CompileError(
                f"the compiler in {folder} is damaged: expected {damaged} as "
                "it was installed",
                hint=hint,
            )
        try:
            found = self.run("--version").split()[1]
        except (MaxPatchError, IndexError) as error:
            raise CompileError(
                f"the compiler in {folder} does not run: {error}", hint=hint
            ) from error
        if found != version:
            raise CompileError(
                f"wrong compiler in {folder}: expected Mojo {version}, "
                f"found {found}",
                hint=hint,
            )

    @classmethod
    def install(
        cls, version: str, folder: Path, *, scratch: Path, offline: bool
    ) -> Compiler:
        """Returns the compiler in a folder, put there first if it isn't.

        Args:
            version: The version of ``mojo-compiler``.
            folder: Where it is, or goes.
            scratch: A folder to install it in, on the same file system.
            offline: Whether only uv's cache may be used.

        Raises:
            CompileError: It can't be had, or isn't that version.
        """
        if not folder.is_dir():
            part = scratch / folder.name
            command: list[str | Path] = [find_uv_bin(), "pip", "install"]
            command += ["--quiet", *(["--offline"] if offline else [])]
            command += ["--python", sys.executable, "--target", part]
            command += [f"mojo-compiler=={version}"]
            try:
                # A uv.toml of the folder we were called from is not ours.
                run(command, cwd=scratch)
            except ProcessError as error:
                raise CompileError(
                    f"cannot install mojo-compiler {version}:\n"
                    + textwrap.indent(error.output.strip(), "  "),
                    hint=install_hint(error.output, offline=offline),
                ) from error
            _keep(part, folder)
        return cls(version, folder)

    @property
    def libraries(self) -> list[Path]:
        """The packages that come with it."""
        return sorted((self._root / "lib" / "mojo").glob(f"*{_SUFFIX}"))

    def precompile(self, package: str, output: Path, path: Path) -> None:
        """Compiles a package.

        Args:
            package: The package's folder, in the folder that ``output``'s
                parent is.
            output: The file to write, named for the package.
            path: The folder of the packages that can be imported.

        Raises:
            ProcessError: It doesn't compile.
        """
        self.run(
            *("precompile", "--disable-warnings", package),
            *("-o", output),
            cwd=output.parent,
            path=path,
        )

    def run(
        self,
        *words: str | Path,
        cwd: Path | None = None,
        path: Path | None = None,
    ) -> str:
        """Runs the compiler, closed to the user's settings of it.

        Args:
            words: Its arguments.
            cwd: The working directory.
            path: The folder of the packages that can be imported.

        Raises:
            ProcessError: It failed.
        """
        kept = {k: v for k, v in os.environ.items() if k[:8] != "MODULAR_"}
        root = os.fspath(self._root)
        return run(
            [self._root / "bin" / "mojo", *words],
            cwd=cwd,
            env={
                **kept,
                "MODULAR_MAX_PACKAGE_ROOT": root,
                "MODULAR_MOJO_MAX_PACKAGE_ROOT": root,
                "MODULAR_MOJO_MAX_IMPORT_PATH": os.fspath(path or root),
            },
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """Where sources come from, in words for who must mend them."""

    source: Path
    release: Release
    patches: Collection[Patch]
    """The patches that were applied."""

    def changed_by(self, path: str) -> set[str]:
        """Returns the names of the patches that change a file."""
        return {
            patch.name
            for patch in self.patches
            if any(target.path == path for target in patch.targets)
        }

    def described(self) -> str:
        """Returns what the source says it is, and what the release is."""
        file = self.source / _VERSIONS
        text = file.read_text(errors="replace") if file.is_file() else ""
        found = [" ".join(pair) for pair in _VERSION.findall(text)]
        says = (
            f"is {', '.join(found)} ({_VERSIONS})"
            if found
            else f"does not say what it is ({_VERSIONS})"
        )
        release = self.release
        commits = release.source_commits
        return (
            f"{self.source} {says}; the release is "
            f"MAX {release.version} with Mojo {release.mojo_compiler}, "
            f"{release.upstream_tag} of modular/modular"
            + (f", commits {commits}" if commits else "")
        )


@dataclass(frozen=True, slots=True)
class Built:
    """A rebuilt package."""

    step: Step
    file: Path
    """The compiled package, in the cache."""

    cached: bool
    """Whether it was compiled before."""

    seconds: float


class Workshop:
    """Where packages of a release are rebuilt, and kept by their inputs."""

    def __init__(
        self,
        base: Wheel,
        digest: str,
        compiler: Compiler,
        *,
        kept: Path,
        scratch: Path,
        origin: Origin,
    ) -> None:
        """Prepares the release's packages to be imported.

        Args:
            base: The release's wheel of Mojo packages.
            digest: Its SHA-256.
            compiler: The release's compiler.
            kept: The folder of the packages that were built.
            scratch: A folder to build them in, on the same file system.
            origin: Where their sources come from, for messages.

        Raises:
            CompileError: The compiler isn't the one that wrote the packages.
        """
        self._base = base
        self._digest = digest
        self._compiler = compiler
        self._kept = kept
        self._scratch = scratch
        self._origin = origin
        self._released = kept / f"base-{digest[:16]}"
        kept.mkdir(parents=True, exist_ok=True)
        released = {
            f"{name}{_SUFFIX}": base.read(member)
            for name, member in members(base).items()
        }
        if not _is_kept(self._released, released):
            shutil.rmtree(self._released, ignore_errors=True)
            part = self._fresh()
            for name, data in released.items():
                (part / name).write_bytes(data)
            _keep(part, self._released)
        self._check_compiler()

    def _check_compiler(self) -> None:
        builds = {
            build
            for file in [*self._libraries(), *self._compiler.libraries]
            if (build := _BUILD.search(_head(file)))
        }
        found = {build[0].decode() for build in builds}
        if len(found) > 1:
            raise CompileError(
                f"Mojo {self._compiler.version} is not the compiler that "
                f"wrote the packages of {self._base.path.name}: expected one "
                f"build, found {', '.join(sorted(b[:12] for b in found))}",
                hint="correct mojo-compiler in build/releases.toml",
            )

    def _libraries(self) -> list[Path]:
        return sorted(self._released.glob(f"*{_SUFFIX}"))

    def importers(
        self, names: Collection[str], others: Collection[str]
    ) -> list[str]:
        """Returns which compiled packages of the release import one of others.

        The compiler is asked to load them without the others.
        """
        found = list(names)
        if not found or self._loads(found, others):
            return []
        return [name for name in found if not self._loads([name], others)]

    def _loads(self, names: Collection[str], hidden: Collection[str]) -> bool:
        folder = self._fresh()
        (folder / "probe").mkdir()
        lines = [f"import {name}\n" for name in names]
        (folder / "probe" / INIT).write_text("".join(lines))
        path = self._link(folder / "path", hidden, {})
        try:
            self._compiler.precompile("probe", folder / "probe.mojoc", path)
        except ProcessError as error:
            if {*_UNLOCATED.findall(error.output)} & {*hidden}:
                return False
            raise CompileError(
                f"cannot tell what {', '.join(names)} import: {error}"
            ) from error
        return True

    def _fresh(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._scratch))

    def _link(
        self, folder: Path, hidden: Collection[str], new: Mapping[str, Path]
    ) -> Path:
        """Makes the folder that a package is compiled against."""
        folder.mkdir()
        for file in [*self._compiler.libraries, *self._libraries()]:
            if file.stem not in hidden:
                (folder / file.name).symlink_to(file.resolve())
        for name, file in new.items():
            (folder / f"{name}{_SUFFIX}").symlink_to(file.resolve())
        return folder

    def rebuild(self, steps: Collection[Step]) -> dict[str, Built]:
        """Compiles packages, side by side where none needs the other.

        Args:
            steps: What is rebuilt, as :func:`plan` returns it.

        Raises:
            CompileError: A package doesn't compile, or they import each other.
        """
        todo = {step.package.name: step for step in steps}
        order = TopologicalSorter({n: step.after for n, step in todo.items()})
        try:
            order.prepare()
        except CycleError as error:
            raise CompileError(
                f"Mojo packages import each other: {' -> '.join(error.args[1])}"
            ) from error
        done: dict[str, Built] = {}
        running: dict[Future[Built], str] = {}
        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            while order.is_active():
                for name in order.get_ready():
                    after = {other: done[other] for other in todo[name].after}
                    future = pool.submit(self._make, todo[name], after, {*todo})
                    running[future] = name
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(future)
                    done[name] = future.result()
                    order.done(name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_running()
            raise
        finally:
            pool.shutdown()
        return {name: done[name] for name in todo}

    def _make(
        self, step: Step, after: Mapping[str, Built], hidden: Collection[str]
    ) -> Built:
        start = perf_counter()
        name = step.package.name
        new = {other: built.file for other, built in after.items()}
        inputs = {
            "layout": _LAYOUT,
            "compiler": self._compiler.version,
            "package": name,
            "sources": step.package.digest,
            "base": self._digest,
            "hidden": sorted(hidden),
            "new": {o: sha256(file.read_bytes()) for o, file in new.items()},
        }
        key = sha256(json.dumps(inputs, sort_keys=True).encode())[:32]
        kept = self._kept / key
        file = kept / f"{name}{_SUFFIX}"
        if _is_true(file):
            return Built(step, file, True, 0.0)
        folder = self._fresh()
        for path, data in step.package.sources.items():
            target = folder / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        written = folder / file.name
        links = self._link(folder / "path", hidden, new)
        try:
            self._compiler.precompile(name, written, links)
        except ProcessError as error:
            raise self._explained(step.package, error) from error
        part = folder / "kept"
        part.mkdir()
        written.rename(part / file.name)
        _digest_of(part / file.name).write_text(
            sha256((part / file.name).read_bytes())
        )
        if not _is_true(file):
            shutil.rmtree(kept, ignore_errors=True)
            _keep(part, kept)
        return Built(step, file, False, perf_counter() - start)

    def _explained(self, package: Package, error: ProcessError) -> CompileError:
        """Returns a failed compilation as an error that says whose it is."""
        errors: list[str] = []
        first: set[str] = set()
        for match in _ERROR.finditer(error.output):
            path = match["file"]
            if path.startswith(f"{package.name}/"):
                path = package.folder + path.removeprefix(package.name)
            if not errors:
                first = self._origin.changed_by(path)
            errors.append(f"{path}{match['place']}: {match['text']}")
        if len(errors) > _SHOWN:
            errors[_SHOWN:] = [f"and {len(errors) - _SHOWN} more"]
        lines = errors or error.output.strip().splitlines()[-_SHOWN:]
        names = ", ".join(sorted(first))
        steps = [
            f"check out {self._origin.release.upstream_tag}, without local "
            "changes",
            "correct the patches of the package",
        ]
        return CompileError(
            f"the Mojo package {package.name} does not compile with "
            f"Mojo {self._compiler.version}:\n  "
            + "\n  ".join(lines)
            + (f"\nthe first file is patched by {names}" if names else "")
            + f"\n{self._origin.described()}",
            hint=", or ".join(reversed(steps) if names else steps),
        )


def members(base: Wheel) -> dict[str, str]:
    """Returns, by package name, the members of a wheel that are packages."""
    return {
        PurePosixPath(info.filename).stem: info.filename
        for info in base.infos
        if info.filename.endswith(_SUFFIX)
    }


def _digest_of(file: Path) -> Path:
    """Returns where a compiled package's SHA-256 is kept."""
    return file.with_suffix(".sha256")


def _is_true(file: Path) -> bool:
    """Whether a compiled package is there as it was kept."""
    try:
        return sha256(file.read_bytes()) == _digest_of(file).read_text()
    except OSError:  # not there, or not to be read: compile anew
        return False


def _is_kept(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether a folder has some files, and no others."""
    there = {path.name: path for path in folder.glob("*")}
    return there.keys() == files.keys() and all(
        there[name].read_bytes() == data for name, data in files.items()
    )


def _damaged(folder: Path) -> str:
    """Returns an installed file that is gone or of another size, or "".

    The sizes are those of each distribution's RECORD.
    """
    for record in folder.glob("*.dist-info/RECORD"):
        with record.open(newline="") as opened:
            for path, *_, size in filter(None, csv.reader(opened)):
                file = folder / path
                if size and not (
                    file.is_file() and str(file.stat().st_size) == size
                ):
                    return path
    return ""


def _keep(part: Path, folder: Path) -> None:
    """Puts a folder in its place, unless another build was faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        part.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(256)
