# SPDX-License-Identifier: Apache-2.0
"""The proof that a built wheel works: install, import, patches in force."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

from . import provenance
from .errors import ProcessError, VerifyError
from .process import install_hint, run
from .release import Release, WheelPin, host_platform, host_python
from .series import Patch
from .wheel import Wheel

PYTHON_VARIABLE = "MAXPATCH_TEST_PYTHON"
"""Names, for a proof, the Python that has the patched wheel installed."""

_ADDOPTS = "PYTEST_ADDOPTS"
"""The user's own options could leave a proof out."""

_IMPORT = """
import hashlib, importlib, importlib.metadata, json, sys
wanted = json.load(sys.stdin)
for name, version in wanted["versions"].items():
    found = importlib.metadata.version(name)
    assert found == version, f"{name}: expected {version}, found {found}"
for name, files in wanted["files"].items():
    there = importlib.metadata.distribution(name)
    for path, digest in files.items():
        data = there.locate_file(path).read_bytes()
        found = hashlib.sha256(data).hexdigest()
        assert found == digest, f"{path}: expected {digest}, found {found}"
for module in wanted["modules"]:
    importlib.import_module(module)
"""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was verified beyond the wheel's own consistency."""

    imported: bool
    """Whether it was installed and its changed modules imported here."""

    proofs: tuple[str, ...]
    """The patches' proofs that ran."""

    reason: str
    """Why not more, or empty."""


def find_python(python: str, platform: str) -> tuple[Path | None, str]:
    """Returns an interpreter that can load a wheel, or None and the reason.

    Args:
        python: The wheel's Python, as ``3.12``.
        platform: The wheel's platform, as ``linux-x86_64``.
    """
    if platform != host_platform():
        return None, f"the wheel is for {platform}, this is {host_platform()}"
    if python == host_python():
        return Path(sys.executable), ""
    command = [find_uv_bin(), "python", "find", "--no-python-downloads", python]
    try:
        return Path(run(command).strip()), ""
    except ProcessError:
        return None, f"there is no Python {python} here"


def install(
    wheel: Path,
    interpreter: Path,
    folder: Path,
    *,
    offline: bool,
    libraries: Path | None = None,
) -> Path:
    """Installs a wheel with what serving needs in a fresh environment.

    Args:
        wheel: The wheel.
        interpreter: The Python to make the environment with.
        folder: The environment's folder, replaced if it is there.
        offline: Whether only uv's cache may be used.
        libraries: The wheel of Mojo packages to install with it, if not the
            released one.

    Returns:
        The environment's Python.

    Raises:
        VerifyError: It doesn't install.
    """
    uv = find_uv_bin()
    venv: list[str | Path] = [uv, "venv", "--quiet", "--clear"]
    venv += ["--python", interpreter, folder]
    python = folder / "bin" / "python"
    command: list[str | Path] = [uv, "pip", "install", "--quiet"]
    command += ["--offline"] if offline else []
    names = [path.name for path in (wheel, libraries) if path]
    wanted = [f"max[serve] @ {wheel.as_uri()}"]
    if libraries:
        wanted.append(f"max-mojo-libs @ {libraries.as_uri()}")
    try:
        # A uv.toml of the folder we were called from is not ours to heed.
        run(venv, cwd=folder.parent)
        run([*command, "--python", python, *wanted], cwd=folder.parent)
    except ProcessError as error:
        raise VerifyError(
            f"{' with '.join(names)} does not install:\n{error.output.strip()}",
            hint=install_hint(error.output, offline=offline),
        ) from error
    return python


def check_imports(wheel: Path, release: Release, python: Path) -> None:
    """Checks that a wheel is what is installed, and imports its modules.

    Every file that it changes or adds must be there, and every such module be
    importable.

    Raises:
        VerifyError: A version or a file is another one, or an import fails.
    """
    table = provenance.read(wheel)
    with Wheel(wheel) as opened:
        name = opened.name
        files = {
            opened.installed(file["path"]): file["after"]
            for file in table["files"]
            if file["after"]
        }
    wanted = {
        "versions": {
            name: table["version"],
            "mojo-compiler": release.mojo_compiler,
        },
        "files": {name: files},
        "modules": [
            _module(file["path"])
            for file in table["files"]
            if file["after"] and file["path"].endswith(".py")
        ],
    }
    try:
        # The folder must not shadow what is installed.
        run(
            [python, "-I", "-c", _IMPORT],
            cwd=python.parent,
            stdin=json.dumps(wanted).encode(),
        )
    except ProcessError as error:
        raise VerifyError(
            f"{wheel.name} does not import:\n{error.output.strip()}"
        ) from error


def run_proofs(patches: Sequence[Patch], python: Path, root: Path) -> list[str]:
    """Runs the tests that show that the patches are in force.

    Args:
        patches: The applied patches.
        python: The Python that has the wheel installed.
        root: The folder that the proofs' paths are relative to.

    Returns:
        The proofs that ran, as pytest ids.

    Raises:
        VerifyError: A proof failed, was skipped, or isn't there.
    """
    proofs = sorted({p.proof for p in patches if p.proof.startswith("tests/")})
    if not proofs:
        return []
    try:
        output = run(
            [
                *(sys.executable, "-m", "pytest", "--quiet", "--no-header"),
                *("-p", "no:cacheprovider", *proofs),
            ],
            cwd=root,
            env={
                **{k: v for k, v in os.environ.items() if k != _ADDOPTS},
                PYTHON_VARIABLE: os.fspath(python),
                # As without pytest's cache: nothing is left in the project.
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )
    except ProcessError as error:
        raise VerifyError(
            f"a patch is not in force:\n{error.output.strip()}"
        ) from error
    # pytest calls it a success when a test was left out.
    *_, summary = output.strip().splitlines()
    if re.search("deselected|skipped|xfailed", summary):
        raise VerifyError(f"a proof did not run: {summary}\n{output.strip()}")
    return proofs


def verify(
    wheel: Path,
    release: Release,
    pin: WheelPin,
    patches: Sequence[Patch],
    *,
    folder: Path,
    root: Path,
    offline: bool,
    libraries: Path | None = None,
) -> Verification:
    """Installs and imports a wheel and runs its patches' proofs.

    Args:
        wheel: The wheel of ``max``: ours, which :func:`maxpatch.wheel.check`
            found true, or the released one.
        release: The release it was made from.
        pin: The wheel it was made from.
        patches: The patches that it carries.
        folder: Where the fresh environment goes.
        root: The folder that the proofs' paths are relative to.
        offline: Whether only uv's cache may be used.
        libraries: Our wheel of Mojo packages to go with it, if there is one.

    Raises:
        VerifyError: It doesn't install or import, or a proof fails.
    """
    interpreter, reason = find_python(pin.python, pin.platform)
    if interpreter is None:
        return Verification(False, (), reason)
    python = install(
        wheel, interpreter, folder, offline=offline, libraries=libraries
    )
    for ours in filter(None, (wheel, libraries)):
        if "+" in ours.name:
            check_imports(ours, release, python)
    return Verification(True, tuple(run_proofs(patches, python, root)), "")


def _module(member: str) -> str:
    parts = member.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
