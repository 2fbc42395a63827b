# SPDX-License-Identifier: Apache-2.0
"""A cache of prepared weights on disk.

The key of an entry covers the content of the source tensors, the settings and
the preparing code's version. An entry is a folder::

    <key>/tensors.safetensors   the weights; loaded by mapping into memory
    <key>/manifest.json         each tensor's type, shape and digest
    <key>/verified.json         the stamps under which both were last verified
    <key>.partial/              the same while it is made
    <key>.lock                  held by the process that makes or removes it
    sources/                    digests of checkpoints' files

It is made under another name and renamed when it is on the disk in full. Who
uses an entry shares a lock on its tensors' file until the last array of it is
gone; an entry in use is not removed. Its time of last use is the folder's
mtime.

A load always verifies key, names, types, shapes, sizes and offsets. It reads
the contents against their digests if one of the two files has another
:class:`~.digests.Stamp` than when they were last verified: after any write to
them, and after a copy to another place. Otherwise the load reads nothing but
the header, so a warm start costs what reading the weights costs.

A cache that cannot be used does not keep a server from starting: one line in
the log says why, and the weights are prepared in memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from . import tensorfile
from .digests import (
    SETTLED,
    DamagedFileError,
    Stamp,
    TensorDigest,
    content,
    digest,
    digests,
    file_digests,
    write_atomically,
)
from .files import sync
from .locks import locked
from .progress import Progress
from .tensor import STORED_AS, Tensor, TensorSpec
from .tensorfile import Layout

DEFAULT_LIMIT = 200 * 10**9
"""Bytes that a cache holds at most, unless told otherwise."""

# MAX's log shows what is below this name only.
log = logging.getLogger("max.pipelines.attnquant")

_FORMAT = 1
_KEY = re.compile("[0-9a-f]{64}")
_TENSORS = "tensors.safetensors"
_MANIFEST = "manifest.json"
_VERIFIED = "verified.json"
_TAG = "CACHEDIR.TAG"
# https://bford.info/cachedir/
_SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55\n"


class PlanError(ValueError):
    """The tensors that were made are not those that were planned."""


class _UnusableError(Exception):
    """The cache cannot be used; says why."""


class _DamagedError(Exception):
    """An entry is not what was stored; says why."""


Plan = Mapping[str, TensorSpec]
"""The tensors of an entry, by name, known before they are made."""

Produce = Callable[[], Iterable[tuple[str, Tensor]]]
"""Makes the planned tensors, each once, in any order.

It may be called a second time, if the disk fails during the first. A tensor
must keep its elements after the next one is made.
"""


class Weights(Mapping[str, Tensor]):
    """The weights, by name; mapped from a file, or in memory.

    What is written to a mapped array does not reach the file. The entry
    counts as in use until the last of its arrays is gone.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        outcome: Literal["hit", "miss", "off"],
    ) -> None:
        self._tensors = tensors
        self.outcome = outcome
        """Whether the weights were there, were made and stored, or were made
        without a cache."""

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True)
class Entry:
    """What there is to say of an entry without its weights."""

    key: str
    nbytes: int
    """Bytes of its files."""

    used: float
    """When it was last used, in seconds since the epoch."""

    label: Mapping[str, str] | None
    """What it is, or None if its manifest cannot be read."""


def entry_key(
    tensors: Mapping[str, TensorDigest],
    settings: Mapping[str, Any],
    version: str,
) -> str:
    """Returns the key for weights that are made of tensors.

    Any other tensor, name, setting or version gives another key; the order of
    the mappings does not.

    Args:
        tensors: The source tensors' digests, by name.
        settings: All that the result depends on, as JSON has it.
        version: The version of the code that makes the weights.

    Raises:
        TypeError: If a setting is not of a type of JSON's.
        ValueError: If a setting is NaN or infinite.
    """
    content = [_FORMAT, version, _plain(settings), tensors]
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def layout(key: str, plan: Plan) -> Layout:
    """Returns where in its entry's file each planned tensor lies."""
    return tensorfile.layout(plan, {"attnquant.key": key})


