# SPDX-License-Identifier: Apache-2.0
"""What the environment variables ``ATTNQUANT*`` ask for.

They are parsed once, at start, and everything else reads :class:`Settings`.
A name or value that is not understood, and a combination that could not mean
anything, is an error: a server must not start as something else than asked.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

PREFIX = "ATTNQUANT"

_RANKS_BY_OP = {"sm_90": 16, "metal": float("inf")}
"""The highest rank at which the custom op rebuilds, where it does, by how the
target's name begins.

On an H200 (sm_90a) the op is faster than matmuls at rank 4 and slower at 32;
its time grows with the rank and theirs does not, so that they meet at about 20
(docs/attnquant.md). Elsewhere it is as published for the system that this
implements, on sm_100 and with another op, which was faster on Metal alone.
"""


class SettingsError(ValueError):
    """Variables that cannot be followed; names variable, value and choices."""


@dataclass(frozen=True)
class Settings:
    """How AttnQuant serves a model."""

    quant: Literal["nvfp4"] | None = None
    """The format that projections are quantized to, or ``None``."""

    ignore: tuple[str, ...] = ()
    """Patterns of the modules that are not quantized; see :func:`matches`."""

    scales: Literal["rtn", "sweep"] = "rtn"
    """How block scales are chosen: from the block's largest weight, or the
    best of its neighbours."""

    blocks: int | None = None
    """Bands that the layers are grouped into; ``None``: no decomposition."""

    rank: int | None = None
    """Rank of each layer's difference from its band."""

    precompute_outside: bool = True
    """Rebuild weights once, at load; else in the graph, at each forward."""

    gemm: bool | None = None
    """How the graph rebuilds: by matmuls, by a custom op, or ``None``: by what
    suits the device."""

    cache_dir: Path | None = None
    """Folder of the weight cache; ``None``: see :func:`default_cache_dir`."""

    cache_limit: int | None = None
    """Gigabytes (10^9 bytes) that the cache may hold; ``None``: its default."""

    def decomposition(self, layers: int) -> tuple[int, int]:
        """Returns the number of bands and the rank for a model.

        Without bands asked for, or with as many as layers, each layer is a
        band of its own and keeps its weights bit for bit.

        Args:
            layers: The model's number of decoder layers.

        Raises:
            SettingsError: If there are more bands than layers, a rank is needed
                and not set, or there is nothing for the graph to rebuild.
        """
        if self.blocks is None and not self.precompute_outside:
            raise SettingsError(
                "ATTNQUANT_PRECOMPUTE_OUTSIDE=0 has nothing to rebuild: set "
                "ATTNQUANT_BLOCKS, or serve a bundle"
            )
        if self.blocks is None or self.blocks == layers:
            return layers, 0
        if self.blocks > layers:
            raise SettingsError(
                f"ATTNQUANT_BLOCKS={self.blocks}: the model has {layers} "
                f"layers; expected 1 to {layers}"
            )
        if self.rank is None:
            raise SettingsError(
                f"ATTNQUANT_BLOCKS={self.blocks} on {layers} layers needs "
                "ATTNQUANT_RANK: a whole number, 0 or more (0 keeps only the "
                "means)"
            )
        return self.blocks, self.rank

    def ignores(self, module: str) -> bool:
        """Says whether a module, by its path, is not to be quantized."""
        return any(matches(pattern, module) for pattern in self.ignore)

    def check_ignored(self, modules: Collection[str]) -> None:
        """Checks that each ignore pattern matches one of the modules.

        Raises:
            SettingsError: If a pattern matches none, and so is mistyped.
        """
        for pattern in self.ignore:
            if not any(matches(pattern, module) for module in modules):
                example = next(iter(modules), "none")
                raise SettingsError(
                    f"ATTNQUANT_QUANT_IGNORE: {pattern!r} matches none of the "
                    f"{len(modules)} projections, such as {example}"
                )

    def uses_gemm(self, target: str, rank: int) -> bool:
        """Says whether the graph rebuilds weights by matmuls.

        Args:
            target: See :func:`.hardware.target`.
            rank: Of each layer's difference from its band.
        """
        if self.gemm is not None:
            return self.gemm
        return not any(
            target.startswith(name) and rank <= highest
            for name, highest in _RANKS_BY_OP.items()
        )

    def identity(self) -> dict[str, str | int | list[str] | None]:
        """Returns what the served weights depend on, fit for JSON.

        Where and how large the cache is, and how the graph rebuilds, are not
        in it.
        """
        return {
            "quant": self.quant,
            "ignore": sorted(set(self.ignore)),
            "scales": self.scales if self.quant else None,
            "blocks": self.blocks,
            "rank": self.rank,
            "precompute_outside": self.precompute_outside,
        }


def matches(pattern: str, module: str) -> bool:
    """Says whether a pattern names a module, or a module that contains it.

    Patterns are ModelOpt's: shell wildcards against the whole path, case and
    all, such as ``model.layers.0.*`` or ``*mlp*``. One without a dot may also
    be a part of the path: ``self_attn``, ``[qk]_proj``.

    Args:
        pattern: The pattern.
        module: A module's path, as the checkpoint names it.
    """
    parts = module.split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(fnmatchcase(name, pattern) for name in (*paths, *parts))


