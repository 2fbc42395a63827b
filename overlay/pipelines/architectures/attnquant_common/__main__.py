# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201
"""Shows and clears the weight cache: ``cache ls``, ``cache rm``."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence

from .cache import Cache, Entry
from .settings import SettingsError, cache_dir

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SHOWN = 12
"""Digits of a key that are shown; any that are unique name it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status.

    It is 1 if an entry was not found or is in use, or the cache cannot be
    read, and 2 if the command was not understood.
    """
    options = _parser().parse_args(arguments)
    try:
        cache = Cache(cache_dir(os.environ))
        return _list(cache) if options.verb == "ls" else _remove(cache, options)
    except (OSError, SettingsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description="AttnQuant's tools."
    )
    tools = parser.add_subparsers(required=True, metavar="cache")
    cache = tools.add_parser(
        "cache",
        help="the weight cache",
        description="The weight cache, in $ATTNQUANT_CACHE_DIR, or else "
        "attnquant in $XDG_CACHE_HOME or ~/.cache.",
    )
    verbs = cache.add_subparsers(dest="verb", required=True)
    verbs.add_parser("ls", help="list the entries, last used ones last")
    remove = verbs.add_parser("rm", help="remove entries that are not in use")
    which = remove.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "keys",
        nargs="*",
        default=[],
        metavar="KEY",
        help="an entry's key, or the first digits of it",
    )
    which.add_argument("--all", action="store_true", help="every entry")
    which.add_argument(
        "--older-than",
        type=_seconds,
        metavar="AGE",
        help="those not used for so long: a number and s, m, h or d",
    )
    return parser


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no age; one is a number and s, m, h or d, as in 30d"
        )
    return float(match[1]) * _UNITS[match[2]]


def _list(cache: Cache) -> int:
    entries = cache.entries()
    print(f"{'KEY':{_SHOWN}}  {'SIZE':>9}  {'LAST USED':>9}  WHAT")
    for entry in entries:
        what = "damaged"
        if entry.label is not None:
            what = ", ".join(f"{k} {v}" for k, v in entry.label.items())
        print(
            f"{entry.key[:_SHOWN]}  {_size(entry.nbytes):>9}  "
            f"{_age(entry):>9}  {what}"
        )
    total = sum(entry.nbytes for entry in entries)
    what = "entry" if len(entries) == 1 else "entries"
    print(f"{len(entries)} {what}, {_size(total)}, in {cache.folder}")
    return 0


def _remove(cache: Cache, options: argparse.Namespace) -> int:
    entries = cache.entries()
    chosen, failed = entries, False
    if options.older_than is not None:
        oldest = time.time() - options.older_than
        chosen = [entry for entry in entries if entry.used <= oldest]
    elif not options.all:
        chosen = []
        for key in options.keys:
            found = [entry for entry in entries if entry.key.startswith(key)]
            if key and len(found) == 1:
                chosen += found
            else:
                print(
                    f"error: the keys of {len(found)} entries begin with "
                    f"{key!r}",
                    file=sys.stderr,
                )
                failed = True
    for entry in dict.fromkeys(entry.key for entry in chosen):
        if cache.remove(entry):
            print(f"removed {entry[:_SHOWN]}")
        else:
            print(f"error: {entry[:_SHOWN]} is in use", file=sys.stderr)
            failed = True
    cache.sweep()
    return int(failed)


def _age(entry: Entry) -> str:
    age = max(time.time() - entry.used, 0)
    for unit in "dhm":
        if age >= 2 * _UNITS[unit]:
            return f"{age / _UNITS[unit]:.0f}{unit} ago"
    return f"{age:.0f}s ago"


def _size(size: int) -> str:
    power = min(max(len(str(size)) - 1, 0) // 3, 4)
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return f"{size / 1000**power:.{1 if power else 0}f} {unit}"


if __name__ == "__main__":
    sys.exit(main())
