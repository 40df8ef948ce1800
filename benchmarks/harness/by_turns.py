"""Runs candidates by turns, in random order in every round, and sums up their samples as medians and ratios."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.page_cache import StillResidentError
from benchmarks.harness.usage import Usage, measure, tidy

CEILING, STOCK = "ceiling", "stock"
GiB = 2**30

Steps = Mapping[str, Usage | float]  # what each step took; seconds, where nothing else is known
Turn = Callable[[], Steps]


@dataclass(frozen=True)
class Sample:
    """What one step of one candidate took in one round. Rounds below zero are warm-up."""

    case: str
    step: str
    candidate: str
    round: int
    usage: Usage


@dataclass(frozen=True)
class Row:
    """One step of one candidate: medians over the counted rounds. None is unknown, or of something that did not run."""

    case: str
    step: str
    candidate: str
    rounds: list[float]  #: seconds by counted round
    seconds: float
    rate: float | None  #: GB/s
    of_ceiling: float | None  #: times as fast as the ceiling: median of the ratios within the rounds
    of_baseline: float | None
    cpu_seconds: float | None
    cpu_seconds_per_gib: float | None
    peak_extra_bytes: int | None  #: over all rounds, warm-up included: a candidate may keep what it took in its first
    disk: float | None  #: bytes that went to or from the storage, over those of the state
    calls: float | None  #: bytes that went through read and write calls, over those of the state
    shared: float | None
    first_seconds: float | None  #: the first warm-up round's
    path: str | None


def alternate(case: str, candidates: Mapping[str, Turn], rounds: int, *, warmup: int = 0) -> Iterator[Sample]:
    """Runs every candidate once a round, each round in another order.

    A round in which files could not be dropped from memory is dropped whole, with a line on stderr.
    """
    order = random.Random(0)  # the same on all ranks of a job
    for number in range(-warmup, rounds):
        try:
            found = {name: _steps(candidates[name]) for name in order.sample([*candidates], len(candidates))}
        except StillResidentError as error:
            print(f"{case}: round {number} is dropped: {error}", file=sys.stderr)
            continue
        for name in candidates:
            yield from (Sample(case, step, name, number, usage) for step, usage in found[name].items())


def _steps(turn: Turn) -> dict[str, Usage]:
    found: dict[str, Usage | float] = {}
    tidy()  # what uses the storage also settles it
    whole = measure(lambda: found.update(turn()))
    return {
        step: taken if isinstance(taken, Usage) else Usage(taken, peak_extra_bytes=whole.peak_extra_bytes)
        for step, taken in found.items()
    }


class Stopwatch:
    """Seconds by step: each from the one before, or from the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.restart()

    def lap(self, step: str) -> None:
        self.seconds[step] = time.perf_counter() - self._last
        self.restart()

    def restart(self) -> None:
        """Leaves out what was done since the last lap."""
        self._last = time.perf_counter()


# --- Rows


def summarize(samples: Iterable[Sample], baseline: str = STOCK, ceiling: str = CEILING) -> list[Row]:
    """Rows by case, step and candidate, in the order of their first appearance; none without a counted round."""
    groups: dict[tuple[str, str], dict[str, list[Sample]]] = {}
    for sample in samples:
        groups.setdefault((sample.case, sample.step), {}).setdefault(sample.candidate, []).append(sample)
    return [
        _row(own, group.get(ceiling, []), group.get(baseline, []))
        for group in groups.values()
        for own in group.values()
        if own[-1].round >= 0
    ]


def ratios(own: Iterable[Sample], other: Iterable[Sample]) -> list[float]:
    """How many times faster `own` was than `other`, by counted round that both have."""
    seconds = {sample.round: sample.usage.seconds for sample in other}
    return [
        seconds[sample.round] / sample.usage.seconds
        for sample in own
        if sample.round >= 0 and sample.round in seconds and sample.usage.seconds > 0
    ]


def _row(own: Sequence[Sample], ceiling: Sequence[Sample], rival: Sequence[Sample]) -> Row:
    counted = [sample.usage for sample in own if sample.round >= 0]
    peaks = [sample.usage.peak_extra_bytes for sample in own if sample.usage.peak_extra_bytes is not None]
    last = own[-1]

    def of_each(value: Callable[[Usage], float | None]) -> float | None:
        return _median(found for found in map(value, counted) if found is not None)

    def part(of: float | None, whole: float | None) -> float | None:
        return of / whole if of is not None and whole else None

    return Row(
        case=last.case,
        step=last.step,
        candidate=last.candidate,
        rounds=[usage.seconds for usage in counted],
        seconds=statistics.median(usage.seconds for usage in counted),
        rate=of_each(lambda usage: part(usage.state_bytes, usage.seconds * 1e9)),
        of_ceiling=_median(ratios(own, ceiling)),
        of_baseline=_median(ratios(own, rival)),
        cpu_seconds=of_each(lambda usage: usage.cpu_seconds),
        cpu_seconds_per_gib=of_each(lambda usage: part(usage.cpu_seconds, (usage.state_bytes or 0) / GiB)),
        peak_extra_bytes=max(peaks, default=None),
        disk=of_each(lambda usage: part(usage.disk_bytes, usage.state_bytes)),
        calls=of_each(lambda usage: part(usage.call_bytes, usage.state_bytes)),
        shared=of_each(lambda usage: usage.shared),
        first_seconds=own[0].usage.seconds if own[0].round < 0 else None,
        path=last.usage.path,
    )


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


# --- Tables


def table(rows: Sequence[Row], baseline: str = STOCK) -> str:
    """The rows as text, one block for each case. A column that would be empty is left out."""
    columns: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("step", lambda row: row.step),
        ("candidate", lambda row: row.candidate),
        ("median", lambda row: _seconds(row.seconds)),
        ("min-max", lambda row: f"{_seconds(min(row.rounds))}-{_seconds(max(row.rounds))}"),
        ("GB/s", lambda row: _number(row.rate, ".3g")),
        ("x ceil", lambda row: _number(row.of_ceiling, ".3g")),
        (f"x {baseline}", lambda row: _number(row.of_baseline, ".3g")),
        ("CPU s", lambda row: _number(row.cpu_seconds, ".3g")),
        ("CPU s/GiB", lambda row: _number(row.cpu_seconds_per_gib, ".3g")),
        ("peak MiB", lambda row: _number(row.peak_extra_bytes, ".0f", 2**20)),
        ("disk x", lambda row: _number(row.disk, ".2f")),
        ("calls x", lambda row: _number(row.calls, ".2f")),
        ("shared", lambda row: _number(row.shared, ".0%")),
        ("first", lambda row: "" if row.first_seconds is None else _seconds(row.first_seconds)),
        ("path", lambda row: row.path or ""),
    )
    blocks = []
    for case in dict.fromkeys(row.case for row in rows):
        part = [row for row in rows if row.case == case]
        shown = [(title, [cell(row) or "-" for row in part]) for title, cell in columns if any(map(cell, part))]
        lines = [[title for title, _ in shown], *([*line] for line in zip(*(cells for _, cells in shown), strict=True))]
        left = [number for number, (title, _) in enumerate(shown) if title in ("step", "candidate", "path")]
        blocks.append(f"{case}, median of {max(len(row.rounds) for row in part)}\n{aligned(lines, left)}")
    return "\n\n".join(blocks)


def aligned(lines: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """Lines of equally many cells, in columns: those numbered in `left` to the left, the others, numbers, right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _number(value: float | None, form: str, unit: int = 1) -> str:
    return "" if value is None else format(value / unit, form)
