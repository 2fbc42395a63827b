# SPDX-License-Identifier: Apache-2.0
"""The whole story: a pinned release in, a verified patched wheel out."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import filecmp
import json
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from . import mojo, provenance, wheel
from .checkout import (
    Checkout,
    apply_source,
    changed_members,
    check_source,
)
from .compiler import Built, Compiler, Origin, Workshop
from .compiler import members as libraries_of
from .errors import OutputError
from .overlay import OverlayPackage, check_collisions
from .overlay import load as load_overlay
from .plain import Plain, is_plain
from .release import (
    Release,
    Releases,
    WheelPin,
    fetch,
    host_platform,
    host_python,
    sha256_of,
)
from .series import Patch, Selection, Series, State
from .verify import Verification, verify

CACHE_VARIABLE = "MAXPATCH_CACHE"
"""Names the folder of downloaded wheels, if it isn't build/work/downloads."""


@dataclass(frozen=True, slots=True)
class Project:
    """The repository that holds series, overlay and release table."""

    root: Path

    @property
    def work(self) -> Path:
        """Where scratch trees, locks, reports and downloads live."""
        return self.root / "build" / "work"

    @property
    def cache(self) -> Path:
        """Where downloaded wheels are kept."""
        named = os.environ.get(CACHE_VARIABLE)
        return Path(named) if named else self.work / "downloads"

    @property
    def series_number(self) -> int:
        """The N of the built wheels' versions: the project's version."""
        return int(self._table["version"])

    @property
    def requires_python(self) -> str:
        """The range of Pythons that the project's own code is written for."""
        return str(self._table["requires-python"])

    @property
    def _table(self) -> dict[str, Any]:
        table = tomllib.loads((self.root / "pyproject.toml").read_text())
        found: dict[str, Any] = table["project"]
        return found

    def releases(self) -> Releases:
        """Reads the release table."""
        return Releases.load(self.root / "build" / "releases.toml")

    def series(self) -> Series:
        """Reads the series and checks that every patch has a release."""
        series = Series.load(self.root / "patches" / "max")
        series.check_used(Version(v) for v in self.releases().rows)
        return series

    def overlay(self) -> list[OverlayPackage]:
        """Reads the overlay packages."""
        return load_overlay(self.root / "overlay")


@dataclass(frozen=True, slots=True)
class Request:
    """What to build."""

    release: str | None = None
    """A version in the release table; its default if None."""

    python: str = field(default_factory=host_python)
    platform: str = field(default_factory=host_platform)
    source: Path | None = None
    """A MAX source checkout, to rebuild Mojo packages from."""

    inexact: bool = False
    """Whether the checkout's Python may differ from the release's."""

    output: Path = Path("dist")
    offline: bool = False
    keep: bool = False
    """Whether the scratch folder outlives the build."""


@dataclass(slots=True)
class Steps:
    """Names the step in progress and adds up the seconds of each name."""

    announce: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def step(self, name: str, detail: str) -> Iterator[None]:
        """Times a step."""
        self.announce(f"{name:<8}{detail}")
        start = time.perf_counter()
        yield
        seconds = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.seconds[name] = round(seconds, 3)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that decides what is built."""

    series_number: int
    requires_python: str
    release: Release
    pin: WheelPin
    selections: list[Selection]
    overlay: list[tuple[OverlayPackage, State, str]]

    @classmethod
    def resolve(cls, project: Project, request: Request) -> Inputs:
        """Selects release, wheel, patches and overlay for a request."""
        release = project.releases().get(request.release)
        return cls(
            series_number=project.series_number,
            requires_python=project.requires_python,
            release=release,
            pin=release.wheel(request.python, request.platform),
            selections=project.series().select(
                release.version, source=request.source is not None
            ),
            overlay=[(p, *p.state(release.version)) for p in project.overlay()],
        )

    @property
    def applied(self) -> list[Patch]:
        """The patches that are applied, in order."""
        return [s.patch for s in self.selections if s.state is State.APPLIED]

    @property
    def patches(self) -> list[Patch]:
        """Those that change the wheel of ``max``."""
        return [patch for patch in self.applied if not patch.mojo_packages]

    @property
    def mojo_patches(self) -> list[Patch]:
        """Those that change sources of Mojo packages."""
        return [patch for patch in self.applied if patch.mojo_packages]

    @property
    def packages(self) -> list[OverlayPackage]:
        """The overlay packages that are added."""
        return [p for p, state, _ in self.overlay if state is State.APPLIED]

    @property
    def version(self) -> str:
        """The built wheel's version."""
        return provenance.version(
            self.release,
            self.series_number,
            self.pin,
            self.patches,
            self.packages,
        )

    @property
    def filename(self) -> str:
        """The built wheel's file name."""
        return _filename(self.pin, self.version)

    @property
    def plain(self) -> Plain | None:
        """The plain wheel, if the release's overlay has architectures."""
        return Plain.of(self.packages, self.series_number, self.requires_python)