class Cache:
    """A folder of entries."""

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT) -> None:
        self.folder = folder
        self.limit = limit_bytes

    def source_digests(self, paths: Iterable[Path]) -> dict[str, TensorDigest]:
        """Returns the digests of a checkpoint's tensors, by name.

        Those of a file that is as it was are remembered, not computed.

        Args:
            paths: The checkpoint's safetensors files.

        Raises:
            DamagedFileError: If a file is damaged, or a tensor is in two.
            OSError: If a file cannot be read, or is written to meanwhile.
        """
        paths = list(paths)
        total = sum(path.stat().st_size for path in paths)
        with Progress("reading the checkpoint", total) as progress:
            return digests(paths, self.folder / "sources", progress.advance)

    def load(
        self,
        key: str,
        plan: Plan,
        produce: Produce,
        label: Mapping[str, str],
    ) -> Weights:
        """Returns an entry's weights, making them if they are not there.

        Args:
            key: See :func:`entry_key`.
            plan: The tensors, by name.
            produce: Makes them.
            label: What the entry is, for people: its model, its settings.

        Raises:
            PlanError: If ``produce`` makes other tensors than planned.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"not a key: {key!r}")
        try:
            found = None
            # Damage counts only if it is there while we hold the lock.
            with contextlib.suppress(_DamagedError):
                found = self._open(key, plan)
            if found is None:
                found = self._make(key, plan, produce, label)
            return found
        except _UnusableError as error:
            log.warning(
                "AttnQuant: going on without the weight cache, "
                "so the next start is as slow: %s",
                error,
            )
            with Progress("preparing weights", _total(plan)) as progress:
                made = {}
                for name, tensor in _planned(plan, produce()):
                    made[name] = tensor
                    progress.advance(tensor.nbytes)
                return Weights(made, "off")

    def entries(self) -> list[Entry]:
        """Returns what is in the cache, the least recently used first.

        Raises:
            OSError: If the folder cannot be read.
        """
        found = []
        for folder in self._folders(""):
            # It may be removed at any time.
            with contextlib.suppress(FileNotFoundError):
                found.append(
                    Entry(
                        folder.name,
                        _size(folder),
                        folder.stat().st_mtime_ns / 1e9,
                        _label(folder / _MANIFEST),
                    )
                )
        return sorted(found, key=lambda entry: (entry.used, entry.key))

    def remove(self, key: str) -> bool:
        """Removes an entry and returns True, or False if it is in use.

        Raises:
            OSError: If it cannot be removed.
        """
        folder = self.folder / key
        try:
            with locked(self._lock(key)), contextlib.ExitStack() as stack:
                with contextlib.suppress(FileNotFoundError):
                    file = os.open(folder / _TENSORS, os.O_RDWR | os.O_CLOEXEC)
                    stack.callback(os.close, file)
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _discard(folder)
        except BlockingIOError:
            return False
        return True

    def sweep(self) -> None:
        """Removes what killed processes left behind.

        Raises:
            OSError: If it cannot be removed.
        """
        for folder in self._folders(".removed"):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self._folders(".partial"):
            with (
                contextlib.suppress(BlockingIOError),
                locked(self._lock(folder.stem)),
            ):
                _discard(folder)

    def _lock(self, key: str) -> Path:
        return self.folder / f"{key}.lock"

    def _folders(self, suffix: str) -> list[Path]:
        try:
            return [
                path
                for path in self.folder.iterdir()
                if path.suffix == suffix
                and _KEY.fullmatch(path.name.partition(".")[0])
                and path.is_dir()
            ]
        except FileNotFoundError:
            return []

    def _open(self, key: str, plan: Plan) -> Weights | None:
        """Returns an entry's weights, or None if there is no such entry.

        Raises:
            _DamagedError: If the entry is damaged.
            _UnusableError: If it cannot be read.
        """
        folder = self.folder / key
        with _needing(folder), contextlib.ExitStack() as stack:

            def opened(name: Path | str, inside: int | None = None) -> int:
                file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=inside)
                stack.callback(os.close, file)
                return file

            try:
                # Held open, so that all files are of one and the same entry.
                inside = opened(folder)
            except FileNotFoundError:
                return None
            try:
                file = opened(_TENSORS, inside)
                fcntl.flock(file, fcntl.LOCK_SH)
                manifest = opened(_MANIFEST, inside)
            except FileNotFoundError as error:
                raise _DamagedError(f"{error.filename} is missing") from None
            digests = _check(key, plan, file, manifest)
            verified = None
            with contextlib.suppress(OSError, ValueError):
                verified = json.loads(_text(opened(_VERIFIED, inside)))
            if verified != _stamps(file, manifest):
                self._verify(folder, file, manifest, digests)
            with contextlib.suppress(OSError):  # of others, or read-only
                os.utime(folder)
            return Weights(_mapped(file, key, plan), "hit")

    def _verify(
        self,
        folder: Path,
        file: int,
        manifest: int,
        expected: Mapping[str, TensorDigest],
    ) -> None:
        began = time.time_ns()
        stamps = _stamps(file, manifest)
        with Progress("verifying weights", os.fstat(file).st_size) as progress:
            try:
                found = file_digests(file, progress.advance)
            except DamagedFileError as error:
                raise _DamagedError(str(error)) from error
        wrong = [name for name in expected if found.get(name) != expected[name]]
        if wrong:
            raise _DamagedError(
                f"the content of {wrong[0]}"
                + (f" and {len(wrong) - 1} more" if wrong[1:] else "")
                + " is not what was stored"
            )
        settled = all(Stamp.of(f).settled(began) for f in (file, manifest))
        if settled and _stamps(file, manifest) == stamps:
            # Where it cannot be written, the next load verifies again.
            with contextlib.suppress(OSError):
                write_atomically(folder / _VERIFIED, stamps)

    def _make(
        self,
        key: str,
        plan: Plan,
        produce: Produce,
        label: Mapping[str, str],
    ) -> Weights:
        """Makes an entry, or finds it once another process has made it.

        Raises:
            PlanError: If ``produce`` makes other tensors than planned.
            _UnusableError: If the cache cannot be written.
        """
        folder = self.folder / key
        part = self.folder / f"{key}.partial"
        with contextlib.ExitStack() as stack:
            with _needing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self._lock(key), on_wait=_tell))
            try:
                found = self._open(key, plan)
                if found is not None:
                    return found
            except _DamagedError as error:
                log.warning(
                    "AttnQuant: %s is damaged and made anew: %s", folder, error
                )
                with _needing(folder):
                    _discard(folder)
            try:
                file = self._start(part, layout(key, plan))
                stack.callback(os.close, file)
                self._fill(part, file, key, plan, produce, label)
                with _needing(folder):
                    # In use before others can see it, and so remove it.
                    fcntl.flock(file, fcntl.LOCK_SH)
                    os.utime(part)
                    part.rename(folder)
                    sync(self.folder)
                    return Weights(_mapped(file, key, plan), "miss")
            finally:
                # What is still there of it after a failure.
                shutil.rmtree(part, ignore_errors=True)

    def _start(self, part: Path, layout: Layout) -> int:
        """Makes room for an entry and returns its file of tensors, open."""
        with (
            _needing(part),
            locked(self.folder / "cache.lock", on_wait=lambda holder: None),
        ):
            tag = self.folder / _TAG
            if not tag.exists():
                tag.write_text(_SIGNATURE)
            self.sweep()
            shutil.rmtree(part, ignore_errors=True)  # a killed process's
            self._make_room(layout.size)
            part.mkdir()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            file = os.open(part / _TENSORS, flags, 0o666)
            try:
                _allocate(file, layout.size)
                _write(file, memoryview(layout.header), 0)
            except BaseException:
                os.close(file)
                raise
            return file

    def _fill(
        self,
        part: Path,
        file: int,
        key: str,
        plan: Plan,
        produce: Produce,
        label: Mapping[str, str],
    ) -> None:
        """Writes all of an entry's files to the disk."""
        offsets = layout(key, plan).offsets
        made = {}
        with Progress("preparing weights", _total(plan)) as progress:
            for name, tensor in _planned(plan, produce()):
                with _needing(part):
                    _write(file, content(tensor), offsets[name])
                made[name] = digest(tensor)
                progress.advance(tensor.nbytes)
        with _needing(part):
            os.fsync(file)
            write_atomically(
                part / _MANIFEST,
                {
                    "format": _FORMAT,
                    "key": key,
                    "label": dict(label),
                    "tensors": made,
                },
            )
            # So that no change from now on leaves the stamps as they are.
            time.sleep(SETTLED / 1e9)
            with (part / _MANIFEST).open("rb") as manifest:
                stamps = _stamps(file, manifest.fileno())
                if all(Stamp.of(f).fine for f in (file, manifest.fileno())):
                    write_atomically(part / _VERIFIED, stamps)
            sync(part)

    def _make_room(self, size: int) -> None:
        """Removes the least recently used entries until another one fits.

        Raises:
            _UnusableError: If it does not fit.
        """
        entries = self.entries()
        used = sum(entry.nbytes for entry in entries)
        used += sum(map(_size, self._folders(".partial")))
        room = min(self.limit, used + shutil.disk_usage(self.folder).free)
        if size <= room:
            for entry in entries:
                if used + size <= room:
                    return
                # One that cannot be removed, we pass over as one in use.
                with contextlib.suppress(OSError):
                    if self.remove(entry.key):
                        used -= entry.nbytes
        if used + size > room:
            raise _UnusableError(
                f"{self.folder} has room for {room / 1e9:.1f} GB by its limit "
                f"and the disk's; the weights need {size / 1e9:.1f} GB, and "
                f"{used / 1e9:.1f} GB are in use"
            )


