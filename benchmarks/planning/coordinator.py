"""Cold planning on the coordinator, from what ranks sent to what they are sent, and the metadata made from it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.command import Alternate
from benchmarks.harness.by_turns import STOCK, Sample, Steps, Turn
from benchmarks.planning.models import Entry
from benchmarks.planning.simulated_job import (
    Parallelism,
    SimulatedState,
    Written,
    gather,
    metadata_files,
    planned,
    written,
)
from benchmarks.planning.stock import Coordinator
from benchmarks.planning.stopwatch import Stopwatch
from vescale_ckpt._engine.rows import Inventory

_EVERY_SO_MANY_REPLICATED = 50


def entries(ranks: int, items: int) -> list[Entry]:
    """Tensors of which every rank holds a share, and a few that all hold whole."""
    return [
        Entry(
            f"model.layers.{number}.feed_forward.weight",
            (4 * ranks, 64),
            torch.bfloat16,
            everywhere=number % _EVERY_SO_MANY_REPLICATED == 0,
        )
        for number in range(items)
    ]


class Ours:
    """Our coordinator, between what it gathers and what it sends."""

    def __init__(self, inventories: Sequence[Inventory], state: SimulatedState) -> None:
        self._inventories = inventories
        self._state = state
        self._results: Written | None = None

    def run(self) -> Steps:
        watch = Stopwatch()
        plan, parts = planned(self._inventories, "balanced")
        watch.lap("plan")
        if self._results is None:
            self._results = written(self._state, parts)
        watch.restart()
        metadata_files(plan, self._results)
        watch.lap("metadata")
        return watch.seconds


def run(alternate: Alternate, ranks: int, items: int, with_stock: bool, directory: Path) -> list[Sample]:
    """Stock needs gigabytes and minutes where we need neither."""
    state = SimulatedState(entries(ranks, items), Parallelism(ranks, fsdp=ranks))
    inventories, sent = gather(state)
    case = f"coordinator, {ranks:,} ranks x {items:,} items, {sent / 2**20:,.1f} MiB of inventories"
    candidates: dict[str, Turn] = {"vescale": Ours(inventories, state).run}
    with tempfile.TemporaryDirectory(dir=directory) as metadata_directory:
        if with_stock:
            candidates[STOCK] = Coordinator(inventories, Path(metadata_directory)).run
        return list(alternate(case, candidates))
