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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt
from benchmarks import command
from benchmarks.harness.by_turns import STOCK, Sample, Steps
from benchmarks.harness.usage import Usage
from benchmarks.ranks import Rank, Timed, ranks_on, timed, together
from vescale_ckpt._ranks import store_thread
from vescale_ckpt._ranks.exchange import Exchange

OURS, PURPOSES = "vescale", ("save", "load", "manager")
_TIMEOUT, _STEADY = 300, 3


@dataclass(frozen=True)
class Cost:
    """What one rank took to connect for all purposes, and for one collective of each kind along the tree."""

    descriptors: int
    requests: int  #: to the store
    seconds: dict[str, float]  #: by step
    cpu_seconds: float


class _CountingStore:
    """Counts the requests of this process to the store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._store, name)

        def counted(*arguments: Any) -> Any:
            self.asked += 1
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
    exchange, *_others = [Exchange.of(None, _TIMEOUT, purpose) for purpose in PURPOSES]
    seconds, asked = {"connect": time.perf_counter() - began}, stores[0].asked
    exchange.agree([1], "agree")
    for name, collective in (
        ("agree", lambda: exchange.agree([1], "again")),
        ("gather", lambda: exchange.gather(b"x" * 100, "gather")),
    ):
        rank.barrier.wait()
        began = time.perf_counter()
        collective()
        seconds[name] = time.perf_counter() - began
    cost = Cost(_descriptors() - before, asked, seconds, time.process_time() - cpu)
    rank.barrier.wait()  # no rank ends its connections before the others are done
    return cost


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _connecting(size: int) -> Steps:
    """Seconds of the slowest rank."""
    with ranks_on(size, backend="fake") as ranks:
        costs: list[Cost] = ranks.call(_connect)
    held = _middle_and_most("descriptors", [cost.descriptors for cost in costs])
    asked = _middle_and_most("requests to the store", [cost.requests for cost in costs])
    cpu = sum(cost.cpu_seconds for cost in costs)
    slowest = {step: Usage(max(cost.seconds[step] for cost in costs)) for step in costs[0].seconds}
    return {**slowest, "connect": replace(slowest["connect"], cpu_seconds=cpu, path=f"{held}, {asked}")}


def _middle_and_most(what: str, of_ranks: Sequence[int]) -> str:
    return f"{statistics.median(of_ranks):.0f} {what} (at most {max(of_ranks)})"


# --- The first saves and loads of a job


def _job(rank: Rank, name: str, items: int, folder: str) -> dict[str, list[Timed]]:
    """Returns what each save and load took, by step."""
    state = {f"w{rank.rank}.{number}": torch.full((16, 16), float(number)) for number in range(items)}

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
            of_step.append(timed(rank.barrier.wait, partial(operation, number)))
    return steps


def _turn(size: int, name: str, items: int, directory: Path) -> Steps:
    folder = directory / name
    folder.mkdir()
    with ranks_on(size) as ranks:
        steps: list[dict[str, list[Timed]]] = ranks.call(_job, name, items, str(folder))
    shutil.rmtree(folder)
    found: dict[str, Usage] = {}
    for step, of_step in steps[0].items():
        times = [together([of_rank[step][number] for of_rank in steps]) for number in range(len(of_step))]
        found[step] = Usage(statistics.median(usage.seconds for usage in times))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs what `arguments` ask for and returns the exit status."""
    parser = command.parser("benchmarks many_ranks", __doc__)
    sizes = command.listed(command.positive)
    parser.add_argument("--connect", type=sizes, default=[], metavar="N,…", help="numbers of ranks that only connect")
    parser.add_argument("--save", type=sizes, default=[16, 48, 64], metavar="N,…", help="numbers of ranks that save")
    parser.add_argument("--items", type=command.positive, default=200, metavar="N", help="of 1 KiB, of each rank")
    options = parser.parse_args(arguments)

    def measured(directory: Path, alternate: command.Alternate) -> Iterator[Sample]:
        for size in options.connect:
            yield from alternate(f"{size} ranks that connect", {OURS: partial(_connecting, size)})
        for size in options.save:
            turns = {name: partial(_turn, size, name, options.items, directory) for name in (OURS, STOCK)}
            yield from alternate(f"{size} ranks x {options.items} items", turns)

    return command.run(options, measured)
