# SPDX-License-Identifier: Apache-2.0
"""The series' patches of Mojo code: where they fit, and that they are in force.

With ``MAX_SOURCE`` some tests hold for that source checkout, which is only
read. The proofs run in an environment that a build with ``--source`` made,
which ``MAXPATCH_TEST_PYTHON`` names. Nothing here needs a GPU.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.maxpatch.toy import write_tree

from maxpatch.build import Project
from maxpatch.checkout import apply_source
from maxpatch.errors import ConflictError
from maxpatch.hunks import hunks_of
from maxpatch.provenance import FILENAME
from maxpatch.series import Patch
from maxpatch.verify import PYTHON_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
PATCHES = [p for p in Project(ROOT).series().patches if p.mojo_packages]
NAMES = [patch.name for patch in PATCHES]
SOURCE_VARIABLE = "MAX_SOURCE"


def files(tree: dict[str, Path]) -> dict[str, bytes]:
    """Returns the content of files by path."""
    return {path: file.read_bytes() for path, file in tree.items()}


def stand_in(patch: Patch) -> dict[str, bytes]:
    """Returns files that have each hunk's old lines once, lines apart."""
    found = {}
    for path, hunks in hunks_of(patch.data).items():
        parts = [b"# Line %d.\n" % n for n in range(len(hunks) + 1)]
        for number, hunk in enumerate(hunks):
            parts[number] += b"".join(hunk.old)
        found[path] = b"# A stand-in.\n" + b"".join(parts)
    return found


@pytest.fixture
def real() -> Path:
    """The user's source checkout."""
    named = os.environ.get(SOURCE_VARIABLE)
    if not named:
        pytest.skip(f"{SOURCE_VARIABLE} names no source checkout of MAX")
    return Path(named)


def check_round(patch: Patch, source: Path, folder: Path) -> None:
    """Checks that a patch applies once, is then known, and refuses a twin."""
    made = apply_source(source, [patch], folder / "first")
    if patch.name in made.landed:
        assert not made.files
        return
    assert set(made.files) == {target.path for target in patch.targets}
    after = files(dict(made.files))
    write_tree(folder / "landed", after)
    again = apply_source(folder / "landed", [patch], folder / "second")
    assert not again.files and set(again.landed) == {patch.name}
    for number, path in enumerate(after):
        before = (source / path).read_bytes()
        twin = folder / f"twin-{number}"
        write_tree(twin, {**after, path: before + before})
        with pytest.raises(ConflictError, match=f"{patch.name} does not fit"):
            apply_source(twin, [patch], folder / "third")
        assert not (folder / "third").exists()


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_patch_is_told_from_its_result(patch: Patch, tmp_path: Path) -> None:
    """Each hunk has one place, is known once applied, and takes no twin."""
    write_tree(tmp_path / "source", stand_in(patch))
    check_round(patch, tmp_path / "source", tmp_path)


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_half_of_a_patch_is_refused(patch: Patch, tmp_path: Path) -> None:
    """A source with one of several hunks is neither with nor without it."""
    ((path, hunks),) = hunks_of(patch.data).items()
    (before,) = stand_in(patch).values()
    if len(hunks) == 1:
        before += b"# Apart.\n"  # the one hunk stands beside its result
    old, new = b"".join(hunks[0].old), b"".join(hunks[0].new)
    assert before.count(old) == 1
    half = before.replace(old, new) if len(hunks) > 1 else before + new
    write_tree(tmp_path / "source", {path: half})
    with pytest.raises(ConflictError, match=f"{patch.name} does not fit"):
        apply_source(tmp_path / "source", [patch], tmp_path / "scratch")


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_patch_fits_the_source(
    patch: Patch, real: Path, tmp_path: Path
) -> None:
    """On a real source each patch applies or has landed, and is known then."""
    check_round(patch, real, tmp_path)


def test_patches_fit_the_source_together(real: Path, tmp_path: Path) -> None:
    """The series applies as a whole, and none of it is applied twice."""
    made = apply_source(real, PATCHES, tmp_path / "scratch")
    paths = {
        target.path
        for patch in PATCHES
        if patch.name not in made.landed
        for target in patch.targets
    }
    assert set(made.files) == paths


