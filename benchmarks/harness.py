"""The harness of all benchmarks: candidates alternated in random order, medians, ratios within rounds, tables, JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import cache
from benchmarks.measure import Usage, available_memory, measure, tidy

CEILING, STOCK = "ceiling", "stock"
GIB = 2**30

Steps = Mapping[str, Usage | float]  # what each step took; seconds, where nothing else is known
Turn = Callable[[], Steps | None]  # None: the turn is one step, and is measured from outside


class BenchmarkError(RuntimeError):
    """Nothing more can be measured; what was measured before counts."""


class WrongContentsError(BenchmarkError):
    """A candidate loaded something else than was saved."""


class NoRoomError(BenchmarkError):
    """The disk or the memory is too small for this run."""


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
    """One step of one candidate: medians over the counted rounds.

    Ratios are medians of the ratios within each round, above 1 where this candidate is the faster one; None where the
    other did not run. ``peak_extra_bytes`` is the largest of all rounds, warm-up included, as a candidate may keep what
    it took in its first. ``disk`` and ``calls`` are bytes that went to or from the storage, and through read and write
    calls, over the bytes of the state. ``first_seconds`` is of the first warm-up round.
    """

    case: str
    step: str
    candidate: str
    rounds: int
    seconds: float
    least: float
    most: float
    rate: float | None
    of_ceiling: float | None
    of_baseline: float | None
    cpu_seconds: float | None
    cpu_seconds_per_gib: float | None
    peak_extra_bytes: int | None
    disk: float | None
    calls: float | None
    shared: float | None
    first_seconds: float | None
    path: str | None


# --- Rounds


def alternate(
    case: str,
    candidates: Mapping[str, Turn],
    rounds: int,
    *,
    warmup: int = 0,
    seed: int = 0,
    fewer: Mapping[str, int] | None = None,
) -> Iterator[Sample]:
    """Runs every candidate once a round, each round in another order; candidates of ``fewer`` for so many rounds only.

    A round in which files could not be dropped from memory is dropped whole, with a line on stderr.
    """
    order = random.Random(seed)
    for number in range(-warmup, rounds):
        names = [name for name in candidates if number < (fewer or {}).get(name, rounds)]
        try:
            found = {name: _steps(candidates[name]) for name in order.sample(names, len(names))}
        except cache.StillResidentError as error:
            print(f"{case}: round {number} is dropped: {error}", file=sys.stderr)
            continue
        for name in names:
            yield from (Sample(case, step, name, number, usage) for step, usage in found[name].items())


def _steps(turn: Turn) -> dict[str, Usage]:
    found: list[Steps | None] = []
    tidy()  # what uses the storage also settles it
    usage = measure(lambda: found.append(turn()))
    steps = {"all": usage} if found[0] is None else found[0]
    return {
        step: taken if isinstance(taken, Usage) else Usage(taken, peak_extra_bytes=usage.peak_extra_bytes)
        for step, taken in steps.items()
    }


# --- Rows and tables


def summarize(samples: Iterable[Sample], baseline: str = STOCK) -> list[Row]:
    """Rows by case, step and candidate, in the order of their first appearance; none without a counted round."""
    groups: dict[tuple[str, str], dict[str, list[Sample]]] = {}
    for sample in samples:
        groups.setdefault((sample.case, sample.step), {}).setdefault(sample.candidate, []).append(sample)
    return [
        _row(own, group.get(CEILING, []), group.get(baseline, []))
        for group in groups.values()
        for own in group.values()
        if own[-1].round >= 0
    ]


def _row(own: Sequence[Sample], ceiling: Sequence[Sample], rival: Sequence[Sample]) -> Row:
    counted = [sample.usage for sample in own if sample.round >= 0]
    seconds = [usage.seconds for usage in counted]
    peaks = [sample.usage.peak_extra_bytes for sample in own if sample.usage.peak_extra_bytes is not None]
    last = own[-1]

    def median(value: Callable[[Usage], float | None]) -> float | None:
        known = [found for found in map(value, counted) if found is not None]
        return statistics.median(known) if known else None

    def part(of: float | None, whole: float | None) -> float | None:
        return of / whole if of is not None and whole else None

    return Row(
        case=last.case,
        step=last.step,
        candidate=last.candidate,
        rounds=len(counted),
        seconds=statistics.median(seconds),
        least=min(seconds),
        most=max(seconds),
        rate=median(lambda usage: part(usage.state_bytes, usage.seconds * 1e9)),
        of_ceiling=_ratio(own, ceiling),
        of_baseline=_ratio(own, rival),
        cpu_seconds=median(lambda usage: usage.cpu_seconds),
        cpu_seconds_per_gib=median(lambda usage: part(usage.cpu_seconds, (usage.state_bytes or 0) / GIB)),
        peak_extra_bytes=max(peaks, default=None),
        disk=median(lambda usage: part(usage.disk_bytes, usage.state_bytes)),
        calls=median(lambda usage: part(usage.call_bytes, usage.state_bytes)),
        shared=median(lambda usage: usage.shared),
        first_seconds=own[0].usage.seconds if own[0].round < 0 else None,
        path=last.usage.path,
    )


def _ratio(own: Sequence[Sample], other: Sequence[Sample]) -> float | None:
    """Median over counted rounds of how many times faster ``own`` was than ``other`` in the same round."""
    seconds = {sample.round: sample.usage.seconds for sample in other}
    ratios = [
        seconds[sample.round] / sample.usage.seconds
        for sample in own
        if sample.round >= 0 and sample.round in seconds and sample.usage.seconds > 0
    ]
    return statistics.median(ratios) if ratios else None


def table(rows: Sequence[Row], baseline: str = STOCK) -> str:
    """The rows as text, one block for each case. A column that would be empty is left out."""
    columns: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("step", lambda row: row.step),
        ("candidate", lambda row: row.candidate),
        ("median", lambda row: _seconds(row.seconds)),
        ("min-max", lambda row: f"{_seconds(row.least)}-{_seconds(row.most)}"),
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
        blocks.append(f"{case}, median of {max(row.rounds for row in part)}\n{aligned(lines, left)}")
    return "\n\n".join(blocks)


def overview(rows: Sequence[Row]) -> str:
    """Median seconds: a line for each case, a column for each candidate."""
    seconds = {(row.case, row.candidate): f"{row.seconds:.3f}" for row in rows}
    names = list(dict.fromkeys(row.candidate for row in rows))
    cases = dict.fromkeys(row.case for row in rows)
    lines = [["seconds", *names], *([case, *(seconds.get((case, name), "-") for name in names)] for case in cases)]
    return aligned(lines, left=(0,))


def aligned(lines: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """Lines of equally many cells, in columns: those numbered in ``left`` to the left, the others, numbers, right."""
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


# --- Commands


def command(
    name: str, description: str | None, epilog: str | None = None, directory: str = tempfile.gettempdir()
) -> argparse.ArgumentParser:
    """A parser of what all benchmarks can be asked for."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=positive, default=5, metavar="N", help="counted rounds (default %(default)s)")
    add("--warmup", type=int, default=1, metavar="N", help="rounds before them, not counted (default %(default)s)")
    add("--dir", type=_directory, default=Path(directory), metavar="DIR", help="where to save (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of contents and order (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0 is wanted")
    return int(text)


