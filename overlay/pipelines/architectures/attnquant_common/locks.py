# SPDX-License-Identifier: Apache-2.0
"""Locks between processes that the system drops when their holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(
    path: Path, *, on_wait: Callable[[str], object] | None = None
) -> Iterator[None]:
    """Holds an exclusive lock, whose file is gone afterwards.

    Args:
        path: The lock's file; a killed holder may have left it.
        on_wait: Is told the holder's process id if there is one to wait for.
            If None, there is no waiting.

    Raises:
        BlockingIOError: If another process holds it and we do not wait.
        OSError: If the file cannot be made.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is None:
                    raise
                on_wait(os.pread(file, 32, 0).decode(errors="replace"))
                fcntl.flock(file, fcntl.LOCK_EX)
            # The holder before us may have removed the file we waited at.
            if _is(path, file):
                os.ftruncate(file, 0)
                os.pwrite(file, str(os.getpid()).encode(), 0)
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(file)


def _is(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
