# SPDX-License-Identifier: Apache-2.0
"""Which Mojo packages are rebuilt, in which order, and against what."""

from __future__ import annotations

import os
import shlex
import shutil
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from maxpatch.checkout import SourceTree
from maxpatch.compiler import Built, Compiler, Origin, Workshop, members
from maxpatch.errors import CompileError, SourceError
from maxpatch.mojo import (
    Package,
    Step,
    Tree,
    imports,
    interface,
    plan,
    spreads,
)
from maxpatch.release import sha256_of
from maxpatch.wheel import Wheel
from tests.maxpatch import toy as made
from tests.maxpatch.toy import KERNELS, Toy

MODULE = '''
"""A module."""

from .other import (
    a,  # the first
    b,
)
import std.math as math, base


comptime WIDTH = 4


@always_inline
def plain[
    n: Int = WIDTH,
](x: Int = 1) -> Int:
    """Its docstring."""
    var text = "def inner():"
    return x


struct Pair[T: AnyType](Copyable):
    """Two."""

    var first: Int

    def sum(self) -> Int:
        def inner() -> Int:
            return 1
        return self.first


@always_inline("builtin")
def folded(x: Int) -> Int:
    return x + 1


trait Shape:
    def area(self) -> Int: ...

    def twice(self) -> Int:
        return 2
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return x\n", "    return x + 1\n"),
        ("            return 1\n", "            return 2\n"),
        ("        return 2\n", "        var y = 2\n        return y\n"),
        ('"""A module."""', '"""Another\ntext."""'),
        ('"""Its docstring."""', '"""def other(): ..."""'),
        ("  # the first", "  # def first():"),
        ("comptime WIDTH = 4", "comptime WIDTH = 4  # lanes"),
        ("    n: Int = WIDTH,\n", "        n: Int  =  WIDTH,\n"),
        ("\n\n\ntrait", "\n\ntrait"),
        ("\n    var first", "\n\n    # the first\n    var first"),
    ],
)
def test_bodies_and_comments_are_no_interface(old: str, new: str) -> None:
    """What no other package can copy doesn't count."""
    assert MODULE.count(old) == 1
    assert not spreads(MODULE, MODULE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("WIDTH = 4", "WIDTH = 8"),
        ("x: Int = 1", "x: Int = 2"),
        ("n: Int = WIDTH", "n: Int = 2"),
        ("@always_inline\n", ""),
        ("var first: Int", "var first: Int8"),
        ("(Copyable)", "(Movable)"),
        ("return x + 1", "return x + 2"),
        ("def area(self)", "def area(self, n: Int)"),
        ("def twice(self) -> Int:", "def twice(self) raises -> Int:"),
        ("    b,\n", "    c,\n"),
        ("trait Shape:", "comptime X = 1\n\n\ntrait Shape:"),
        (
            "def plain[",
            "def plain() -> Int:\n    return 1\n\n\ndef plain[",
        ),
    ],
)
def test_what_can_be_copied_is_interface(old: str, new: str) -> None:
    """Constants, signatures, fields, decorators and "builtin" bodies count."""
    assert MODULE.count(old) == 1
    assert spreads(MODULE, MODULE.replace(old, new))


def test_a_line_after_a_body_is_seen_again() -> None:
    """A body ends where its indentation does, docstring text or not."""
    text = 'def f():\n    """Text\nat the margin.\n    """\n    pass\n\nx = 1\n'
    assert interface(text) == (["0 def f():", "0 x = 1"], set())


def test_one_line_body_counts() -> None:
    """A body on the line of its function is taken for interface: safe."""
    assert interface("def f(): return 1\n")[0] == ["0 def f(): return 1"]


def test_only_imports_that_go_can_be_missed() -> None:
    """Who imported a name from here has it; a new one can't be in use."""
    before = "from .a import (\n    f,\n    g as h,\n)\nimport x.y, z\n"
    assert interface(before)[1] == {
        ".a f",
        ".a g as h",
        "import x.y",
        "import z",
    }
    assert not spreads(before, "from .b import k\n" + before)
    assert not spreads(before, before.replace("f,", "f, k,"))
    assert spreads(before, before.replace("f,", ""))
    assert spreads(before, before.replace(".a", ".b"))
    assert spreads(before, before.replace(", z", ""))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from a.b import c, d", {"a.b"}),
        ("import a.b as c, d", {"a.b", "d"}),
        ("from . import x\nfrom ..y.z import w", {".", "..y.z"}),
        ("from a import (\n    b,\n    c,\n)", {"a"}),
        ("def f():\n    comptime if X:\n        from a import b", {"a"}),
        ("if X: from a import b", {"a"}),
        ("pass; import a", {"a"}),
        ('"""\nfrom a import b\n"""\nx = "import c"', set()),
        ("# from a import b", set()),
        ("from a import \\\n    b", {"a"}),
        ("important = 1\nfrom_a = 2", set()),
        ("from a import *", {"a"}),
    ],
)
def test_imports_are_found(text: str, found: set[str]) -> None:
    """Each form of an import, at any depth, and nothing in text."""
    assert imports(text) == found


def test_relative_modules_that_are_missing_are_named() -> None:
    """A sparse checkout's gaps are found before the compiler is asked."""
    package = Package(
        "nn",
        "max/nn",
        {
            "__init__.mojo": b"from .a import x\nfrom . import y\n"
            b"from .s import z\n",
            "a.mojo": b"from nn.gone import x\nfrom nn import q\nimport nn\n",
            "s/__init__.mojo": b"from ..a import x\nfrom ..b.c import x\n",
            "s/t.mojo": b"from .u import x\nfrom ...other import x\n",
        },
    )
    assert package.missing() == [
        "max/nn/b/c.mojo, which max/nn/s/__init__.mojo imports",
        "max/nn/gone.mojo, which max/nn/a.mojo imports",
        "max/nn/s/u.mojo, which max/nn/s/t.mojo imports",
    ]
    assert package.imported == set()


# What is rebuilt.

FILES = {
    "base": b"comptime K = 1\n\n\ndef one() -> Int:\n    return 1\n",
    "linalg": b"from base import K\n\n\ndef mm():\n    pass\n",
    "shmem": b"from linalg import mm\n",
    "nn": b"import nn.own\nfrom shmem import mm\n\n\ndef f():\n    pass\n",
    "own": b"",
    "alone": b"def g():\n    pass\n",
}
INSTALLED = {"base", "linalg", "shmem", "nn", "alone", "closed"}


def tree(folder: Path, **after: bytes | None) -> Tree:
    """Writes a checkout of one file a package, and patches some.

    Args:
        folder: Where to write it.
        after: New content of a package's file; None removes it.
    """
    source, new = folder / "source", folder / "new"
    for name, data in FILES.items():
        path = f"{KERNELS}{name}/impl.mojo"
        init = f"{KERNELS}{name}/__init__.mojo"
        if name == "own":
            path, init = f"{KERNELS}nn/own.mojo", f"{KERNELS}nn/own.mojo"
        made.write_tree(source, {init: b"", path: data})
    paths = {f"{KERNELS}{name}/impl.mojo": d for name, d in after.items()}
    made.write_tree(new, {p: d for p, d in paths.items() if d is not None})
    patched = SourceTree(
        {path: new / path for path, d in paths.items() if d is not None},
        frozenset(path for path, d in paths.items() if d is None),
        {},
    )
    return Tree(source, patched)


def none(names: Collection[str], others: Collection[str]) -> list[str]:
    """Compiled packages that import nothing of interest."""
    return []


def never(names: Collection[str], others: Collection[str]) -> list[str]:
    """For plans that have no reason to ask."""
    raise AssertionError(names)


def planned(steps: list[Step]) -> dict[str, tuple[str, ...]]:
    """Returns what is compiled after what."""
    return {step.package.name: step.after for step in steps}


def edited(name: str, old: bytes, new: bytes) -> bytes:
    """Returns a package's file, changed."""
    assert FILES[name].count(old) == 1
    return FILES[name].replace(old, new)


def test_changed_bodies_rebuild_the_package_alone(tmp_path: Path) -> None:
    """Nothing keeps a copy of a body, so nobody else is rebuilt."""
    there = tree(tmp_path, base=edited("base", b"return 1", b"return 2"))
    (step,) = plan(there, INSTALLED, never)
    assert (step.package.name, step.after) == ("base", ())
    assert step.reason == "only function bodies in it are changed"
    assert step.package.sources["impl.mojo"].endswith(b"return 2\n")


def test_changed_constant_rebuilds_who_imports_it(tmp_path: Path) -> None:
    """Who may have copied it is rebuilt, and who imports those; others not."""
    there = tree(tmp_path, base=edited("base", b"K = 1", b"K = 2"))
    steps = plan(there, INSTALLED, none)
    assert planned(steps) == {
        "base": (),
        "linalg": ("base",),
        "shmem": ("base", "linalg"),
        "nn": ("base", "linalg", "shmem"),
    }
    assert {step.package.name: step.reason for step in steps} == {
        "base": "more than function bodies is changed: "
        f"{KERNELS}base/impl.mojo",
        "linalg": "imports base, and copies from it",
        "shmem": "imports linalg, and copies from it",
        "nn": "imports shmem, and copies from it",
    }


def test_removed_file_counts_as_interface(tmp_path: Path) -> None:
    """What is no more may have been copied."""
    there = tree(tmp_path, linalg=None)
    assert set(planned(plan(there, INSTALLED, none))) == {
        "linalg",
        "shmem",
        "nn",
    }


def test_landed_patch_rebuilds_like_an_applied_one(tmp_path: Path) -> None:
    """The release was made without it, so what it changes may be copied."""
    there = tree(tmp_path)
    body = edited("base", b"return 1", b"return 0")
    constant = edited("base", b"K = 1", b"K = 0")
    path = f"{KERNELS}base/impl.mojo"
    for before, names in (
        (body, {"base"}),
        (constant, {"base", "linalg", "shmem", "nn"}),
        (b"", {"base", "linalg", "shmem", "nn"}),
        (None, {"base"}),
    ):
        patched = SourceTree({}, frozenset(), {}, {path: before})
        steps = plan(Tree(there.source, patched), INSTALLED, none)
        assert set(planned(steps)) == names
        assert steps[0].package.sources["impl.mojo"] == FILES["base"]


def test_stray_names_are_no_sources(tmp_path: Path) -> None:
    """Hidden files and folders, pipes and other suffixes stay out."""
    there = tree(tmp_path)
    folder = there.source / KERNELS / "nn"
    made.write_tree(
        folder,
        {
            ".#own.mojo": b"",
            ".cache/x.mojo": b"",
            "notes.txt": b"",
            "sub.mojo/__init__.mojo": b"",
        },
    )
    os.mkfifo(folder / "pipe.mojo")
    package = there.load(f"{KERNELS}nn")
    assert list(package.sources) == [
        *("__init__.mojo", "impl.mojo", "own.mojo", "sub.mojo/__init__.mojo")
    ]


@pytest.mark.parametrize("name", ["linked.mojo", "linked"])
@pytest.mark.parametrize("target", ["../base", "nowhere"])
def test_symbolic_link_in_a_package_is_named(
    name: str, target: str, tmp_path: Path
) -> None:
    """What a link leads to is not the package's: it isn't read."""
    there = tree(tmp_path)
    link = there.source / KERNELS / "nn" / name
    link.symlink_to(target)
    if (name, target) == ("linked", "nowhere"):
        assert there.load(f"{KERNELS}nn").name == "nn"
        return
    with pytest.raises(SourceError, match="is a symbolic link to") as caught:
        there.load(f"{KERNELS}nn")
    assert str(link) in str(caught.value) and target in str(caught.value)


def test_denied_package_is_no_sparse_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be read is named, file or folder, with the reason."""
    there = tree(tmp_path)

    def deny(path: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    for place, name in (
        ("pathlib.Path.read_bytes", "__init__.mojo"),
        ("os.scandir", "nn"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, deny)
            with pytest.raises(SourceError) as caught:
                there.load(f"{KERNELS}nn")
        assert f"{name} cannot be read: Permission denied" in str(caught.value)
        assert caught.value.hint is None


def test_hint_can_be_pasted(tmp_path: Path) -> None:
    """A checkout's path with blanks and quotes is one word of the shell."""
    there = tree(tmp_path / "It's here", nn=b"from .gone import x\n")
    with pytest.raises(SourceError) as caught:
        plan(there, INSTALLED, never)
    assert caught.value.hint
    command = caught.value.hint.split("`")[1]
    assert shlex.split(command)[:3] == ["git", "-C", str(there.source)]


def test_order_goes_through_packages_that_stay(tmp_path: Path) -> None:
    """nn needs the new base, as its shmem does, though that is not rebuilt."""
    there = tree(
        tmp_path,
        base=edited("base", b"return 1", b"return 2"),
        nn=edited("nn", b"    pass", b"    return"),
        alone=edited("alone", b"    pass", b"    return"),
    )
    assert planned(plan(there, INSTALLED, never)) == {
        "alone": (),
        "base": (),
        "nn": ("base",),
    }


def test_release_is_asked_where_sources_are_missing(tmp_path: Path) -> None:
    """Only a compiled package without sources that imports it is an error."""
    asked: list[tuple[list[str], list[str]]] = []

    def closed_does(
        names: Collection[str], others: Collection[str]
    ) -> list[str]:
        asked.append((sorted(names), sorted(others)))
        return ["closed"]

    there = tree(tmp_path, nn=edited("nn", b"def f()", b"def f(x: Int)"))
    with pytest.raises(SourceError, match="closed must be rebuilt"):
        plan(there, INSTALLED, closed_does)
    assert asked == [(["closed"], ["nn"])]


# How it is compiled.


class Bench:
    """The toy's workshop, with the toy compiler."""

    def __init__(self, toy: Toy, folder: Path) -> None:
        self.toy = toy
        libraries = made.write_compiler(folder / "compilers")
        self.compiler_folder = folder / "compiler"
        for member in made.read_members(libraries):
            target = self.compiler_folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(member.data)
            target.chmod(member.mode & 0o777)
        self.base = (
            toy.root
            / "build/work/downloads"
            / ("max_mojo_libs-1.0-py3-none-any.whl")
        )
        self.folder = folder / "mojo"
        self.scratch = folder / "scratch"
        self.scratch.mkdir()

    def shop(self) -> Workshop:
        """Returns a workshop on the folder of all of them."""
        release = self.toy.project.releases().get("1.0")
        compiler = Compiler(made.MOJO_COMPILER, self.compiler_folder)
        with Wheel(self.base) as base:
            return Workshop(
                base,
                sha256_of(self.base),
                compiler,
                kept=self.folder,
                scratch=self.scratch,
                origin=Origin(self.toy.root, release, []),
            )


@pytest.fixture
def bench(toy: Toy, tmp_path: Path) -> Bench:
    """The toy's workshop."""
    return Bench(toy, tmp_path)


def step(
    name: str, text: bytes, *after: str, more: Mapping[str, bytes] | None = None
) -> Step:
    """Returns a package of one file to be rebuilt."""
    sources = {"__init__.mojo": text, **(more or {})}
    return Step(Package(name, f"{KERNELS}{name}", sources), "", after)


def texts(built: Mapping[str, Built]) -> dict[str, str]:
    """Returns what the toy compiler wrote."""
    return {name: one.file.read_text() for name, one in built.items()}


def test_package_is_named_by_its_file(bench: Bench) -> None:
    """The file that is packed has the package's own name."""
    built = bench.shop().rebuild([step("nn", b"from base import one\n")])
    assert built["nn"].file.name == "nn.mojoc"
    assert texts(built) == {
        "nn": f"{made.COMPILER_BUILD} nn +base from_base_import_one"
    }


def test_rebuilt_packages_are_hidden_from_those_that_do_not_import_them(
    bench: Bench,
) -> None:
    """The released `base` isn't there while another one is made."""
    with pytest.raises(CompileError, match="unable to locate module 'base'"):
        bench.shop().rebuild(
            [step("base", b"comptime K = 2\n"), step("nn", b"import base\n")]
        )


def test_released_package_of_the_name_is_hidden(bench: Bench) -> None:
    """A package that is compiled never meets the released one of its name."""
    with pytest.raises(CompileError, match="unable to locate module 'nn'"):
        # `top` of the release imports `nn`.
        bench.shop().rebuild([step("nn", b"import top\n")])


def test_new_packages_are_imported(bench: Bench) -> None:
    """A dependent is compiled after what it imports, against the new one."""
    built = bench.shop().rebuild(
        [
            step("top", b"import nn\n", "base", "nn"),
            step("nn", b"import base\n", "base"),
            step("base", b"comptime K = 2\n"),
        ]
    )
    assert list(built) == ["top", "nn", "base"]


def test_nothing_is_compiled_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same sources, same imports: the kept file is taken, and no other."""
    one = step("nn", b"import base\n", "base")
    base = step("base", b"comptime K = 1\n")
    first = bench.shop().rebuild([base, one])
    compiled: list[str] = []
    real = Compiler.precompile

    def seen(self: Compiler, package: str, output: Path, path: Path) -> None:
        compiled.append(package)
        real(self, package, output, path)

    monkeypatch.setattr(Compiler, "precompile", seen)
    again = bench.shop().rebuild([base, one])
    assert (texts(again), compiled) == (texts(first), [])
    assert all(b.cached for b in again.values())
    # A comment in `base` alone makes another `base`, so another `nn`.
    changed = step("base", b"comptime K = 2\n")
    bench.shop().rebuild([changed, one])
    assert compiled == ["base", "nn"]
    # By itself it is compiled against the released `base`.
    bench.shop().rebuild([step("nn", b"import base\n")])
    assert compiled == ["base", "nn", "nn"]


@pytest.mark.parametrize("left", ["changed", "cut", "unsigned", "empty"])
def test_kept_package_that_is_not_as_it_was_is_compiled_anew(
    left: str, bench: Bench
) -> None:
    """Only a file whose digest stands beside it is taken."""
    one = step("nn", b"import base\n")
    built = bench.shop().rebuild([one])["nn"]
    good = built.file.read_bytes()
    if left in {"changed", "cut"}:
        built.file.write_bytes(good + b" x" if left == "changed" else b"")
    elif left == "unsigned":
        built.file.with_suffix(".sha256").unlink()
    else:
        shutil.rmtree(built.file.parent)
        built.file.parent.mkdir()
    again = bench.shop().rebuild([one])["nn"]
    assert (again.cached, again.file.read_bytes()) == (False, good)
    assert bench.shop().rebuild([one])["nn"].cached


def test_kept_base_that_is_not_as_released_is_put_right(bench: Bench) -> None:
    """A changed, missing or foreign package isn't compiled against."""
    bench.shop()
    (kept,) = bench.folder.glob("base-*")
    before = made.snapshot(kept)
    for spoil in (
        lambda: (kept / "nn.mojoc").write_bytes(b"c0 nn"),
        lambda: (kept / "nn.mojoc").unlink(),
        lambda: (kept / "other.mojoc").write_bytes(b"c0 other"),
    ):
        spoil()
        bench.shop()
        assert made.snapshot(kept) == before


@pytest.mark.parametrize(
    ("name", "recorded"),
    [("bin/mojo", True), ("lib/mojo/std.mojoc", True), ("bin/mojo", False)],
)
def test_compiler_that_is_not_whole_is_named(
    name: str, recorded: bool, bench: Bench
) -> None:
    """A file that is gone or cut is an error that says what to delete."""
    file = bench.compiler_folder / "modular" / name
    if recorded:
        file.write_bytes(file.read_bytes()[:-1])
    else:
        shutil.rmtree(next(bench.compiler_folder.glob("*.dist-info")))
        file.unlink()
    with pytest.raises(CompileError) as caught:
        bench.shop()
    assert str(file) in str(caught.value) or name in str(caught.value)
    assert caught.value.hint == f"delete {bench.compiler_folder} and run again"


def test_build_that_was_faster_with_the_same_is_no_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two builds of one package at once both end with it."""
    one = step("nn", b"comptime N = 1\n")
    real = Compiler.precompile

    def slow(self: Compiler, package: str, output: Path, path: Path) -> None:
        monkeypatch.setattr(Compiler, "precompile", real)
        bench.shop().rebuild([one])
        real(self, package, output, path)

    monkeypatch.setattr(Compiler, "precompile", slow)
    assert not bench.shop().rebuild([one])["nn"].cached
    assert bench.shop().rebuild([one])["nn"].cached


def test_independent_packages_are_compiled_side_by_side(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that don't import each other are both in work at one time."""
    monkeypatch.setattr("maxpatch.compiler.os.cpu_count", lambda: 2)
    both = threading.Barrier(2, timeout=30)
    real = Compiler.precompile

    def meet(self: Compiler, package: str, output: Path, path: Path) -> None:
        both.wait()
        real(self, package, output, path)

    monkeypatch.setattr(Compiler, "precompile", meet)
    built = bench.shop().rebuild(
        [step("base", b"comptime K = 1\n"), step("alone", b"\n")]
    )
    assert set(built) == {"base", "alone"}


def test_errors_of_the_compiler_are_cut_short(bench: Bench) -> None:
    """The first ones are shown, and how many more there are."""
    with pytest.raises(CompileError) as caught:
        bench.shop().rebuild([step("nn", b"???\n" * 8)])
    lines = str(caught.value).splitlines()
    assert lines[1:6] == [
        f"  {KERNELS}nn/__init__.mojo:{n}:1: use of unknown declaration '???'"
        for n in range(1, 6)
    ]
    assert lines[6] == "  and 3 more"


def test_compiler_is_asked_what_a_released_package_imports(
    bench: Bench,
) -> None:
    """A compiled package doesn't load without what it imports."""
    shop = bench.shop()
    assert shop.importers(["base", "top"], {"nn"}) == ["top"]
    assert shop.importers(["nn", "top"], {"base"}) == ["nn", "top"]
    assert shop.importers(["base", "nn"], {"top"}) == []
    assert shop.importers([], {"base"}) == []


def test_settings_of_the_user_do_not_reach_the_compiler(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An import path of the user's would bring old code in again."""
    (tmp_path / "users").mkdir()
    (tmp_path / "users/newer.mojoc").write_text("x newer")
    monkeypatch.setenv("MODULAR_MOJO_MAX_IMPORT_PATH", str(tmp_path / "users"))
    with pytest.raises(CompileError, match="unable to locate module 'newer'"):
        bench.shop().rebuild([step("nn", b"import newer\n")])


def test_members_are_known_by_package(bench: Bench) -> None:
    """Each compiled package of the release's wheel has its member."""
    with Wheel(bench.base) as base:
        folder = f"{base.data}/platlib/modular/lib/mojo"
        assert members(base) == {
            name: f"{folder}/{name}.mojoc" for name in ("base", "nn", "top")
        }
