"""Runs the command `bench`: how fast a disk is, how much of that saves and loads reach, and which settings fit."""

from __future__ import annotations

import statistics
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from .._bench.measure_disk import DISK, OURS, STOCK, BenchReport, bench
from .._observe.amounts import size
from ..settings import checked_bytes
from . import draw, output
from .output import FINE

_SHARED = ("nfs", "nfs4", "lustre", "ceph", "gpfs", "beegfs", "cifs", "smb3", "9p", "virtiofs")  # and fuse.*
_NODES = 8  # the example has so many


def run(options: Namespace) -> int:
    if options.repeats < 1:
        raise ValueError(f"--repeats: expected at least 1, got {options.repeats}")
    draw.check(options.plot)
    count = None if options.bytes is None else checked_bytes("--bytes", options.bytes)
    with output.progress("measuring") as progress:
        found = bench(options.directory, count, options.repeats, with_trials=not options.no_trials, progress=progress)
    if options.plot is not None:
        _plot(found, options.plot)
    if options.json:
        output.print_json("bench/1", _as_json(found))
        return FINE
    output.print_facts(
        [
            ("directory", f"{found.directory} ({found.file_system})"),
            ("state", f"{size(found.bytes)}, median of {found.rounds}"),
            *([] if found.cold else [("warm", "files stayed in memory: loads did not read the disk")]),
        ]
    )
    _print_rows(found)
    for name, text in _broadcast(found).items():
        print(f"{name.replace('_', ' ')}: {text}")
    print()
    _print_recommended(found)
    return FINE


def _print_rows(found: BenchReport) -> None:
    cells = [
        (
            row.step,
            row.candidate,
            f"{row.seconds:.3f} s",
            f"{min(row.rounds):.3f} - {max(row.rounds):.3f}",
            f"{row.rate:.2f}",
            f"{row.of_ceiling:.0%}",
            "" if row.candidate == DISK else f"{row.of_baseline:.2f} x",
        )
        for row in found.rows
    ]
    columns = ("step", "what", "median", "range", "GB/s", "of disk", "of stock")
    output.print_table(columns, cells, right=columns[2:])


def _print_recommended(found: BenchReport) -> None:
    for trial in found.recommended:
        print(
            f"{trial.variable}={trial.value} is worth setting: a save was {trial.save:.2f} x as fast, a load "
            f"{trial.load:.2f} x"
        )
    if not found.trials:
        return
    others = "the other settings in force are" if found.recommended else "the settings in force are"
    print(f"{others} as good as those tried ({len(found.trials)} trials)")


def _broadcast(found: BenchReport) -> dict[str, str]:
    """What of docs/tuning.md fits this storage."""
    rate = next(row.rate or 0 for row in found.rows if (row.step, row.candidate) == ("load", DISK))
    if found.file_system in _SHARED or found.file_system.startswith("fuse"):
        nodes = (
            f'broadcast_checkpoint="auto" fits: one rank reads and sends, which pays where the network gives a rank '
            f"more than {rate:.2g} GB/s / nodes (for {_NODES}: {rate / _NODES:.2g})"
        )
    else:
        nodes = (
            "this disk is local: if each node has its own copy, set VESCALE_CKPT_BROADCAST_SCOPE=node or "
            "broadcast_checkpoint=False"
        )
    return {
        "one_node": 'broadcast_checkpoint="auto" fits: each rank reads for itself, through the shared page cache',
        "several_nodes": nodes,
    }


def _as_json(found: BenchReport) -> dict[str, Any]:
    results = [
        {
            "step": row.step,
            "candidate": row.candidate,
            "seconds": row.rounds,
            "median": row.seconds,
            "bytes_per_second": found.bytes / row.seconds,
            "of_disk": row.of_ceiling,
            "of_stock": row.of_baseline,
        }
        for row in found.rows
    ]
    content = asdict(found)
    del content["rows"]
    return content | {"results": results, "broadcast": _broadcast(found)}


def _plot(found: BenchReport, path: str) -> None:
    drawn, ((axes,),) = draw.figure(7, 4)
    colours = {DISK: draw.DISK_COLOUR, OURS: draw.OURS_COLOUR, STOCK: draw.OTHER_COLOUR}
    steps = list(dict.fromkeys(row.step for row in found.rows))
    for number, (candidate, colour) in enumerate(colours.items()):
        at = [step + (number - 1) * 0.27 for step in range(len(steps))]
        rates = [
            [found.bytes / seconds / 1e9 for seconds in row.rounds] for row in found.rows if row.candidate == candidate
        ]
        medians = [statistics.median(of_step) for of_step in rates]
        errors = [
            [median - min(of_step) for median, of_step in zip(medians, rates, strict=True)],
            [max(of_step) - median for median, of_step in zip(medians, rates, strict=True)],
        ]
        bars = axes.bar(at, medians, 0.25, yerr=errors, color=colour, label=candidate, capsize=3, ecolor="#555555")
        axes.bar_label(bars, [f"{rate:.2f}" for rate in medians], padding=3, fontsize=9)
    axes.set_xticks(range(len(steps)), steps)
    axes.set_ylabel("GB/s (median and range)")
    axes.set_title(draw.plain(f"{found.directory}: {size(found.bytes)}, median of {found.rounds}"), fontsize=10)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    draw.write(drawn, path)