# In force, in an environment that has the rebuilt packages.

_CARRIES = f"""
import importlib.metadata, json, sys
names = set()
for wheel in ("max", "max-mojo-libs"):
    text = importlib.metadata.distribution(wheel).read_text({FILENAME!r})
    table = json.loads(text or "{{}}")
    names |= {{row["name"] for row in table.get("patches", [])}}
print(importlib.metadata.version("max-core"))
sys.exit(sys.argv[1] not in names)
"""

_SAMPLE = """
from {gpu}.host import DeviceContext
from std.utils import IndexList
from layout import Coord, TileTensor, row_major
from nn.topk import fused_token_sampling_gpu


def main() raises:
    var ctx = DeviceContext()
    var logits = ctx.enqueue_create_buffer[DType.float32](1024)
    var tokens = ctx.enqueue_create_buffer[DType.int64](1)
    fused_token_sampling_gpu(
        ctx,
        5,
        1.0,
        TileTensor(logits, row_major(Coord(IndexList[2](1, 1024)))).as_immut(),
        TileTensor(tokens, row_major(Coord(IndexList[2](1, 1)))),
    )
"""
"""Waits for the device only if the sampling does."""

_WAIT = b"AsyncRT_DeviceContext_synchronize"
"""What a program imports from MAX's runtime to wait for the device."""

_ROWS = """
from linalg.matmul.gpu.sm100_structured.default.tuning_configs import (
    _get_tuning_list_sm100_nvfp4,
)


def main():
    for row in _get_tuning_list_sm100_nvfp4():
        print(row.M, row.M_end, row.N, row.K, row.k_group_size)
"""


@pytest.fixture
def rebuilt(request: pytest.FixtureRequest) -> tuple[Path, str]:
    """The Python that has the rebuilt packages, and its release.

    The test's parameter names the patch that they must carry.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    if not named:
        pytest.skip(f"{PYTHON_VARIABLE} names no environment")
    done = subprocess.run(
        [named, "-I", "-c", _CARRIES, request.param],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        assert done.stdout, done.stderr
        pytest.skip(f"{named} has no package that {request.param} changed")
    return Path(named), done.stdout.strip()


def mojo(python: Path, folder: Path, text: str, *words: str) -> str:
    """Runs the environment's `mojo VERB [OPTION...]` on a program."""
    (folder / "program.mojo").write_text(text)
    done = subprocess.run(
        [python.parent / "mojo", *words, "program.mojo"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("rebuilt", ["topk-sampling-no-sync"], indirect=True)
def test_sampling_does_not_wait(
    rebuilt: tuple[Path, str], tmp_path: Path
) -> None:
    """A program that samples waits for the device with ASSERT=all only."""
    python, release = rebuilt
    # MAX's own packages left `std` after 26.4.
    gpu = "std.gpu" if release.startswith("26.4.") else "max.gpu"
    waits = {}
    for level in ("safe", "all"):
        mojo(
            *(python, tmp_path, _SAMPLE.format(gpu=gpu)),
            *("build", "--target-accelerator", "sm_90a"),
            *("-D", f"ASSERT={level}", "-o", level),
        )
        waits[level] = _WAIT in (tmp_path / level).read_bytes()
    assert waits == {"safe": False, "all": True}


@pytest.mark.parametrize("rebuilt", ["sm100-nvfp4-gemma4-rows"], indirect=True)
def test_decode_rows_are_in_the_table(
    rebuilt: tuple[Path, str], tmp_path: Path
) -> None:
    """The compiled table has one row for each of Gemma 4's decode shapes."""
    python, _ = rebuilt
    rows = [
        tuple(map(int, line.split()))
        for line in mojo(python, tmp_path, _ROWS, "run").splitlines()
    ]
    shapes = {(5376, 21504), (43008, 5376)}
    assert [row for row in rows if row[2:4] in shapes] == [
        (1, 2, 5376, 21504, 2),
        (1, 2, 43008, 5376, 3),
    ]
