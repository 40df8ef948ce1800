"""The command line: ``python -m benchmarks.planning``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import cache, report, timing
from benchmarks.__main__ import _names
from benchmarks.planning import balance, coordinator, local, reading, steady
from benchmarks.planning.simulated_rank import in_new_process
from vescale_ckpt.simulate.parallelism import Parallelism

DESCRIPTION = """\
Time planning, ours and stock DCP's on the same items, alternated in random order. The processes of one machine
stand in for all ranks; nothing but planning and metadata is timed, except in "steady"."""

CASES = {
    "coordinator": "cold global planning, and the metadata made from it",
    "large": "the same for --large-ranks, ours alone",
    "balance": "the busiest rank's bytes over the mean",
    "local": "one rank, until its first byte is written; local plans of a big job",
    "steady": "saves and loads on --world ranks once plans are kept",
    "load": "load plans after a change of the number of ranks, and what one rank of many reads of the metadata",
}


def _parser() -> argparse.ArgumentParser:
    cases = "\n".join(f"  {name:<14} {summary}" for name, summary in CASES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning",
        description=DESCRIPTION,
        epilog=f"cases:\n{cases}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cases", type=_names(CASES), default=list(CASES), metavar="A,B,…", help="which (default all)")
    add("--rounds", type=int, default=5, metavar="N", help="of each (default %(default)s)")
    add("--stock-rounds", type=int, default=3, metavar="N",
        help="of stock where each takes a minute: coordinator, load; 0: none (default %(default)s)")  # fmt: skip
    add("--slow-stock", action="store_true", help="also stock's local plan of the big job, once: a minute or two")
    add("--ranks", type=int, default=1024, metavar="N", help="simulated ranks (default %(default)s)")
    add("--large-ranks", type=int, default=9000, metavar="N", help="simulated ranks in large (default %(default)s)")
    add("--items", type=int, default=1000, metavar="N", help="items of a simulated rank (default %(default)s)")
    add("--tensors", type=int, default=10_000, metavar="N",
        help="tensors of a rank in local, steady and load (default %(default)s)")  # fmt: skip
    add("--world", type=int, default=8, metavar="N", help="ranks in steady (default %(default)s)")
    add("--dir", type=Path, default=Path("/dev/shm"), metavar="DIR", help="where to save (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the order (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    counts = (options.rounds, options.ranks, options.large_ranks, options.items, options.tensors, options.world)
    if min(counts) < 1 or options.stock_rounds < 0:
        parser.error("counts must be positive")
    if not options.dir.is_dir():
        parser.error(f"--dir {options.dir} is not a directory")
    about = report.machine(options.dir, cache.file_system_of(options.dir))
    samples: list[timing.Sample] = []
    balances: list[balance.Balance] = []
    for case in options.cases:
        if case == "balance":
            balances = balance.run(balance.cases())
            print(f"{balance.table(balances)}\n", flush=True)
            continue
        for run in _runs(case, options):
            found = run()
            samples += found
            print(f"{timing.table(timing.summarize(found))}\n", flush=True)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if options.json:
        content = {
            "machine": about,
            "settings": vars(options),
            "rows": [dataclasses.asdict(row) for row in timing.summarize(samples)],
            "samples": [dataclasses.asdict(sample) for sample in samples],
            "balance": [dataclasses.asdict(found) for found in balances],
        }
        options.json.write_text(json.dumps(content, indent=1, default=str) + "\n")
    return 0


def _runs(case: str, options: argparse.Namespace) -> list[Callable[[], list[timing.Sample]]]:
    """What a case consists of. Memory is a process's own, and so is a process group."""
    rounds, stock_rounds, directory, seed = options.rounds, options.stock_rounds, options.dir, options.seed
    if case == "coordinator":
        return [
            lambda: in_new_process(coordinator.run, options.ranks, options.items, rounds, stock_rounds, directory, seed)
        ]
    if case == "large":
        return [lambda: in_new_process(coordinator.run, options.large_ranks, options.items, rounds, 0, directory, seed)]
    if case == "local":
        big_job = Parallelism(8960, fsdp=1120, tensor=8)
        slow = int(options.slow_stock)
        return [
            lambda: _in_directory(directory, local.before_first_byte, "plain tensors", options.tensors, rounds, seed),
            lambda: _in_directory(directory, local.before_first_byte, "DTensors", options.tensors, rounds, seed),
            lambda: in_new_process(local.local_plans, "plain tensors", options.tensors, rounds, seed),
            lambda: in_new_process(local.local_plans, "DTensors", options.tensors, rounds, seed),
            lambda: in_new_process(local.local_plans_of_model, "llama-405b", big_job, rounds, slow, seed),
        ]
    if case == "steady":
        return [lambda: steady.run(options.world, options.tensors, rounds, directory, seed)]
    return [
        lambda: _in_directory(directory, reading.changed_world, options.tensors, 8, 6, rounds, seed),
        lambda: _in_directory(
            directory, reading.one_rank_of_many, options.ranks, options.items, rounds, stock_rounds, seed
        ),
    ]


def _in_directory(
    parent: Path, function: Callable[..., list[timing.Sample]], *arguments: object
) -> list[timing.Sample]:
    """In a new process, with an empty directory before the seed."""
    with tempfile.TemporaryDirectory(prefix="vescale-ckpt-benchmark-", dir=parent) as directory:
        *others, seed = arguments
        return in_new_process(function, *others, Path(directory), seed)


if __name__ == "__main__":
    sys.exit(main())
