"""Writes bytes, seconds and how far something has come for people."""

from __future__ import annotations

import sys
import time

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_QUIET_SECONDS = 1.0  # nothing is shown if it is over sooner


def size(count: float) -> str:
    """Bytes in the largest unit of which there is at least one."""
    for unit in _UNITS:
        if abs(count) < 1024 or unit == _UNITS[-1]:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """Seconds, with as many digits as matter: 0.0123 s, 1.23 s, 123 s."""
    if seconds < 0.1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


class Bar:
    """Shows on standard error how far something has come: after a second, on a terminal.

    `line_seconds`: elsewhere a line is printed so often; None: nothing is.
    """

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
