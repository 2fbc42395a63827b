# SPDX-License-Identifier: Apache-2.0
"""Digests of the tensors in safetensors files, computed once a file.

A tensor's digest is SHA-256 over the SHA-256 of its pieces, so that all cores
work on it; with the processor's SHA instructions that is the fastest strong
hash of the standard library. The digests of a file are remembered with its
:class:`Stamp` and hold while the stamp does.

That is safe on a file system that keeps times in fractions of a second and
sets them itself: a write changes the ctime, which no program can set back. It
does not see what changes without a write to the file: a storage fault, a
write to the raw device, a clock set back to the very nanosecond. A file that
changed in the last moment, or has times in whole seconds, is not remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .files import replacing
from .tensor import Tensor

PIECE = 16 << 20
"""Bytes of a tensor that are hashed together."""

SETTLED = 100_000_000
"""Nanoseconds since its last change after which a file's stamp is trusted.

Kernels set times in steps of up to 10 ms; a second change in the same step
would leave the stamp as it is.
"""

_READ = 1 << 20
_LONGEST_HEADER = 100_000_000  # safetensors' own limit
_RECORD = 1

Advance = Callable[[int], object]
"""Is told of bytes that are done, from any thread."""


class DamagedFileError(ValueError):
    """A file isn't the safetensors file that its size and header promise."""


class TensorDigest(NamedTuple):
    """What a tensor is: equal for two tensors only if they are equal."""

    dtype: str
    """safetensors' name of the type."""

    shape: tuple[int, ...]
    """The sizes of the dimensions."""

    sha256: str
    """The digest of the elements' bytes, little-endian and row-major."""


class Span(NamedTuple):
    """Where a tensor lies in a safetensors file."""

    dtype: str
    """safetensors' name of the type."""

    shape: tuple[int, ...]
    """The sizes of the dimensions."""

    start: int
    """Its first byte's offset in the file."""

    stop: int
    """The offset after its last byte."""


@dataclass(frozen=True)
class Stamp:
    """What of a file's inode changes with every write to the file."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, file: int) -> Stamp:
        """Returns the stamp of an open file, by its descriptor."""
        stat = os.fstat(file)
        return cls(
            stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
        )

    @property
    def fine(self) -> bool:
        """Whether the file system keeps fractions of a second."""
        return self.ctime_ns % 1_000_000_000 != 0

    def settled(self, now_ns: int) -> bool:
        """Whether a change after ``now_ns`` is bound to change the stamp."""
        return self.fine and now_ns - self.ctime_ns >= SETTLED


def content(tensor: Tensor) -> memoryview:
    """Returns a tensor's bytes in row-major order, copied if they are not."""
    flat = np.ascontiguousarray(tensor.data).reshape(-1)
    return flat.view(np.uint8).data


def digest(tensor: Tensor) -> TensorDigest:
    """Returns a tensor's digest."""
    data = content(tensor)
    pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)]
    with ThreadPoolExecutor(threads()) as pool:
        hashes = list(pool.map(_sha256, pieces))
    return TensorDigest(tensor.dtype, tensor.shape, _join(hashes))


def digests(
    paths: Iterable[Path],
    records: Path | None = None,
    advance: Advance = lambda done: None,
) -> dict[str, TensorDigest]:
    """Returns the digests of a checkpoint's tensors, by name.

    Args:
        paths: The checkpoint's safetensors files, in any order.
        records: The folder in which digests are remembered, or None. If it
            cannot be written, they are not.
        advance: Is told how many bytes of the files are done.

    Raises:
        DamagedFileError: If a file is damaged, or a tensor is in two of them.
        OSError: If a file cannot be read, or is written to meanwhile.
    """
    found: dict[str, TensorDigest] = {}
    homes: dict[str, Path] = {}
    for path in paths:
        for name, tensor in _remembered(path, records, advance).items():
            if name in found:
                raise DamagedFileError(
                    f"{path}: tensor {name} is also in {homes[name]}"
                )
            found[name], homes[name] = tensor, path
    return found


