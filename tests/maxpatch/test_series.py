# SPDX-License-Identifier: Apache-2.0
"""The series: headers, order, and what is selected for a release."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from maxpatch.errors import SeriesError
from maxpatch.git import NO_BLOB, blob_id
from maxpatch.series import Patch, Series, State, covers
from tests.maxpatch import toy as made
from tests.maxpatch.toy import Toy


@pytest.fixture(scope="module")
def diff(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A diff that changes, adds and removes a file."""
    return made.make_diff(
        tmp_path_factory.mktemp("series") / "diff",
        {"a.py": b"one\ntwo\nthree\n", "gone.py": b"x\n"},
        {"a.py": b"one\n2\nthree\n", "new.py": b"y\n"},
    )


def faults_of(data: bytes) -> str:
    """Returns the error of a patch that is malformed."""
    with pytest.raises(SeriesError) as caught:
        Patch.parse("it", data)
    assert caught.value.hint
    return str(caught.value)


def test_header_is_read_into_typed_fields(diff: bytes) -> None:
    """Every field of the header has its attribute."""
    data = made.make_patch(
        "[Pipelines] A long subject that git would\n fold over lines",
        diff,
        Reason="build",
        Applies_To=">=1.0,<2",
        Bug="https://example.invalid/bugs/1",
        Upstream_Status="Submitted [https://example.invalid/1]",
        Proof="tests/test_it.py::test_it",
        Last_Update="2026-02-28",
    )
    patch = Patch.parse("it", data)
    assert patch.subject == (
        "[Pipelines] A long subject that git would fold over lines"
    )
    assert patch.reason == "build"
    assert patch.applies_to == SpecifierSet(">=1.0,<2")
    assert patch.upstream_status == "Submitted [https://example.invalid/1]"
    assert patch.proof == "tests/test_it.py::test_it"
    assert patch.last_update == date(2026, 2, 28)
    assert patch.mojo_packages == ()
    assert patch.data == data
    assert patch.first_release_with_it is None


def test_targets_carry_git_blob_ids(diff: bytes) -> None:
    """A target's ids are those of its content; zeros stand for no file."""
    patch = Patch.parse("it", made.make_patch("x", diff))
    found = {t.path: (t.before, t.after) for t in patch.targets}
    assert found == {
        "a.py": (blob_id(b"one\ntwo\nthree\n"), blob_id(b"one\n2\nthree\n")),
        "gone.py": (blob_id(b"x\n"), NO_BLOB),
        "new.py": (NO_BLOB, blob_id(b"y\n")),
    }


def test_header_in_other_letters_is_read(diff: bytes) -> None:
    """Names and reasons may be in any script, encoded or not."""
    data = made.make_patch("=?UTF-8?q?Gr=C3=B6=C3=9Fe?=", diff)
    data = data.replace(b"The toy needs it.", "Größe — 大きさ".encode())
    assert Patch.parse("it", data).subject == "Größe"


@pytest.mark.parametrize("field", made.HEADER)
def test_required_field_may_not_be_missing(field: str, diff: bytes) -> None:
    """Each field of the header is required, and named when missing."""
    key = field.replace("-", "_")
    wanted = f"field {field} is missing"
    assert wanted in faults_of(made.make_patch("x", diff, **{key: None}))
    assert wanted in faults_of(made.make_patch("x", diff, **{key: ""}))


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("Reason", "taste", "expected temporary | build | permanent, found"),
        ("Applies_To", "26.7", "Applies-To: Invalid specifier"),
        ("Applies_To", ">=x", "Applies-To: Invalid specifier"),
        ("Upstream_Status", "Sent", "Upstream-Status: expected Pending"),
        ("Upstream_Status", "Submitted", "Upstream-Status: expected Pending"),
        ("Upstream_Status", "Denied [no]", "Upstream-Status: expected"),
        ("Upstream_Status", "Inappropriate []", "Upstream-Status: expected"),
        (
            "Upstream_Status",
            "Accepted [https://example.invalid]",
            "Upstream-Status: expected",
        ),
        (
            "Upstream_Status",
            "Accepted [https://example.invalid, soon]",
            "Upstream-Status: Invalid version",
        ),
        ("Bug", "number 3", "Bug: expected a url, found 'number 3'"),
        ("Last_Update", "yesterday", "Last-Update: Invalid isoformat"),
        ("Last_Update", "2026-02-30", "Last-Update: day"),
        ("Touches_Mojo", "nn", "Touches-Mojo: nn, but the diff changes no"),
        ("Colour", "blue", "expected only fields in the last paragraph"),
    ],
)
def test_malformed_field_is_named(
    field: str, value: str, fault: str, diff: bytes
) -> None:
    """A field of the wrong form is quoted with what was expected."""
    assert fault in faults_of(made.make_patch("x", diff, **{field: value}))


