"""Finding out what to read: from the metadata of a checkpoint whose data nobody needs for that."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from benchmarks.command import Alternate
from benchmarks.harness.by_turns import STOCK, Sample, Steps, Turn
from benchmarks.planning.coordinator import entries
from benchmarks.planning.models import MODELS, Entry, with_adam
from benchmarks.planning.simulated_job import (
    Parallelism,
    SimulatedState,
    gather,
    metadata_files,
    planned,
    shared_reads,
    written,
)
from benchmarks.planning.stock import no_collector
from benchmarks.planning.stopwatch import Stopwatch
from vescale_ckpt._checkpoint.native import commit_metadata, metadata_file
from vescale_ckpt._engine import _C


def write_metadata(directory: Path, entries: list[Entry], parallelism: Parallelism) -> SimulatedState:
    """Makes a checkpoint without data."""
    directory.mkdir()
    state = SimulatedState(entries, parallelism)
    plan, parts = planned(gather(state).inventories, "balanced")
    metadata, index = metadata_files(plan, written(state, parts))
    commit_metadata.commit(str(directory), metadata, index)
    return state


def one_rank_of_many(alternate: Alternate, ranks: int, items: int, with_stock: bool, directory: Path) -> list[Sample]:
    """What a rank that loads its own share reads of the metadata."""
    state = write_metadata(directory, entries(ranks, items), Parallelism(ranks, fsdp=ranks))
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