def file_digests(
    path: Path | int, advance: Advance = lambda done: None
) -> dict[str, TensorDigest]:
    """Returns the digests of a file's tensors, by name, by reading it.

    Args:
        path: A safetensors file, or a descriptor of one.
        advance: Is told how many bytes of tensors are done.

    Raises:
        DamagedFileError: If the file is damaged.
        OSError: If it cannot be read.
    """
    with _opened(path) as file:
        spans = read_header(file)
        # All tensors' pieces in one list, so that no core waits for the last
        # piece of a tensor.
        pieces = [
            (name, start, min(start + PIECE, span.stop))
            for name, span in spans.items()
            for start in range(span.start, span.stop, PIECE)
        ]
        local = threading.local()

        def hash_piece(piece: tuple[str, int, int]) -> bytes:
            _, start, stop = piece
            if not hasattr(local, "buffer"):
                local.buffer = memoryview(bytearray(_READ))
            sha256 = hashlib.sha256()
            for offset in range(start, stop, _READ):
                part = local.buffer[: min(_READ, stop - offset)]
                _read(file, part, offset)
                sha256.update(part)
            advance(stop - start)
            return sha256.digest()

        hashes: dict[str, list[bytes]] = {name: [] for name in spans}
        with ThreadPoolExecutor(threads()) as pool:
            for piece, value in zip(
                pieces, pool.map(hash_piece, pieces), strict=True
            ):
                hashes[piece[0]].append(value)
    return {
        name: TensorDigest(span.dtype, span.shape, _join(hashes[name]))
        for name, span in spans.items()
    }


def read_header(file: int) -> dict[str, Span]:
    """Returns where the tensors of a safetensors file are, in file order.

    The format: https://github.com/huggingface/safetensors#format

    Args:
        file: A descriptor.

    Raises:
        DamagedFileError: If the header is none, or the file's size another.
    """
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise DamagedFileError(
            f"its header should have {length} bytes, but the file has {size}"
        )
    try:
        header = json.loads(os.pread(file, length, 8))
        spans = {
            name: _span(entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedFileError(f"its header is malformed: {error}") from error
    spans = dict(sorted(spans.items(), key=lambda item: item[1][2:]))
    bounds = [(8 + length,) * 2, *(s[2:] for s in spans.values()), (size,) * 2]
    for (_, before), (after, _) in pairwise(bounds):
        if before != after:
            raise DamagedFileError(
                f"expected a tensor or the end at byte {before}, "
                f"found it at byte {after}"
            )
    return spans


def threads() -> int:
    """Returns how many threads hash: one a core that we may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write_atomically(path: Path, content: object) -> None:
    """Writes JSON to a file that is there in full or not at all."""
    with replacing(path) as file:
        file.write(json.dumps(content).encode())


def _remembered(
    path: Path, records: Path | None, advance: Advance
) -> Mapping[str, TensorDigest]:
    real = path.resolve()
    record = None
    if records is not None:
        name = hashlib.sha256(os.fsencode(real)).hexdigest()
        record = records / f"{name}.json"
    with _opened(real) as file:
        began = time.time_ns()
        stamp = Stamp.of(file)
        if record is not None:
            known = _recall(record, stamp)
            if known is not None:
                advance(stamp.size)
                return known
        try:
            found = file_digests(file, advance)
        except DamagedFileError as error:
            raise DamagedFileError(f"{path}: {error}") from error
        if Stamp.of(file) != stamp:
            raise OSError(f"{path} was written to while it was read")
    if record is not None and stamp.settled(began):
        # A folder that cannot be written costs time at the next start only.
        with contextlib.suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            _forget_missing(record.parent)
            write_atomically(
                record,
                {
                    "format": _RECORD,
                    "path": str(real),
                    "stamp": vars(stamp),
                    "tensors": found,
                },
            )
    return found


def _recall(record: Path, stamp: Stamp) -> dict[str, TensorDigest] | None:
    try:
        known = json.loads(record.read_bytes())
        if known["format"] != _RECORD or known["stamp"] != vars(stamp):
            return None
        return {
            name: TensorDigest(dtype, tuple(shape), sha256)
            for name, (dtype, shape, sha256) in known["tensors"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _forget_missing(records: Path) -> None:
    for record in records.glob("*.json"):
        try:
            there = Path(json.loads(record.read_bytes())["path"]).exists()
        except (OSError, ValueError, KeyError, TypeError):
            there = False
        if not there:
            record.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path | int) -> Iterator[int]:
    if isinstance(path, int):
        yield path
        return
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _read(file: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(file, [target], offset)
        if not count:
            raise DamagedFileError(f"it ends at byte {offset}")
        target, offset = target[count:], offset + count


def _sha256(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _join(hashes: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(hashes)).hexdigest()


def _span(entry: Mapping[str, Any], base: int) -> Span:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in (start, stop, *shape)):
        raise ValueError(f"no sizes: {entry}")
    if stop < start:
        raise ValueError(f"no range: {entry}")
    return Span(str(entry["dtype"]), shape, base + start, base + stop)
