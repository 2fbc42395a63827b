# SPDX-License-Identifier: Apache-2.0
"""Mojo packages rebuilt from a source checkout, by the real compiler.

Most have a toy release: three packages, compiled by a release's compiler, and
a fake checkout with their sources. One takes a real source of MAX 26.4.0, from
the folder in ``MAX_SOURCE``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.maxpatch import toy as made
from tests.maxpatch.toy import KERNELS, Toy

from maxpatch.build import Project, Request, build
from maxpatch.compiler import Compiler, Origin, Workshop
from maxpatch.errors import CompileError, ProcessError
from maxpatch.mojo import Package, Step
from maxpatch.release import host_platform, host_python, sha256_of
from maxpatch.wheel import Wheel

ROOT = Path(__file__).resolve().parents[2]

BASE = """\
comptime CONSTANT = 1
comptime CALLED = body()


def body() -> Int:
    return 1


@always_inline
def inlined() -> Int:
    return 1


@always_inline("builtin")
def folded(x: Int) -> Int:
    return x * 1


def argument(x: Int = 1) -> Int:
    return x


def parameter[x: Int = 1]() -> Int:
    return x


def overloaded(x: Int, y: Float64) -> Int:
    return 1


def overloaded(x: Int, y: String) -> Int:
    return 2


trait Shape:
    def area(self) -> Int:
        return 1


struct Pair(ImplicitlyCopyable):
    var a: Int
    var b: Int

    def __init__(out self):
        self.a = 1
        self.b = 2

    def method(self) -> Int:
        return 1


def branch[n: Int]() -> Int:
    comptime if n > 2:
        return 1
    else:
        return 0
"""

NN = """\
from base import (
    CALLED,
    CONSTANT,
    Pair,
    Shape,
    argument,
    body,
    branch,
    folded,
    inlined,
    overloaded,
    parameter,
)


struct Square(ImplicitlyCopyable, Shape):
    def __init__(out self):
        pass


def body_() -> Int:
    return body()


def called_() -> Int:
    return CALLED


def at_compile_time_() -> Int:
    comptime x = body()
    return x


def width_() -> Int:
    return len(SIMD[DType.float32, 2 * body()]())


def inlined_() -> Int:
    return inlined()


def branch_() -> Int:
    return branch[3]()


def method_() -> Int:
    return Pair().method()


def inherited_() -> Int:
    return Square().area()


def fields_() -> Int:
    return Pair().a * 10 + Pair().b


def constant_() -> Int:
    return CONSTANT


def argument_() -> Int:
    return argument()


def parameter_() -> Int:
    return parameter()


def folded_() -> Int:
    return folded(1)


def overloaded_() -> Int:
    return overloaded(1, 2)
"""

LOOKED_UP = {
    "body": ("def body() -> Int:\n    return ", "1"),
    "inlined": ("def inlined() -> Int:\n    return ", "1"),
    "branch": ("comptime if n > 2:\n        return ", "1"),
    "method": ("def method(self) -> Int:\n        return ", "1"),
    "inherited": ("def area(self) -> Int:\n        return ", "1"),
}
"""By function, where its body gives the 1 that becomes a 2."""

KEPT = {
    "constant": ("CONSTANT = ", "1"),
    "argument": ("argument(x: Int = ", "1"),
    "parameter": ("parameter[x: Int = ", "1"),
    "folded": ("folded(x: Int) -> Int:\n    return x * ", "1"),
    "overloaded": ("overloaded(x: Int, y: ", "String"),
}
"""The same of what a package that imports it has a copy of; the overload for
a String becomes one for an Int."""


def changed(edits: Mapping[str, tuple[str, str]]) -> str:
    """Returns the base package after some changes."""
    text = BASE
    for before, old in edits.values():
        assert text.count(before + old) == 1, before
        new = "Int" if old == "String" else "2"
        text = text.replace(before + old, before + new)
    return text


@pytest.fixture(
    scope="module",
    params=["26.7.0", pytest.param("26.5.0", marks=pytest.mark.slow)],
)
def compiler(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Compiler:
    """A release's compiler."""
    version = Project(ROOT).releases().get(request.param).mojo_compiler
    scratch = tmp_path_factory.mktemp("mojo")
    folder = scratch / "kept"
    return Compiler.install(version, folder, scratch=scratch, offline=False)


