# SPDX-License-Identifier: Apache-2.0
"""A toy release of MAX, a toy project that patches it, and real patches.

The wheels have what makes MAX's own hard to repack: a ``.data/platlib`` with a
shared object, an executable, stored and deflated members, lines that end in
CRLF or in spaces, and two functions so alike that a hunk fits both.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from maxpatch.build import Project
from maxpatch.release import host_platform, host_python

PLATFORM = host_platform()
FOREIGN = "linux-aarch64" if PLATFORM != "linux-aarch64" else "linux-x86_64"
"""A platform whose wheel can be built but not installed here."""

MOJO_COMPILER = "9.9"
COMPILER_BUILD = "c0" * 32
"""What the toy compiler writes into the head of each package."""

SCRATCH = {"downloads", "locks", "mojo", "reports"}
"""What may stay in build/work after a build."""

_SYSTEM_TAGS = {"linux": "manylinux_2_17", "macos": "macosx_11_0"}


def tag(platform: str) -> str:
    """Returns a wheel tag for the running Python, cp311-cp311-..."""
    python = f"cp{host_python().replace('.', '')}"
    system, _, machine = platform.partition("-")
    return f"{python}-{python}-{_SYSTEM_TAGS[system]}_{machine}"


@dataclass(frozen=True)
class Member:
    """One member of a wheel that is written."""

    name: str
    data: bytes
    mode: int = 0o100644
    compression: int = zipfile.ZIP_DEFLATED


def record_row(name: str, data: bytes) -> str:
    """Returns RECORD's line for a member."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"{name},sha256={digest.decode().rstrip('=')},{len(data)}\n"


def record_of(members: Iterable[Member], stem: str) -> Member:
    """Returns the RECORD that is true for some members."""
    name = f"{stem}.dist-info/RECORD"
    rows = [record_row(m.name, m.data) for m in members if m.name != name]
    return Member(name, "".join([*rows, f"{name},,\n"]).encode())


