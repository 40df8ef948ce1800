"""Runs the command `trace`: what each rank did in a save or load, and which rank was slow."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from . import draw, output
from .output import FINE

if TYPE_CHECKING:
    from .._inspect.merge_traces import Operation

_MOST_RANKS = 12  # so many are listed, the slowest ones
_MOST_LABELS = 32  # so many ranks are named in a picture
_COLOURS = {
    "previous save": "#ccb974",
    "metadata": "#8172b3",
    "plan": "#64b5cd",
    "snapshot": "#dd8452",
    "read": "#4c72b0",
    "write": "#4c72b0",
    "sync": "#55a868",
    "commit": "#c44e52",
    "hand over": "#937860",
    "wait": "#d9d9d9",
}


def run(options: Namespace) -> int:
    from .._inspect.merge_traces import operations, read_events, write_merged

    draw.check(options.plot)
    events = read_events(options.directory)
    found = [operation for operation in operations(events) if options.of in operation.doing]
    if not found:
        raise ValueError(f"{options.directory} has no save or load{f' of {options.of!r}' if options.of else ''}")
    if options.out:
        write_merged(events, options.out)
    if options.plot:
        _draw(found[-1], options.plot)
    if options.json:
        output.print_json("trace/1", {"operations": list(map(_as_json, found))})
        return FINE
    for path in filter(None, (options.out, options.plot)):
        print(f"{output.clean(path)} is written")
    _print(found)
    return FINE


def _as_json(operation: Operation) -> dict[str, object]:
    return {
        "doing": operation.doing,
        "kind": operation.kind,
        "seconds": operation.seconds,
        "slowest_rank": operation.slowest,
        "mean_busy_seconds": operation.mean_busy,
        "last_rank": operation.last,
        "late_seconds": operation.late_seconds,
        "ranks": {
            rank: {"seconds": times.end - times.begin, "busy_seconds": times.busy, **times.seconds}
            for rank, times in sorted(operation.ranks.items())
        },
    }


def _print(found: list[Operation]) -> None:
    rows = [
        (
            operation.doing,
            str(len(operation.ranks)),
            f"{operation.seconds:.3f}",
            str(operation.slowest),
            f"{operation.ranks[operation.slowest].busy:.3f}",
            f"{operation.mean_busy:.3f}",
            str(operation.last),
            f"{operation.late_seconds:.3f}",
        )
        for operation in found
    ]
    columns = ("save or load", "ranks", "seconds", "slowest", "busy", "mean busy", "last", "late")
    output.print_table(columns, rows, right=columns[1:], lead=1)
    last = found[-1]
    print(f"\n{output.clean(last.doing)}: seconds of the slowest ranks, by phase\n")
    phases = _phases(last)
    slowest_first = sorted(last.ranks, key=lambda rank: -last.ranks[rank].busy)
    of_ranks = [
        (
            str(rank),
            f"{last.ranks[rank].end - last.ranks[rank].begin:.3f}",
            *(f"{last.ranks[rank].seconds.get(phase, 0.0):.3f}" for phase in phases),
        )
        for rank in slowest_first[:_MOST_RANKS]
    ]
    names = ("rank", "all", *phases)
    output.print_table(names, of_ranks, right=names)


def _phases(operation: Operation) -> list[str]:
    return [name for name in _COLOURS if any(name in times.seconds for times in operation.ranks.values())]


def _draw(operation: Operation, path: str) -> None:
    """Draws the phases of each rank as bars along one axis of time. The slowest rank is named, and red."""
    ranks, start = sorted(operation.ranks), operation.begin
    height = min(20.0, 0.28 * len(ranks))  # height of the bars; the rest of the figure is text
    drawn, ((axes,),) = draw.figure(11, height + 1.4)
    for row, rank in enumerate(ranks):
        for name, begin, end in operation.ranks[rank].spans:
            axes.broken_barh([(begin - start, end - begin)], (row - 0.4, 0.8), facecolors=_COLOURS[name], linewidth=0)
    phases = _phases(operation)
    for name in phases:
        axes.broken_barh([], (0, 0), facecolors=_COLOURS[name], label=name)
    drawn.legend(loc="outside lower center", ncols=len(phases), frameon=False)
    step = -(-len(ranks) // _MOST_LABELS)
    axes.set_yticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, operation.seconds)
    axes.set_xlabel("seconds")
    axes.set_ylabel("rank")
    title = f"{draw.plain(operation.doing)}: {operation.seconds:.2f} s"
    if len(ranks) > 1:
        slowest = operation.slowest
        busy = f"busy {operation.ranks[slowest].busy:.2f} s (mean {operation.mean_busy:.2f} s)"
        title += (
            f"; slowest: rank {slowest}, {busy}; last to come: rank {operation.last}, {operation.late_seconds:.2f} s"
        )
        for label in axes.get_yticklabels():
            if label.get_text() == str(slowest):
                label.set(color=_COLOURS["commit"], fontweight="bold")
    axes.set_title(title, loc="left", fontsize=11, wrap=True)
    draw.write(drawn, path)
