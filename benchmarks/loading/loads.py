"""One checkpoint, loaded by all ranks in the way of one candidate after the other, every load compared bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import vescale_ckpt
from benchmarks.harness import page_cache, random_states
from benchmarks.harness.by_turns import STOCK, Steps
from benchmarks.harness.random_states import Shapes, State
from benchmarks.harness.saves_and_loads import WrongContentsError
from benchmarks.harness.usage import settle
from benchmarks.loading import limit
from benchmarks.loading.cases import Case, Held
from benchmarks.ranks import ONE_NODE, Rank, Ranks, Timed, timed, together
from benchmarks.storage import MB, StorageLimit

CHECKPOINT = "checkpoint"

Load = Callable[[Path, dict[str, Any]], Any]  # returns LoadStats, or None


def _ours(broadcast: Any) -> Load:
    return lambda path, state: vescale_ckpt.load(path, state, broadcast_checkpoint=broadcast).stats


MODES: dict[str, tuple[str, Load]] = {
    "auto": ("vescale_ckpt.load, by the rule", _ours("auto")),
    "true": ("vescale_ckpt.load, ranks read for each other", _ours(True)),
    "false": ("vescale_ckpt.load, each rank for itself", _ours(False)),
    STOCK: (
        "dcp.load with FileSystemReader",
        lambda path, state: dcp_load(state, storage_reader=FileSystemReader(path)),
    ),
}
LIMIT = "limit"  #: beside them: a direct read of each byte once on one node, and the copies


@contextlib.contextmanager
def saved(ranks: Ranks, network: str, case: Case, directory: Path, seed: int, with_limit: bool) -> Iterator[None]:
    """Saves what the case says; then the ranks hold what they load into. It is gone afterwards.

    Ranks on nodes of their own have each its own copy of the checkpoint, because nodes share no page cache: what stock
    reads on one is in the memory of that one. They are told a relative path, and stand in different directories.
    """
    places = [directory / f"node{node}" for node in range(1 if network == ONE_NODE else ranks.size)]
    path = places[0] / CHECKPOINT
    state = random_states.build(case.shapes, seed)
    for tensor in state.values():
        tensor.share_memory_()
    try:
        places[0].mkdir()
        if case.saved is None:
            vescale_ckpt.save(path, {"model": state})
        else:
            ranks.call(_save, state, case.saved, path)
        for place in places[1:]:
            shutil.copytree(path, place / CHECKPOINT)
        if with_limit:
            limit.write(state, case.shapes, places[0])
        ranks.call(_hold, state, case.shapes, case.loaded, places, with_limit)
        yield
    finally:
        limit.remove(places[0])
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def load(
    ranks: Ranks, case: Case, directory: Path, name: str, limit: StorageLimit | None, storage: int | None
) -> Steps:
    """One load of what is saved, by the candidate ``name``, from storage of so many MB/s (None: as fast as it is).

    Raises WrongContentsError where a rank has other bits than were saved.
    """
    ranks.call(_make_ready, directory)
    resident = page_cache.prepare(directory, warm=False)
    if limit is not None:
        limit.set(None if storage is None else storage * MB)
    parts: list[tuple[Timed, list[str], float | None]] = ranks.call(_load, name)
    if limit is not None:
        limit.set(None)
    for rank, (_, wrong, _) in enumerate(parts):
        if wrong:
            what = f"{len(wrong)} tensors, first {wrong[0]!r}"
            raise WrongContentsError(f"{case.name}: {name} loaded wrong contents on rank {rank}: {what}")
    shared = [part for _, _, part in parts if part is not None]
    usage = together([part for part, _, _ in parts])
    of_ranks = sum(shared) / len(shared) if shared else None
    return {"load": dataclasses.replace(usage, state_bytes=case.bytes, resident=resident, shared=of_ranks)}


# --- What ranks do


def _save(rank: Rank, state: State, held: Held, path: Path) -> None:
    pieces = {name: piece.contiguous() for name, piece in held.pieces(state, rank.rank, rank.size).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    vescale_ckpt.save(path, {"model": held.wrapped(pieces, shapes, rank.mesh)})


def _hold(rank: Rank, state: State, shapes: Shapes, held: Held, places: Sequence[Path], with_limit: bool) -> None:
    """Makes what is loaded into, every page touched, and keeps what it has to be then."""
    rank.kept.clear()
    os.chdir(places[rank.rank % len(places)])
    pieces = held.pieces(state, rank.rank, rank.size)
    expected = {name: piece.contiguous() for name, piece in pieces.items()}  # a copy, unless it is whole rows
    targets = random_states.targets_for(expected)
    rank.kept.update(expected=expected, targets=targets, state=held.wrapped(targets, shapes, rank.mesh))
    if with_limit:
        rank.kept["limit"] = limit.LeastLoad(places[0], shapes, held, targets, rank.rank, rank.size)


def _make_ready(rank: Rank, directory: Path) -> None:
    random_states.poison(rank.kept["targets"])
    settle(directory)


def _load(rank: Rank, name: str) -> tuple[Timed, list[str], float | None]:
    """What a load took, which tensors are wrong then, and how much of it was shared."""
    if name == LIMIT:
        taken = timed(rank, rank.kept["limit"].load)
        return taken, random_states.differences(rank.kept["expected"], rank.kept["targets"]), None
    told: list[Any] = []
    state = {"model": dict(rank.kept["state"])}  # a tensor that is replaced in it is not loaded in place
    taken = timed(rank, lambda: told.append(MODES[name][1](Path(CHECKPOINT), state)))
    stats = told[0]
    shared = None if stats is None or not stats.bytes else stats.shared_bytes / stats.bytes
    return taken, random_states.differences(rank.kept["expected"], rank.kept["targets"]), shared