@dataclass(frozen=True, slots=True)
class Packed:
    """A wheel that was packed, in the scratch folder."""

    path: Path
    base: Path
    """The wheel that it was made from."""

    version: str


@dataclass(frozen=True, slots=True)
class Libraries:
    """The rebuilt Mojo packages, and the wheel that carries them."""

    wheel: Packed
    built: list[Built]


def _filename(pin: WheelPin, version: str) -> str:
    return f"{pin.filename.split('-')[0]}-{version}-{pin.tag}.whl"


def build(
    project: Project, request: Request, announce: Callable[[str], None]
) -> dict[str, Any]:
    """Builds a patched wheel, or recognises that it is built already.

    Args:
        project: Where series, overlay and releases are.
        request: What to build.
        announce: Takes a line for each step.

    Returns:
        The report: release, wheels, plain wheel, patches, overlay,
        verification, and seconds by step.

    Raises:
        MaxPatchError: Something expected failed. The output folder is as
            before, and so is the source checkout.
    """
    steps = Steps(announce)
    with steps.step("select", "series, overlay and release"):
        inputs = Inputs.resolve(project, request)
    built = request.output / inputs.filename
    recorded = project.work / "reports" / f"{inputs.filename}.json"
    scratch = project.work / inputs.pin.filename.removesuffix(".whl")
    _check_folders(project, request, scratch)
    with _locked(project.work / "locks" / f"{inputs.pin.filename}.lock"):
        with steps.step("reuse", f"look for {inputs.filename}"):
            report = _read_report(recorded, built)
        if report and request.source is None:
            # Not into what an earlier build was asked to keep.
            aside = scratch.with_name(f"{scratch.name}.plain")
            with _scratch(aside, keep=False):
                alone = _pack_plain(project, request, inputs, steps, aside)
                if alone is not None:
                    _move(alone, request.output / alone.name)
            # What was left out then may have other reasons now.
            return {
                **report,
                **_states(inputs),
                "plain": _describe_plain(request, inputs),
                "reused": True,
                "seconds": steps.seconds,
            }
        with _scratch(scratch, keep=request.keep):
            report = _make(project, request, inputs, steps, scratch)
        if request.keep:
            announce(f"kept    {scratch}")
        if request.source is None:
            write_json(recorded, report)
    return report


def _check_folders(project: Project, request: Request, scratch: Path) -> None:
    """Raises OutputError, before any work, if a folder can't serve."""
    for folder in (request.output, request.source):
        if folder and folder.resolve().is_relative_to(scratch.resolve()):
            raise OutputError(
                f"{folder} is in {scratch}, which every build replaces",
                hint="name a folder elsewhere; copy there what is to be kept",
            )
    needed = [request.output, project.work, project.work / "reports"]
    needed += [project.work / "mojo"] if request.source else []
    for folder in needed:
        check_writable(folder)


def _make(
    project: Project,
    request: Request,
    inputs: Inputs,
    steps: Steps,
    scratch: Path,
) -> dict[str, Any]:
    """Packs, checks and verifies, moves to the output, and reports."""
    tree = None
    if request.source is not None:
        with steps.step("source", f"check and patch {request.source}"):
            tree, inputs = _patch_source(
                project, request, inputs, scratch / "source"
            )
        if tree is None:
            steps.announce(
                "no selected patch changes Mojo code: nothing is rebuilt from "
                f"{request.source}"
            )
    alone = _pack_plain(project, request, inputs, steps, scratch)
    packed = [
        Packed(
            pack(project, request, inputs, steps, scratch),
            project.cache / inputs.pin.filename,
            inputs.version,
        )
    ]
    libraries = None
    if tree is not None:
        libraries = pack_libraries(
            project, request, inputs, steps, scratch, tree
        )
        packed.append(libraries.wheel)
    with steps.step("check", "against base and RECORD"):
        for ours in packed:
            wheel.check(ours.path, ours.base, provenance.files(ours.path))
    with steps.step("verify", "install afresh, import, proofs"):
        verification = verify(
            packed[0].path,
            inputs.release,
            inputs.pin,
            inputs.applied,
            folder=scratch / "environment",
            root=project.root,
            offline=request.offline,
            libraries=libraries.wheel.path if libraries else None,
        )
    with steps.step("move", f"into {request.output}"):
        # The wheel of `max` last: it is what a build is known by.
        moved = [ours.path for ours in reversed(packed)]
        for path in filter(None, [alone, *moved]):
            _move(path, request.output / path.name)
    return _report(request, inputs, packed, libraries, verification, steps)


