"""What planning is measured for: the cases, each alone in a process where memory or a process group are its own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks import command
from benchmarks.command import Alternate, listed, one_of, positive
from benchmarks.harness.by_turns import Sample
from benchmarks.planning import balance, coordinator, local
from benchmarks.planning.simulated_job import Parallelism
from benchmarks.ranks import in_new_process

DESCRIPTION = """\
Time planning, ours and stock DCP's on the same items, alternated in random order. The processes of one machine
stand in for all ranks; nothing but planning and metadata is timed, except in "steady"."""

BIG_JOB = ("llama-405b", Parallelism(8960, fsdp=1120, tensor=8))  # in metadata
CASES = {
    "coordinator": "cold global planning, and the metadata made from it",
    "balance": "the busiest rank's bytes over the mean",
    "local": "one rank, until its first byte is written",
    "steady": "saves and loads on --world ranks once plans are kept",
    "metadata": "the metadata of a big job: made, committed, looked up",
    "shared": "loads of llama-8b whose ranks read for each other, in replicas of 8 shards and as one shard each",
    "load": "what one rank of many reads of the metadata",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status."""
    cases = "\n".join(f"  {name:<14} {summary}" for name, summary in CASES.items())
    parser = command.parser("benchmarks planning", DESCRIPTION, f"cases:\n{cases}")
    parser.set_defaults(warmup=0, dir=Path("/dev/shm"))
    add = parser.add_argument
    add("--cases", type=listed(one_of(CASES)), default=list(CASES), metavar="A,B,…", help="which (default all)")
    add("--no-stock", action="store_true", help="without stock where a round takes a minute: coordinator, load")
    add("--ranks", type=positive, default=1024, metavar="N", help="simulated ranks (default %(default)s)")
    add("--items", type=positive, default=1000, metavar="N", help="items of a simulated rank (default %(default)s)")
    add("--tensors", type=positive, default=10_000, metavar="N",
        help="tensors of a rank in local and steady (default %(default)s)")  # fmt: skip
    add("--world", type=positive, default=8, metavar="N", help="ranks in steady (default %(default)s)")
    options = parser.parse_args(arguments)

    return command.run(options, partial(_samples, options))


def _samples(options: argparse.Namespace, directory: Path, alternate: Alternate) -> Iterator[Sample]:
    """Memory is a process's own, and so is a process group."""
    ranks, items, with_stock = options.ranks, options.items, not options.no_stock
    for case in options.cases:
        if case == "balance":
            print(f"{balance.table()}\n", flush=True)
        if case == "coordinator":
            yield from in_new_process(coordinator.run, alternate, ranks, items, with_stock, directory)
        if case == "local":
            for kind in local.STATES:
                yield from in_new_process(local.before_first_byte, alternate, kind, options.tensors, directory)
        if case == "steady":
            yield from local.steady(alternate, options.world, options.tensors, directory)
        if case == "metadata":
            yield from in_new_process(coordinator.metadata_of_model, alternate, *BIG_JOB, directory / "big")
        if case == "shared":
            for fsdp in (8, ranks):
                yield from in_new_process(coordinator.shared_load, alternate, Parallelism(ranks, fsdp=fsdp))
        if case == "load":
            path = directory / "many"
            yield from in_new_process(coordinator.one_rank_of_many, alternate, ranks, items, with_stock, path)
