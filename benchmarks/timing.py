"""Candidates alternated in random order, and what their steps took."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from unittest import mock

from benchmarks.columns import aligned
from benchmarks.measure import measure, settle

STOCK = "stock"

Steps = dict[str, float]  # seconds by the name of the step


@dataclass(frozen=True)
class Sample:
    """One run of one candidate. ``peak_extra_bytes`` is None where it was not, or cannot be, measured."""

    case: str
    candidate: str
    round: int
    seconds: Steps
    peak_extra_bytes: int | None = None


@dataclass(frozen=True)
class Row:
    """One step of one candidate. ``of_stock`` is the median over rounds of how many times faster it was than stock."""

    case: str
    step: str
    candidate: str
    rounds: int
    median: float
    least: float
    most: float
    of_stock: float | None
    peak_extra_bytes: int | None


class Stopwatch:
    """Seconds by step: each from the one before, or from the start."""

    def __init__(self) -> None:
        self.seconds: Steps = {}
        self._last = perf_counter()

    def lap(self, step: str) -> None:
        now = perf_counter()
        self.seconds[step] = now - self._last
        self._last = now

    def restart(self) -> None:
        """Leaves out what was done since the last lap."""
        self._last = perf_counter()


def alternate(
    case: str, candidates: Mapping[str, Callable[[], Steps]], rounds: Mapping[str, int], seed: int = 0
) -> list[Sample]:
    """Runs every candidate as many times as ``rounds`` says, each round in another order."""
    order = random.Random(seed)
    samples = []
    for number in range(max(rounds[name] for name in candidates)):
        names = [name for name in candidates if number < rounds[name]]
        order.shuffle(names)
        for name in names:
            samples.append(_sample(case, name, number, candidates[name]))
    return samples


def _sample(case: str, name: str, number: int, candidate: Callable[[], Steps]) -> Sample:
    found: list[Steps] = []
    settle()
    usage = measure(lambda: found.append(candidate()))
    return Sample(case, name, number, found[0], usage.peak_extra_bytes)


class FirstCall:
    """When a function was first called, as ``perf_counter`` tells it; None if it was not."""

    def __init__(self) -> None:
        self.at: float | None = None

    def since(self, start: float) -> float:
        if self.at is None:
            raise RuntimeError("what was waited for was never called")
        return self.at - start


@contextmanager
def first_call(owner: Any, name: str) -> Iterator[FirstCall]:
    """Watches the function ``name`` of a module or class."""
    function = getattr(owner, name)
    found = FirstCall()

    def watched(*arguments: Any, **keywords: Any) -> Any:
        if found.at is None:
            found.at = perf_counter()
        return function(*arguments, **keywords)

    with mock.patch.object(owner, name, watched):
        yield found


def summarize(samples: Sequence[Sample]) -> list[Row]:
    """Rows by case, step and candidate, in the order of their first appearance."""
    groups: dict[tuple[str, str, str], dict[int, float]] = {}
    peaks: dict[tuple[str, str], list[int | None]] = {}
    for sample in samples:
        peaks.setdefault((sample.case, sample.candidate), []).append(sample.peak_extra_bytes)
        for step, seconds in sample.seconds.items():
            groups.setdefault((sample.case, step, sample.candidate), {})[sample.round] = seconds
    steps = list(dict.fromkeys((case, step) for case, step, _ in groups))
    rows = []
    for (case, step, candidate), own in sorted(groups.items(), key=lambda group: steps.index(group[0][:2])):
        stock = groups.get((case, step, STOCK), {})
        ratios = [stock[number] / seconds for number, seconds in own.items() if number in stock and seconds > 0]
        rows.append(
            Row(
                case=case,
                step=step,
                candidate=candidate,
                rounds=len(own),
                median=statistics.median(own.values()),
                least=min(own.values()),
                most=max(own.values()),
                of_stock=statistics.median(ratios) if ratios else None,
                peak_extra_bytes=_most(peaks[case, candidate]),
            )
        )
    return rows


def _most(peaks: Sequence[int | None]) -> int | None:
    known = [peak for peak in peaks if peak is not None]
    return max(known) if len(known) == len(peaks) else None


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one block for each case."""
    header = ("step", "candidate", "rounds", "median", "min-max", f"x {STOCK}", "peak MiB")
    blocks = []
    for case in dict.fromkeys(row.case for row in rows):
        lines = [header, *(_cells(row) for row in rows if row.case == case)]
        blocks.append(f"{case}\n{aligned(lines, left=(0, 1))}")
    return "\n\n".join(blocks)


def _cells(row: Row) -> tuple[str, ...]:
    peak = row.peak_extra_bytes
    return (
        row.step,
        row.candidate,
        str(row.rounds),
        _seconds(row.median),
        f"{_seconds(row.least)}-{_seconds(row.most)}",
        "-" if row.of_stock is None else f"{row.of_stock:.3g}",
        "-" if peak is None else f"{peak / 2**20:.0f}",
    )


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
