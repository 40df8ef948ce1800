"""What planning is measured for: the cases, each alone in a process where memory or a process group are its own."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from benchmarks import command
from benchmarks.command import Alternate, listed, one_of, positive
from benchmarks.harness.by_turns import Sample
from benchmarks.planning import balance, coordinator, local, reading, steady
from benchmarks.planning.simulated_job import Parallelism
from benchmarks.planning.simulated_rank import in_new_process

DESCRIPTION = """\
Time planning, ours and stock DCP's on the same items, alternated in random order. The processes of one machine
stand in for all ranks; nothing but planning and metadata is timed, except in "steady"."""

BIG_JOB = ("llama-405b", Parallelism(8960, fsdp=1120, tensor=8))  # in local and metadata
CASES = {
    "coordinator": "cold global planning, and the metadata made from it",
    "large": "the same for --large-ranks, ours alone",
    "balance": "the busiest rank's bytes over the mean",
    "local": "one rank, until its first byte is written; local plans of a big job",
    "steady": "saves and loads on --world ranks once plans are kept",
    "metadata": "the metadata of a big job: made, committed, looked up",
    "shared": "loads of llama-8b whose ranks read for each other, in replicas of 8 shards and as one shard each",
    "load": "load plans after a change of the number of ranks, and what one rank of many reads of the metadata",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status."""
    cases = "\n".join(f"  {name:<14} {summary}" for name, summary in CASES.items())
    parser = command.parser("benchmarks planning", DESCRIPTION, f"cases:\n{cases}", directory="/dev/shm")
    parser.set_defaults(warmup=0)
    add = parser.add_argument
    add("--cases", type=listed(one_of(CASES)), default=list(CASES), metavar="A,B,…", help="which (default all)")
    add("--stock-rounds", type=int, default=3, metavar="N",
        help="of stock where each takes a minute: coordinator, load; 0: none (default %(default)s)")  # fmt: skip
    add("--slow-stock", action="store_true", help="also stock's local plan of the big job, once: a minute or two")
    add("--ranks", type=positive, default=1024, metavar="N", help="simulated ranks (default %(default)s)")
    add("--large-ranks", type=positive, default=9000, metavar="N", help="in large (default %(default)s)")
    add("--items", type=positive, default=1000, metavar="N", help="items of a simulated rank (default %(default)s)")
    add("--tensors", type=positive, default=10_000, metavar="N",
        help="tensors of a rank in local, steady and load (default %(default)s)")  # fmt: skip
    add("--world", type=positive, default=8, metavar="N", help="ranks in steady (default %(default)s)")
    options = parser.parse_args(arguments)
    balances: list[dict[str, object]] = []

    def measured(directory: Path, alternate: Alternate) -> Iterator[Sample]:
        for case in options.cases:
            if case == "balance":
                found = [balance.balance(of_model) for of_model in balance.cases()]
                print(f"{balance.table(found)}\n", flush=True)
                balances.extend(map(dataclasses.asdict, found))
            for run in _runs(case, options, directory, alternate):
                yield from run()

    return command.run(options, measured, others={"balance": balances})


def _runs(
    case: str, options: argparse.Namespace, directory: Path, alternate: Alternate
) -> list[Callable[[], Iterable[Sample]]]:
    """What a case consists of. Memory is a process's own, and so is a process group."""
    tensors, ranks, items, stock_rounds = options.tensors, options.ranks, options.items, options.stock_rounds

    def alone(function: Callable[..., list[Sample]], *arguments: object) -> Callable[[], Iterable[Sample]]:
        return partial(in_new_process, function, alternate, *arguments)

    if case == "coordinator":
        return [alone(coordinator.run, ranks, items, stock_rounds, directory)]
    if case == "large":
        return [alone(coordinator.run, options.large_ranks, items, 0, directory)]
    if case == "local":
        kinds = ("plain tensors", "DTensors")
        return [
            *(alone(local.before_first_byte, kind, tensors, directory) for kind in kinds),
            *(alone(local.local_plans, kind, tensors) for kind in kinds),
            alone(local.local_plans_of_model, *BIG_JOB, int(options.slow_stock)),
        ]
    if case == "steady":
        return [partial(steady.run, alternate, options.world, tensors, directory)]
    if case == "metadata":
        return [alone(reading.metadata_of_model, *BIG_JOB, directory / "big")]
    if case == "shared":
        return [alone(reading.shared_load, Parallelism(ranks, fsdp=fsdp)) for fsdp in (8, ranks)]
    if case == "load":
        return [
            alone(reading.changed_world, tensors, 8, 6, directory / "changed"),
            alone(reading.one_rank_of_many, ranks, items, stock_rounds, directory / "many"),
        ]
    return []
