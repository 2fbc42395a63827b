# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from attnquant_common import digests as digests_module
from attnquant_common.digests import (
    PIECE,
    SETTLED,
    DamagedFileError,
    TensorDigest,
    digest,
    digests,
    file_digests,
    read_header,
)
from attnquant_common.tensor import Tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

ARRAYS = npst.arrays(
    st.sampled_from([np.uint8, np.uint16, np.float32, np.int64]),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)
NAMES = {"uint8": "U8", "uint16": "U16", "float32": "F32", "int64": "I64"}
WEIGHTS = {
    "a": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b": np.array(7, np.int64),
    "empty": np.empty((0, 3), np.uint8),
}


def expected(array: np.ndarray) -> TensorDigest:
    """The digest, as its description has it."""
    data = array.tobytes()
    pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)]
    parts = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    whole = hashlib.sha256(parts).hexdigest()
    return TensorDigest(NAMES[str(array.dtype)], array.shape, whole)


def save(path: Path, weights: dict[str, np.ndarray] = WEIGHTS) -> Path:
    """Writes a checkpoint that has settled, as one of yesterday has."""
    safetensors.numpy.save_file(weights, path)
    time.sleep(1.5 * SETTLED / 1e9)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Lists the files whose contents were read."""
    found: list[object] = []

    def note(*arguments: object) -> dict[str, TensorDigest]:
        found.append(arguments[0])
        return file_digests(*arguments)

    monkeypatch.setattr(digests_module, "file_digests", note)
    return found


@settings(max_examples=50)
@given(st.dictionaries(st.text(min_size=1, max_size=5), ARRAYS, max_size=4))
def test_digests_of_a_file(
    tmp_path_factory: pytest.TempPathFactory, weights: dict[str, np.ndarray]
) -> None:
    """A tensor has the same digest in a file as in memory."""
    weights.pop("__metadata__", None)
    path = tmp_path_factory.mktemp("w") / "model.safetensors"
    safetensors.numpy.save_file(weights, path)
    found = {name: expected(array) for name, array in weights.items()}
    assert file_digests(path) == found
    assert found == {
        name: digest(Tensor(array, NAMES[str(array.dtype)]))
        for name, array in weights.items()
    }


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_pieces(tmp_path: Path, size: int) -> None:
    """Pieces are cut where they should be, in files and in memory."""
    array = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": array}, path)
    done: list[int] = []
    assert file_digests(path, done.append) == {"w": expected(array)}
    assert digest(Tensor(array, "U8")) == expected(array)
    assert sum(done) == size


def test_not_in_row_major_order() -> None:
    """An array's digest is that of its elements, however they lie."""
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert digest(Tensor(array.T, "F32")) == expected(array.T.copy())
    assert digest(Tensor(array[:, ::2], "F32")) == expected(array[:, ::2])


def test_remembered(tmp_path: Path, reads: list[object]) -> None:
    """A file's contents are read once; then its record serves."""
    paths = [
        save(tmp_path / "1.safetensors"),
        save(tmp_path / "2.safetensors", {"c": WEIGHTS["a"]}),
    ]
    records = tmp_path / "sources"
    weights = {**WEIGHTS, "c": WEIGHTS["a"]}
    found = {name: expected(array) for name, array in weights.items()}
    done: list[int] = []
    assert digests(paths, records) == found
    assert len(reads) == 2
    assert digests(reversed(paths), records, done.append) == found
    assert len(reads) == 2
    assert sum(done) == sum(path.stat().st_size for path in paths)


def test_remembered_through_links(tmp_path: Path, reads: list[object]) -> None:
    """A link to a file, as in Hugging Face's cache, has the file's record."""
    path = save(tmp_path / "blob")
    link = tmp_path / "model.safetensors"
    link.symlink_to(path)
    assert digests([link], tmp_path / "s") == digests([path], tmp_path / "s")
    assert len(reads) == 1


