"""`Bar` shows on standard error how far something has come, with rich where it is installed."""

from __future__ import annotations

import sys
import time
from typing import Any

from .texts import size

_QUIET_SECONDS = 1.0  # nothing is shown if it is over sooner


class Bar:
    """Shown after a second, on a terminal. `line_seconds`: elsewhere a line is printed so often; None: nothing is."""

    def __init__(self, label: str, line_seconds: float | None = None) -> None:
        self._label = label
        self._line_seconds = line_seconds
        self._began = time.monotonic()
        self._shown = 0.0
        self._rich: Any = None
        self._task: Any = None

    def show(self, done: int, total: int) -> None:
        """Bytes. `total`: 0 if it is not known."""
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        often = 0.1 if terminal else self._line_seconds
        if often is None or now - self._began < _QUIET_SECONDS or now - self._shown < often:
            return
        self._shown = now
        text = f"{self._label}: {size(done)}{f' of {size(total)}' if total else ''}"
        rate = f"{size(done / max(1e-9, now - self._began))}/s"
        if not terminal:
            print(f"{text}, {rate}", file=sys.stderr, flush=True)
        elif self._start_rich(total):
            self._rich.update(self._task, completed=done, total=total or None)
        else:
            print(f"\r{text}, {rate} ", end="", file=sys.stderr, flush=True)

    def _start_rich(self, total: int) -> bool:
        if self._rich is None:
            try:
                from rich.console import Console
                from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
            except ImportError:
                return False
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._rich = Progress(*columns, console=Console(stderr=True), transient=True)
            self._rich.start()
            self._task = self._rich.add_task(self._label, total=total or None)
        return True

    def end(self) -> None:
        if self._rich is not None:
            self._rich.stop()
        elif self._shown and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