def write_zip(path: Path, members: Iterable[Member]) -> Path:
    """Writes members as they are, RECORD included if it is among them."""
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            info = zipfile.ZipInfo(member.name, (2020, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = member.mode << 16
            info.compress_type = member.compression
            archive.writestr(info, member.data)
    return path


def write_wheel(path: Path, members: Iterable[Member]) -> Path:
    """Writes a wheel and the RECORD that is true for it."""
    there = list(members)
    stem = "-".join(path.name.split("-")[:2])
    return write_zip(path, [*there, record_of(there, stem)])


def read_members(path: Path) -> list[Member]:
    """Returns the members of a zip file."""
    with zipfile.ZipFile(path) as archive:
        return [
            Member(
                info.filename,
                archive.read(info),
                info.external_attr >> 16,
                info.compress_type,
            )
            for info in archive.infolist()
        ]


def _code(text: str) -> bytes:
    return textwrap.dedent(text).lstrip("\n").encode()


TWINS = _code(
    '''
    """Two functions that look the same around their middle."""


    def encode(x: float) -> float:
        factor = 2
        y = x * factor
        return y


    def decode(x: float) -> float:
        factor = 2
        y = x * factor
        return y


    def main() -> None:
        print(decode(4))
    '''
)
ENDINGS = (
    b'"""Lines that a careless tool would rewrite."""\r\n'
    b"\r\n"
    b"WIDTH = 1   \r\n"
    b"HEIGHT = 1\t\n"
    b"DEPTH = 1\r\n"
)
SCALES = b'"""Scales."""\n\nSCALE = 1\nBIAS = 0\n'
SCALES_FIXED = SCALES.replace(b"SCALE = 1", b"SCALE = 2")

PYTHON_ROOT = "max/python/"
DECODED = TWINS[::-1].replace(b"rotcaf * x"[::1], b"rotcaf / x", 1)[::-1]
"""The twins with the second one changed."""

GUARDED = DECODED.replace(b"    print(decode(4))", b"    print(decode(8))")


def max_members(version: str, platform: str) -> list[Member]:
    """Returns a toy MAX wheel's members, RECORD aside."""
    stem = f"max-{version}"
    info = f"{stem}.dist-info"
    noise = random.Random(f"{version} {platform}").randbytes(100_000)
    scales = SCALES if version == "1.0" else SCALES_FIXED
    return [
        Member(
            "max/__init__.py",
            f'"""A toy."""\n\n__version__ = "{version}"\n'.encode(),
        ),
        Member("max/layers.py", TWINS),
        Member("max/layers.pyi", b"def decode(x: float) -> float: ...\n"),
        Member("max/legacy.py", b'"""Nobody needs this."""\n'),
        Member("max/endings.py", ENDINGS),
        Member("max/nn/__init__.py", scales, 0o100644, zipfile.ZIP_STORED),
        Member("max/tool.sh", b"#!/bin/sh\necho tool\n", 0o100755),
        Member(f"{stem}.data/platlib/max/_core.so", noise, 0o100755),
        Member(
            f"{stem}.data/purelib/mojo_compiler-{MOJO_COMPILER}.dist-info"
            "/METADATA",
            "Metadata-Version: 2.1\nName: mojo-compiler\n"
            f"Version: {MOJO_COMPILER}\n".encode(),
        ),
        Member(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: toy 1.0\n"
            f"Root-Is-Purelib: false\nTag: {tag(platform)}\n".encode(),
        ),
        Member(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: max\nVersion: {version}\n"
            "Summary: A toy\nProvides-Extra: serve\n\n"
            f"Version: {version}\nis also said in the text.\n".encode(),
        ),
        Member(
            f"{info}/entry_points.txt",
            b"[console_scripts]\nmax = max.layers:main",
        ),
        Member(f"{info}/LICENSE", b"The toy's terms.\n"),
    ]


def write_max(folder: Path, version: str, platform: str) -> Path:
    """Writes a toy MAX wheel."""
    path = folder / f"max-{version}-{tag(platform)}.whl"
    return write_wheel(path, max_members(version, platform))


KERNELS = "max/kernels/src/"
MOJO = {
    f"{KERNELS}base/__init__.mojo": b"comptime K = 1\n\n\n"
    b"def one() -> Int:\n    return 1\n",
    f"{KERNELS}nn/__init__.mojo": b"from base import one\nfrom .x import f\n",
    f"{KERNELS}nn/x.mojo": b"def f():\n    pass\n",
    f"{KERNELS}top/__init__.mojo": b"from nn import f\n",
}
"""The sources of the toy release's Mojo packages."""

_COMPILER = """
#!/usr/bin/env python3
# Like mojo: `--version`, and `precompile --disable-warnings PACKAGE -o FILE`.
import os, pathlib, re, sys

if sys.argv[1] == "--version":
    print("Mojo VERSION (00000000)")
    sys.exit()
_, _, package, _, output = sys.argv[1:]
path = pathlib.Path(os.environ["MODULAR_MOJO_MAX_IMPORT_PATH"])
library = "BUILD " + package
# A package that was written needs what it imports.
known = {f.stem: f.read_text().split()[1:] for f in path.glob("*.mojoc")}
errors = []


def load(name, place):
    if name not in known:
        errors.append(f"{place}: error: unable to locate module '{name}'")
    for other in known.get(name, [name])[1:]:
        if other.startswith("+"):
            load(other[1:], place)


for file in sorted(pathlib.Path(package).rglob("*.mojo")):
    for number, line in enumerate(file.read_text().splitlines(), 1):
        place = f"{file}:{number}:1"
        if "???" in line:
            errors.append(f"{place}: error: use of unknown declaration '???'")
        found = re.match(r"(?:from|import) (\\w+)", line)
        if found and found[1] != package:
            load(found[1], place)
            library += " +" + found[1]
        library += " " + line.replace(" ", "_")
if errors:
    sys.exit("\\n".join([*errors, "mojo: error: failed to parse"]))
pathlib.Path(output).write_text(library)
"""


def compiler_script(version: str, build: str) -> bytes:
    """Returns a program that stands for the Mojo compiler."""
    text = _COMPILER.lstrip().replace("VERSION", version)
    return text.replace("BUILD", build).encode()


def write_compiler(
    folder: Path, version: str = MOJO_COMPILER, build: str = COMPILER_BUILD
) -> Path:
    """Writes a toy wheel of ``mojo-compiler``."""
    stem = f"mojo_compiler-{MOJO_COMPILER}"
    members = [
        Member("modular/bin/mojo", compiler_script(version, build), 0o100755),
        Member("modular/lib/mojo/std.mojoc", f"{build} std".encode()),
        Member(
            f"{stem}.dist-info/WHEEL",
            b"Wheel-Version: 1.0\nGenerator: toy 1.0\n"
            b"Root-Is-Purelib: true\nTag: py3-none-any\n",
        ),
        Member(
            f"{stem}.dist-info/METADATA",
            b"Metadata-Version: 2.1\nName: mojo-compiler\n"
            b"Version: " + MOJO_COMPILER.encode() + b"\n",
        ),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    return write_wheel(folder / f"{stem}-py3-none-any.whl", members)


def write_libraries(folder: Path, version: str) -> Path:
    """Writes a toy wheel of compiled Mojo packages."""
    stem = f"max_mojo_libs-{version}"
    there = {
        "base": "base",
        "nn": "nn +base",
        "top": "top +nn",
    }
    members = [
        *(
            Member(
                f"{stem}.data/platlib/modular/lib/mojo/{name}.mojoc",
                f"{COMPILER_BUILD} {text} released".encode(),
            )
            for name, text in there.items()
        ),
        Member(
            f"{stem}.dist-info/WHEEL",
            b"Wheel-Version: 1.0\nGenerator: toy 1.0\n"
            b"Root-Is-Purelib: true\nTag: py3-none-any\n",
        ),
        Member(
            f"{stem}.dist-info/METADATA",
            b"Metadata-Version: 2.1\nName: max-mojo-libs\n"
            b"Version: " + version.encode() + b"\n",
        ),
    ]
    return write_wheel(folder / f"{stem}-py3-none-any.whl", members)


def git(folder: Path, *words: str, stdin: bytes = b"") -> bytes:
    """Runs git as a user without any configuration would."""
    return subprocess.run(
        ["git", "-c", "user.name=T", "-c", "user.email=t@t", *words],
        cwd=folder,
        input=stdin,
        check=True,
        capture_output=True,
    ).stdout


def write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files, and the folders they need."""
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


HEADER = {
    "Reason": "temporary",
    "Applies-To": ">=1.0",
    "Upstream-Status": "Pending",
    "Touches-Mojo": "none",
    "Proof": "python -c 'import max'",
    "Last-Update": "2026-11-30",
}


def make_diff(
    folder: Path,
    before: Mapping[str, bytes],
    after: Mapping[str, bytes],
    *options: str,
) -> bytes:
    """Returns git's diff of two trees.

    Args:
        folder: An empty folder to work in.
        before: Content by path.
        after: Content by path.
        options: Options of ``git diff`` in place of the series' own.
    """
    folder.mkdir()
    git(folder, "init", "--quiet")
    # A user's defaults may not be git's own.
    git(folder, "config", "core.autocrlf", "false")
    write_tree(folder, before)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "before")
    for path in before:
        (folder / path).unlink()
    write_tree(folder, after)
    git(folder, "add", "--all")
    return git(
        folder,
        *("diff", "--cached"),
        *(options or ("-U1", "--full-index", "--no-renames")),
    )


def make_patch(subject: str, diff: bytes, **fields: str | None) -> bytes:
    """Returns a patch file with a true header.

    Args:
        subject: The first line of its message.
        diff: What it changes.
        fields: Header fields that differ from ``HEADER``, ``_`` for ``-``;
            None leaves one out.
    """
    changes = {key.replace("_", "-"): value for key, value in fields.items()}
    lines = [
        f"{key}: {value}"
        for key, value in {**HEADER, **changes}.items()
        if value is not None
    ]
    head = "\n".join(
        [
            f"From {'0' * 40} Mon Sep 17 00:00:00 2001",
            "From: MAX AttnQuant <attnquant@example.invalid>",
            "Date: Mon, 30 Nov 2026 00:00:00 +0000",
            f"Subject: [PATCH] {subject}",
            "",
            "The toy needs it.",
            "",
            *lines,
            "---",
            "",
        ]
    )
    return head.encode() + diff


_EDITS: list[tuple[str, dict[str, bytes], dict[str, bytes], dict[str, str]]] = [
    (
        "decode-divides",
        {"max/layers.py": TWINS},
        {"max/layers.py": DECODED},
        {"Proof": "tests/test_decode.py::test_decode_divides"},
    ),
    (
        "decode-eight",
        {"max/layers.py": DECODED},
        {"max/layers.py": GUARDED},
        {},
    ),
    (
        "endings",
        {"max/endings.py": ENDINGS},
        {
            "max/endings.py": ENDINGS.replace(
                b"HEIGHT = 1\t\n", b"HEIGHT = 2  \t\r\n"
            )
        },
        {},
    ),
    ("fresh-module", {}, {"max/fresh.py": b'"""New."""\n\nFRESH = 1\n'}, {}),
    ("drop-legacy", {"max/legacy.py": b'"""Nobody needs this."""\n'}, {}, {}),
    (
        "scale-two",
        {"max/nn/__init__.py": SCALES},
        {"max/nn/__init__.py": SCALES_FIXED},
        {"Upstream-Status": "Accepted [https://example.invalid/7, 2.0]"},
    ),
    (
        "two-only",
        {"max/layers.pyi": b"def decode(x: float) -> float: ...\n"},
        {"max/layers.pyi": b"def decode(x: int) -> float: ...\n"},
        {"Applies-To": ">=2.0,<3"},
    ),
    (
        "kernel",
        {"../kernels/src/nn/x.mojo": MOJO[f"{KERNELS}nn/x.mojo"]},
        {"../kernels/src/nn/x.mojo": b"def f():\n    return\n"},
        {"Touches-Mojo": "nn"},
    ),
]

_PROOF = '''
# SPDX-License-Identifier: Apache-2.0
"""The toy series' proof."""

import os
import subprocess


def test_decode_divides() -> None:
    """The installed decode halves."""
    python = os.environ["MAXPATCH_TEST_PYTHON"]
    check = "from max.layers import decode; assert decode(4) == 2"
    subprocess.run([python, "-I", "-c", check], check=True)
'''


def _in_source(tree: Mapping[str, bytes]) -> dict[str, bytes]:
    return {
        os.path.normpath(PYTHON_ROOT + path): data
        for path, data in tree.items()
    }


def _pin(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f'"{path.name}" = "{digest}"'


def write_project(root: Path, scratch: Path) -> None:
    """Writes a project that patches the toy releases 1.0 and 2.0.

    Args:
        root: The folder to write it in.
        scratch: An empty folder that the patches are made in.
    """
    patches = {}
    for name, before, after, fields in _EDITS:
        diff = make_diff(scratch / name, _in_source(before), _in_source(after))
        options = {
            key.replace("-", "_"): value for key, value in fields.items()
        }
        patches[name] = make_patch(f"[Toy] {name}", diff, **options)
    downloads = root / "build/work/downloads"
    downloads.mkdir(parents=True)
    rows = ['default = "1.0"']
    for version in ("1.0", "2.0"):
        wheels = [write_max(downloads, version, p) for p in (PLATFORM, FOREIGN)]
        libraries = write_libraries(downloads, version)
        rows += [
            f'[release."{version}"]',
            f'mojo-compiler = "{MOJO_COMPILER}"',
            f'upstream-tag = "v{version}"',
            f"redistributable = {'true' if version == '1.0' else 'false'}",
            f'[release."{version}".wheels]',
            *map(_pin, wheels),
            f'[release."{version}".mojo-libs]',
            _pin(libraries),
        ]
    write_tree(
        root,
        {
            "pyproject.toml": b'[project]\nname = "toy"\nversion = "1"\n'
            b'requires-python = ">=3.11"\n',
            "build/releases.toml": ("\n".join(rows) + "\n").encode(),
            "tests/test_decode.py": _PROOF.lstrip().encode(),
            "overlay/README.md": b"Not shipped.\n",
            "overlay/extra/overlay.toml": b'applies-to = ">=1.0,<2"\n'
            b'summary = "One module for 1.0"\n',
            "overlay/extra/__init__.py": b'"""Added."""\n\nEXTRA = 1\n',
            "overlay/extra/kernels/op.mojo": b"def op():\n    pass\n",
            "patches/max/series": (
                "# The toy series.\n\n" + "\n".join(patches) + "\n"
            ).encode(),
            **{f"patches/max/{n}.patch": data for n, data in patches.items()},
            "dist/max-0.9-py3-none-any.whl": b"an older build\n",
        },
    )


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Returns mode and content of everything below a folder."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(folder.rglob("*"))
    }


@dataclass(frozen=True)
class Toy:
    """A toy project in a folder of its own."""

    root: Path
    template: Path
    """The project it was copied from."""

    @property
    def project(self) -> Project:
        """The project, as the builder sees it."""
        return Project(self.root)

    @property
    def dist(self) -> Path:
        """Where its wheels go."""
        return self.root / "dist"

    @property
    def series(self) -> Path:
        """The file that orders the patches."""
        return self.root / "patches/max/series"

    def patch(self, name: str) -> Path:
        """Returns a patch file's path."""
        return self.root / "patches/max" / f"{name}.patch"

    def edit_patch(self, name: str, old: str, new: str) -> None:
        """Replaces text that stands once in a patch file."""
        data = self.patch(name).read_bytes()
        assert data.count(old.encode()) == 1, data
        self.patch(name).write_bytes(data.replace(old.encode(), new.encode()))

    def add_patch(
        self,
        name: str,
        before: Mapping[str, bytes],
        after: Mapping[str, bytes],
        *options: str,
        **fields: str | None,
    ) -> None:
        """Adds a patch to the end of the series.

        Args:
            name: Its name.
            before: Content by path below ``max/python``.
            after: Content by path below ``max/python``.
            options: Options of ``git diff`` in place of the series' own.
            fields: Header fields, as :func:`make_patch` takes them.
        """
        scratch = self.root.parent / f"diff-{name}"
        diff = make_diff(
            scratch, _in_source(before), _in_source(after), *options
        )
        shutil.rmtree(scratch)
        self.patch(name).write_bytes(make_patch(name, diff, **fields))
        with self.series.open("a") as file:
            file.write(f"{name}\n")

    def base(self, version: str = "1.0", platform: str = FOREIGN) -> Path:
        """Returns the path of a release's wheel."""
        name = f"max-{version}-{tag(platform)}.whl"
        return self.root / "build/work/downloads" / name

    def base_libraries(self, version: str = "1.0") -> Path:
        """Returns the path of a release's wheel of Mojo packages."""
        name = f"max_mojo_libs-{version}-py3-none-any.whl"
        return self.root / "build/work/downloads" / name

    def built(self) -> list[Path]:
        """Returns the wheels that were built, newest version last."""
        return sorted(self.dist.glob("max-*+attnquant*.whl"))

    def built_libraries(self) -> list[Path]:
        """Returns the wheels of Mojo packages that were built."""
        return sorted(self.dist.glob("max_mojo_libs-*+attnquant*.whl"))

    @property
    def source(self) -> Path:
        """Where its source checkout is put."""
        return self.root / "source"

    def write_source(self, version: str = "1.0") -> None:
        """Writes a release's Python and Mojo files as a source checkout."""
        python = {
            f"{PYTHON_ROOT}{member.name}": member.data
            for member in max_members(version, FOREIGN)
            if member.name.startswith("max/")
        }
        write_tree(self.source, {**python, **MOJO})

    def inputs(self) -> dict[str, tuple[int, bytes]]:
        """Returns everything that a build may not change."""
        return {
            path: what
            for path, what in snapshot(self.root).items()
            if not path.startswith("build/work")
        }

    def leftovers(self) -> set[str]:
        """Returns what a build left in build/work and shouldn't have."""
        work = self.root / "build/work"
        left = {p.name for p in work.iterdir()} - SCRATCH
        downloads = work / "downloads"
        if downloads.is_dir():
            left |= {p.name for p in downloads.iterdir() if p.suffix != ".whl"}
        return left

    def restore(self) -> None:
        """Puts the project's own files back as they were made."""
        for name in ("patches", "overlay", "tests", "build/work/downloads"):
            shutil.rmtree(self.root / name, ignore_errors=True)
            shutil.copytree(self.template / name, self.root / name)
        for name in ("pyproject.toml", "build/releases.toml"):
            shutil.copyfile(self.template / name, self.root / name)


def give_source(
    toy: Toy,
    monkeypatch: pytest.MonkeyPatch,
    version: str = MOJO_COMPILER,
    build: str = COMPILER_BUILD,
) -> None:
    """Writes a source checkout of 1.0, and a Mojo compiler that uv finds."""
    toy.write_source()
    compilers = toy.root.parent / "compilers"
    write_compiler(compilers, version, build)
    monkeypatch.setenv("UV_FIND_LINKS", str(compilers))
    monkeypatch.setenv("UV_OFFLINE", "1")


def rewrite(
    path: Path, edit: Callable[[Member], Member | None], *, record: bool = True
) -> Path:
    """Rewrites a wheel member by member.

    Args:
        path: The wheel.
        edit: Returns what becomes of a member; None drops it.
        record: Whether RECORD is made true again.
    """
    members = [edit(member) for member in read_members(path)]
    kept = [member for member in members if member is not None]
    if record:
        stem = "-".join(path.name.split("-")[:2])
        name = f"{stem}.dist-info/RECORD"
        kept = [member for member in kept if member.name != name]
        return write_wheel(path, kept)
    return write_zip(path, kept)


def edit_member(
    path: Path, suffix: str, old: bytes, new: bytes, *, record: bool = True
) -> Path:
    """Replaces bytes in the one member whose name ends with a suffix."""
    touched = []

    def edit(member: Member) -> Member:
        if not member.name.endswith(suffix):
            return member
        assert old in member.data, member
        touched.append(member.name)
        return replace(member, data=member.data.replace(old, new, 1))

    rewrite(path, edit, record=record)
    assert len(touched) == 1, touched
    return path


RUN_MAIN = (
    "import sys; from pathlib import Path; from maxpatch.__main__ import main"
)
"""Start of a script that runs the command line in another process."""


def start(toy: Toy, *words: str, prelude: str = "") -> subprocess.Popen[str]:
    """Starts the command line on a toy project, in a session of its own."""
    script = (
        f"{RUN_MAIN}\n{prelude}\n"
        f"sys.exit(main(sys.argv[1:], Path({str(toy.root)!r})))"
    )
    scripts = Path(sys.modules["maxpatch"].__path__[0]).parent
    return subprocess.Popen(
        [sys.executable, "-c", script, *words],
        env={**os.environ, "PYTHONPATH": str(scripts)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