def _check(
    key: str, plan: Plan, file: int, manifest: int
) -> dict[str, TensorDigest]:
    """Returns the digests an entry should have, if all else is as planned."""
    try:
        stored = json.loads(_text(manifest))
        stored_key = stored["key"]
        digests = {
            name: TensorDigest(dtype, tuple(shape), sha256)
            for name, (dtype, shape, sha256) in stored["tensors"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(f"{_MANIFEST} is malformed: {error!r}") from error
    if stored_key != key:
        raise _DamagedError(f"{_MANIFEST} is of entry {stored_key}")
    stored_plan = {
        name: TensorSpec(found.dtype, found.shape)
        for name, found in digests.items()
    }
    if stored_plan != plan:
        differing = stored_plan.items() ^ plan.items()
        raise _DamagedError(
            f"expected other tensors than {_MANIFEST} has, "
            f"such as {min(name for name, _ in differing)}"
        )
    expected = layout(key, plan)
    size = os.fstat(file).st_size
    if size != expected.size:
        raise _DamagedError(
            f"{_TENSORS} should have {expected.size} bytes and has {size}"
        )
    if os.pread(file, len(expected.header), 0) != expected.header:
        raise _DamagedError(f"the header of {_TENSORS} is not what was stored")
    return digests


def _planned(
    plan: Plan, made: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Passes on what is made, as it is made, if it is what was planned."""
    missing = dict(plan)
    for name, tensor in made:
        if name not in missing:
            why = "made twice" if name in plan else "not planned"
            raise PlanError(f"tensor {name} was {why}")
        expected = missing.pop(name)
        found = tensor.spec
        if found != expected:
            raise PlanError(
                f"tensor {name} should be {expected.dtype} "
                f"{list(expected.shape)} and is {found.dtype} "
                f"{list(found.shape)}"
            )
        yield name, tensor
    if missing:
        raise PlanError(f"not made: {', '.join(sorted(missing))}")


def _mapped(file: int, key: str, plan: Plan) -> dict[str, Tensor]:
    # The mapping holds a duplicate of the descriptor, and with it our lock.
    # Private and not read-only, since MAX would copy read-only arrays.
    mapping = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    offsets = layout(key, plan).offsets
    return {
        name: Tensor(
            np.ndarray(
                spec.shape,
                STORED_AS[spec.dtype],
                buffer=mapping,
                offset=offsets[name],
            ),
            spec.dtype,
        )
        for name, spec in plan.items()
    }


def _stamps(file: int, manifest: int) -> dict[str, dict[str, int]]:
    return {
        _TENSORS: vars(Stamp.of(file)),
        _MANIFEST: vars(Stamp.of(manifest)),
    }


@contextlib.contextmanager
def _needing(path: Path) -> Iterator[None]:
    """Turns failures of the file system into ones of the cache."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise _UnusableError(f"{where}: {error.strerror or error}") from error


def _discard(folder: Path) -> None:
    """Removes a folder, which is gone at once."""
    gone = folder.with_name(
        f"{folder.name.partition('.')[0]}.{secrets.token_hex(4)}.removed"
    )
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
        shutil.rmtree(gone)


def _allocate(file: int, size: int) -> None:
    """Reserves a file's bytes, so that a full disk shows before the work."""
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    os.ftruncate(file, size)


def _write(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data, offset = data[count:], offset + count


def _text(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _label(manifest: Path) -> dict[str, str] | None:
    try:
        label = json.loads(manifest.read_bytes())["label"]
        return {str(name): str(value) for name, value in label.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _size(folder: Path) -> int:
    size = 0
    with contextlib.suppress(FileNotFoundError):
        for file in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                size += file.stat().st_size
    return size


def _total(plan: Plan) -> int:
    return sum(spec.nbytes for spec in plan.values())


def _tell(holder: str) -> None:
    log.info(
        "AttnQuant: waiting for process %s, which makes or removes the same "
        "weights",
        holder,
    )


def _plain(value: object) -> object:
    """Returns a setting in JSON's types, or raises TypeError.

    `json` would take the key 1 for "1", and so two settings for one.
    """
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise TypeError(f"names of settings are strings: {value!r}")
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"a setting is a value of JSON's, not {value!r}")
