"""`Timeline` measures the phases of one save or load on one rank for its statistics, log lines and trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ..reports import JobStats, LoadStats, SaveStats
from . import lines, listeners, logs, trace, watch
from .listeners import Finished

Kind = Literal["save", "load"]
_Stats = TypeVar("_Stats", SaveStats, LoadStats)

WAIT = "wait"  #: the phase in which a rank waits for others
_TICKS = 10_000  # of which a second has so many in what ranks compare
_RANK_BITS = 24


@dataclass
class OpenPhase:
    """A phase that is not over."""

    name: str
    detail: str  #: of what is done in it: the step of an exchange, a file
    who: Callable[[], str] | None  #: names the ranks that it waits for; called on another thread
    began: int  #: nanoseconds
    thread: str


class Timeline:
    """One save or load of this rank, from the call to its end.

    One thread at a time goes on with it, within `here`. `phase` attributes time to phases: that of an inner phase does
    not count for the outer one.

    Args:
        doing: names the save or load, as errors do.
    """

    def __init__(self, kind: Kind, path: str, doing: str, rank: int = 0, ranks: int = 1) -> None:
        logs.set_up()
        self.kind = kind
        self.path = path
        self.doing = doing
        self.rank = rank
        self.ranks = ranks
        self.seconds_by_phase: dict[str, float] = {}
        self.progress: Callable[[], tuple[int, int]] | None = None  #: bytes done, and in total (0: not known)
        self.blocked_seconds: float | None = None  #: until the call returned; None: it has not returned yet
        self.ended = False
        self._began = self._mark = time.perf_counter_ns()
        self._open: list[OpenPhase] = []
        self._first_wait = 0.0  # seconds until the ranks had met in this save or load; the last rank waits least
        self._trace = trace.sink(rank)

    # --- What goes on

    @contextmanager
    def here(self) -> Iterator[None]:
        """A context in which this thread goes on with the save or load. An error ends the timeline."""
        token = _current.set(self)
        watch.add(self)
        try:
            yield
        except BaseException as error:
            self.end(error=error)
            raise
        finally:
            watch.remove(self)
            _current.reset(token)

    @contextmanager
    def phase(
        self, name: str, detail: str = "", who: Callable[[], str] | None = None, meets: bool = False
    ) -> Iterator[None]:
        opened = OpenPhase(name, detail, who, time.perf_counter_ns(), threading.current_thread().name)
        self._count(opened.began)
        self._open.append(opened)
        try:
            yield
        finally:
            now = time.perf_counter_ns()
            self._count(now)
            self._open.pop()
            if name == WAIT and meets and not self._first_wait:
                self._first_wait = self.seconds_by_phase[WAIT]
            if self._trace is not None:
                self._trace.add(self.kind, opened.name, opened.detail, opened.thread, opened.began, now)

    def _count(self, now: int) -> None:
        if self._open:
            name = self._open[-1].name
            self.seconds_by_phase[name] = self.seconds_by_phase.get(name, 0.0) + (now - self._mark) / 1e9
        self._mark = now

    @property
    def open_phase(self) -> OpenPhase | None:
        """The innermost phase. Any thread may ask."""
        phases = self._open[-1:]
        return phases[0] if phases else None

    @property
    def seconds(self) -> float:
        """Since the call."""
        return (time.perf_counter_ns() - self._began) / 1e9

    @property
    def busy_seconds(self) -> float:
        """In phases other than waiting for other ranks."""
        return sum(seconds for name, seconds in self.seconds_by_phase.items() if name != WAIT)

    def begin(self, rank: int, ranks: int, note: str = "") -> None:
        """The rank is known. Logs that the save or load begins."""
        self.rank, self.ranks = rank, ranks
        lines.log_begin(self, note)

    def returned(self) -> None:
        """The call returns to training now."""
        self.blocked_seconds = self.seconds

    # --- Its end

    def votes(self, own_bytes: int) -> tuple[list[int], list[int]]:
        """What `job` needs of this rank: numbers of which all ranks find the minimum, and numbers that they add up."""
        busy, wait = round(self.busy_seconds * _TICKS), round(self._first_wait * _TICKS)
        least = [~(busy << _RANK_BITS | self.rank), ~own_bytes, wait << _RANK_BITS | self.rank, ~wait]
        return least, [busy, own_bytes]

    def job(self, agreed: Sequence[int]) -> JobStats:
        """The statistics of all ranks, from the minima and sums of their votes."""
        least_busy, least_bytes, least_wait, not_most_wait, busy, all_bytes = agreed
        slowest = ~least_busy
        return JobStats(
            ranks=self.ranks,
            bytes=all_bytes,
            most_bytes=~least_bytes,
            slowest_rank=slowest & (1 << _RANK_BITS) - 1,
            slowest_seconds=(slowest >> _RANK_BITS) / _TICKS,
            mean_seconds=busy / _TICKS / self.ranks,
            last_rank=least_wait & (1 << _RANK_BITS) - 1,
            late_seconds=(~not_most_wait - (least_wait >> _RANK_BITS)) / _TICKS,
        )

    def with_times(self, stats: _Stats, job: JobStats | None = None) -> _Stats:
        """The statistics with the times that this timeline has measured."""
        total = self.seconds
        blocked = total if self.blocked_seconds is None else self.blocked_seconds
        phases = {name: round(seconds, 6) for name, seconds in self.seconds_by_phase.items()}
        return replace(stats, total_seconds=total, blocked_seconds=blocked, phases=phases, job=job)

    def end(self, stats: SaveStats | LoadStats | None = None, error: BaseException | None = None) -> None:
        """The save or load is over: logs it, tells the listeners, and writes its part of the trace. The first call
        counts."""
        if self.ended:
            return
        self.ended = True
        self.progress = None  # it may hold the state
        lines.log_end(self, stats, error)
        if self._trace is not None:
            self._trace.add(self.kind, self.doing, "", f"{self.kind}s", self._began, time.perf_counter_ns())
            self._trace.write()
        listeners.tell(Finished(self.kind, self.path, self.rank, self.ranks, self.seconds, stats, error))


_current: ContextVar[Timeline | None] = ContextVar("vescale_ckpt_timeline", default=None)


def current() -> Timeline | None:
    """The save or load that this thread goes on with."""
    return _current.get()


@contextmanager
def phase(name: str, detail: str = "", who: Callable[[], str] | None = None, meets: bool = False) -> Iterator[None]:
    """A phase of the save or load that this thread goes on with. Without one it does nothing.

    Args:
        detail: what is done in it.
        who: names the ranks that it waits for. Called on another thread if it takes long.
        meets: all ranks take part, so that the one that waits least has come last.
    """
    timeline = _current.get()
    if timeline is None:
        yield
        return
    with timeline.phase(name, detail, who, meets):
        yield
