"""Runs the command `trace`: what each rank did in a save or load, and which rank was slow."""

from __future__ import annotations

from types import SimpleNamespace

from . import output
from .output import FINE

_MOST_RANKS = 12  # that are listed, the slowest ones


def run(options: SimpleNamespace) -> int:
    from .._inspect import trace

    events = trace.read_events(options.directory)
    found = [operation for operation in trace.operations(events) if options.of in operation.doing]
    if options.out:
        trace.write_merged(events, options.out)
    if not found:
        raise ValueError(f"{options.directory} has no save or load{f' of {options.of!r}' if options.of else ''}")
    chosen = found[-1]
    if options.plot:
        try:
            trace.draw(chosen, options.plot)
        except ImportError:
            raise ValueError("--plot needs matplotlib: pip install 'vescale_ckpt[plot]'") from None
    phases = [name for name in trace.COLOURS if any(name in times.seconds for times in chosen.ranks.values())]
    if options.json:
        output.print_json(
            "trace/1",
            {
                "operations": [
                    {
                        "doing": operation.doing,
                        "kind": operation.kind,
                        "seconds": operation.seconds,
                        "slowest_rank": operation.slowest,
                        "mean_busy_seconds": operation.mean_busy,
                        "ranks": {
                            rank: {"seconds": times.end - times.begin, "busy_seconds": times.busy, **times.seconds}
                            for rank, times in sorted(operation.ranks.items())
                        },
                    }
                    for operation in found
                ]
            },
        )
        return FINE
    rows = [
        (
            operation.doing,
            str(len(operation.ranks)),
            f"{operation.seconds:.3f}",
            str(operation.slowest),
            f"{operation.ranks[operation.slowest].busy:.3f}",
            f"{operation.mean_busy:.3f}",
        )
        for operation in found
    ]
    columns = ("save or load", "ranks", "seconds", "slowest", "busy", "mean busy")
    output.print_table(columns, rows, right=columns[1:])
    print(f"\n{output.clean(chosen.doing)}: seconds of the slowest ranks, by phase\n")
    slowest_first = sorted(chosen.ranks, key=lambda rank: -chosen.ranks[rank].busy)
    rows_of_ranks = [
        (
            str(rank),
            f"{chosen.ranks[rank].end - chosen.ranks[rank].begin:.3f}",
            *(f"{chosen.ranks[rank].seconds.get(phase, 0.0):.3f}" for phase in phases),
        )
        for rank in slowest_first[:_MOST_RANKS]
    ]
    names = ("rank", "all", *phases)
    output.print_table(names, rows_of_ranks, right=names)
    return FINE
