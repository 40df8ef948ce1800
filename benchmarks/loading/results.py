"""From samples to rows, and from rows to tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.columns import aligned
from benchmarks.loading.trial import Place, Sample
from benchmarks.timing import STOCK


@dataclass(frozen=True)
class Row:
    """One candidate at one case in one place: medians over the counted rounds.

    ``of_stock`` is the median over rounds of how many times faster it was than stock in the same round. ``disk_reads``
    and ``call_reads`` are the bytes that all ranks asked of the storage, and of read calls (which the page cache may
    have served), over the stored bytes that any rank needs. ``peak_extra_bytes`` is the most of any rank in any round,
    warm-up included, as is ``first_seconds``.
    """

    case: str
    place: Place
    candidate: str
    rounds: int
    seconds: float
    least: float
    most: float
    of_stock: float | None
    disk_reads: float
    call_reads: float
    cpu_seconds: float
    peak_extra_bytes: int | None
    shared: float | None
    first_seconds: float | None


def summarize(samples: Sequence[Sample]) -> list[Row]:
    """Rows in the order of cases, places, and the names of candidates."""
    groups: dict[tuple[str, Place, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.case, sample.place, sample.candidate), []).append(sample)
    order = list(dict.fromkeys((case, place) for case, place, _ in groups))
    rows = []
    for case, place, candidate in sorted(groups, key=lambda key: (order.index(key[:2]), key[2] == STOCK, key[2])):
        group = groups[case, place, candidate]
        if any(sample.round >= 0 for sample in group):
            rows.append(_row(group, groups.get((case, place, STOCK), [])))
    return rows


def _row(group: list[Sample], stock: list[Sample]) -> Row:
    counted = [sample for sample in group if sample.round >= 0]
    first = [sample.seconds for sample in group if sample.round < 0]
    of_stock = {sample.round: sample.seconds for sample in stock}
    ratios = [of_stock[sample.round] / sample.seconds for sample in counted if sample.round in of_stock]
    peaks = [sample.peak_extra_bytes for sample in group if sample.peak_extra_bytes is not None]
    shared = [sample.shared for sample in counted if sample.shared is not None]
    return Row(
        case=group[0].case,
        place=group[0].place,
        candidate=group[0].candidate,
        rounds=len(counted),
        seconds=statistics.median(sample.seconds for sample in counted),
        least=min(sample.seconds for sample in counted),
        most=max(sample.seconds for sample in counted),
        of_stock=statistics.median(ratios) if ratios else None,
        disk_reads=statistics.median(sample.disk_read_bytes / sample.needed_bytes for sample in counted),
        call_reads=statistics.median(sample.call_read_bytes / sample.needed_bytes for sample in counted),
        cpu_seconds=statistics.median(sample.cpu_seconds for sample in counted),
        peak_extra_bytes=max(peaks, default=None),
        shared=statistics.fmean(shared) if shared else None,
        first_seconds=first[0] if first else None,
    )


def details(rows: Sequence[Row]) -> str:
    """All of every row, one block for each case and place."""
    header = (
        *("candidate", "s", "min-max", f"x {STOCK}", "disk x", "calls x"),
        *("shared", "CPU s", "peak MiB a rank", "first s"),
    )
    blocks = []
    for case, place in dict.fromkeys((row.case, row.place) for row in rows):
        part = [row for row in rows if (row.case, row.place) == (case, place)]
        text = aligned([header, *(_details(row) for row in part)], left=(0,))
        blocks.append(f"{case}: {place}, median of {part[0].rounds}\n{text}")
    return "\n\n".join(blocks)


def _details(row: Row) -> tuple[str, ...]:
    return (
        row.candidate,
        f"{row.seconds:.3f}",
        f"{row.least:.3f}-{row.most:.3f}",
        _number(row.of_stock, ".2f"),
        f"{row.disk_reads:.2f}",
        f"{row.call_reads:.2f}",
        _number(row.shared, ".0%"),
        f"{row.cpu_seconds:.2f}",
        _number(None if row.peak_extra_bytes is None else row.peak_extra_bytes / 2**20, ".0f"),
        _number(row.first_seconds, ".3f"),
    )


def crossover(rows: Sequence[Row]) -> str:
    """Seconds of ranks that read each for itself and for each other, by place, and what finding out itself costs."""
    header = ("case", "ranks", "storage MB/s", "network", "false", "true", "auto", "wins", "auto / best", "auto shared")
    lines = [header]
    for case, place in dict.fromkeys((row.case, row.place) for row in rows):
        found = {row.candidate: row for row in rows if (row.case, row.place) == (case, place)}
        seconds = {name: found[name].seconds for name in ("false", "true", "auto") if name in found}
        of_two = {name: seconds[name] for name in ("false", "true") if name in seconds}
        best = min(of_two, key=of_two.__getitem__) if of_two else None
        loss = seconds["auto"] / of_two[best] if best is not None and "auto" in seconds else None
        lines.append(
            (
                case,
                str(place.ranks),
                "as it is" if place.storage is None else str(place.storage),
                f"{place.network} MB/s" if place.network.isdecimal() else place.network,
                *(_number(seconds.get(name), ".3f") for name in ("false", "true", "auto")),
                best or "-",
                _number(loss, ".2f"),
                _number(found["auto"].shared if "auto" in found else None, ".0%"),
            )
        )
    return aligned(lines, left=(0, 3, 7))


def twins(rows: Sequence[Row], pairs: Iterable[tuple[str, str]]) -> str:
    """Pairs of cases beside each other: the first over the second."""
    header = ("case", "candidate", "s", "of", "s", "ratio", "disk x", "disk x")
    lines = [header]
    for first, second in pairs:
        others = {(row.place, row.candidate): row for row in rows if row.case == second}
        for row in rows:
            other = others.get((row.place, row.candidate))
            if row.case == first and other is not None:
                ratio = f"{row.seconds / other.seconds:.2f}"
                reads = (f"{row.disk_reads:.2f}", f"{other.disk_reads:.2f}")
                times = (f"{row.seconds:.3f}", second, f"{other.seconds:.3f}")
                lines.append((f"{first}: {row.place}", row.candidate, *times, ratio, *reads))
    return aligned(lines, left=(0, 1, 3))


def by_ranks(rows: Sequence[Row]) -> str:
    """The same case and candidate on several numbers of ranks, each over the fastest of them."""
    header = ("case", "candidate", "storage, network", "ranks", "s", "x fastest", "disk x", "peak MiB a rank")
    groups: dict[tuple[str, str, int | None, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.candidate, row.place.storage, row.place.network), []).append(row)
    lines = [header]
    for (case, candidate, storage, network), group in groups.items():
        fastest = min(row.seconds for row in group)
        where = f"{'as it is' if storage is None else f'{storage} MB/s'}, {network}"
        for row in group:
            peak = _number(None if row.peak_extra_bytes is None else row.peak_extra_bytes / 2**20, ".0f")
            ratio = f"{row.seconds / fastest:.2f}"
            cells = (f"{row.seconds:.3f}", ratio, f"{row.disk_reads:.2f}", peak)
            lines.append((case, candidate, where, str(row.place.ranks), *cells))
    return aligned(lines, left=(0, 1, 2))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
