"""What connecting costs each of hundreds of ranks, and the first saves and loads of a job beside DCP's own.

Ranks are forks of one process that has imported torch, on one machine. Those that only connect have no group of
torch's own, because gloo would connect each with all others; those that save have one, because DCP's messages need it.
The first save and load are those of new ranks; the steady ones are medians of the three that follow.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt
from benchmarks import command
from benchmarks.harness.by_turns import STOCK, Sample, Steps
from benchmarks.ranks import ONE_NODE, Rank, Timed, ranks_on, timed, together
from vescale_ckpt._ranks import store_thread
from vescale_ckpt._ranks.exchange import Exchange

OURS, PURPOSES = "vescale", ("save", "load", "manager")
_TIMEOUT, _STEADY = 300, 3
_ASKED_ONCE = 5  # requests of a rank for each purpose, which do not depend on the number of ranks
_COUNTED_RANKS = 10_000


@dataclass(frozen=True)
class Cost:
    """What one rank took to connect for all purposes, and for one collective of each kind along the tree."""

    descriptors: int
    requests: int  #: to the store
    once: int  #: of them those that do not depend on how long it waits for others
    seconds: float
    cpu_seconds: float
    agree: float  #: seconds of the second `agree`
    gather: float


class _CountingStore:
    """Counts the requests of this process to the store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.asked.append(f"{name} {arguments[0] if arguments else ''}")
            return function(*arguments)

        return counted


def _connect(rank: Rank) -> Cost:
    stores: list[_CountingStore] = []

    def counting(store: Any) -> Any:
        stores.append(_CountingStore(store.clone()))
        return stores[-1]

    store_thread.clone_of = counting
    rank.barrier.wait()
    before, cpu = _descriptors(), time.process_time()
    began = time.perf_counter()
    exchanges = [Exchange.of(None, _TIMEOUT, purpose) for purpose in PURPOSES]
    seconds = time.perf_counter() - began
    asked = [*stores[0].asked]
    exchange = exchanges[0]
    exchange.agree([1], "agree")
    took = []
    for collective in (lambda: exchange.agree([1], "again"), lambda: exchange.gather(b"x" * 100, "gather")):
        rank.barrier.wait()
        began = time.perf_counter()
        collective()
        took.append(time.perf_counter() - began)
    cost = Cost(
        descriptors=_descriptors() - before,
        requests=len(asked),
        once=len([request for request in asked if not request.endswith(("/outcome']", f"/at/{rank.rank}"))]),
        seconds=seconds,
        cpu_seconds=time.process_time() - cpu,
        agree=took[0],
        gather=took[1],
    )
    rank.barrier.wait()  # no rank ends its connections before the others are done
    return cost


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def counted_requests(size: int, seconds: float) -> float:
    """Requests to the store of one rank that connects for all purposes in so many seconds: those that it makes once,
    and while it waits for others, questions at growing distances and its note again and again."""
    heartbeat = 0.4 + size / 10_000
    each = seconds / len(PURPOSES)
    pause, waited, asked = 0.002, 0.0, 0
    while waited < each:
        asked += 1
        waited += pause
        pause = min(1.5 * pause, heartbeat)
    return len(PURPOSES) * (_ASKED_ONCE + asked + each / heartbeat)


def costs_of(size: int) -> list[Cost]:
    with ranks_on(size, ONE_NODE, "fake") as ranks:
        return ranks.call(_connect)


