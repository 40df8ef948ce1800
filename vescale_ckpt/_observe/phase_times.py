"""`PhaseTimes` measures the phases of one save or load on one rank, for its statistics and for those who look at it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from ..reports import JobStats, LoadStats, SaveStats

Kind = Literal["save", "load"]
_Stats = TypeVar("_Stats", SaveStats, LoadStats)

WAIT = "wait"  #: the phase in which a rank waits for others
_TICKS = 10_000  # a second has so many in what ranks compare
_RANK_BITS = 24


@dataclass
class Phase:
    """A phase, which is open until it has ended."""

    name: str
    detail: str  #: what is done in it: the step of an exchange, a file
    #: names the ranks that it waits for; empty if a lower rank logs them. Called on another thread
    who: Callable[[], str] | None
    began: int  #: nanoseconds of `time.perf_counter_ns`
    thread: str
    ended: int = 0


class PhaseTimes:
    """The times of a call from its beginning on. Those of an inner phase do not count for the outer one.

    Args:
        doing: names the call, as errors do.
    """

    def __init__(self, doing: str, rank: int, ranks: int) -> None:
        self.doing = doing
        self.rank = rank
        self.ranks = ranks
        self.seconds_by_phase: dict[str, float] = {}
        self.progress: Callable[[], tuple[int, int]] | None = None  #: bytes done, and in total (0: not known)
        self.blocked_seconds: float | None = None  #: until the call returned; None: it has not returned yet
        self.began = time.perf_counter_ns()
        self._mark = self.began
        self._open: list[Phase] = []
        self.have_met = False  #: whether all ranks have entered this call
        self._first_wait = 0.0  # seconds until they had; the last rank waits least

    def open(self, phase: Phase) -> None:
        self._count(phase.began)
        self._open.append(phase)

    def close(self, meets: bool) -> Phase:
        """Ends the innermost phase. `meets`: all ranks took part in it."""
        now = time.perf_counter_ns()
        self._count(now)
        phase = self._open.pop()
        phase.ended = now
        if phase.name == WAIT and meets and not self.have_met:
            self.have_met = True
            self._first_wait = self.seconds_by_phase[WAIT]
        return phase

    def _count(self, now: int) -> None:
        if self._open:
            name = self._open[-1].name
            self.seconds_by_phase[name] = self.seconds_by_phase.get(name, 0.0) + (now - self._mark) / 1e9
        self._mark = now

    @property
    def open_phase(self) -> Phase | None:
        """The innermost phase. Any thread may ask."""
        return next(iter(self._open[-1:]), None)

    @property
    def seconds(self) -> float:
        """Since the call."""
        return (time.perf_counter_ns() - self.began) / 1e9

    def votes(self, own_bytes: int) -> tuple[list[int], list[int]]:
        """What `job` needs of this rank: numbers of which all ranks find the minimum, and numbers that they add up."""
        own_seconds = sum(seconds for name, seconds in self.seconds_by_phase.items() if name != WAIT)
        busy, wait = round(own_seconds * _TICKS), round(self._first_wait * _TICKS)
        return [~(busy << _RANK_BITS | self.rank), ~own_bytes, wait << _RANK_BITS | self.rank, ~wait], [busy, own_bytes]

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
