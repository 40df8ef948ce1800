"""From samples to a table and to JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.columns import aligned
from benchmarks.rounds import Sample
from benchmarks.states import GIB

CEILING = "ceiling"


@dataclasses.dataclass(frozen=True)
class Row:
    """One candidate at one operation on one state: medians over the counted rounds.

    Rates are decimal GB of state a second. Ratios are medians of the ratios within each round, above 1 where
    this candidate is the faster one; None where the other did not run. ``peak_extra_bytes`` is the largest
    of all rounds, warm-up included, as a candidate may keep what it took in its first. ``moved`` is bytes
    read or written over bytes of state, asked of the disk, or of the calls where no disk took part.
    ``first_seconds`` is of the first warm-up round.
    """

    state: str
    candidate: str
    operation: str
    rounds: int
    seconds: float
    rate: float
    rate_min: float
    rate_max: float
    of_ceiling: float | None
    of_baseline: float | None
    cpu_seconds_per_gib: float
    peak_extra_bytes: int | None
    moved: float
    first_seconds: float | None
    path_taken: str | None


def summarize(samples: Sequence[Sample], candidates: Iterable[str], baseline: str, *, disk: bool) -> list[Row]:
    """Rows in the order of states, operations and ``candidates``; those without a counted round are left out.

    ``disk`` tells whether bytes moved are those of the disk or those of the calls.
    """
    ranks = {name: rank for rank, name in enumerate(candidates)}
    groups: dict[tuple[str, str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.state, sample.operation, sample.candidate), []).append(sample)
    order = list(dict.fromkeys(sample.state for sample in samples))
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1] != "save", ranks[key[2]]))
    rows = []
    for state, operation, candidate in keys:
        group = groups[state, operation, candidate]
        if any(sample.round >= 0 for sample in group):
            ceiling = groups.get((state, operation, CEILING), [])
            rival = groups.get((state, operation, baseline), [])
            rows.append(_row(group, ceiling, rival, disk=disk))
    return rows


def _row(group: list[Sample], ceiling: list[Sample], rival: list[Sample], *, disk: bool) -> Row:
    counted = [sample for sample in group if sample.round >= 0]
    first = [sample for sample in group if sample.round < 0]
    last = counted[-1]
    rates = [sample.state_bytes / sample.usage.seconds / 1e9 for sample in counted]
    peaks = [sample.usage.peak_extra_bytes for sample in group if sample.usage.peak_extra_bytes is not None]
    return Row(
        state=last.state,
        candidate=last.candidate,
        operation=last.operation,
        rounds=len(counted),
        seconds=statistics.median(sample.usage.seconds for sample in counted),
        rate=statistics.median(rates),
        rate_min=min(rates),
        rate_max=max(rates),
        of_ceiling=_ratio(counted, ceiling),
        of_baseline=_ratio(counted, rival),
        cpu_seconds_per_gib=statistics.median(
            sample.usage.cpu_seconds / (sample.state_bytes / GIB) for sample in counted
        ),
        peak_extra_bytes=max(peaks, default=None),
        moved=statistics.median(_moved(sample, disk=disk) / sample.state_bytes for sample in counted),
        first_seconds=first[0].usage.seconds if first else None,
        path_taken=last.path_taken,
    )


def _ratio(own: list[Sample], other: list[Sample]) -> float | None:
    """Median over rounds of how many times faster ``own`` was than ``other`` in the same round."""
    seconds = {sample.round: sample.usage.seconds for sample in other}
    ratios = [seconds[sample.round] / sample.usage.seconds for sample in own if sample.round in seconds]
    return statistics.median(ratios) if ratios else None


def _moved(sample: Sample, *, disk: bool) -> int:
    usage = sample.usage
    if sample.operation == "save":
        return usage.disk_write_bytes if disk else usage.call_write_bytes
    return usage.disk_read_bytes if disk else usage.call_read_bytes


def table(rows: Sequence[Row], baseline: str) -> str:
    """The rows as text, one block for each state and operation."""
    header = (
        *("candidate", "s", "GB/s", "min-max", "x ceil", f"x {baseline}"),
        *("CPU s/GiB", "peak MiB", "bytes x", "first s", "path"),
    )
    blocks = []
    for state, operation in dict.fromkeys((row.state, row.operation) for row in rows):
        part = [row for row in rows if (row.state, row.operation) == (state, operation)]
        lines = [header, *(_cells(row) for row in part)]
        text = aligned(lines, left=(0, len(header) - 1))
        blocks.append(f"{state}: {operation}, median of {part[0].rounds}\n{text}")
    return "\n\n".join(blocks)


def _cells(row: Row) -> tuple[str, ...]:
    peak = None if row.peak_extra_bytes is None else row.peak_extra_bytes / 2**20
    return (
        row.candidate,
        f"{row.seconds:.3f}",
        f"{row.rate:.3g}",
        f"{row.rate_min:.3g}-{row.rate_max:.3g}",
        _number(row.of_ceiling, ".3g"),
        _number(row.of_baseline, ".3g"),
        f"{row.cpu_seconds_per_gib:.3g}",
        _number(peak, ".0f"),
        f"{row.moved:.2f}",
        _number(row.first_seconds, ".3f"),
        row.path_taken or "-",
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def machine(directory: Path, file_system: str) -> dict[str, Any]:
    """What a reader must know of the machine to judge the numbers."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "directory": str(directory),
        "file_system": file_system,
        "load_average": os.getloadavg()[0],
    }


def write_json(
    path: Path,
    about: dict[str, Any],
    settings: dict[str, Any],
    rows: Sequence[Row],
    samples: Sequence[Sample],
) -> None:
    """Everything: the machine, the settings, the rows of the table, and each sample behind them."""
    content = {
        "machine": about,
        "settings": settings,
        "rows": [dataclasses.asdict(row) for row in rows],
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
