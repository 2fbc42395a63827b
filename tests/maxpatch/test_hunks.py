# SPDX-License-Identifier: Apache-2.0
"""Where hunks belong in files that they weren't made for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxpatch.hunks import Hunk, find, hunks_of, lines_of, replaced
from tests.maxpatch import toy as made

BEFORE = b"a\nb\nc\nd\ne\nf\ng\nh\n"


def hunks(
    folder: Path, before: bytes, after: bytes, *options: str
) -> list[Hunk]:
    """Returns the hunks of git's diff of a file."""
    words = (*options, "--full-index") if options else ()
    diff = made.make_diff(folder, {"f": before}, {"f": after}, *words)
    return hunks_of(diff)["f"]


def git_applies(folder: Path, data: bytes, diff: bytes) -> bytes | None:
    """Returns what git makes of a file, or None if it refuses."""
    folder.mkdir()
    made.git(folder, "init", "--quiet")
    (folder / "f").write_bytes(data)
    try:
        made.git(folder, "apply", "-", stdin=diff)
    except Exception:
        return None
    return (folder / "f").read_bytes()


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"a", b"a\n", b"a\r\nb\x0c\x1c\n\nc", b"\xff\n"]
)
def test_lines_are_gits_lines(data: bytes) -> None:
    """Lines end at a newline and nowhere else, and none is lost."""
    lines = lines_of(data)
    assert b"".join(lines) == data
    assert [line.count(b"\n") for line in lines[:-1]] == [1] * (len(lines) - 1)


def test_a_hunk_is_placed_at_any_offset(tmp_path: Path) -> None:
    """Lines before the one place of the old lines don't matter."""
    (hunk,) = hunks(tmp_path / "d", BEFORE, BEFORE.replace(b"d\n", b"D\n"))
    for offset in (0, 1, 30):
        lines = [b"x\n"] * offset + lines_of(BEFORE)
        places = find(hunk, lines)
        assert places.is_open and not places.has_landed
        assert places.old == (offset + 2,)
        assert b"".join(replaced([places], lines)) == (
            b"x\n" * offset + BEFORE.replace(b"d\n", b"D\n")
        )


def test_a_twin_leaves_no_place(tmp_path: Path) -> None:
    """Two places for the old lines are none."""
    (hunk,) = hunks(tmp_path / "d", BEFORE, BEFORE.replace(b"d\n", b"D\n"))
    places = find(hunk, lines_of(BEFORE * 2))
    assert places.old == (2, 10)
    assert not places.is_open and not places.has_landed
    assert "its old lines at line 3, 11, its new lines nowhere" in str(places)


def test_a_hunk_lands_once(tmp_path: Path) -> None:
    """Its new lines in one place are the hunk; in two, or beside old, not."""
    after = BEFORE.replace(b"d\n", b"D\n")
    (hunk,) = hunks(tmp_path / "d", BEFORE, after)
    assert find(hunk, lines_of(after)).has_landed
    assert not find(hunk, lines_of(after * 2)).has_landed
    beside = find(hunk, lines_of(BEFORE + after))
    assert not beside.has_landed and not beside.is_open


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The new lines are part of the old ones, and the other way about.
        (b"0\nc\nc\nd\n1\n", b"0\nc\nd\n1\n"),
        (b"0\nc\nd\n1\n", b"0\nc\nc\nd\n1\n"),
        # Only added, only removed, at either edge, without a last newline.
        (BEFORE, b"0\n" + BEFORE),
        (BEFORE, BEFORE + b"i\n"),
        (BEFORE, BEFORE[2:]),
        (BEFORE, BEFORE[:-2]),
        (BEFORE, BEFORE[:-1]),
        (BEFORE[:-1], BEFORE),
        (b"a\r\nb\r\n", b"a\r\nB\r\n"),
        (b"a\n\n\nb\n", b"a\n\nX\n\nb\n"),
    ],
)
def test_the_patched_file_is_never_patched_again(
    before: bytes, after: bytes, tmp_path: Path
) -> None:
    """A hunk is open in the file it was made for and landed in the result."""
    (hunk,) = hunks(tmp_path / "d", before, after)
    lines = lines_of(before)
    places = find(hunk, lines)
    assert places.is_open, places
    assert b"".join(replaced([places], lines)) == after
    assert find(hunk, lines_of(after)).has_landed


