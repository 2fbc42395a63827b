# SPDX-License-Identifier: Apache-2.0
"""safetensors files; the safetensors library is the oracle."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from attnquant_common.digests import DamagedFileError
from attnquant_common.tensor import STORED_AS, Tensor, TensorSpec
from attnquant_common.tensorfile import Reader, create
from hypothesis import given, settings
from hypothesis import strategies as st

TENSORS = {
    "bits": Tensor(np.arange(6, dtype=np.uint16).reshape(2, 3), "BF16"),
    "bytes": Tensor(np.arange(5, dtype=np.uint8), "F8_E4M3"),
    "wide": Tensor(np.linspace(0, 1, 12, dtype=np.float64), "F64"),
    "scalar": Tensor(np.array(2.5, np.float32), "F32"),
    "none": Tensor(np.zeros((0, 4), np.float32), "F32"),
    "turned": Tensor(np.arange(12, dtype=np.int32).reshape(3, 4).T, "I32"),
}


def specs(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: tensor.spec for name, tensor in tensors.items()}


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    with create(path, specs(tensors), metadata) as file:
        for name in reversed(tensors):
            file.put(name, tensors[name])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    write(path, TENSORS, colour="blue")
    return path


def test_the_library_reads_what_is_written(path: Path) -> None:
    """Names, types, shapes, bytes and metadata are there for any reader."""
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name]["dtype"] == tensor.dtype
        assert tuple(found[name]["shape"]) == tensor.shape
        assert bytes(found[name]["data"]) == tensor.data.tobytes()
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata()["colour"] == "blue"


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    """A checkpoint of others has no digests, and reads all the same."""
    path = tmp_path / "x.safetensors"
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1, 2], np.int64),
        "c": np.zeros((3, 0), np.float16),
    }
    safetensors.numpy.save_file(arrays, path, {"format": "np"})
    reader = Reader(path)
    assert reader.metadata == {"format": "np"}
    assert sorted(reader) == ["a", "b", "c"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(reader[name].data, array, strict=True)
    with pytest.raises(DamagedFileError, match="in its header"):
        reader.verify_header()
    with pytest.raises(DamagedFileError, match="in a"):
        reader.verified("a")


def test_the_way_there_and_back(path: Path) -> None:
    """What is read is what was written, aligned, and may not be changed."""
    reader = Reader(path)
    reader.verify_header()
    assert len(reader) == len(TENSORS)
    for name, tensor in TENSORS.items():
        found = reader.verified(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert reader.spec(name) == tensor.spec
        assert found.data.tobytes() == tensor.data.tobytes()
        assert found.data.flags.aligned
        assert not found.data.flags.writeable
    with pytest.raises(KeyError):
        reader["other"]


def test_equal_tensors_make_equal_files(tmp_path: Path, path: Path) -> None:
    """The bytes depend on nothing but the tensors, their order and metadata."""
    again = tmp_path / "again.safetensors"
    write(again, TENSORS, colour="blue")
    assert again.read_bytes() == path.read_bytes()


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    """Until the end there is no file of that name, and then only that file."""
    path = tmp_path / "x.safetensors"
    with create(path, specs(TENSORS), {}) as file:
        for name, tensor in TENSORS.items():
            assert not path.exists()
            file.put(name, tensor)
    assert listing(tmp_path) == [path.name]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failure_leaves_what_was_there(path: Path) -> None:
    """An error in the middle leaves the old file, and nothing else."""
    before = path.read_bytes()
    with (
        pytest.raises(RuntimeError, match="stop"),
        create(path, specs(TENSORS), {}) as file,
    ):
        file.put("bits", TENSORS["bits"])
        raise RuntimeError("stop")
    assert path.read_bytes() == before
    assert listing(path.parent) == [path.name]


def test_no_space_is_an_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up at the end does not leave half a file."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "x.safetensors", TENSORS)
    assert listing(tmp_path) == []


def test_a_writer_gets_what_was_announced(tmp_path: Path) -> None:
    """A missing, other or unknown tensor is an error, and there is no file."""
    path = tmp_path / "x.safetensors"
    one = {"a": TensorSpec("F32", (2,))}
    with (
        pytest.raises(ValueError, match="a was not put"),
        create(path, one, {}),
    ):
        pass
    other = Tensor(np.zeros(3, np.float32), "F32")
    with (
        pytest.raises(ValueError, match=r"a is F32 \[3\], not F32 \[2\]"),
        create(path, one, {}) as file,
    ):
        file.put("a", other)
    with pytest.raises(KeyError), create(path, one, {}) as file:
        file.put("b", other)
    assert listing(tmp_path) == []


def test_metadata_is_amended_in_its_place(tmp_path: Path) -> None:
    """What is known only at the end has its room from the start."""
    path = tmp_path / "x.safetensors"
    with create(path, {}, {"sum": "000"}) as file:
        file.amend("sum", "abc")
        with pytest.raises(ValueError, match="sum changed its length"):
            file.amend("sum", "abcd")
    reader = Reader(path)
    reader.verify_header()
    assert reader.metadata["sum"] == "abc"


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_no_changed_byte_goes_unseen(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever byte is changed, opening or verifying finds it."""
    path = tmp_path_factory.mktemp("changed") / "x.safetensors"
    write(path, TENSORS, colour="blue")
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"x\.safetensors"):
        reader = Reader(path)
        reader.verify_header()
        for name in reader:
            reader.verified(name)


def test_no_shorter_or_longer_file_opens(path: Path) -> None:
    """A file that was cut anywhere, or that has more at its end, is damaged."""
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedFileError, match=str(path)):
            Reader(path)
    path.write_bytes(content + b" ")
    with pytest.raises(DamagedFileError, match=str(path)):
        Reader(path)


@pytest.mark.parametrize(
    "header",
    [
        [],
        "text",
        {"a": []},
        {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"__metadata__": [], "a": {}},
        {
            "__metadata__": {"digests": "["},
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        },
    ],
)
def test_no_odd_header_opens(tmp_path: Path, header: object) -> None:
    """A header that says nothing, or nonsense, is an error with the path."""
    path = tmp_path / "x.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(DamagedFileError, match=str(path)):
        Reader(path)


def test_every_type_has_its_width() -> None:
    """The widths of types are those that the library reads by."""
    for dtype, stored in STORED_AS.items():
        spec = TensorSpec(dtype, (2, 3))
        entry = {
            "dtype": dtype,
            "shape": [2, 3],
            "data_offsets": [0, spec.nbytes],
        }
        text = json.dumps({"a": entry}).encode()
        whole = len(text).to_bytes(8, "little") + text + bytes(spec.nbytes)
        assert safetensors.deserialize(whole)
        assert spec.nbytes == 6 * stored.itemsize