def size(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0 is wanted")
    return float(text)


def _directory(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return Path(text)


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of lists with commas."""
    return lambda text: list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    names = list(known)

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def run(
    options: argparse.Namespace,
    measured: Callable[[Path], Iterable[Sample]],
    *,
    baseline: str = STOCK,
    with_overview: bool = False,
    others: Mapping[str, object] | None = None,
) -> int:
    """Takes the samples that ``measured`` yields in an empty directory, prints each case and writes ``--json``.

    Returns the exit status: 1 where something could not be measured. ``others`` are results of another kind, for JSON.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    about = _machine(options.dir)
    samples: list[Sample] = []
    shown = 0
    failure: str | None = None
    try:
        with working_directory(options.dir) as directory:
            for sample in measured(directory):
                if samples and sample.case != samples[-1].case:
                    print(f"{table(summarize(samples[shown:], baseline), baseline)}\n", flush=True)
                    shown = len(samples)
                samples.append(sample)
    except (BenchmarkError, ImportError) as error:
        failure = str(error)
    finally:  # also what was measured before somebody lost patience
        rows = summarize(samples, baseline)
        print(f"{table(summarize(samples[shown:], baseline), baseline)}\n")
        if with_overview:
            print(f"{overview(rows)}\n")
        print(_footnote(about, samples))
        if options.json:
            found: dict[str, Any] = {"machine": about, "settings": vars(options), **(others or {})}
            found |= {"rows": [*map(dataclasses.asdict, rows)], "samples": [*map(dataclasses.asdict, samples)]}
            options.json.write_text(json.dumps(found, indent=1, default=str) + "\n")
    if failure is None and not rows and not others:
        failure = "no round could be counted"
    if failure is not None:
        print(f"benchmark failed: {failure}", file=sys.stderr)
    return int(failure is not None)


def start(main: Callable[[], int]) -> None:
    """Runs a command. What it made is removed, also where it is ended by a signal."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)


def _machine(directory: Path) -> dict[str, Any]:
    """What a reader must know of the machine to judge the numbers."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "directory": str(directory),
        "file_system": cache.file_system_of(directory),
        "load_average": os.getloadavg()[0],
    }


def _footnote(about: dict[str, Any], samples: Sequence[Sample]) -> str:
    resident = [sample.usage.resident for sample in samples if sample.usage.resident is not None]
    loads = f"{min(resident):.2%} to {max(resident):.2%} in the page cache before loads\n" if resident else ""
    if about["file_system"] in cache.MEMORY_FILE_SYSTEMS:
        loads += "files in memory: loads are warm, nothing is durable, and direct I/O is a copy\n"
    return loads + ", ".join(f"{name} {value}" for name, value in about.items())


# --- Room


@contextmanager
def working_directory(parent: Path) -> Iterator[Path]:
    """An empty directory on the file system of ``parent`` that is gone afterwards, whatever happens."""
    directory = Path(tempfile.mkdtemp(prefix="vescale-ckpt-benchmark-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists():
            print(f"could not remove {directory}", file=sys.stderr)


def check_room(directory: Path, on_disk: int, in_memory: int) -> None:
    """Raises NoRoomError unless so many bytes fit the disk of ``directory`` and the memory."""
    if cache.file_system_of(directory) in cache.MEMORY_FILE_SYSTEMS:
        in_memory += on_disk
    for need, free, what in (
        (on_disk, shutil.disk_usage(directory).free, directory),
        (in_memory, available_memory(), "the memory"),
    ):
        if free < need:
            raise NoRoomError(f"{what} has {free:,} bytes free; this run may need {need:,}")
