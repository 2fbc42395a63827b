# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments, printing and exit codes; nothing else prints.

Exit status: 0 done, 1 an expected failure, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from .build import (
    Project,
    Request,
    build,
    check_writable,
    lay_out,
    verify_built,
    write_json,
)
from .errors import MaxPatchError, OutputError
from .release import fetch, host_platform, host_python

ROOT = Path(__file__).resolve().parents[2]


def main(words: list[str] | None = None, root: Path = ROOT) -> int:
    """Runs one verb on a project and returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    arguments = parser.parse_args(words)
    if vars(arguments).get("inexact") and not arguments.source:
        parser.error("--inexact says something of --source, which is missing")
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(arguments.run(arguments, Project(root)))
    except MaxPatchError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has left (`| head`); Python's own flush must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # Permissions and full disks, wherever they are met.
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_: int, __: FrameType | None) -> None:
    """Lets a killed build clean up as an interrupted one does."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="maxpatch",
        description="Patch a MAX release and pack it as a verified wheel.",
        epilog="exit status: 0 done, 1 expected failure, 2 wrong usage",
    )
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    release = argparse.ArgumentParser(add_help=False)
    release.add_argument(
        "--release",
        metavar="VERSION",
        help="MAX release (default: that of build/releases.toml)",
    )
    release.add_argument(
        "--python",
        default=host_python(),
        metavar="X.Y",
        help="Python the wheel is for (default: %(default)s)",
    )
    release.add_argument(
        "--platform",
        default=host_platform(),
        help="linux-x86_64, linux-aarch64 or macos-arm64 "
        "(default: %(default)s)",
    )
    offline = argparse.ArgumentParser(add_help=False)
    offline.add_argument(
        "--offline", action="store_true", help="use only what is cached"
    )
    verb = verbs.add_parser(
        "build",
        parents=[release, offline],
        help="fetch, apply, add the overlay, pack, verify",
    )
    verb.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="that release's MAX source checkout: Mojo packages that patches "
        "change are rebuilt from it; only read",
    )
    verb.add_argument(
        "--inexact",
        action="store_true",
        help="take the checkout although its Python isn't the release's; its "
        "Mojo packages must compile all the same",
    )
    verb.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where the wheel goes (default: dist)",
    )
    verb.add_argument(
        "--report", type=Path, metavar="FILE", help="write a JSON report"
    )
    verb.add_argument(
        "--keep", action="store_true", help="keep the scratch folder"
    )
    verb.set_defaults(run=_build)

    verb = verbs.add_parser(
        "fetch", parents=[release, offline], help="download the pinned wheel"
    )
    verb.set_defaults(run=_fetch)

    verb = verbs.add_parser(
        "apply",
        parents=[release, offline],
        help="lay out MAX's Python with the series as commits",
    )
    verb.add_argument("folder", type=Path, help="a folder that isn't there yet")
    verb.set_defaults(run=_apply)

    verb = verbs.add_parser(
        "verify", parents=[offline], help="verify a built wheel again"
    )
    verb.add_argument("wheel", type=Path)
    verb.set_defaults(run=_verify)

    verb = verbs.add_parser(
        "status", help="show every patch's state for every release"
    )
    verb.add_argument("--json", action="store_true", help="as JSON")
    verb.set_defaults(run=_status)
    return parser


def _request(arguments: argparse.Namespace, project: Project) -> Request:
    options = vars(arguments)
    source: Path | None = options.get("source")
    output: Path | None = options.get("output")
    return Request(
        release=arguments.release,
        python=arguments.python,
        platform=arguments.platform,
        source=source.resolve() if source else None,
        inexact=options.get("inexact", False),
        output=output.absolute() if output else project.root / "dist",
        offline=arguments.offline,
        keep=options.get("keep", False),
    )


def _announce(line: str) -> None:
    print(line, flush=True)


