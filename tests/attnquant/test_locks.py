# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from attnquant_common.locks import locked


def test_second_is_refused(tmp_path: Path) -> None:
    """Who does not wait is told at once that another holds the lock."""
    path = tmp_path / "lock"
    with locked(path), pytest.raises(BlockingIOError), locked(path):
        pass
    assert not path.exists()


def test_left_file_is_no_lock(tmp_path: Path) -> None:
    """A lock's file that a killed process left does not lock."""
    path = tmp_path / "lock"
    path.write_text("1")
    with locked(path):
        assert path.read_text() == str(os.getpid())


def test_one_at_a_time(tmp_path: Path) -> None:
    """A lock that was waited for is held, though its file was removed."""
    path = tmp_path / "lock"
    waits, release, held = (threading.Event() for _ in range(3))
    holders: list[str] = []

    def wait() -> None:
        def on_wait(holder: str) -> None:
            holders.append(holder)
            waits.set()

        with locked(path, on_wait=on_wait):
            held.set()
            release.wait(30)

    waiting = threading.Thread(target=wait)
    with locked(path):
        waiting.start()
        assert waits.wait(30)
        assert not held.is_set()
    assert held.wait(30)
    with pytest.raises(BlockingIOError), locked(path):
        pass
    release.set()
    waiting.join()
    assert holders == [str(os.getpid())]
    assert not path.exists()


def test_no_folder(tmp_path: Path) -> None:
    """A lock in a folder that is not there is an error."""
    with pytest.raises(FileNotFoundError), locked(tmp_path / "no" / "lock"):
        pass
