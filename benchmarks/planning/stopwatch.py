"""Seconds by step."""

from __future__ import annotations

from time import perf_counter


class Stopwatch:
    """Seconds by step: each from the one before, or from the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.restart()

    def lap(self, step: str) -> None:
        self.seconds[step] = perf_counter() - self._last
        self.restart()

    def restart(self) -> None:
        """Leaves out what was done since the last lap."""
        self._last = perf_counter()