def _pack_plain(
    project: Project,
    request: Request,
    inputs: Inputs,
    steps: Steps,
    scratch: Path,
) -> Path | None:
    """Packs the plain wheel, unless there is none or it is there already."""
    if inputs.plain is None:
        return None
    with steps.step("plain", inputs.plain.filename):
        packed = inputs.plain.pack(project.root, scratch)
        built = request.output / packed.name
        if built.is_file() and filecmp.cmp(packed, built, shallow=False):
            return None
        inputs.plain.check(packed)
    return packed


def _patch_source(
    project: Project, request: Request, inputs: Inputs, folder: Path
) -> tuple[mojo.Tree | None, Inputs]:
    """Checks a source checkout and applies the patches of Mojo code.

    Returns:
        The patched tree, if there are such patches, and the inputs without
        those that it has already.
    """
    assert request.source is not None
    base = fetch(inputs.pin, project.cache, offline=request.offline)
    paths = {t.path for p in inputs.patches for t in p.targets}
    with wheel.Wheel(base) as opened:
        check_source(request.source, opened, paths, inexact=request.inexact)
    if not inputs.mojo_patches:
        return None, inputs
    patched = apply_source(request.source, inputs.mojo_patches, folder)
    selections = [
        replace(chosen, state=State.LANDED, reason=patched.landed[name])
        if (name := chosen.patch.name) in patched.landed
        else chosen
        for chosen in inputs.selections
    ]
    return mojo.Tree(request.source, patched), replace(
        inputs, selections=selections
    )


def verify_built(
    project: Project, path: Path, folder: Path, *, offline: bool
) -> Verification:
    """Verifies a wheel that was built before.

    Args:
        project: Where series, overlay and releases are.
        path: The wheel.
        folder: An empty folder for the fresh environment.
        offline: Whether only caches may be used.

    Raises:
        MaxPatchError: It isn't one of ours, isn't true to its metadata, or
            doesn't work.
    """
    if is_plain(path):
        wheel.check(path)
        return Verification(False, (), "a plain wheel is made without MAX")
    table = provenance.read(path)
    release = project.releases().get(table["release"])
    pin = WheelPin(table["base"]["filename"], table["base"]["sha256"])
    base = fetch(pin, project.cache, offline=offline)
    wheel.check(path, base, provenance.files(path))
    carried = {row["sha256"] for row in table["patches"]}
    is_libraries = pin == release.mojo_libs
    if is_libraries:
        # They are installed with the released wheel of `max`.
        pin = release.wheel(host_python(), host_platform())
        base = fetch(pin, project.cache, offline=offline)
    return verify(
        base if is_libraries else path,
        release,
        pin,
        [p for p in project.series().patches if p.sha256 in carried],
        folder=folder / "environment",
        root=project.root,
        offline=offline,
        libraries=path if is_libraries else None,
    )


def lay_out(
    project: Project, request: Request, folder: Path, *, whole: bool
) -> tuple[Checkout, Inputs]:
    """Makes a scratch repository with the series applied, a commit a patch.

    Args:
        project: Where series, overlay and releases are.
        request: What to build.
        folder: The repository's folder.
        whole: Whether all files of MAX are laid out, or only those that the
            patches change.
    """
    inputs = Inputs.resolve(project, request)
    base = fetch(inputs.pin, project.cache, offline=request.offline)
    with wheel.Wheel(base) as opened:
        try:
            return _apply(inputs, opened, folder, whole=whole), inputs
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _apply(
    inputs: Inputs,
    base: wheel.Wheel,
    folder: Path,
    *,
    whole: bool,
) -> Checkout:
    paths = {t.path for p in inputs.patches for t in p.targets}
    checkout = Checkout(folder, f"max {inputs.release.version}")
    checkout.lay_out(base, None if whole else paths)
    for patch in inputs.patches:
        checkout.apply(patch)
    return checkout


