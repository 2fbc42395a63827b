# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from throughput import graphs
from throughput.server import Arm, MeasureError

FLAGS = ("--max-length", "512")


@pytest.fixture
def arms(
    fake_arm: Callable[..., Arm], fake_site: Callable[..., str], tmp_path: Path
) -> list[Arm]:
    """Three arms, two of which share their graphs."""
    arm = fake_arm()
    # What the real driver has, which the fake MAX must have as well.
    (tmp_path / "arm" / "max" / "driver.py").write_text(
        "def set_virtual_cpu_target(name):\n    assert name == 'x86-64-v3'\n"
    )
    return [
        replace(arm, name="a", graphs="one", flags=("--off",)),
        replace(arm, name="b", graphs="one"),
        replace(arm, name="c", graphs="two"),
    ]


def ask(mefs: Path | None, target: str | None = None) -> argparse.Namespace:
    """Returns parsed arguments."""
    parser = argparse.ArgumentParser()
    graphs.add_arguments(parser)
    words = ["--mefs", str(mefs)] if mefs else []
    args = parser.parse_args(
        [*words, *(["--compile-for", target] if target else [])]
    )
    args.model = Path("model")
    return args


def test_each_graph_is_compiled_once_and_then_served(
    arms: list[Arm], tmp_path: Path
) -> None:
    """By the servers' flags, for the target; arms that share one share it."""
    mefs = tmp_path / "mefs"
    with pytest.raises(SystemExit) as ended:
        graphs.served(arms, ask(mefs, "cuda:sm_90a"), FLAGS)
    assert ended.value.code == 0
    made = {f.parent.name: f for f in mefs.glob("*/graph.mef")}
    assert sorted(made) == ["one", "two"]
    for file in made.values():
        said = json.loads(file.read_text())
        assert said[:5] == [
            *("warm-cache", "--model", "model"),
            *("--target", "cuda:sm_90a"),
        ]
        assert said[-2:] == list(FLAGS)
    served = graphs.served(arms, ask(mefs), FLAGS)
    assert [arm.flags for arm in served] == [
        ("--off", "--precompiled-mefs", str(mefs / "one")),
        ("--precompiled-mefs", str(mefs / "one")),
        ("--precompiled-mefs", str(mefs / "two")),
    ]


def test_what_is_compiled_is_kept(arms: list[Arm], tmp_path: Path) -> None:
    """A second run compiles what the first did not get to."""
    (tmp_path / "mefs" / "one").mkdir(parents=True)
    with pytest.raises(SystemExit):
        graphs.served(arms, ask(tmp_path / "mefs", "cuda"), FLAGS)
    assert not list((tmp_path / "mefs" / "one").iterdir())
    assert list((tmp_path / "mefs" / "two").iterdir())


def test_a_failed_compile_leaves_no_folder(
    fake_arm: Callable[..., Arm], arms: list[Arm], tmp_path: Path
) -> None:
    """The error shows the end of the log, and the next run begins anew."""
    failing = replace(fake_arm("failing", exit_code=3), graphs="one")
    (tmp_path / "failing" / "max" / "driver.py").write_text(
        "def set_virtual_cpu_target(name):\n    pass\n"
    )
    with pytest.raises(
        MeasureError, match=r"exit code 3(.|\n)*cannot allocate"
    ):
        graphs.served([failing], ask(tmp_path / "mefs", "cuda"), FLAGS)
    with pytest.raises(MeasureError, match="has no one; make it"):
        graphs.served([failing], ask(tmp_path / "mefs"), FLAGS)


def test_without_a_folder_servers_compile(arms: list[Arm]) -> None:
    """Arms are left alone; there is nowhere to compile to."""
    assert graphs.served(arms, ask(None), FLAGS) == arms
    with pytest.raises(MeasureError, match="needs --mefs"):
        graphs.served(arms, ask(None, "cuda:sm_90a"), FLAGS)
