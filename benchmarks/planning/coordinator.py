"""Cold planning on the coordinator, from what ranks sent to what they are sent; the metadata made from it, and what
ranks find in that."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from benchmarks.command import Alternate
from benchmarks.harness.by_turns import STOCK, Sample, Steps, Stopwatch, Turn
from benchmarks.planning.models import MODELS, Entry, with_adam
from benchmarks.planning.simulated_job import (
    Parallelism,
    SimulatedState,
    Written,
    gather,
    metadata_files,
    planned,
    shared_reads,
    written,
)
from benchmarks.planning.stock import Coordinator, no_collector
from vescale_ckpt._checkpoint.native import commit_metadata, metadata_file
from vescale_ckpt._engine import _C
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


def one_rank_of_many(alternate: Alternate, ranks: int, items: int, with_stock: bool, directory: Path) -> list[Sample]:
    """What a rank that loads its own share reads of the metadata."""
    directory.mkdir()
    state = SimulatedState(entries(ranks, items), Parallelism(ranks, fsdp=ranks))
    plan, parts = planned(gather(state).inventories, "balanced")
    commit_metadata.commit(str(directory), *metadata_files(plan, written(state, parts)))
    wanted = state.inventory(ranks // 2)

    def ours() -> Steps:
        watch = Stopwatch()
        index = metadata_file.read_index(str(directory))
        assert index is not None
        watch.lap("open")
        plan = index.plan_load(wanted)
        watch.lap("find what is wanted")
        assert not plan.missing and not plan.uncovered
        return {"read metadata": sum(watch.seconds.values()), **watch.seconds}

    def stock() -> Steps:
        watch = Stopwatch()
        with no_collector():
            FileSystemReader(directory).read_metadata()
        watch.lap("read metadata")
        return watch.seconds

    case = f"metadata of {ranks:,} ranks x {items:,} items, one rank"
    candidates: dict[str, Turn] = {"vescale": ours}
    if with_stock:
        candidates[STOCK] = stock
    return list(alternate(case, candidates))


def metadata_of_model(alternate: Alternate, model: str, parallelism: Parallelism, directory: Path) -> list[Sample]:
    """The metadata of a big job with Adam's state: to make it, to commit it, and for one rank to find its own in it."""
    state = SimulatedState(with_adam(MODELS[model].entries(torch.bfloat16)), parallelism)
    plan, parts = planned(gather(state).inventories, "balanced")
    plan.catalog()
    results = written(state, parts)
    sizes = "{:,.1f} MiB, index {:,.1f} MiB".format(*(len(made) / 2**20 for made in metadata_files(plan, results)))
    wanted = state.inventory(parallelism.ranks // 2)
    directory.mkdir()

    def turn() -> Steps:
        watch = Stopwatch()
        metadata, index = metadata_files(plan, results)
        watch.lap("make .metadata and index")
        commit_metadata.commit(str(directory), metadata, index)
        watch.lap("write and sync")
        del metadata
        found = metadata_file.read_index(str(directory))
        assert found is not None
        found.plan_load(wanted)
        watch.lap("plan a load, from the file")
        sent = _C.Index.from_bytes(index)
        watch.lap("check an index from memory")
        sent.plan_load(wanted)
        watch.lap("plan a load from it")
        return watch.seconds

    case = f"metadata of {model} + Adam, {parallelism.ranks:,} ranks: .metadata {sizes}"
    return list(alternate(case, {"vescale": turn}))


def shared_load(alternate: Alternate, parallelism: Parallelism) -> list[Sample]:
    """The coordinator's plan of a load in which ranks read for each other."""
    state = SimulatedState(MODELS["llama-8b"].entries(torch.bfloat16), parallelism)
    plan, parts = planned(gather(state).inventories)
    index = _C.Index.from_bytes(metadata_files(plan, written(state, parts))[1])

    def turn() -> Steps:
        watch = Stopwatch()
        shared_reads(index, state)
        watch.lap("plan")
        return watch.seconds

    case = f"shared load of llama-8b, {parallelism.ranks:,} ranks, fsdp {parallelism.fsdp}"
    return list(alternate(case, {"vescale": turn}))
