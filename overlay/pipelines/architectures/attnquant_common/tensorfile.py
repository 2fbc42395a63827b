# SPDX-License-Identifier: Apache-2.0
"""safetensors files that are written tensor by tensor and read by mapping.

The safetensors library writes only what is all in memory, and gives numpy no
bfloat16. The format is https://huggingface.co/docs/safetensors: the header's
length, the header in JSON, the tensors' bytes without gaps. A digest of each
tensor and of the header is kept in the header's metadata.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .digests import DamagedFileError, digest, read_header
from .files import replacing, sync
from .tensor import STORED_AS, Tensor, TensorSpec

_NO_DIGEST = "0" * 64


_ALIGNMENT = 64


class Layout(NamedTuple):
    """How tensors lie in a file."""

    header: bytes
    """The header's length and the header."""

    offsets: dict[str, int]
    """Where in the file each tensor starts."""

    size: int
    """The file's bytes."""


def layout(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> Layout:
    """Returns how tensors lie in a file.

    Tensors of a multiple of 64 bytes come first, so that they start at one;
    all others start at a multiple of their element's size. The format allows
    no gaps.

    Args:
        specs: The tensors, by name; their order does not matter.
        metadata: Text to keep in the header.
    """
    names = sorted(
        specs,
        key=lambda name: (
            specs[name].nbytes % _ALIGNMENT != 0,
            -STORED_AS[specs[name].dtype].itemsize,
            name,
        ),
    )
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name in names:
        starts[name], end = end, end + specs[name].nbytes
        entries[name] = {
            "dtype": specs[name].dtype,
            "shape": specs[name].shape,
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    base = len(header)
    offsets = {name: base + start for name, start in starts.items()}
    return Layout(header, offsets, base + end)


class Writer:
    """Puts the tensors of one file, in any order."""

    def __init__(
        self,
        file: BinaryIO,
        specs: Mapping[str, TensorSpec],
        metadata: Mapping[str, str],
    ) -> None:
        self._file = file
        self._metadata = dict(metadata)
        self._specs = dict(specs)
        self._digests = dict.fromkeys(self._specs, _NO_DIGEST)
        planned = self._layout(_NO_DIGEST)
        self._offsets = planned.offsets
        file.truncate(planned.size)

    def put(self, name: str, tensor: Tensor) -> str:
        """Writes a tensor and returns its SHA-256, as :func:`.digest` has it.

        Raises:
            ValueError: If it is not as its spec says.
            OSError: If it cannot be written.
        """
        spec = self._specs[name]
        if spec != tensor.spec:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, not "
                f"{spec.dtype} {list(spec.shape)} as announced"
            )
        self._file.seek(self._offsets[name])
        # By way of uint8, whose memoryview may have no elements.
        flat = np.ascontiguousarray(tensor.data).reshape(-1)
        self._file.write(flat.view(np.uint8).data)
        self._digests[name] = digest(tensor).sha256
        return self._digests[name]

    def amend(self, key: str, value: str) -> None:
        """Changes a value of the metadata for one that is as long.

        Raises:
            ValueError: If it is of another length.
        """
        if len(value) != len(self._metadata[key]):
            raise ValueError(f"{key} changed its length")
        self._metadata[key] = value

    def finish(self) -> None:
        """Writes the header.

        Raises:
            ValueError: If a tensor was not put.
            OSError: If it cannot be written.
        """
        missing = [n for n, d in self._digests.items() if d == _NO_DIGEST]
        if missing:
            raise ValueError(f"{missing[0]} was not put")
        blank = self._layout(_NO_DIGEST).header
        self._file.seek(0)
        self._file.write(self._layout(_sha256(blank)).header)

    def _layout(self, header_digest: str) -> Layout:
        metadata = {
            **self._metadata,
            "digests": json.dumps(self._digests),
            "header_digest": header_digest,
        }
        return layout(self._specs, metadata)


@contextmanager
def create(
    path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> Iterator[Writer]:
    """Writes a file, which appears under its name only when it is complete.

    Args:
        path: Where; a file there is replaced.
        specs: The tensors to be put, by name.
        metadata: Text to keep in the header.

    Raises:
        OSError: If it cannot be written; nothing is left behind.
    """
    with replacing(path) as file:
        writer = Writer(file, specs, metadata)
        yield writer
        writer.finish()
    sync(path.parent)


class Reader(Mapping[str, Tensor]):
    """The tensors of a file, mapped into memory and read when touched."""

    metadata: Mapping[str, str]
    """The text in the header."""

    def __init__(self, path: Path) -> None:
        """Maps a file.

        Raises:
            DamagedFileError: If it is no safetensors file, or is cut short.
            OSError: If it cannot be read.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                spans = read_header(file.fileno())
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            length = 8 + int.from_bytes(self._map[:8], "little")
            self._header = self._map[:length]
            metadata = json.loads(self._header[8:]).get("__metadata__", {})
            self.metadata = dict(metadata)
            self._digests = dict(json.loads(metadata.get("digests", "{}")))
            self._entries = {}
            for name, span in spans.items():
                spec = TensorSpec(span.dtype, span.shape)
                if span.stop - span.start != spec.nbytes:
                    raise ValueError(
                        f"{name} is {spec.dtype} {list(spec.shape)}, but has "
                        f"{span.stop - span.start} bytes"
                    )
                self._entries[name] = span.start, spec
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{path} is damaged: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        start, spec = self._entries[name]
        stored = STORED_AS[spec.dtype]
        data = np.frombuffer(self._map, np.uint8)[start : start + spec.nbytes]
        return Tensor(data.view(stored).reshape(spec.shape), spec.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def spec(self, name: str) -> TensorSpec:
        """Returns a tensor's type and shape without touching it."""
        return self._entries[name][1]

    def verified(self, name: str) -> Tensor:
        """Returns a tensor after comparing its bytes with its digest.

        Raises:
            DamagedFileError: If they differ, or there is no digest.
        """
        tensor = self[name]
        if digest(tensor).sha256 != self._digests.get(name):
            raise DamagedFileError(f"{self.path} is damaged: in {name}")
        return tensor

    def verify_header(self) -> None:
        """Compares the header with its digest.

        Raises:
            DamagedFileError: If they differ, or there is none.
        """
        kept = str(self.metadata.get("header_digest"))
        blank = self._header.replace(kept.encode(), _NO_DIGEST.encode())
        if len(kept) != len(_NO_DIGEST) or _sha256(blank) != kept:
            raise DamagedFileError(f"{self.path} is damaged: in its header")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