def test_edges_are_gits(tmp_path: Path) -> None:
    """A hunk made at a file's edge belongs at that edge, as git has it."""
    start = made.make_diff(
        tmp_path / "s", {"f": BEFORE}, {"f": b"0\n" + BEFORE}
    )
    end = made.make_diff(tmp_path / "e", {"f": BEFORE}, {"f": BEFORE + b"i\n"})
    for name, diff, data in (
        ("1", start, b"x\n" + BEFORE),
        ("2", end, BEFORE + b"x\n"),
    ):
        (hunk,) = hunks_of(diff)["f"]
        assert find(hunk, lines_of(data)).old == ()
        assert git_applies(tmp_path / name, data, diff) is None


def test_hunks_in_another_order_are_refused(tmp_path: Path) -> None:
    """Places that are each the only one may still contradict the patch."""
    after = BEFORE.replace(b"b\n", b"B\n").replace(b"g\n", b"G\n")
    first, second = hunks(tmp_path / "d", BEFORE, after)
    lines = lines_of(b"f\ng\nh\na\nb\nc\n")
    places = [
        find(Hunk(h.header, h.old, h.new, False, False), lines)
        for h in (first, second)
    ]
    assert all(place.is_open for place in places)
    with pytest.raises(ValueError, match="before the end of the one before"):
        replaced(places, lines)


def test_hunks_of_several_files_are_told_apart(tmp_path: Path) -> None:
    """Each file has its own hunks; a line that looks like one is content."""
    tricky = b"1\n@@ -1 +1 @@\ndiff --git a/f b/f\n-- \n2\n"
    diff = made.make_diff(
        tmp_path / "d",
        {"f": BEFORE, "g": tricky},
        {"f": BEFORE.replace(b"d", b"D"), "g": tricky.replace(b"-- ", b"++ ")},
    )
    found = hunks_of(made.make_patch("x", diff))
    assert {path: len(each) for path, each in found.items()} == {"f": 1, "g": 1}
    assert find(found["g"][0], lines_of(tricky)).is_open


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"@@ -3,3 +3,3 @@", b"@@ -3,4 +3,4 @@"), (b" c\n", b" c\nmore\n")],
)
def test_miscounted_hunk_is_named(
    old: bytes, new: bytes, tmp_path: Path
) -> None:
    """A hunk edited by hand isn't read as something else."""
    diff = made.make_diff(
        tmp_path / "d", {"f": BEFORE}, {"f": BEFORE.replace(b"d", b"D")}
    )
    assert old in diff
    with pytest.raises(ValueError, match=r"f: the lines of hunk @@ -3,[34]"):
        hunks_of(diff.replace(old, new))


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_placed_hunk_is_where_git_puts_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Where each hunk has one place, git makes what is foreseen."""
    folder = tmp_path_factory.mktemp("git")
    line = st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n"])
    before = data.draw(st.lists(line, min_size=1, max_size=9))
    after = data.draw(
        st.lists(line, min_size=1, max_size=9).filter(lambda x: x != before)
    )
    target = data.draw(st.lists(line, max_size=4)) + before
    diff = made.make_diff(
        folder / "d", {"f": b"".join(before)}, {"f": b"".join(after)}
    )
    places = [find(hunk, target) for hunk in hunks_of(diff)["f"]]
    if not all(place.is_open for place in places):
        return
    try:
        foreseen = b"".join(replaced(places, target))
    except ValueError:
        return
    assert git_applies(folder / "r", b"".join(target), diff) == foreseen