def _table(found: dict[int, list[Cost]]) -> str:
    lines = [
        "| ranks | descriptors | requests to the store | by the formula | once | seconds, slowest rank | processor ms "
        "| agree ms | gather ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size, costs in found.items():
        each = {name: [cost[name] for cost in map(asdict, costs)] for name in asdict(costs[0])}
        middle = {name: statistics.median(values) for name, values in each.items()}
        slowest = max(each["seconds"])
        lines.append(
            f"| {size} | {middle['descriptors']:.0f} ({max(each['descriptors'])}) "
            f"| {middle['requests']:.0f} ({max(each['requests'])}) | {counted_requests(size, slowest):.0f} "
            f"| {middle['once']:.0f} | {slowest:.2f} | {1000 * middle['cpu_seconds']:.0f} "
            f"| {1000 * max(each['agree']):.0f} | {1000 * max(each['gather']):.0f} |"
        )
    return "\n".join(lines)


# --- The first saves and loads of a job


@dataclass(frozen=True)
class _OfRank:
    """What one rank did, and holds when the job ends, beyond what it began with."""

    timed: dict[str, list[Timed]]  #: by step
    descriptors: int
    threads: int


def _job(rank: Rank, name: str, items: int, folder: str) -> _OfRank:
    state = {f"w{rank.rank}.{number}": torch.full((16, 16), float(number)) for number in range(items)}
    begun = _descriptors(), _threads()

    def save(number: int) -> object:
        path = f"{folder}/{number}"
        return vescale_ckpt.save(path, state) if name == OURS else dcp.save(state, checkpoint_id=path)

    def load(number: int) -> None:
        path = f"{folder}/{number}"
        vescale_ckpt.load(path, state) if name == OURS else dcp.load(state, checkpoint_id=path)
        assert all(int(tensor[0, 0]) == number for number, tensor in enumerate(state.values()))

    steps: dict[str, list[Timed]] = {}
    for number in range(1 + _STEADY):
        for step, operation in (("save", save), ("load", load)):
            of_step = steps.setdefault(step if number else f"first {step}", [])
            of_step.append(timed(rank, partial(operation, number)))
    return _OfRank(steps, _descriptors() - begun[0], _threads() - begun[1])


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _turn(size: int, name: str, items: int, directory: Path, held: dict[tuple[int, str], tuple[float, float]]) -> Steps:
    folder = directory / name
    folder.mkdir()
    with ranks_on(size, ONE_NODE) as ranks:
        of_ranks: list[_OfRank] = ranks.call(_job, name, items, str(folder))
    shutil.rmtree(folder)
    held[size, name] = (
        statistics.median(of_rank.descriptors for of_rank in of_ranks),
        statistics.median(of_rank.threads for of_rank in of_ranks),
    )
    found: dict[str, float] = {}
    for step, of_step in of_ranks[0].timed.items():
        times = [together([of_rank.timed[step][number] for of_rank in of_ranks]) for number in range(len(of_step))]
        found[step] = statistics.median(usage.seconds for usage in times)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs what `arguments` ask for and returns the exit status."""
    parser = command.parser("benchmarks many_ranks", __doc__)
    sizes = command.listed(command.positive)
    parser.add_argument("--connect", type=sizes, default=[], metavar="N,…", help="numbers of ranks that only connect")
    parser.add_argument("--save", type=sizes, default=[16, 48, 64], metavar="N,…", help="numbers of ranks that save")
    parser.add_argument("--items", type=command.positive, default=200, metavar="N", help="of 1 KiB, of each rank")
    options = parser.parse_args(arguments)
    costs = {size: costs_of(size) for size in options.connect}
    if costs:
        print(
            _table(costs),
            f"| {_COUNTED_RANKS}: counted | {counted_requests(_COUNTED_RANKS, 60):.0f} in 60 s |\n",
            sep="\n",
        )
    held: dict[tuple[int, str], tuple[float, float]] = {}

    def measured(directory: Path, alternate: command.Alternate) -> Iterator[Sample]:
        for size in options.save:
            turns = {name: partial(_turn, size, name, options.items, directory, held) for name in (OURS, STOCK)}
            yield from alternate(f"{size} ranks x {options.items} items", turns)

    status = command.run(
        options, measured, others={"connecting": {size: [*map(asdict, of_size)] for size, of_size in costs.items()}}
    )
    for (size, name), (descriptors, threads) in held.items():
        print(f"{size} ranks, {name}: {descriptors:.0f} descriptors and {threads:.0f} threads more than before")
    return status