@pytest.mark.parametrize(
    "status",
    [
        "Pending",
        "Submitted [https://example.invalid/1]",
        "Denied [http://example.invalid/1]",
        "Accepted [https://example.invalid/1, 26.8]",
        "Inappropriate [only for our toy]",
    ],
)
def test_every_upstream_status_is_read(status: str, diff: bytes) -> None:
    """The five forms of Upstream-Status are allowed."""
    patch = Patch.parse(
        "it", made.make_patch("x", diff, Upstream_Status=status)
    )
    assert patch.upstream_status == status


def test_all_faults_are_listed_at_once(diff: bytes) -> None:
    """A patch with several faults is corrected in one go."""
    data = made.make_patch("x", diff, Reason="taste", Bug="3", Proof=None)
    found = faults_of(data.replace(b"Subject: [PATCH] x\n", b""))
    wanted = ("Reason: ", "Bug: ", "Proof is missing", "no subject")
    assert all(fault in found for fault in wanted), found


def test_field_may_not_stand_twice(diff: bytes) -> None:
    """A repeated field is a fault, not a choice."""
    data = made.make_patch("x", diff).replace(
        b"Reason: temporary\n", b"Reason: temporary\nReason: build\n"
    )
    assert "field Reason stands twice" in faults_of(data)


def test_message_must_say_why(diff: bytes) -> None:
    """Fields alone are no reason for a patch."""
    data = made.make_patch("x", diff).replace(b"The toy needs it.\n\n", b"")
    assert "doesn't say why the patch exists" in faults_of(data)


def test_commit_id_must_be_zero(diff: bytes) -> None:
    """The commit that a patch was made from isn't part of it."""
    data = made.make_patch("x", diff).replace(b"0" * 40, b"1" * 40, 1)
    assert "expected `From 0000" in faults_of(data)


def test_bare_diff_has_no_header(diff: bytes) -> None:
    """The output of `git diff` alone isn't a patch of the series."""
    assert "expected `From 0000" in faults_of(diff)


def test_mojo_file_must_be_declared(tmp_path: Path) -> None:
    """A patch of Mojo code names the packages that must be rebuilt."""
    diff = made.make_diff(
        tmp_path / "d", {"x.mojo": b"a\n"}, {"x.mojo": b"b\n"}
    )
    assert "Touches-Mojo: none, but the diff changes a .mojo file" in faults_of(
        made.make_patch("x", diff)
    )
    data = made.make_patch("x", diff, Touches_Mojo="nn, linalg")
    assert Patch.parse("it", data).mojo_packages == ("nn", "linalg")


@pytest.mark.parametrize("name", ["x.py", "y.mojo"])
def test_mojo_and_python_are_changed_apart(name: str, tmp_path: Path) -> None:
    """A patch of Mojo code changes no file that a wheel carries as source."""
    before = {"x.mojo": b"a\n", f"max/python/max/{name}": b"a\n"}
    diff = made.make_diff(tmp_path / "d", before, dict.fromkeys(before, b"b\n"))
    assert f"max/python/max/{name}: a patch of Mojo code changes no" in (
        faults_of(made.make_patch("x", diff, Touches_Mojo="nn"))
    )


def test_commits_of_a_source_patch_are_a_range(
    diff: bytes, tmp_path: Path
) -> None:
    """Source-Commits is FIRST..LAST, of a patch of Mojo code only."""
    mojo = made.make_diff(
        tmp_path / "d", {"x.mojo": b"a\n"}, {"x.mojo": b"b\n"}
    )
    good = "0123456789..abcdef0123"
    options = {"Touches_Mojo": "nn", "Source_Commits": good}
    data = made.make_patch("x", mojo, **options)
    assert Patch.parse("it", data).source_commits == good
    data = made.make_patch("x", mojo, Touches_Mojo="nn")
    assert Patch.parse("it", data).source_commits == ""
    for bad in ("main", "0123456789", "0123456789...abcdef0123", "01..23"):
        options["Source_Commits"] = bad
        assert "expected FIRST..LAST commit ids, found" in faults_of(
            made.make_patch("x", mojo, **options)
        )
    assert "only a patch of Mojo code has it" in faults_of(
        made.make_patch("x", diff, Source_Commits=good)
    )


CONTEXT = b"".join(b"%d\n" % i for i in range(20))


@pytest.mark.parametrize(
    ("options", "edits", "good"),
    [
        (("-U1",), ("9",), True),
        (("-U2",), ("9",), False),
        (("-U3",), ("9",), False),
        # At a file's edge only one side shows the width.
        (("-U2",), ("0",), False),
        (("-U2",), ("19",), False),
        # Two lines between changes are one on each side.
        (("-U1",), ("9", "12"), True),
        (("-U1", "--inter-hunk-context=3"), ("9", "13"), False),
    ],
)
def test_hunks_have_one_line_of_context(
    options: tuple[str, ...], edits: tuple[str, ...], good: bool, tmp_path: Path
) -> None:
    """More context than -U1 gives is a fault, wherever it stands."""
    after = CONTEXT
    for edit in edits:
        after = (b"\n" + after).replace(f"\n{edit}\n".encode(), b"\nx\n")[1:]
    diff = made.make_diff(
        tmp_path / "d",
        {"f": CONTEXT, "g": CONTEXT},
        {"f": after, "g": CONTEXT.replace(b"9\n1", b"9\n\n1", 1)},
        *options,
        "--full-index",
    )
    data = made.make_patch("x", diff)
    if good:
        Patch.parse("it", data)
    else:
        assert "one line of context" in faults_of(data)