class Bench:
    """Compiles toy packages and runs programs that import them."""

    def __init__(self, compiler: Compiler, folder: Path) -> None:
        self.compiler = compiler
        self.folder = folder
        self.count = 0

    def new(self, name: str) -> Path:
        """Returns a fresh folder."""
        self.count += 1
        path = self.folder / f"{name}-{self.count}"
        path.mkdir()
        return path

    def package(
        self, name: str, sources: str | Mapping[str, str], *imported: Path
    ) -> Path:
        """Compiles a package against others."""
        if isinstance(sources, str):
            sources = {"__init__.mojo": sources}
        folder = self.new(name)
        made.write_tree(
            folder / name, {p: text.encode() for p, text in sources.items()}
        )
        output = folder / f"{name}.mojoc"
        self.compiler.precompile(name, output, self.path(*imported))
        return output

    def path(self, *packages: Path) -> Path:
        """Returns a folder with packages and the compiler's own."""
        folder = self.new("path")
        for file in (*self.compiler.libraries, *packages):
            (folder / file.name).symlink_to(file.resolve())
        return folder

    def values(self, *packages: Path) -> dict[str, int]:
        """Runs each function of `nn` that shows a value."""
        names = [
            line.removeprefix("def ").partition("(")[0]
            for line in NN.splitlines()
            if line.startswith("def ")
        ]
        program = self.new("program") / "main.mojo"
        program.write_text(
            "\n".join(
                [
                    *(f"from nn import {name}" for name in names),
                    "",
                    "",
                    "def main():",
                    *(f'    print("{name}", {name}())' for name in names),
                    "",
                ]
            )
        )
        with pytest.MonkeyPatch.context() as patched:
            # Mojo 1.0.0 keeps programs, whatever becomes of their imports.
            patched.setenv("XDG_CACHE_HOME", str(self.new("cache")))
            shown = self.compiler.run(
                *("run", "--disable-warnings", program),
                cwd=program.parent,
                path=self.path(*packages),
            )
        rows = [line.split() for line in shown.splitlines()]
        return {name.rstrip("_"): int(value) for name, value in rows}