def from_environment(environment: Mapping[str, str]) -> Settings | None:
    """Returns the settings, or ``None`` if AttnQuant is off.

    It is on if any variable is set whose name starts with ``ATTNQUANT``,
    unless ``ATTNQUANT=0``; then the others are not looked at.

    Args:
        environment: The variables, such as ``os.environ``.

    Raises:
        SettingsError: With all that is wrong with names and values, or else
            with all contradictions.
    """
    given = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIX)
    }
    if not given or given.get(PREFIX) == "0":
        return None
    fields: dict[str, Any] = {}
    problems = []
    for name, value in sorted(given.items()):
        variable = VARIABLES.get(name)
        if variable is None:
            problems.append(_unknown(name))
            continue
        try:
            fields[variable.field] = variable.parse(value)
        except ValueError:
            problems.append(f"{name}={value!r}: expected {variable.choices}")
    if not problems:
        problems = _contradictions(given.keys(), fields)
    if problems:
        raise SettingsError(
            "; ".join(problems) + " (ATTNQUANT=0 switches AttnQuant off)"
        )
    fields.pop("on", None)
    return Settings(**fields)


@functools.cache
def asked() -> Settings:
    """Returns the process's settings, which are parsed once.

    Raises:
        SettingsError: As :func:`from_environment`.
    """
    return from_environment(os.environ) or Settings()


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Returns where the weight cache lies, whatever else is set.

    Raises:
        SettingsError: If the variable names no folder, or as
            :func:`default_cache_dir`.
    """
    name = "ATTNQUANT_CACHE_DIR"
    if name not in environment:
        return default_cache_dir(environment)
    try:
        return _folder(environment[name])
    except ValueError:
        raise SettingsError(
            f"{name}={environment[name]!r}: expected {VARIABLES[name].choices}"
        ) from None


def default_cache_dir(environment: Mapping[str, str]) -> Path:
    """Returns where the weight cache lies if ``ATTNQUANT_CACHE_DIR`` is unset.

    That is ``attnquant`` in the user's cache folder as freedesktop.org's base
    directory specification has it, which ignores a relative
    ``XDG_CACHE_HOME``.

    Raises:
        SettingsError: If the user has no home.
    """
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            raise SettingsError(
                "there is no home directory to cache weights in; set "
                "ATTNQUANT_CACHE_DIR to a folder"
            ) from None
    return base / "attnquant"


@dataclass(frozen=True)
class _Variable:
    field: str
    parse: Callable[[str], Any]
    """Raises ValueError for what is not one of the choices."""
    choices: str


def _one_of(field: str, values: Mapping[str, object]) -> _Variable:
    def parse(text: str) -> object:
        if text not in values:
            raise ValueError(text)
        return values[text]

    return _Variable(field, parse, " or ".join(values))


def _whole_number(field: str, least: int) -> _Variable:
    def parse(text: str) -> int:
        # int() alone would also take "1_0", " 1" and other scripts' digits.
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
            raise ValueError(text)
        return int(text)

    return _Variable(field, parse, f"a whole number, {least} or more")


def _patterns(text: str) -> tuple[str, ...]:
    patterns = tuple(pattern.strip() for pattern in text.split(","))
    if not all(patterns):
        raise ValueError(text)
    return patterns


def _folder(text: str) -> Path:
    if not text:
        raise ValueError(text)
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # "~name" of no such user
        raise ValueError(text) from error


VARIABLES = {
    "ATTNQUANT": _one_of("on", {"0": False, "1": True}),
    "ATTNQUANT_QUANT": _one_of("quant", {"nvfp4": "nvfp4"}),
    "ATTNQUANT_QUANT_IGNORE": _Variable(
        "ignore", _patterns, "patterns with commas between, such as self_attn"
    ),
    "ATTNQUANT_SCALES": _one_of("scales", {"rtn": "rtn", "sweep": "sweep"}),
    "ATTNQUANT_BLOCKS": _whole_number("blocks", 1),
    "ATTNQUANT_RANK": _whole_number("rank", 0),
    "ATTNQUANT_PRECOMPUTE_OUTSIDE": _one_of(
        "precompute_outside", {"0": False, "1": True}
    ),
    "ATTNQUANT_GEMM": _one_of("gemm", {"0": False, "1": True, "auto": None}),
    "ATTNQUANT_CACHE_DIR": _Variable("cache_dir", _folder, "a folder"),
    "ATTNQUANT_CACHE_LIMIT": _whole_number("cache_limit", 1),
}
"""What there is to set, by name."""

_NEEDS = {
    "ATTNQUANT_QUANT_IGNORE": "ATTNQUANT_QUANT",
    "ATTNQUANT_SCALES": "ATTNQUANT_QUANT",
    "ATTNQUANT_RANK": "ATTNQUANT_BLOCKS",
}
"""Variables that only say how to do what another asks for."""


def _contradictions(
    given: Collection[str], fields: Mapping[str, object]
) -> list[str]:
    found = [
        f"{name} means nothing without {needed}"
        for name, needed in _NEEDS.items()
        if name in given and needed not in given
    ]
    runtime = not fields.get("precompute_outside", True)
    if "ATTNQUANT_GEMM" in given and not runtime:
        found.append(
            "ATTNQUANT_GEMM says how the graph rebuilds weights, which it "
            "does only with ATTNQUANT_PRECOMPUTE_OUTSIDE=0"
        )
    if "ATTNQUANT_GEMM" in given and fields.get("rank") == 0:
        found.append(
            "ATTNQUANT_GEMM says how the graph rebuilds weights, and "
            "ATTNQUANT_RANK=0 leaves nothing to rebuild"
        )
    if runtime and "ATTNQUANT_QUANT" in given:
        found.append(
            "ATTNQUANT_QUANT quantizes weights that are rebuilt at load; it "
            "needs ATTNQUANT_PRECOMPUTE_OUTSIDE=1"
        )
    return found


def _unknown(name: str) -> str:
    nearest = get_close_matches(name, VARIABLES, n=1, cutoff=0.0)[0]
    return (
        f"{name} is not a variable of AttnQuant (did you mean {nearest}?); "
        f"there are {', '.join(VARIABLES)}"
    )