@pytest.mark.parametrize(("width", "good"), [(1, True), (3, True), (4, False)])
def test_source_patch_may_have_the_context_that_tells_its_place(
    width: int, good: bool, tmp_path: Path
) -> None:
    """A patch of Mojo code has at most git's own three lines of context."""
    for number in (0, 9, 19):
        diff = made.make_diff(
            tmp_path / str(number),
            {"f.mojo": CONTEXT},
            {"f.mojo": CONTEXT.replace(b"%d\n" % number, b"x\n", 1)},
            f"-U{width}",
            "--full-index",
        )
        data = made.make_patch("x", diff, Touches_Mojo="nn")
        if good:
            Patch.parse("it", data)
        else:
            assert "expected 3 lines of context" in faults_of(data)


def test_context_is_counted_by_lines_as_git_does(tmp_path: Path) -> None:
    """Form feeds, carriage returns and missing last newlines are content."""
    before = b"a\n \x0c \x1c x\r\r\nc\nlast"
    diff = made.make_diff(
        tmp_path / "d", {"f": before}, {"f": before.replace(b"c", b"d")}
    )
    Patch.parse("it", made.make_patch("x", diff))


@pytest.mark.parametrize(
    ("version", "applies_to", "inside"),
    [
        ("26.7.0", ">=26.7,<26.8", True),
        ("26.7.1", ">=26.7,<26.8", True),
        ("26.8.0", ">=26.7,<26.8", False),
        # A nightly counts as the release it leads to.
        ("26.8.0.dev2026112905", ">=26.7,<26.8", False),
        ("26.8.0.dev2026112905", ">=26.8", True),
        ("26.7.0rc1", ">=26.7", True),
        ("26.7.0+local.1", "==26.7.0", True),
    ],
)
def test_range_covers_nightlies_as_their_release(
    version: str, applies_to: str, inside: bool
) -> None:
    """A pre-release or local version is judged by its release."""
    assert covers(SpecifierSet(applies_to), Version(version)) is inside


def test_series_is_read_in_the_order_of_its_file(toy: Toy) -> None:
    """Comments and blank lines aside, a line is a patch."""
    toy.series.write_text(
        "# first\n\nendings  # why\n"
        + toy.series.read_text().replace("endings\n", "")
    )
    names = [patch.name for patch in Series.load(toy.series.parent).patches]
    assert names[:2] == ["endings", "decode-divides"]
    assert len(names) == 8


def test_both_disagreements_of_a_series_are_listed(toy: Toy) -> None:
    """A line without a file and a file without a line come in one error."""
    toy.series.write_text(
        toy.series.read_text().replace("endings\n", "ending\nkernel\n")
    )
    with pytest.raises(SeriesError) as caught:
        Series.load(toy.series.parent)
    assert str(caught.value).splitlines()[1:] == [
        "  kernel stands twice",
        "  ending: no file ending.patch",
        "  endings.patch: not listed",
    ]


def test_selection_says_what_and_why(toy: Toy) -> None:
    """Each patch has a state for each release, with its reason."""
    series = Series.load(toy.series.parent)
    first, second = (
        {
            s.patch.name: (s.state, s.reason)
            for s in series.select(Version(version), source=False)
        }
        for version in ("1.0", "2.0")
    )
    assert first["scale-two"] == (State.APPLIED, "[Toy] scale-two")
    assert second["scale-two"] == (State.LANDED, "upstream has it since 2.0")
    state, reason = first["two-only"]
    assert state is State.NOT_FOR_RELEASE and reason.endswith("excludes 1.0")
    assert second["two-only"][0] is State.APPLIED
    assert first["kernel"][0] is State.SOURCE_ONLY
    assert "Mojo" in first["kernel"][1]
    with_source = series.select(Version("1.0"), source=True)
    assert {s.patch.name: s.state for s in with_source}["kernel"] == "applied"


def test_unused_patch_is_an_error_with_its_range(toy: Toy) -> None:
    """A patch that landed before every release, or fits none, is named."""
    toy.edit_patch("scale-two", "invalid/7, 2.0]", "invalid/7, 1.0]")
    toy.edit_patch("endings", "Applies-To: >=1.0", "Applies-To: <1")
    series = Series.load(toy.series.parent)
    with pytest.raises(SeriesError, match=r"no release \(1.0, 2.0\)") as caught:
        series.check_used([Version("1.0"), Version("2.0")])
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == [
        "endings",
        "scale-two",
    ]


def test_digest_of_a_patch_is_its_files(toy: Toy) -> None:
    """A changed byte of a patch file is another patch."""
    data = toy.patch("endings").read_bytes()
    one = Patch.parse("endings", data)
    other = Patch.parse("endings", data.replace(b"toy needs", b"toy wants"))
    assert one.sha256 != other.sha256
    assert one.targets == other.targets