@pytest.fixture(scope="module")
def bench(
    compiler: Compiler, tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    """A folder to compile in."""
    return Bench(compiler, tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def released(bench: Bench) -> tuple[Path, Path]:
    """The toy release's `base` and `nn`."""
    base = bench.package("base", BASE)
    return base, bench.package("nn", NN, base)


def test_bodies_are_looked_up(
    bench: Bench, released: tuple[Path, Path]
) -> None:
    """A package sees the new bodies of one that it was compiled without.

    Also those of inlined functions, of defaults that its types inherit, and of
    functions that are called at compile time.
    """
    _, nn = released
    found = bench.values(bench.package("base", changed(LOOKED_UP)), nn)
    assert {name: found[name] for name in LOOKED_UP} == (
        dict.fromkeys(LOOKED_UP, 2)
    )
    assert (found["called"], found["at_compile_time"]) == (2, 2)
    assert found["width"] == 4


def test_constants_defaults_and_overloads_are_kept(
    bench: Bench, released: tuple[Path, Path]
) -> None:
    """A package has the old values, so it must be compiled anew for others."""
    _, nn = released
    base = bench.package("base", changed(KEPT))
    assert {n: v for n, v in bench.values(base, nn).items() if n in KEPT} == (
        dict.fromkeys(KEPT, 1)
    )
    new = bench.package("nn", NN, base)
    found = bench.values(base, new)
    assert {n: v for n, v in found.items() if n in KEPT} == (
        dict.fromkeys(KEPT, 2)
    )


OLD = {
    "__init__.mojo": "from .x import answer\n",
    "x.mojo": "def answer() -> Int:\n    return 1\n\n\n"
    "def gone() -> Int:\n    return 1\n",
}
NEW = {
    "__init__.mojo": "from .x import answer\nfrom .y import used\n",
    "x.mojo": "def answer() -> Int:\n    return 2\n",
    "y.mojo": "from nn.x import gone\n\n\n"
    "def used() -> Int:\n    return gone()\n",
}


def test_old_code_cannot_leak_in(
    bench: Bench, released: tuple[Path, Path], tmp_path: Path
) -> None:
    """What the new package lacks is an error, although the old one has it."""
    libraries = write_libraries(
        tmp_path, bench.package("base", BASE), bench.package("nn", OLD)
    )
    sources = {path: text.encode() for path, text in NEW.items()}
    step = Step(Package("nn", f"{KERNELS}nn", sources), "", ())
    release = Project(ROOT).releases().get(None)
    with Wheel(libraries) as base:
        shop = Workshop(
            base,
            sha256_of(libraries),
            bench.compiler,
            kept=tmp_path / "kept",
            scratch=tmp_path,
            origin=Origin(tmp_path, release, []),
        )
        with pytest.raises(CompileError) as caught:
            shop.rebuild([step])
    assert f"{KERNELS}nn/y.mojo:1:18: " in str(caught.value)
    assert "gone" in str(caught.value)


@pytest.mark.slow
def test_old_code_leaks_in_where_it_is_not_hidden(tmp_path: Path) -> None:
    """The fault that hiding is for: the new nn takes the old nn's `gone`.

    Mojo 1.0.0b2 does, if the file that it writes has another name.
    """
    compiler = Compiler.install(
        "1.0.0b2", tmp_path / "kept", scratch=tmp_path, offline=False
    )
    bench = Bench(compiler, tmp_path)
    old = bench.package("nn", OLD)
    folder = bench.new("nn")
    made.write_tree(folder / "nn", {p: t.encode() for p, t in NEW.items()})
    compiler.precompile("nn", folder / "nn_new.mojoc", bench.path(old))
    with pytest.raises(ProcessError, match="does not contain 'gone'"):
        compiler.precompile("nn", folder / "nn.mojoc", bench.path(old))


def test_user_is_told_where_it_fails(bench: Bench) -> None:
    """The compiler's errors have the form that messages are made from."""
    with pytest.raises(ProcessError) as caught:
        bench.package("nn", "def f() -> Int:\n    return missing\n")
    assert "nn/__init__.mojo:2:12: error: use of unknown" in str(caught.value)


# The builder, on a toy release.

SOURCES = {
    f"{KERNELS}base/__init__.mojo": b"comptime K = 1\n",
    f"{KERNELS}nn/__init__.mojo": b"from nn.x import f\n"
    b"from nn.y import answer\n",
    f"{KERNELS}nn/x.mojo": b"def f():\n    pass\n",
    f"{KERNELS}nn/y.mojo": b"from base import K\n\n\n"
    b"def answer() -> Int:\n    return K\n",
    f"{KERNELS}top/__init__.mojo": b"from nn import answer\n\n\n"
    b"def shown() -> Int:\n    return 10 * answer()\n",
}
PROOF = '''
# SPDX-License-Identifier: Apache-2.0
"""A program sees what the series changes in `nn`, through `top`."""

import os
import subprocess
from pathlib import Path

PROGRAM = "from top import shown\\n\\n\\ndef main():\\n    print(shown())\\n"


def test_shown(tmp_path):
    """It prints what it should."""
    environment = Path(os.environ["MAXPATCH_TEST_PYTHON"]).parents[1]
    (site,) = environment.glob("lib/python*/site-packages")
    work = Path(__file__).parents[1] / "build" / "work" / "mojo"
    (root,) = work.glob("compiler-*/modular")
    (tmp_path / "path").mkdir()
    for folder in (site / "modular" / "lib" / "mojo", root / "lib" / "mojo"):
        for file in folder.glob("*.mojoc"):
            (tmp_path / "path" / file.name).symlink_to(file)
    (tmp_path / "main.mojo").write_text(PROGRAM)
    shown = subprocess.run(
        [root / "bin" / "mojo", "run", tmp_path / "main.mojo"],
        env={
            **os.environ,
            "MODULAR_CACHE_DIR": str(tmp_path / "cache"),
            "MODULAR_MAX_PACKAGE_ROOT": str(root),
            "MODULAR_MOJO_MAX_PACKAGE_ROOT": str(root),
            "MODULAR_MOJO_MAX_IMPORT_PATH": str(tmp_path / "path"),
        },
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert shown == "EXPECTED\\n"
'''


def write_libraries(folder: Path, *packages: Path) -> Path:
    """Writes a wheel of compiled packages, as MAX's."""
    template = made.write_libraries(folder, "1.0")
    kept = [
        member
        for member in made.read_members(template)
        if not member.name.endswith((".mojoc", "/RECORD"))
    ]
    place = "max_mojo_libs-1.0.data/platlib/modular/lib/mojo"
    return made.write_wheel(
        template,
        [
            *kept,
            *(
                made.Member(f"{place}/{file.name}", file.read_bytes())
                for file in packages
            ),
        ],
    )


@pytest.fixture
def project(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Toy:
    """A toy release of real packages, its checkout, and a series for it."""

    def text(name: str) -> dict[str, str]:
        start = f"{KERNELS}{name}/"
        return {
            path.removeprefix(start): data.decode()
            for path, data in SOURCES.items()
            if path.startswith(start)
        }

    base = bench.package("base", text("base"))
    nn = bench.package("nn", text("nn"), base)
    top = bench.package("top", text("top"), base, nn)
    template = made.write_libraries

    def real(folder: Path, version: str) -> Path:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(made, "write_libraries", template)
            if version == "1.0":
                return write_libraries(folder, base, nn, top)
            return template(folder, version)

    monkeypatch.setattr(made, "write_libraries", real)
    monkeypatch.setattr(made, "MOJO", SOURCES)
    monkeypatch.setattr(made, "MOJO_COMPILER", bench.compiler.version)
    (tmp_path / "scratch").mkdir()
    root = tmp_path / "project"
    made.write_project(root, tmp_path / "scratch")
    toy = Toy(root, root)
    toy.write_source()
    return toy


def plant(toy: Toy, path: str, old: bytes, new: bytes, expected: int) -> None:
    """Adds a patch of one line, and the proof that it is in force."""
    before = SOURCES[path]
    assert before.count(old) == 1
    name = path.removeprefix(KERNELS).partition("/")[0]
    toy.add_patch(
        "planted",
        {f"../../{path}": before},
        {f"../../{path}": before.replace(old, new)},
        Touches_Mojo=name,
        Proof="tests/test_shown.py::test_shown",
    )
    proof = PROOF.lstrip().replace("EXPECTED", str(expected))
    (toy.root / "tests/test_shown.py").write_text(proof)


def test_planted_body_is_in_force(project: Toy) -> None:
    """A body of `nn` is new in a program, and `nn` alone is compiled."""
    path = f"{KERNELS}nn/y.mojo"
    plant(project, path, b"return K", b"return K + 6", 70)
    before = made.snapshot(project.source)
    request = Request(output=project.dist, source=project.source)
    report = build(project.project, request, print)
    assert [row["package"] for row in report["mojo"]] == ["nn"]
    assert report["verification"]["proofs"] == (
        "tests/test_decode.py::test_decode_divides",
        "tests/test_shown.py::test_shown",
    )
    assert made.snapshot(project.source) == before


def test_planted_constant_is_in_force(project: Toy) -> None:
    """A constant of `base` is new where `nn` has a copy of it."""
    path = f"{KERNELS}base/__init__.mojo"
    plant(project, path, b"K = 1", b"K = 3", 30)
    request = Request(output=project.dist, source=project.source)
    report = build(project.project, request, print)
    assert {row["package"] for row in report["mojo"]} == {"base", "nn", "top"}
    assert (
        "tests/test_shown.py::test_shown" in (report["verification"]["proofs"])
    )


# The builder, on a real checkout.

DIGESTS = {
    "311": "92339883cec9261521bd7d1adc9df8297ccfe3116ea87cc8ec47500e30c1be12",
    "312": "a3d68f0b9e9af07410df0f637f66d5f8d8d45d1f8cb2a5893d80fe731c24fead",
    "": "5e85a8bf45e8ac194edfdafa72f21bce5a508f6abbfef436bca45d1f281dd0d2",
}
"""Of the wheels of 26.4.0 by Python, and of its Mojo packages."""

RELEASE = """
default = "26.4.0"

[release."26.4.0"]
mojo-compiler = "1.0.0b2"
upstream-tag = "modular/v26.4.0"
redistributable = false

[release."26.4.0".mojo-libs]
"max_mojo_libs-26.4.0-py3-none-any.whl" = "{libraries}"

[release."26.4.0".wheels]
"max-26.4.0-cp{python}-cp{python}-manylinux_2_34_x86_64.whl" = "{digest}"
"""

SAMPLING = '''
# SPDX-License-Identifier: Apache-2.0
"""A sampling graph on the CPU."""

import os
import subprocess
from pathlib import Path

PROGRAM = """
import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.nn.kernels import topk_fused_sampling

logits = TensorType(DType.float32, ["batch", "vocab"], DeviceRef.CPU())
graph = Graph("sample", lambda x: topk_fused_sampling(x, 5), [logits])
model = InferenceSession(devices=[CPU()]).load(graph)
values = np.random.default_rng(0).standard_normal((8, 512), np.float32)
(tokens,) = model.execute(values)
best = np.argsort(values)[:, -5:]
assert all(t in row for (t,), row in zip(tokens.to_numpy(), best))
print("tokens", tokens.to_numpy().ravel().tolist())
"""


def test_sampling(tmp_path):
    """Each row's token is one of its five best."""
    (tmp_path / "sample.py").write_text(PROGRAM)
    done = subprocess.run(
        [os.environ["MAXPATCH_TEST_PYTHON"], tmp_path / "sample.py"],
        env={**os.environ, "MODULAR_MAX_CACHE_DIR": str(tmp_path / "cache")},
        check=True,
        capture_output=True,
        text=True,
    )
    Path(__file__).with_name("shown").write_text(done.stdout)
'''


@pytest.mark.slow
def test_topk_patch_on_a_real_source(tmp_path: Path) -> None:
    """The series' sampling fix is built into 26.4.0, and samples on the CPU.

    ``MAX_SOURCE`` names a folder with the source of 26.4.0 and the commit that
    brought the wait (0acfb592e7). Mojo's compiler takes about a minute.
    """
    source = os.environ.get("MAX_SOURCE")
    if not source:
        pytest.skip("MAX_SOURCE doesn't name a source of MAX 26.4.0")
    python = host_python().replace(".", "")
    if host_platform() != "linux-x86_64" or python not in DIGESTS:
        pytest.skip("26.4.0 is pinned here for Python 3.11 and 3.12 on x86-64")
    root = tmp_path / "project"
    patch = ROOT / "patches/max/topk-sampling-no-sync.patch"
    lines = patch.read_text().splitlines(keepends=True)
    fields = {
        "Applies-To: ": ">=26.4,<26.5",
        "Proof: ": "tests/test_sampling.py::test_sampling",
    }
    for number, line in enumerate(lines):
        for field, value in fields.items():
            if line.startswith(field):
                lines[number] = f"{field}{value}\n"
    made.write_tree(
        root,
        {
            "pyproject.toml": b'[project]\nname = "t"\nversion = "1"\n',
            "build/releases.toml": RELEASE.format(
                python=python, digest=DIGESTS[python], libraries=DIGESTS[""]
            ).encode(),
            "overlay/README.md": b"",
            f"patches/max/{patch.name}": "".join(lines).encode(),
            "patches/max/series": f"{patch.stem}\n".encode(),
            "tests/test_sampling.py": SAMPLING.lstrip().encode(),
        },
    )
    request = Request(source=Path(source), inexact=True, output=root / "dist")
    report = build(Project(root), request, print)
    assert [row["package"] for row in report["mojo"]] == ["nn"]
    assert report["verification"]["proofs"] == (
        "tests/test_sampling.py::test_sampling",
    )
    print((root / "tests/shown").read_text(), report["seconds"])
