# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from throughput import capture_equality
from throughput.capture_equality import (
    ROWS,
    changing,
    check_changes,
    check_discriminating,
    decodes,
    differences,
    main,
)
from throughput.server import MeasureError

DRIVER = """\
#!{python}
# Stands in for an interpreter that runs `throughput.fixed_batches`. A token
# depends on the request, its count and the rows, as rounding does.
import json, sys
from pathlib import Path

settings = json.loads(Path({settings!r}).read_text())
argument = lambda name: Path(sys.argv[sys.argv.index(name) + 1])
if "-c" in sys.argv:
    print(json.dumps({{"max": "1.0", "python": "3"}}))
    sys.exit()
assert sys.argv[1:3] == ["-m", "throughput.fixed_batches"]
capture = "--no-device-graph-capture" not in sys.argv
plan = json.loads(argument("--plan").read_text())


def phase(steps, stale=None):
    given, replays = {{}}, 0
    for step in steps:
        replays += all(i in given for i in step)
        for row, i in enumerate(step):
            mine = given.setdefault(i, [])
            token = i * 10007 + len(mine) * 31 + len(step) * 3 + row
            wrong = stale == 0 or len(step) == settings["wrong_rows"]
            mine.append(token + 5000 * (capture and wrong))
    tokens = [given[i] for i in range(len(plan["requests"]))]
    replays -= settings["skipped"]
    return {{"tokens": tokens, "replays": replays if capture else 0}}


result = {{
    "pipeline": "Fake",
    "capture": capture and settings["captures"],
    "versions": {{"max": "1.0"}},
    "prompts": [[1]],
    "phases": {{name: phase(s) for name, s in plan["phases"].items()}},
    "buffers": ["int64[1]", "uint32[2]", "uint32[1]"],
    "controls": [],
}}
if settings["exit_code"]:
    print("cannot allocate")
    sys.exit(settings["exit_code"])
if "--stale" in sys.argv:
    changed = settings["changed"]
    for stale in (None, 0, 1):
        control = phase(plan["phases"]["together"], stale)
        control |= {{"buffer": stale, "changed": changed[stale or 0]}}
        if stale is None:
            control["changed"] = 0
        result["controls"].append(control)
    if settings["dies"]:
        result["controls"].append({{"buffer": 2}})
argument("--output").write_text(json.dumps(result))
sys.exit(bool(result["controls"] and settings["dies"]))
"""


def compare(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *flags: str,
    **changes: object,
) -> int:
    """Runs the command with a stand-in for MAX's interpreter."""
    settings = {
        "captures": True,
        "wrong_rows": None,
        "skipped": 0,
        "exit_code": 0,
        "changed": [9, 0],
        "dies": False,
    } | changes
    (folder / "settings.json").write_text(json.dumps(settings))
    python = folder / "python"
    python.write_text(
        DRIVER.format(
            python=sys.executable, settings=str(folder / "settings.json")
        )
    )
    python.chmod(0o755)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *("capture_equality", "--patched", str(python)),
            *("--model", str(folder), "--output", str(folder / "equal.json")),
            *flags,
        ],
    )
    return main()


def test_equal_tokens_pass(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Equal runs pass, and the result says how much was compared."""
    assert compare(tmp_path, monkeypatch) == 0
    text = capsys.readouterr().out
    assert text.startswith("PASS")
    assert "- alone: 2014 tokens of 16 requests, 1998 replays of 1 to" in text
    assert "replays of 1 to 8 rows, 0 requests differ" in text
    result = json.loads((tmp_path / "equal.json").read_text())
    assert set(result) == {"machine", "flags", "plan", "off", "on"}


def test_one_wrong_batch_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A buffer that is stale only in batches of five is found, and told."""
    assert compare(tmp_path, monkeypatch, wrong_rows=5) == 1
    text = capsys.readouterr().out
    assert text.startswith("FAIL")
    alone, together, first, *_ = text.splitlines()[1:]
    assert alone.endswith("0 requests differ")
    assert not together.endswith(" 0 requests differ")
    rows = json.loads(first.split("of rows ")[1].split(":")[0])
    assert len(rows) == 5
    assert "with capture" in first


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({}, 0, "int64[1] (0): other values in 9 of"),
        ({"changed": [9, 3]}, 1, "(1): other values in 3 of"),
        ({"changed": [0, 0]}, 1, "(0): other values in 0 of"),
        ({"dies": True}, 1, "uint32[1] (2): ended the process"),
    ],
)
def test_controls_must_be_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    code: int,
    says: str,
) -> None:
    """Tokens differ for a buffer whose values changed, and for no other."""
    assert compare(tmp_path, monkeypatch, "--controls", **changes) == code
    text = capsys.readouterr().out
    assert text.startswith("FAIL" if code else "PASS")
    assert "stale nothing (None): other values in 0 of" in text
    assert says in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"captures": False}, "capture on: the pipeline says False"),
        ({"skipped": 1}, "expected {'alone': 1998, 'together'"),
        ({"exit_code": 3}, "ended with exit code 3"),
    ],
)
def test_run_without_capture_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    says: str,
) -> None:
    """Equality counts only if each decode step was a replay."""
    assert compare(tmp_path, monkeypatch, **changes) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert says in captured.err
    assert not captured.out


@pytest.mark.parametrize("seed", range(20))
def test_plan_gives_each_request_its_tokens(seed: int) -> None:
    """Requests arrive alone and in order, and no step is too large."""
    tokens = [2 + (7 * i + seed) % 23 for i in range(16)]
    steps = changing(tokens, ROWS, seed)
    assert [sum(i in s for s in steps) for i in range(16)] == tokens
    assert all(len(set(step)) == len(step) <= ROWS for step in steps)
    assert all(steps)
    new = [step for step in steps if step not in decodes(steps)]
    seen: list[int] = []
    for step in steps:
        if fresh := set(step).difference(seen):
            assert len(step) == 1
            seen += fresh
    assert seen == sorted(seen)
    assert len(new) <= 16


def test_measured_plan_changes_enough() -> None:
    """The plan that is measured has all sizes of batch, and often changes."""
    steps = changing(capture_equality._TOKENS, ROWS)
    check_changes(steps, ROWS)
    assert {len(step) for step in decodes(steps)} == set(range(1, ROWS + 1))


def test_batch_that_hardly_changes_is_refused() -> None:
    """A full batch that never shrinks or moves shows no stale buffer."""
    first = [[i] for i in range(4)]
    down = [[0, 1, 2, 3], [3, 2, 1], [1, 2], [2]]
    check_changes([*first, *down, *down[::-1], *down], 4)
    for steps in ([], [*first, *[[0, 1, 2, 3]] * 9], [*first, *down]):
        with pytest.raises(MeasureError, match="too little"):
            check_changes(steps, 4)


def test_difference_names_its_step() -> None:
    """The second token of request 1 comes from the step after its prefill."""
    steps = [[0], [1], [1, 0]]
    (line,) = differences(steps, [[5, 6], [7, 8]], [[5, 6], [7, 9]])
    assert line == (
        "request 1, token 1, step 2 of rows [1, 0]: 8 with capture, 9 without"
    )
    assert differences(steps, [[5, 6], [7, 8]], [[5, 6], [7, 8]]) == []


def test_output_that_repeats_itself_is_refused() -> None:
    """Equality of one repeated token, or of equal outputs, says nothing."""
    check_discriminating([[1, 2, 3], [4, 5, 6]])
    for answers in ([[1, 2], [1, 2]], [[0] * 9, [1] * 9]):
        with pytest.raises(MeasureError, match="repeats itself"):
            check_discriminating(answers)