def _build(arguments: argparse.Namespace, project: Project) -> int:
    if arguments.report:
        if arguments.report.is_dir():
            raise OutputError(
                f"cannot write {arguments.report}: it is a folder"
            )
        check_writable(arguments.report.absolute().parent)
    report = build(project, _request(arguments, project), _announce)
    if arguments.report:
        write_json(arguments.report, report)
    for row in report["patches"]:
        _announce(f"  {row['name']}: {row['state']} ({row['reason']})")
    for row in report["overlay"]:
        _announce(f"  overlay/{row['name']}: {row['state']} ({row['reason']})")
    verification = report["verification"]
    if verification["reason"]:
        _announce(f"not imported: {verification['reason']}")
    seconds = report["seconds"]
    slowest = ", ".join(f"{k} {v:.1f} s" for k, v in seconds.items() if v > 0.1)
    if report["reused"]:
        _announce("nothing changed: the wheel is the one built before")
    elif slowest:
        _announce(slowest)
    for row in report.get("mojo", []):
        made = "kept from before" if row["cached"] else "compiled"
        _announce(f"  {row['package']}.mojoc: {made} ({row['reason']})")
    for built in filter(None, [*report["wheels"], report["plain"]]):
        _announce(f"{built['path']}  sha256 {built['sha256']}")
    first, *others = [_shown(Path(w["path"])) for w in report["wheels"]]
    words = shlex.join([f"{first}[serve]", *map(str, others)])
    _announce(f"install: pip install {words}")
    return 0


def _shown(path: Path) -> Path:
    """Returns a path as the user would type it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _fetch(arguments: argparse.Namespace, project: Project) -> int:
    pin = (
        project.releases()
        .get(arguments.release)
        .wheel(arguments.python, arguments.platform)
    )
    _announce(str(fetch(pin, project.cache, offline=arguments.offline)))
    return 0


def _apply(arguments: argparse.Namespace, project: Project) -> int:
    folder: Path = arguments.folder
    if folder.exists():
        raise MaxPatchError(
            f"{folder} is there already", hint="name a new folder"
        )
    checkout, inputs = lay_out(
        project, _request(arguments, project), folder, whole=True
    )
    _announce(
        f"{checkout.folder}: max {inputs.release.version} and "
        f"{len(inputs.patches)} patches, one commit each"
    )
    return 0


def _verify(arguments: argparse.Namespace, project: Project) -> int:
    with tempfile.TemporaryDirectory() as folder:
        done = verify_built(
            project,
            arguments.wheel.resolve(),
            Path(folder),
            offline=arguments.offline,
        )
    _announce(f"{arguments.wheel.name} is a true wheel")
    if done.reason:
        _announce(f"not imported: {done.reason}")
    for proof in done.proofs:
        _announce(f"in force: {proof}")
    return 0


def _status(arguments: argparse.Namespace, project: Project) -> int:
    rows: list[dict[str, str]] = []
    series, packages = project.series(), project.overlay()
    releases = [row.version for row in project.releases().rows.values()]
    for version in releases:
        found = [
            (chosen.patch.name, chosen.state, chosen.reason)
            for chosen in series.select(version, source=False)
        ]
        found += [(f"overlay/{p.name}", *p.state(version)) for p in packages]
        rows += [
            {
                "patch": name,
                "release": str(version),
                "state": state,
                "reason": reason,
            }
            for name, state, reason in found
        ]
    if arguments.json:
        _announce(json.dumps(rows, indent=2))
        return 0
    names = list(dict.fromkeys(row["patch"] for row in rows))
    width = max(map(len, ["patch", *names]))
    _announce(
        " ".join([f"{'patch':{width}}", *(f"{v!s:21}" for v in releases)])
    )
    for name in names:
        states = [row["state"] for row in rows if row["patch"] == name]
        _announce(" ".join([f"{name:{width}}", *(f"{s:21}" for s in states)]))
    for row in sorted(rows, key=lambda row: row["patch"]):
        _announce("")
        _announce(f"{row['patch']}, {row['release']}: {row['state']}")
        _announce(f"  {row['reason']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
