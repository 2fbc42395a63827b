# SPDX-License-Identifier: Apache-2.0
"""AttnQuant takes over an architecture name when on, and is absent when off.

The hook is for MAX 26.7, the default release.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TOY = '''\
"""The built-in architecture, with a model class of its own."""
import dataclasses

from max.pipelines.architectures.gemma3.arch import gemma3_arch


class ToyModel(gemma3_arch.pipeline_model):
    pass


toy_arch = dataclasses.replace(gemma3_arch, pipeline_model=ToyModel)
'''

ROW = 'TAKEN_OVER["{}"] = {{"module": ".attnquant_toy", "symbol": "toy_arch"}}'

# A spawned child beside the parent, because MAX's model worker is one.
PROBE = """\
import json
import multiprocessing
import sys


def found():
    import max.pipelines
    from max.pipelines.lib.arch_lookup import ARCH_LOOKUP

    arch = ARCH_LOOKUP.find("Gemma3ForCausalLM")
    from max.pipelines.architectures.gemma3.arch import gemma3_arch

    return {
        "model": arch.pipeline_model.__name__,
        "is built-in": arch is gemma3_arch,
        "imported": any("attnquant" in name for name in sys.modules),
    }


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child = pool.apply_async(found)
        print(json.dumps([found(), child.get()]))
"""

BUILT_IN = {"model": "Gemma3Model", "is built-in": True, "imported": False}
TAKEN_OVER = {"model": "ToyModel", "is built-in": False, "imported": True}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(patched_env: Path) -> Run:
    """Runs that Python with the AttnQuant settings given by name, no other."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ATTNQUANT")
    }
    inherited["PYTHONDONTWRITEBYTECODE"] = "1"

    def call(
        *arguments: str | Path, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [patched_env, *arguments],
            env={**inherited, **settings},
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.fixture(scope="module")
def architectures(run: Run) -> Path:
    """The folder of architectures in the environment's MAX."""
    shown = run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    assert shown.returncode == 0, shown.stderr
    return Path(shown.stdout.strip(), "max", "pipelines", "architectures")


@pytest.fixture(scope="module")
def toy(architectures: Path) -> Iterator[None]:
    """A toy architecture, in the environment while the tests use it."""
    placed = architectures / "attnquant_toy"
    placed.mkdir()
    (placed / "__init__.py").write_text(TOY)
    yield
    shutil.rmtree(placed)


@pytest.fixture
def add(architectures: Path) -> Iterator[Callable[[str], None]]:
    """Adds a line to the overlay's table, until the test is over."""
    table = architectures / "attnquant_common" / "registration.py"
    text = table.read_text()

    def append(line: str) -> None:
        table.write_text(f"{text}\n\n{line}\n")

    yield append
    table.write_text(text)


@pytest.fixture
def found(run: Run, tmp_path: Path) -> Callable[..., list[dict[str, object]]]:
    """What parent and spawned child find under Gemma 3's name."""
    script = tmp_path / "probe.py"
    script.write_text(PROBE)

    def find(**settings: str) -> list[dict[str, object]]:
        done = run(script, **settings)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return find


@pytest.mark.usefixtures("toy")
def test_switched_on_takes_over(
    add: Callable[[str], None],
    found: Callable[..., list[dict[str, object]]],
) -> None:
    """Any ATTNQUANT variable gives the name to the overlay, child included."""
    add(ROW.format("Gemma3ForCausalLM"))
    assert found(ATTNQUANT_BLOCKS="3") == [TAKEN_OVER, TAKEN_OVER]


@pytest.mark.usefixtures("toy")
def test_switched_off_is_the_built_in(
    add: Callable[[str], None],
    found: Callable[..., list[dict[str, object]]],
) -> None:
    """Off, the name gives the built-in object and no overlay is imported."""
    add(ROW.format("Gemma3ForCausalLM"))
    assert found() == [BUILT_IN, BUILT_IN]


def test_zero_switches_off(run: Run) -> None:
    """ATTNQUANT=0 outweighs the other variables: no overlay is imported."""
    code = (
        "import max.pipelines, sys; print([m for m in sys.modules if %r in m])"
    )
    done = run("-c", code % "attnquant", ATTNQUANT="0", ATTNQUANT_BLOCKS="3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("TAKEN_OVER.clear()", "carries no AttnQuant architecture"),
        (ROW.format("NoSuchModel"), "takes over NoSuchModel"),
    ],
    ids=["empty", "unknown"],
)
def test_nothing_to_take_over_is_an_error(
    run: Run, add: Callable[[str], None], line: str, error: str
) -> None:
    """Switched on in vain, MAX stops and says how to switch it off."""
    add(line)
    done = run("-c", "import max.pipelines", ATTNQUANT="1")
    assert done.returncode == 1
    assert error in done.stderr
    assert "ATTNQUANT=0" in done.stderr