def pack(
    project: Project,
    request: Request,
    inputs: Inputs,
    steps: Steps,
    scratch: Path,
) -> Path:
    """Fetches, applies, adds the overlay and packs.

    Args:
        project: Where series, overlay and releases are.
        request: What to build.
        inputs: What :meth:`Inputs.resolve` made of the request.
        steps: Times the steps.
        scratch: An existing folder for the scratch tree and the wheel.

    Returns:
        The packed wheel, not verified.

    Raises:
        MaxPatchError: A step failed.
    """
    with steps.step("fetch", inputs.pin.filename):
        path = fetch(inputs.pin, project.cache, offline=request.offline)
    with wheel.Wheel(path) as base:
        patches = inputs.patches
        with steps.step("apply", f"{len(patches)} patches"):
            tree = scratch / "tree"
            checkout = _apply(inputs, base, tree, whole=False)
            changed, new = changed_members(checkout, patches, base)
        count = sum(len(package.files) for package in inputs.packages)
        with steps.step("overlay", f"{count} files"):
            check_collisions(
                inputs.packages, [*base.installed_paths(), *new], path.name
            )
            added = {**new}
            for package in inputs.packages:
                added |= package.files
        with steps.step("pack", inputs.filename):
            packed = scratch / inputs.filename
            about = provenance.document(
                inputs.release,
                inputs.version,
                inputs.pin,
                patches,
                before={member: base.read(member) for member in changed},
                changed=changed,
                added=added,
            )
            notice = provenance.notice(
                inputs.release, patches, list(changed), list(added)
            )
            wheel.repack(
                base,
                packed,
                inputs.version,
                changed=changed,
                added=added,
                metadata={provenance.FILENAME: about, "NOTICE": notice},
            )
    return packed


def pack_libraries(
    project: Project,
    request: Request,
    inputs: Inputs,
    steps: Steps,
    scratch: Path,
    tree: mojo.Tree,
) -> Libraries:
    """Rebuilds the Mojo packages that patches change, and packs them.

    Also those of patches that the source has and the release has not.

    Args:
        project: Where series, overlay and releases are.
        request: What to build.
        inputs: What the request was made of.
        steps: Times the steps.
        scratch: An existing folder for the wheel.
        tree: The patched source checkout.

    Raises:
        MaxPatchError: A step failed.
    """
    release, pin = inputs.release, inputs.release.mojo_libs
    patches = inputs.mojo_patches
    path = fetch(pin, project.cache, offline=request.offline)
    with wheel.Wheel(path) as base:
        built = _rebuild(project, request, inputs, steps, scratch, tree, base)
        members = libraries_of(base)
        changed = {
            members[one.step.package.name]: one.file.read_bytes()
            for one in built
        }
        sources = {
            one.step.package.name: one.step.package.digest for one in built
        }
        version = provenance.version(
            release, inputs.series_number, pin, patches, [], sources
        )
        packed = scratch / _filename(pin, version)
        with steps.step("pack", packed.name):
            stem = "-".join(packed.name.split("-")[:2])
            renamed = {m: base.renamed(stem, m) for m in changed}
            about = provenance.document(
                release,
                version,
                pin,
                patches,
                before={renamed[m]: base.read(m) for m in changed},
                changed={renamed[m]: data for m, data in changed.items()},
                added={},
                mojo=sources,
            )
            notice = provenance.notice(
                release, patches, list(map(base.installed, changed)), []
            )
            wheel.repack(
                base,
                packed,
                version,
                changed=changed,
                added={},
                metadata={
                    provenance.FILENAME: about,
                    "NOTICE": notice,
                    **_terms(project, inputs),
                },
            )
    return Libraries(Packed(packed, path, version), built)