def rewrite(path: Path) -> None:
    """Changes a byte and puts the mtime back."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replace(path: Path) -> None:
    """Puts another file of the same size and mtime in its place."""
    stat = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-1] + b"\xff")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [rewrite, replace])
def test_changed_file(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """A changed file is read anew, though size and mtime are as they were."""
    path = save(tmp_path / "model.safetensors")
    before = digests([path], tmp_path / "s")
    change(path)
    after = digests([path], tmp_path / "s")
    assert after != before
    assert after == file_digests(path)


def test_just_written_is_not_remembered(
    tmp_path: Path, reads: list[object]
) -> None:
    """A file that changed this moment might change again unnoticed."""
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(WEIGHTS, path)
    digests([path], tmp_path / "s")
    digests([path], tmp_path / "s")
    assert len(reads) == 2


def test_whole_seconds_are_not_trusted() -> None:
    """Times without fractions could be those of two different states."""
    stamp = digests_module.Stamp(1, 1, 5_000_000_000, 1)
    assert not stamp.settled(9_000_000_000)
    stamp = digests_module.Stamp(1, 1, 5_000_000_001, 1)
    assert stamp.settled(9_000_000_000)


def test_damaged_record(tmp_path: Path, reads: list[object]) -> None:
    """A record that cannot be read is none."""
    path = save(tmp_path / "model.safetensors")
    found = digests([path], tmp_path / "s")
    (record,) = (tmp_path / "s").iterdir()
    for text in ("", "[]", '{"format": 1}'):
        record.write_text(text)
        assert digests([path], tmp_path / "s") == found
    assert len(reads) == 4


def test_records_of_missing_files_go(tmp_path: Path) -> None:
    """A removed checkpoint's record is removed when the next one is kept."""
    first = save(tmp_path / "1.safetensors")
    digests([first], tmp_path / "s")
    first.unlink()
    second = save(tmp_path / "2.safetensors")
    digests([second], tmp_path / "s")
    (record,) = (tmp_path / "s").iterdir()
    assert json.loads(record.read_text())["path"] == str(second)


def test_records_cannot_be_kept(tmp_path: Path) -> None:
    """Without a place for records, digests are computed all the same."""
    path = save(tmp_path / "model.safetensors")
    (tmp_path / "s").write_text("a file")
    assert digests([path], tmp_path / "s") == file_digests(path)


def test_written_to_while_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes while it is read has no digests."""
    path = save(tmp_path / "model.safetensors")

    def meanwhile(*arguments: object) -> dict[str, TensorDigest]:
        found = file_digests(*arguments)
        rewrite(path)
        return found

    monkeypatch.setattr(digests_module, "file_digests", meanwhile)
    with pytest.raises(OSError, match="was written to while it was read"):
        digests([path], tmp_path / "s")


def test_tensor_in_two_files(tmp_path: Path) -> None:
    """A tensor of two files could be either: an error names both."""
    paths = [save(tmp_path / "1.safetensors"), save(tmp_path / "2.safetensors")]
    with pytest.raises(DamagedFileError, match=r"2\.safe.* is also in .*1\.s"):
        digests(paths)


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(start: int, stop: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [start, stop]}


DAMAGED = {
    "empty": b"",
    "short": b"\0" * 7,
    "longer header than file": (9).to_bytes(8, "little") + b"{}",
    "endless header": b"\xff" * 20,
    "no JSON": (2).to_bytes(8, "little") + b"{]",
    "no object": (2).to_bytes(8, "little") + b"[]",
    "no entry": header(w=1) + b"1234",
    "no offsets": header(w={"dtype": "U8", "shape": [4]}) + b"1234",
    "negative": header(w=entry(-4, 4)) + b"1234",
    "backwards": header(w=entry(4, 0)) + b"1234",
    "overlap": header(w=entry(0, 4), v=entry(2, 6)) + b"123456",
    "gap": header(w=entry(0, 2), v=entry(3, 5)) + b"12345",
    "truncated": header(w=entry(0, 4)) + b"123",
    "longer": header(w=entry(0, 4)) + b"12345",
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_file(tmp_path: Path, fault: str) -> None:
    """A damaged file is an error that names it, as for safetensors' own."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED[fault])
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(DAMAGED[fault])
    with pytest.raises(DamagedFileError, match=r"/model\.safetensors: "):
        digests([path])


def test_header_of_a_file(tmp_path: Path) -> None:
    """The spans hold the tensors' bytes."""
    path = save(tmp_path / "model.safetensors")
    data = path.read_bytes()
    with path.open("rb") as file:
        spans = read_header(file.fileno())
    assert spans.keys() == WEIGHTS.keys()
    for name, span in spans.items():
        assert data[span.start : span.stop] == WEIGHTS[name].tobytes()
