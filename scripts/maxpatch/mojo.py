# SPDX-License-Identifier: Apache-2.0
"""Mojo packages of a source checkout: which are rebuilt, in which order.

A compiled package (``nn.mojoc``) looks up most of what it imports by name when
a graph is compiled, and keeps a copy of the rest. Which is which was measured
with Mojo 1.0.0 and 1.2.0: one package was rebuilt after a change, the one that
imports it was not. ``tests/integration/test_source_build.py`` holds it.

- Looked up: a function's body, also that of an ``@always_inline`` function, of
  a trait's default and of one that is called at compile time, even for a type.
- Kept: values of ``comptime`` constants, default arguments and parameters,
  bodies of ``@always_inline("builtin")`` functions, the overload that was
  chosen, and the places of arguments that are given by name. A function that is
  gone, or raises where it didn't, crashes the compiler of the graph.

So a change of function bodies alone needs the changed package alone. Any other
change also needs the packages that import it, and those that import them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .checkout import SourceTree
from .errors import SourceError

INIT = "__init__.mojo"
"""The file that makes a folder a package."""

_TOKEN = re.compile(
    r"""
    (?P<string> \"{3}(?:\\.|[^\\])*?\"{3} | '{3}(?:\\.|[^\\])*?'{3}
              | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
    | (?P<skip> \#[^\n]* | \\\n )
    | (?P<open> [(\[{] ) | (?P<close> [)\]}] ) | (?P<end> \n )
    | [^"'\#\\(){}\[\]\n]+ | .
    """,
    re.DOTALL | re.VERBOSE,
)
_FUNCTION = re.compile(r"(?:async )?(?:def|fn)\b.*:")
_IMPORT = re.compile(
    r"(?:^|[:;] ?)(?:from (\.*[\w.]*) ?import\b|import ([\w., ]+))"
)


def _lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields a source's logical lines.

    Comments are dropped, a bracketed expression is one line, and runs of
    blanks are one blank.

    Yields:
        Indentation, the line, and the line with its strings emptied.
    """
    indent, depth, line, code = 0, 0, "", ""
    for token in _TOKEN.finditer(text + "\n"):
        kind, found = token.lastgroup, token[0]
        if kind == "end" and not depth:
            if line.strip():
                whole = " ".join(line.split())
                yield indent, whole, " ".join(code.split())
            line = code = ""
            continue
        if not line.strip() and kind != "end":
            before = line + found
            indent = len(before) - len(before.lstrip(" \t"))
        if kind == "string":
            line, code = line + repr(found), code + '""'
        else:
            plain = " " if kind in {"skip", "end"} else found
            line, code = line + plain, code + plain
            depth += (kind == "open") - (kind == "close")


def interface(text: str) -> tuple[list[str], set[str]]:
    """Returns what a package that imports a module may have copied from it.

    That is every line outside function bodies, comments and docstrings, and
    the bodies of ``@always_inline("builtin")`` functions.

    Args:
        text: The module's source.

    Returns:
        The lines, and apart from them the names that it imports: each of them
        can be imported from here again.
    """
    kept: list[str] = []
    names: set[str] = set()
    body: int | None = None
    baked = False
    for indent, line, code in _lines(text):
        if body is not None and indent > body:
            continue
        body = None
        if code == '""':
            continue
        if match := _IMPORT.match(code):
            listed = match[2] or code[match.end() :].strip(" ()")
            names |= {
                f"{match[1] or 'import'} {n.strip()}"
                for n in listed.split(",")
                if n.strip()
            }
            continue
        kept.append(f"{indent} {line}")
        if code.startswith("@"):
            baked = baked or ("always_inline" in code and "builtin" in line)
            continue
        if _FUNCTION.fullmatch(code) and not baked:
            body = indent
        baked = False
    return kept, names


def spreads(before: str, after: str) -> bool:
    """Whether a change of a module can outdate packages that import it.

    Args:
        before: The module's source that they were compiled with.
        after: Its new source. Imports that it adds are no matter: what is
            compiled has found its names already.
    """
    (old, names), (new, others) = interface(before), interface(after)
    return old != new or not names <= others


def imports(text: str) -> set[str]:
    """Returns the modules that a module imports, as they are written.

    It finds ``from x.y import z``, ``import x.y as z``, lists of them, and
    relative ones (``..x``), at any depth and also behind a colon.

    Args:
        text: The module's source.
    """
    found: set[str] = set()
    for _, _, code in _lines(text):
        for module, modules in _IMPORT.findall(code):
            names = [module] if module else modules.split(",")
            found |= {name.split()[0] for name in names if name.strip()}
    return found


@dataclass(frozen=True, slots=True)
class Package:
    """The sources of a Mojo package, with patches applied."""

    name: str
    folder: str
    """Its path in the source tree."""

    sources: Mapping[str, bytes]
    """Content by path below its folder."""

    @property
    def imported(self) -> frozenset[str]:
        """The other packages that it imports."""
        found: set[str] = set()
        for data in self.sources.values():
            found |= {name.partition(".")[0] for name in imports(_text(data))}
        return frozenset(found - {"", self.name})

    @property
    def digest(self) -> str:
        """The digest of names and contents, in hex."""
        files = {path: sha256(data) for path, data in self.sources.items()}
        return sha256(json.dumps(files, sort_keys=True).encode())

    def missing(self) -> list[str]:
        """Returns its own modules that it imports and doesn't have."""
        faults = []
        for path, data in sorted(self.sources.items()):
            for name in sorted(imports(_text(data))):
                first, _, rest = name.partition(".")
                if name.startswith("."):
                    rest = name.lstrip(".")
                    up = len(name) - len(rest)
                    parents = PurePosixPath(path).parents
                    if not rest or up > len(parents):
                        continue
                    base = parents[up - 1]
                elif first == self.name and rest:
                    base = PurePosixPath()
                else:
                    continue
                module = base / rest.replace(".", "/")
                if not {f"{module}.mojo", f"{module}/{INIT}"} & set(
                    self.sources
                ):
                    faults.append(
                        f"{self.folder}/{module}.mojo, which "
                        f"{self.folder}/{path} imports"
                    )
        return sorted(set(faults))


@dataclass(frozen=True, slots=True)
class Step:
    """A package that is rebuilt."""

    package: Package
    reason: str
    after: tuple[str, ...]
    """The rebuilt packages that it is compiled against, sorted."""


class Tree:
    """The Mojo packages of a source checkout; it is only read."""

    def __init__(self, source: Path, patched: SourceTree) -> None:
        """Looks at a checkout.

        Args:
            source: The checkout.
            patched: What the patches made of its files.
        """
        self.source = source
        self.patched = patched

    def folder_of(self, path: str) -> str | None:
        """Returns the folder of the package that a file belongs to.

        That is the outermost of the folders around the file, each with an
        ``__init__.mojo``.
        """
        found = None
        for folder in PurePosixPath(path).parents:
            if not self._is_there(f"{folder}/{INIT}"):
                break
            found = str(folder)
        return found

    def folders(self) -> dict[str, list[str]]:
        """Returns, by name, the folders below ``max`` that are packages."""
        found: dict[str, list[str]] = {}
        for place, folders, files in os.walk(self.source / "max"):
            folders[:] = sorted(f for f in folders if not f.startswith("."))
            if INIT in files:
                folders.clear()
                path = Path(place).relative_to(self.source)
                found.setdefault(path.name, []).append(path.as_posix())
        return found

    def load(self, folder: str) -> Package:
        """Reads a package.

        Raises:
            SourceError: A file of it can't be read, or isn't there.
        """
        there = self._files(folder)
        there |= {
            path: file
            for path, file in self.patched.files.items()
            if path.startswith(f"{folder}/") and path.endswith(".mojo")
        }
        sources = {}
        for path, file in sorted(there.items()):
            if path in self.patched.removed:
                continue
            try:
                sources[path.removeprefix(f"{folder}/")] = file.read_bytes()
            except OSError as error:
                raise SourceError(
                    f"{file} cannot be read: {error.strerror}"
                ) from error
        package = Package(PurePosixPath(folder).name, folder, sources)
        if missing := package.missing():
            raise SourceError(
                f"{self.source} has only a part of the Mojo package "
                f"{package.name}: expected\n  " + "\n  ".join(missing),
                hint=_checkout_hint(self.source, folder),
            )
        return package

    def _files(self, folder: str) -> dict[str, Path]:
        """Returns the Mojo files below a package's folder, hidden ones aside.

        Raises:
            SourceError: A folder can't be read, or a symbolic link is there.
        """

        def fail(error: OSError) -> None:
            raise SourceError(
                f"{error.filename} cannot be read: {error.strerror}"
            ) from error

        found = {}
        walk = os.walk(self.source / folder, onerror=fail)
        for place, folders, files in walk:
            folders[:] = [name for name in folders if name[0] != "."]
            mojo = [n for n in files if n.endswith(".mojo") and n[0] != "."]
            for file in (Path(place, name) for name in [*folders, *mojo]):
                if file.is_symlink():
                    raise SourceError(
                        f"{file} is a symbolic link to {file.readlink()}: "
                        f"expected the Mojo package {folder} without links",
                        hint="copy what it leads to to its place",
                    )
                if file.is_file():
                    found[file.relative_to(self.source).as_posix()] = file
        return found

    def before(self, path: str) -> bytes | None:
        """Returns a file as the release's packages were made from it, or None.

        That is as the checkout has it, without the patches that are in it.
        """
        if path in self.patched.before:
            return self.patched.before[path]
        file = self.source / path
        return file.read_bytes() if file.is_file() else None

    def after(self, path: str) -> bytes | None:
        """Returns a file as the patches leave it, or None."""
        if path in self.patched.removed:
            return None
        file = self.patched.files.get(path, self.source / path)
        return file.read_bytes() if file.is_file() else None

    def _is_there(self, path: str) -> bool:
        return path in self.patched.files or (self.source / path).is_file()


def _checkout_hint(source: Path, folder: str) -> str:
    git = f"git -C {shlex.quote(str(source))}"
    return (
        f"in a sparse or partial clone: `{git} sparse-checkout add {folder}`, "
        f"or `{git} checkout HEAD -- {folder}`"
    )


Importers = Callable[[Collection[str], Collection[str]], list[str]]
"""Returns which of some compiled packages import one of others."""


def plan(
    tree: Tree,
    installed: Collection[str],
    importers: Importers,
) -> list[Step]:
    """Decides which packages are rebuilt, and in which order.

    Args:
        tree: The source checkout, with what the patches made of it.
        installed: The names of the release's packages.
        importers: Asked about packages of which the checkout doesn't have the
            sources.

    Raises:
        SourceError: A changed file is in no package of the release, or the
            sources of a package that must be rebuilt aren't there.
    """
    reasons: dict[str, str] = {}
    loaded: dict[str, Package] = {}
    copied: set[str] = set()
    patched = tree.patched
    for path in sorted({*patched.files, *patched.removed, *patched.before}):
        folder = tree.folder_of(path)
        name = folder and PurePosixPath(folder).name
        if folder is None or name not in installed:
            raise SourceError(
                f"a patch changes {path}, which is in no Mojo package of the "
                f"release: expected one of {', '.join(sorted(installed))}"
                + (f", found {name}" if name else f", found no {INIT}"),
                hint=None
                if name
                else _checkout_hint(
                    tree.source, str(PurePosixPath(path).parent)
                ),
            )
        assert name is not None
        if name not in loaded:
            loaded[name] = tree.load(folder)
        before, after = tree.before(path), tree.after(path)
        if before is None or (
            after and not spreads(_text(before), _text(after))
        ):
            reasons.setdefault(name, "only function bodies in it are changed")
        else:
            copied.add(name)
            reasons[name] = f"more than function bodies is changed: {path}"
    if len(reasons) < 2 and not copied:
        return [Step(loaded[name], why, ()) for name, why in reasons.items()]
    for name, folders in tree.folders().items():
        if name not in installed or name in loaded:
            continue
        if len(folders) > 1:
            raise SourceError(
                f"{tree.source} has the Mojo package {name} twice: "
                + ", ".join(folders)
            )
        loaded[name] = tree.load(folders[0])
    graph = {name: package.imported for name, package in loaded.items()}
    spread = sorted(copied)
    while spread:
        changed = spread.pop()
        for name in sorted(graph):
            if changed in graph[name] and name not in copied:
                copied.add(name)
                reasons[name] = f"imports {changed}, and copies from it"
                spread.append(name)
    if copied:
        _check_closed(tree, set(installed) - set(loaded), copied, importers)
    return [
        Step(
            loaded[name], why, tuple(sorted(_reached(graph, name) & {*reasons}))
        )
        for name, why in reasons.items()
    ]


def _check_closed(
    tree: Tree,
    elsewhere: Collection[str],
    copied: Collection[str],
    importers: Importers,
) -> None:
    wanted = importers(sorted(elsewhere), copied)
    if wanted:
        raise SourceError(
            f"{', '.join(wanted)} must be rebuilt, because a patch changes "
            f"more than function bodies in what they import "
            f"({', '.join(sorted(copied))}): expected their sources below "
            f"{tree.source}/max, found none",
            hint=_checkout_hint(tree.source, "max"),
        )


def _reached(graph: Mapping[str, Collection[str]], name: str) -> set[str]:
    """Returns the packages that one imports, directly or not."""
    found: set[str] = set()
    left = [name]
    while left:
        for other in graph.get(left.pop(), ()):
            if other not in found:
                found.add(other)
                left.append(other)
    return found - {name}


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def sha256(data: bytes) -> str:
    """Returns a content's SHA-256, in hex."""
    return hashlib.sha256(data).hexdigest()
