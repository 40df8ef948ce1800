"""`Bar` shows on standard error how far something has come."""

from __future__ import annotations

import sys
import time

from .amounts import size

_QUIET_SECONDS = 1.0  # nothing is shown if it is over sooner


class Bar:
    """Shown after a second, on a terminal. `line_seconds`: elsewhere a line is printed so often; None: nothing is."""

    def __init__(self, label: str, line_seconds: float | None = None) -> None:
        self._label = label
        self._line_seconds = line_seconds
        self._began = time.monotonic()
        self._shown = 0.0

    def show(self, done: int, total: int) -> None:
        """Bytes. `total`: 0 if it is not known."""
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        often = 0.1 if terminal else self._line_seconds
        if often is None or now - self._began < _QUIET_SECONDS or now - self._shown < often:
            return
        self._shown = now
        text = f"{self._label}: {size(done)}{f' of {size(total)}' if total else ''}"
        text += f", {size(done / max(1e-9, now - self._began))}/s"
        print(f"\r{text} " if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown and sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