def _rebuild(
    project: Project,
    request: Request,
    inputs: Inputs,
    steps: Steps,
    scratch: Path,
    tree: mojo.Tree,
    base: wheel.Wheel,
) -> list[Built]:
    """Compiles the Mojo packages that must be, against the released ones."""
    release = inputs.release
    kept = project.work / "mojo"
    with steps.step("tools", f"Mojo {release.mojo_compiler}"):
        compiler = Compiler.install(
            release.mojo_compiler,
            kept / f"compiler-{release.mojo_compiler}",
            scratch=scratch,
            offline=request.offline,
        )
    shop = Workshop(
        base,
        release.mojo_libs.sha256,
        compiler,
        kept=kept,
        scratch=scratch,
        origin=Origin(tree.source, release, inputs.mojo_patches),
    )
    with steps.step("plan", "which Mojo packages are rebuilt"):
        todo = mojo.plan(tree, libraries_of(base), shop.importers)
    with steps.step("compile", ", ".join(s.package.name for s in todo)):
        return list(shop.rebuild(todo).values())


def _terms(project: Project, inputs: Inputs) -> dict[str, bytes]:
    """Returns MAX's terms, which its wheel of Mojo packages doesn't carry."""
    with wheel.Wheel(project.cache / inputs.pin.filename) as opened:
        there = {info.filename for info in opened.infos}
        return {
            name: opened.read(member)
            for name in ("LICENSE", "Third-Party-Notices")
            if (member := f"{opened.dist_info}/{name}") in there
        }


def _report(
    request: Request,
    inputs: Inputs,
    packed: list[Packed],
    libraries: Libraries | None,
    verification: Verification,
    steps: Steps,
) -> dict[str, Any]:
    built = libraries.built if libraries else []
    return {
        "release": str(inputs.release.version),
        "source": str(request.source) if request.source else None,
        "inexact": request.inexact,
        "reused": False,
        "wheels": [
            _described(request.output / ours.path.name, ours.version)
            for ours in packed
        ],
        "plain": _describe_plain(request, inputs),
        **_states(inputs),
        "mojo": [
            {
                "package": one.step.package.name,
                "reason": one.step.reason,
                "compiler": inputs.release.mojo_compiler,
                "sources": one.step.package.digest,
                "cached": one.cached,
                "seconds": round(one.seconds, 3),
            }
            for one in built
        ],
        "verification": asdict(verification),
        "seconds": steps.seconds,
    }


def _described(path: Path, version: str) -> dict[str, Any]:
    return {
        "path": str(path),
        "sha256": sha256_of(path),
        "size": path.stat().st_size,
        "version": version,
    }


def _describe_plain(request: Request, inputs: Inputs) -> dict[str, Any] | None:
    if inputs.plain is None:
        return None
    path = request.output / inputs.plain.filename
    return _described(path, str(inputs.series_number))


def _states(inputs: Inputs) -> dict[str, Any]:
    return {
        "patches": [
            {"name": s.patch.name, "state": s.state, "reason": s.reason}
            for s in inputs.selections
        ],
        "overlay": [
            {
                "name": package.name,
                "state": state,
                "reason": reason,
                "files": sorted(package.files),
            }
            for package, state, reason in inputs.overlay
        ],
    }


def write_json(path: Path, table: object) -> None:
    """Writes JSON in one rename.

    Raises:
        OutputError: The file can't be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(table, indent=2) + "\n")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def _read_report(recorded: Path, built: Path) -> dict[str, Any] | None:
    """Returns the report of an earlier build whose wheel is still as it was."""
    if not (recorded.is_file() and built.is_file()):
        return None
    try:
        report: dict[str, Any] = json.loads(recorded.read_text())
    except ValueError:  # damaged: build anew
        return None
    (described,) = report["wheels"]
    if sha256_of(built) != described["sha256"]:
        return None
    described["path"] = str(built)
    return report


def check_writable(folder: Path) -> None:
    """Raises OutputError, before any work, if a folder can't be written."""
    there = folder
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise OutputError(f"cannot write {folder}: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {folder}: no permission in {there}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that the system drops if the build is killed.

    Raises:
        OutputError: Another build holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"another build of {path.stem} is running: it holds {path}",
                hint="wait for it to end and run again",
            ) from error
        yield


@contextlib.contextmanager
def _scratch(folder: Path, *, keep: bool) -> Iterator[None]:
    """Makes a fresh scratch folder; a killed build's one is replaced."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        if not keep:
            shutil.rmtree(folder)


def _move(packed: Path, built: Path) -> None:
    """Moves a wheel into the output folder in one rename."""
    part = built.with_name(f".{built.name}.part")
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        try:
            packed.replace(built)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copyfile(packed, part)
            part.replace(built)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise OutputError(f"cannot write {built}: {error.strerror}") from error
