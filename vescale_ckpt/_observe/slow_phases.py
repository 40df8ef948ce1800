"""Looks at running saves and loads from a thread of its own: reports phases that take long, and draws progress bars."""

from __future__ import annotations

import logging
import os
import threading
import time

from .. import settings
from . import lines
from .amounts import Bar
from .phase_times import Phase, PhaseTimes

logger = logging.getLogger(__name__)

_BAR_SECONDS = 0.2  # between two looks at a bar
_LEAST_SECONDS = 0.01  # between two looks
_LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal


class _Watched:
    """What the thread knows of one timeline."""

    def __init__(self, timeline: PhaseTimes) -> None:
        self.timeline = timeline
        self.times = 1  # `here` may be nested
        self._phase: Phase | None = None
        self._due = 0.0  # when that phase is to be reported (again), in seconds of `time.perf_counter`
        self._bytes = (0, 0)  # at the last report
        wants_bar = timeline.rank == 0 and settings.lenient("progress") == 1
        self._bar = Bar(timeline.doing, _LINE_SECONDS) if wants_bar else None

    def next_look(self) -> float:
        """In so many seconds."""
        phase, seconds = self.timeline.open_phase, float(settings.lenient("report_seconds"))
        if phase is not None:
            seconds = self._due - time.perf_counter() if phase is self._phase else seconds - _seconds_since(phase)
        return min(seconds, _BAR_SECONDS) if self._bar is not None else seconds

    def look(self) -> None:
        timeline, phase = self.timeline, self.timeline.open_phase
        progress, seconds = timeline.progress, float(settings.lenient("report_seconds"))
        moved_bytes = progress() if progress is not None else (0, 0)
        if self._bar is not None and progress is not None:
            self._bar.show(*moved_bytes)
        if phase is not self._phase:
            self._phase, self._bytes = phase, moved_bytes
            self._due = 0.0 if phase is None else phase.began / 1e9 + seconds
        if phase is not None and time.perf_counter() >= self._due:
            self._due += seconds
            lines.log_still(timeline, phase, _seconds_since(phase), moved=moved_bytes != self._bytes)
            self._bytes = moved_bytes

    def end(self) -> None:
        if self._bar is not None:
            self._bar.end()


def _seconds_since(phase: Phase) -> float:
    return (time.perf_counter_ns() - phase.began) / 1e9


class _Watch:
    def __init__(self) -> None:
        self._start_anew()
        os.register_at_fork(after_in_child=self._start_anew)

    def _start_anew(self) -> None:
        """In a forked child the thread is gone, and the saves belong to the parent."""
        self._changed = threading.Condition()
        self._watched: dict[int, _Watched] = {}
        self._thread: threading.Thread | None = None

    def add(self, timeline: PhaseTimes) -> None:
        with self._changed:
            known = self._watched.get(id(timeline))
            if known is not None:
                known.times += 1
                return
            self._watched[id(timeline)] = _Watched(timeline)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vescale_ckpt watch", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter is ending
                    self._thread = None
            elif len(self._watched) == 1:
                self._changed.notify()

    def remove(self, timeline: PhaseTimes) -> None:
        with self._changed:
            known = self._watched.get(id(timeline))
            if known is None:  # it was added before a fork
                return
            known.times -= 1
            if known.times:
                return
            del self._watched[id(timeline)]
        known.end()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._watched:
                    self._changed.wait()
                    continue
                next_look = min(watched.next_look() for watched in self._watched.values())
                self._changed.wait(max(next_look, _LEAST_SECONDS))
                now = list(self._watched.values())
            for watched in now:
                try:
                    watched.look()
                except Exception:
                    logger.debug("a look at a running save or load failed", exc_info=True)


watch = _Watch()
