# SPDX-License-Identifier: Apache-2.0
"""Bad input, each by the name of its fault.

A fault spoils a toy project and says which words the one error must have: what
failed, where, expected against found, and the next step.
"""

from __future__ import annotations

import hashlib
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.maxpatch import toy as made
from tests.maxpatch.toy import Toy

Plant = Callable[[Toy, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """A way to spoil a project."""

    plant: Plant
    words: tuple[str, ...]
    """What the error message and its hint must say."""

    options: tuple[str, ...]
    """Further words of the command line."""


FAULTS: dict[str, Fault] = {}


def fault(
    *words: str, options: tuple[str, ...] = ()
) -> Callable[[Plant], Plant]:
    """Registers a fault under its function's name."""

    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = Fault(plant, words, options)
        return plant

    return register


# The release and its wheel.


@fault("cannot download max-1.0", "hint: check the network")
def no_network(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.base().unlink()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")


@fault("is not in", "--offline", "hint: ", options=("--offline",))
def offline_without_the_wheel(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.base().unlink()


@fault("cannot keep downloads in", "cache/downloads: Not a directory")
def cache_below_a_file(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    (toy.root / "cache").write_text("a file\n")
    monkeypatch.setenv("MAXPATCH_CACHE", str(toy.root / "cache/downloads"))


@fault("is not the pinned wheel", "expected sha256", "found", "hint: delete")
def wheel_with_another_digest(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.base().write_bytes(toy.base().read_bytes() + b"\0")


@fault("is not a wheel", "not a zip file")
def wheel_that_is_no_zip(toy: Toy, _: pytest.MonkeyPatch) -> None:
    pinned = hashlib.sha256(toy.base().read_bytes()).hexdigest()
    toy.base().write_bytes(b"no zip")
    spoilt = hashlib.sha256(b"no zip").hexdigest()
    _edit(toy, "build/releases.toml", pinned, spoilt)


@fault("no release 3.0", "1.0, 2.0", "hint: ", options=("--release", "3.0"))
def release_without_a_row(toy: Toy, _: pytest.MonkeyPatch) -> None:
    pass


@fault("Python 3.1 ", "expected one of", "hint: ", options=("--python", "3.1"))
def python_without_a_wheel(toy: Toy, _: pytest.MonkeyPatch) -> None:
    pass


@fault("releases.toml is malformed", "upstream-tag")
def release_row_without_a_tag(toy: Toy, _: pytest.MonkeyPatch) -> None:
    _edit(toy, "build/releases.toml", 'upstream-tag = "v1.0"', "")


@fault("releases.toml is malformed", "Invalid wheel filename", "max-1.0")
def release_row_with_a_bad_wheel_name(toy: Toy, _: pytest.MonkeyPatch) -> None:
    _edit(toy, "build/releases.toml", toy.base().name, "max-1.0.whl")


@fault("releases.toml is malformed", "items")
def release_row_with_no_table_of_wheels(
    toy: Toy, _: pytest.MonkeyPatch
) -> None:
    path = toy.root / "build/releases.toml"
    text = path.read_text().replace('[release."1.0".wheels]', "wheels = 1\n[x]")
    path.write_text(text)


# The series.


@fault("series is missing", "patches/max")
def no_series(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.series.unlink()


@fault("disagree", "ghost: no file ghost.patch", "hint: ")
def line_without_a_file(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.series.write_text(toy.series.read_text() + "ghost\n")


@fault("disagree", "stray.patch: not listed", "hint: ")
def file_without_a_line(toy: Toy, _: pytest.MonkeyPatch) -> None:
    shutil.copy(toy.patch("endings"), toy.patch("stray"))


@fault("disagree", "endings stands twice", "hint: ")
def line_that_stands_twice(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.series.write_text(toy.series.read_text() + "endings # again\n")


@fault("no release (1.0, 2.0) selects", "endings", ">=7", "hint: ")
def patch_for_no_release(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.edit_patch("endings", "Applies-To: >=1.0", "Applies-To: >=7")


# A patch file.


@fault("endings.patch is empty")
def empty_patch(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.patch("endings").write_bytes(b"")


@fault("endings.patch is empty")
def blank_patch(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.patch("endings").write_bytes(b"\n \n")


@fault("endings.patch is not UTF-8")
def patch_that_is_not_text(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.patch("endings").write_bytes(b"\xff\xfe")


@fault("endings.patch is malformed", "it has no diff", "hint: ")
def header_without_a_diff(toy: Toy, _: pytest.MonkeyPatch) -> None:
    head = toy.patch("endings").read_bytes().partition(b"diff --git")[0]
    toy.patch("endings").write_bytes(head)


@fault("endings.patch is malformed", "expected `From 000", "hint: ")
def diff_without_a_header(toy: Toy, _: pytest.MonkeyPatch) -> None:
    diff = toy.patch("endings").read_bytes().partition(b"diff --git")
    toy.patch("endings").write_bytes(b"\n" + b"".join(diff[1:]))


@fault("endings.patch is malformed", "changes nothing", "hint: ")
def patch_that_changes_nothing(toy: Toy, _: pytest.MonkeyPatch) -> None:
    before, after = index_line(toy, "endings")
    toy.edit_patch("endings", after, before)


@fault("endings.patch is malformed", "--full-index", "hint: ")
def abbreviated_index(toy: Toy, _: pytest.MonkeyPatch) -> None:
    before, after = index_line(toy, "endings")
    toy.edit_patch(
        "endings", f"{before}..{after}", f"{before[:9]}..{after[:9]}"
    )


@fault("endings.patch is malformed", "expected an index line", "hint: ")
def patch_without_an_index_line(toy: Toy, _: pytest.MonkeyPatch) -> None:
    before, after = index_line(toy, "endings")
    toy.edit_patch("endings", f"index {before}..{after} 100644\n", "")


@fault("wide.patch is malformed", "one line of context", "-U1", "hint: ")
def two_lines_of_context(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.add_patch(
        "wide",
        {"max/layers.py": made.GUARDED},
        {"max/layers.py": made.GUARDED.replace(b"decode(8)", b"decode(9)")},
        *("-U2", "--full-index"),
    )


@fault("moved.patch is malformed", "rename from", "hint: ")
def patch_that_renames(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.add_patch(
        "moved",
        {"max/tool.sh": b"#!/bin/sh\necho tool\n"},
        {"max/other.sh": b"#!/bin/sh\necho tool\n"},
        *("-U1", "--full-index", "-M"),
    )


@fault("image.patch is malformed", "GIT binary patch", "hint: ")
def patch_of_a_binary_file(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.add_patch(
        "image", {}, {"max/x.png": b"\0\1"}, "--full-index", "--binary"
    )


@fault("executable.patch is malformed", "old mode 100755", "hint: ")
def patch_that_changes_a_mode(toy: Toy, _: pytest.MonkeyPatch) -> None:
    data = toy.patch("endings").read_bytes()
    before, after = index_line(toy, "endings")
    modes = b"old mode 100755\nnew mode 100644\n"
    line = f"index {before}..{after}".encode()
    toy.patch("executable").write_bytes(
        data.replace(line + b" 100644", modes + line)
    )
    toy.series.write_text(toy.series.read_text() + "executable\n")


@fault("fresh-module.patch is malformed", "new file mode 120000", "hint: ")
def patch_that_adds_a_link(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.edit_patch(
        "fresh-module", "new file mode 100644", "new file mode 120000"
    )


@fault("endings.patch is malformed", "leaves the source tree", "hint: ")
def patch_that_leaves_the_tree(toy: Toy, _: pytest.MonkeyPatch) -> None:
    data = toy.patch("endings").read_bytes()
    toy.patch("endings").write_bytes(data.replace(b"/max/python", b"/../max"))


@fault("endings.patch is malformed", "a file stands twice", "hint: ")
def patch_with_a_file_twice(toy: Toy, _: pytest.MonkeyPatch) -> None:
    data = toy.patch("endings").read_bytes()
    diff = b"".join(data.partition(b"diff --git")[1:])
    toy.patch("endings").write_bytes(data + diff)


@fault("endings.patch is malformed", "ends with a signature", "hint: ")
def patch_with_a_signature(toy: Toy, _: pytest.MonkeyPatch) -> None:
    data = toy.patch("endings").read_bytes()
    toy.patch("endings").write_bytes(data + b"-- \n2.39.5\n\n")


# A patch and the tree.


@fault(
    "outside: max/README.md", "isn't part of the wheel", "expected a path below"
)
def patch_outside_the_wheel(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.add_patch("outside", {}, {"../README.md": b"Not in a wheel.\n"})


@fault(
    "endings was made for other files than those of max 1.0",
    "does not apply",
    "max/endings.py: expected blob",
    "found",
    "hint: ",
)
def patch_that_does_not_apply(toy: Toy, _: pytest.MonkeyPatch) -> None:
    other = made.ENDINGS.replace(b"HEIGHT = 1", b"HEIGHT = 5")
    edited = made.ENDINGS.replace(b"HEIGHT = 1", b"HEIGHT = 6")
    _remake(toy, "endings", "max/endings.py", other, edited)


@fault(
    "endings was made for other files",
    "would apply, but perhaps in the wrong place",
    "expected blob",
    "hint: ",
)
def patch_for_the_twin_of_its_place(toy: Toy, _: pytest.MonkeyPatch) -> None:
    # Made for a file whose only such function is `decode`; the hunk then
    # stands where the base has `encode`.
    encode, decode = made.TWINS.split(b"def decode")
    alone = encode[: encode.index(b"def encode")] + b"def decode" + decode
    edited = alone.replace(b"y = x * factor", b"y = x - factor")
    _remake(toy, "endings", "max/layers.py", alone, edited)
    toy.series.write_text("\n".join(_first(toy, "endings")) + "\n")


@fault(
    "decode-divides came out wrong",
    "max/python/max/layers.py: expected blob",
    "expected blob",
    "found",
    "hint: ",
)
def patch_with_a_hunk_moved_by_hand(toy: Toy, _: pytest.MonkeyPatch) -> None:
    data = toy.patch("decode-divides").read_bytes()
    assert b"@@ -11,3 +11,3 @@" in data
    toy.patch("decode-divides").write_bytes(
        data.replace(b"@@ -11,3 +11,3 @@", b"@@ -5,3 +5,3 @@")
    )


@fault(
    "decode-divides came out wrong",
    "max/python/max/stray.py: expected no change, found blob",
    "hint: ",
)
def patch_with_a_part_that_names_no_diff(
    toy: Toy, _: pytest.MonkeyPatch
) -> None:
    data = toy.patch("decode-divides").read_bytes()
    stray = b"--- /dev/null\n+++ b/max/python/max/stray.py\n@@ -0,0 +1 @@\n+X\n"
    toy.patch("decode-divides").write_bytes(data + stray)


@fault("although its files are those it was made for", "hint: ")
def patch_with_a_line_edited_by_hand(toy: Toy, _: pytest.MonkeyPatch) -> None:
    toy.edit_patch("endings", "-HEIGHT = 1\t", "-HEIGHT = 3\t")


@fault("although its files are those it was made for", "corrupt", "hint: ")
def patch_cut_short(toy: Toy, _: pytest.MonkeyPatch) -> None:
    data = toy.patch("endings").read_bytes()
    toy.patch("endings").write_bytes(data[: data.index(b"+HEIGHT")])


@fault("again is already in max 1.0", "hint: narrow its Applies-To")
def patch_that_is_already_in(toy: Toy, _: pytest.MonkeyPatch) -> None:
    shutil.copy(toy.patch("endings"), toy.patch("again"))
    toy.series.write_text(toy.series.read_text() + "again\n")


@fault("again was made for", "seems to be in them", "expected blob", "hint: ")
def patch_whose_change_is_in(toy: Toy, _: pytest.MonkeyPatch) -> None:
    # The change landed beside another one, so no blob id says so.
    shutil.copy(toy.patch("endings"), toy.patch("again"))
    before, after = index_line(toy, "endings")
    other = "1" * 40
    toy.edit_patch("again", f"{before}..{after}", f"{before}..{other}")
    toy.series.write_text(toy.series.read_text() + "again\n")


# The overlay.


@fault("would cover files of max-1.0", ": max/layers.py", "hint: ")
def overlay_over_a_file_of_max(toy: Toy, _: pytest.MonkeyPatch) -> None:
    _claim(toy)
    (toy.root / "overlay/layers.py").write_bytes(b"")


@fault("would cover files of max-1.0", "max/_core.so", "hint: ")
def overlay_over_a_compiled_file(toy: Toy, _: pytest.MonkeyPatch) -> None:
    _claim(toy)
    (toy.root / "overlay/_core.so").write_bytes(b"")


@fault("would cover files of max-1.0", "max/LAYERS.py", "hint: ")
def overlay_over_a_file_in_other_case(toy: Toy, _: pytest.MonkeyPatch) -> None:
    _claim(toy)
    (toy.root / "overlay/LAYERS.py").write_bytes(b"")


@fault("would cover files of max-1.0", "max/fresh.py", "hint: ")
def overlay_over_a_file_of_a_patch(toy: Toy, _: pytest.MonkeyPatch) -> None:
    _claim(toy)
    (toy.root / "overlay/fresh.py").write_bytes(b"")


@fault(
    "overlay/lost.py belongs to no overlay package", "hint: add overlay.toml"
)
def overlay_file_without_a_package(toy: Toy, _: pytest.MonkeyPatch) -> None:
    (toy.root / "overlay/lost.py").write_bytes(b"")


def _manifest_fault(name: str, text: str, *words: str) -> None:
    def plant(toy: Toy, _: pytest.MonkeyPatch) -> None:
        (toy.root / "overlay/extra/overlay.toml").write_text(text)

    plant.__name__ = f"overlay_manifest_{name}"
    fault("overlay.toml is malformed", *words, "hint: expected")(plant)


_GOOD = 'applies-to = ">=1"\nsummary = "x"\n'
_manifest_fault("is_no_toml", "applies-to = ", "Invalid value")
_manifest_fault("lacks_a_range", 'summary = "x"\n', "applies-to")
_manifest_fault("lacks_a_summary", 'applies-to = ">=1"\n', "summary")
_manifest_fault("has_a_bad_range", _GOOD.replace(">=1", "new"), "new")
_manifest_fault("has_a_number", _GOOD.replace('">=1"', "1"), "applies-to")
_manifest_fault("has_an_unknown_key", _GOOD + "range = 1\n", "range")


# The output.


@fault("cannot write", "dist is not a folder")
def output_that_is_a_file(toy: Toy, _: pytest.MonkeyPatch) -> None:
    shutil.rmtree(toy.dist)
    toy.dist.write_text("a file\n")


@fault("cannot write", "dist is not a folder", options=("--output", "dist/sub"))
def output_below_a_file(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    output_that_is_a_file(toy, monkeypatch)
    monkeypatch.chdir(toy.root)


@fault("cannot write", "no permission in")
def output_without_permission(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: object, mode: int) -> bool:
        return path != toy.dist

    # The tests may run as root, whom no mode stops.
    monkeypatch.setattr("maxpatch.build.os.access", denied)


@fault(
    "cannot write", "/r is not a folder", options=("--report", "r/report.json")
)
def report_below_a_file(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    (toy.root / "r").write_text("a file\n")
    monkeypatch.chdir(toy.root)


# The source checkout.


@fault(
    "is not a MAX source checkout",
    "max/python/max",
    "hint: name the top folder of a clone",
    options=("--source",),
)
def source_that_is_no_checkout(toy: Toy, _: pytest.MonkeyPatch) -> None:
    source_folder(toy).mkdir()


@fault(
    "is not the source of max-1.0",
    "expected max/python/max/layers.py, which a patch changes",
    options=("--source",),
)
def source_without_a_patched_file(toy: Toy, _: pytest.MonkeyPatch) -> None:
    write_source(toy)
    (source_folder(toy) / "max/python/max/layers.py").unlink()


@fault(
    "is not the source of max-1.0",
    "1 of 5 different, max/layers.py",
    "hint: check out",
    options=("--source",),
)
def source_that_differs(toy: Toy, _: pytest.MonkeyPatch) -> None:
    write_source(toy)
    path = source_folder(toy) / "max/python/max/layers.py"
    path.write_bytes(path.read_bytes() + b"# local change\n")


@fault(
    "is not a MAX source checkout",
    "expected the folder max/kernels in it",
    options=("--source", "--inexact", "--release", "2.0"),
)
def source_that_is_no_checkout_and_is_not_needed(
    toy: Toy, _: pytest.MonkeyPatch
) -> None:
    toy.edit_patch("kernel", "Applies-To: >=1.0", "Applies-To: >=1.0,<2")


@fault(
    "a patch changes max/kernels/src/nn/x.mojo, which is in no Mojo package",
    "found no __init__.mojo",
    "sparse-checkout add max/kernels/src/nn`",
    options=("--source",),
)
def source_without_the_file_that_makes_a_package(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch)
    (toy.source / made.KERNELS / "nn/__init__.mojo").unlink()


@fault("cannot write", "mojo is not a folder", options=("--source",))
def kept_packages_that_cannot_be_written(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch)
    (toy.root / "build/work/mojo").write_text("a file\n")


@fault(
    "cannot install mojo-compiler 9.9",
    "hint: check the network",
    options=("--source",),
)
def compiler_that_cannot_be_had(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch)
    shutil.rmtree(toy.root.parent / "compilers")
    (toy.root.parent / "compilers").mkdir()


@fault(
    "wrong compiler in",
    "expected Mojo 9.9, found 9.8",
    "hint: delete",
    options=("--source",),
)
def compiler_of_another_version(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch, version="9.8")


@fault(
    "Mojo 9.9 is not the compiler that wrote the packages of max_mojo_libs-1.0",
    "expected one build, found 0123456789ab, c0c0c0c0c0c0",
    "hint: correct mojo-compiler in build/releases.toml",
    options=("--source",),
)
def compiler_of_another_build(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch, build="0123456789abcdef" * 4)


@fault(
    "the Mojo package nn does not compile with Mojo 9.9:",
    "max/kernels/src/nn/x.mojo:2:1: use of unknown declaration",
    "the first file is patched by broken, kernel",
    "source does not say what it is (bazel/mojo.MODULE.bazel)",
    "the release is MAX 1.0 with Mojo 9.9, v1.0 of modular/modular",
    "hint: correct the patches of the package, or check out v1.0",
    options=("--source",),
)
def patch_with_a_syntax_error(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch)
    path = f"{made.KERNELS}nn/x.mojo"
    before = b"def f():\n    return\n"
    toy.add_patch(
        "broken",
        {f"../../{path}": before},
        {f"../../{path}": before.replace(b"return", b"???")},
        Touches_Mojo="nn",
    )


@fault(
    "the Mojo package nn does not compile with Mojo 9.9:",
    "max/kernels/src/nn/__init__.mojo:1:1: unable to locate module 'newer'",
    "source is MAX 1.1.0.dev7, MOJO 9.10.0.dev7 (bazel/mojo.MODULE.bazel);",
    "v1.0 of modular/modular, commits aaa..bbb",
    "hint: check out v1.0",
    options=("--source",),
)
def source_of_another_release(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch)
    init = toy.source / made.KERNELS / "nn/__init__.mojo"
    init.write_bytes(b"from newer import g\n" + init.read_bytes())
    made.write_tree(
        toy.source,
        {
            "bazel/mojo.MODULE.bazel": b"# As MAX has it.\n"
            b'MAX_PACKAGE_VERSION = "1.1.0.dev7"\n\n'
            b'MOJO_PACKAGE_VERSION = "9.10.0.dev7"\n'
        },
    )
    _edit(
        toy,
        "build/releases.toml",
        'upstream-tag = "v1.0"',
        'upstream-tag = "v1.0"\nsource-commits = "aaa..bbb"',
    )


@fault(
    "has only a part of the Mojo package nn: expected",
    "max/kernels/src/nn/y.mojo, which max/kernels/src/nn/__init__.mojo imports",
    "hint: in a sparse or partial clone: `git -C",
    "sparse-checkout add max/kernels/src/nn`",
    options=("--source",),
)
def source_with_a_part_of_a_package(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch)
    init = toy.source / made.KERNELS / "nn/__init__.mojo"
    init.write_bytes(init.read_bytes() + b"from .y import g\n")


@fault(
    "top must be rebuilt, because a patch changes more than function bodies",
    "in what they import (nn)",
    "expected their sources below",
    "hint: in a sparse or partial clone",
    options=("--source",),
)
def source_without_a_package_that_must_be_rebuilt(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch)
    _default_argument(toy)
    shutil.rmtree(toy.source / made.KERNELS / "top")


@fault(
    "the Mojo package top twice: max/examples/top, max/kernels/src/top",
    options=("--source",),
)
def source_with_a_package_twice(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch)
    _default_argument(toy)
    made.write_tree(toy.source, {"max/examples/top/__init__.mojo": b""})


@fault(
    "a patch changes max/kernels/src/other/y.mojo, which is in no Mojo package",
    "expected one of base, nn, top, found other",
    options=("--source",),
)
def patch_of_a_package_that_is_not_released(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch)
    made.write_tree(
        toy.source,
        {
            f"{made.KERNELS}other/__init__.mojo": b"",
            f"{made.KERNELS}other/y.mojo": b"comptime Y = 1\n",
        },
    )
    path = f"../../{made.KERNELS}other/y.mojo"
    toy.add_patch(
        "elsewhere",
        {path: b"comptime Y = 1\n"},
        {path: b"comptime Y = 2\n"},
        Touches_Mojo="other",
    )


@fault(
    "Mojo packages import each other: ",
    "base -> nn",
    options=("--source",),
)
def source_whose_packages_import_each_other(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.give_source(toy, monkeypatch)
    _default_argument(toy)
    init = toy.source / made.KERNELS / "base/__init__.mojo"
    init.write_bytes(b"from nn import f\n" + init.read_bytes())


def _default_argument(toy: Toy) -> None:
    """Adds a patch of which a dependent keeps a copy."""
    path = f"../../{made.KERNELS}nn/x.mojo"
    toy.add_patch(
        "argument",
        {path: b"def f():\n    return\n"},
        {path: b"def f(x: Int = 1):\n    return\n"},
        Touches_Mojo="nn",
    )


def source_folder(toy: Toy) -> Path:
    """Where a toy's source checkout is put; main is given it."""
    return toy.source


def write_source(toy: Toy) -> None:
    """Writes the toy's 1.0 as a source checkout."""
    toy.write_source()


def index_line(toy: Toy, name: str) -> tuple[str, str]:
    """Returns the two blob ids of a patch of one file."""
    (line,) = [
        line
        for line in toy.patch(name).read_text().splitlines()
        if line.startswith("index ")
    ]
    before, _, after = line.split()[1].partition("..")
    return before, after


def _edit(toy: Toy, name: str, old: str, new: str) -> None:
    path = toy.root / name
    text = path.read_text()
    assert text.count(old) == 1, text
    path.write_text(text.replace(old, new))


def _claim(toy: Toy) -> None:
    """Makes the overlay's root a package, so that any file has an owner."""
    shutil.move(
        toy.root / "overlay/extra/overlay.toml",
        toy.root / "overlay/overlay.toml",
    )


def _first(toy: Toy, name: str) -> list[str]:
    """Returns the series' names, one of them moved to the front."""
    names = [n for n in toy.series.read_text().split("\n") if n[:1] != "#"]
    return [name, *(n for n in names if n != name)]


def _remake(toy: Toy, name: str, path: str, old: bytes, new: bytes) -> None:
    """Replaces a patch by one of other content."""
    lines = toy.series.read_text()
    toy.add_patch(name, {path: old}, {path: new})
    toy.series.write_text(lines)
