# SPDX-License-Identifier: Apache-2.0
"""Shows how far a long start is: a bar on a terminal, else lines in the log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

INTERVAL = 10.0
"""Seconds between two lines in the log."""

# MAX's log shows what is below this name only.
log = logging.getLogger("max.pipelines.attnquant")


class Progress:
    """Bytes done of all, from entering to leaving the context."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self._lock = threading.Lock()
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        self._began = self._said = time.monotonic()
        if sys.stderr.isatty():
            self._bar = _bar()
            self._bar.add_task(self.title, total=self.total)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, done: int) -> None:
        """Counts bytes as done; any thread may."""
        with self._lock:
            self.done += done
            if self._bar is not None:
                self._bar.advance(self._bar.task_ids[0], done)
                return
            now = time.monotonic()
            if now - self._said < INTERVAL:
                return
            self._said = now
        log.info(
            "AttnQuant: %s: %d%%, %.1f of %.1f MB, %.0f s",
            self.title,
            100 * self.done // max(self.total, 1),
            self.done / 1e6,
            self.total / 1e6,
            now - self._began,
        )


def _bar() -> Bar:
    # Here, since most starts are warm and show none.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("AttnQuant: {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
