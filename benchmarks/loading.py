"""Loads by several ranks: ``python -m benchmarks loading``.

The ways to load alternate in random order in every round: seconds of the slowest rank, bytes read over bytes needed,
peak memory of a rank. Loads go into tensors in place, cold, and every tensor of every load is compared bit for bit.
Judge by the ratios of one round; a virtual disk may be cached by its host, and answers the second reader from there:
--throttle is one limit for all ranks together, as shared storage has it. It needs root (control groups). The ceiling
reads as many bytes once, by direct I/O on one rank.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor

import vescale_ckpt
from benchmarks import command, states
from benchmarks.command import Alternate, listed, one_of, positive
from benchmarks.harness import page_cache, random_states
from benchmarks.harness.by_turns import CEILING, STOCK, Sample, Steps
from benchmarks.harness.random_states import Shapes, State, bytes_in
from benchmarks.harness.raw_file import RawFile
from benchmarks.harness.room import WrongContentsError, check_room
from benchmarks.harness.usage import settle
from benchmarks.ranks import Rank, Ranks, Timed, distributed, ranks_on, timed, together
from benchmarks.storage import MB, StorageLimit, UnavailableError, storage_limit

CHECKPOINT = "checkpoint"

Load = Callable[[Path, dict[str, Any]], Any]  # returns LoadStats, or None


@dataclasses.dataclass(frozen=True)
class Case:
    """The dimensions along which DTensors are sharded when saved and when loaded. None: replicated."""

    summary: str
    kind: str  #: of states.KINDS
    saved: int | None
    loaded: int | None


CASES = {
    "replicated": Case("DTensors that every rank has whole", "llama", None, None),
    "rows": Case("saved and loaded in shards of rows", "llama", 0, 0),
    "rows-to-columns": Case("saved in shards of rows, loaded in shards of columns", "llama", 0, 1),
    "stacked": Case("layers stacked in 7 tensors, saved by layers, loaded along the next dimension", "stacked", 0, 1),
}


def _ours(broadcast: Any) -> Load:
    return lambda path, state: vescale_ckpt.load(path, state, broadcast_checkpoint=broadcast).stats


MODES: dict[str, Load] = {
    "auto": _ours("auto"),
    "true": _ours(True),
    "false": _ours(False),
    STOCK: lambda path, state: dcp_load(state, storage_reader=FileSystemReader(path)),
}


@contextlib.contextmanager
def _saved(ranks: Ranks, apart: bool, case: Case, shapes: Shapes, directory: Path) -> Iterator[None]:
    """Saves what the case says; then the ranks hold what they load into. It is gone afterwards.

    Ranks on nodes of their own have each its own copy of the checkpoint, because nodes share no page cache: what stock
    reads on one is in the memory of that one. They are told a relative path, and stand in different directories.
    """
    places = [directory / f"node{node}" for node in range(ranks.size if apart else 1)]
    state = random_states.build(shapes)
    for tensor in state.values():
        tensor.share_memory_()
    try:
        places[0].mkdir()
        ranks.call(_save, state, case.saved, places[0] / CHECKPOINT)
        for place in places[1:]:
            shutil.copytree(places[0] / CHECKPOINT, place / CHECKPOINT)
        RawFile().write(places[0], bytes_in(shapes))
        ranks.call(_hold, state, case.loaded, places)
        yield
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def _turn(
    ranks: Ranks, size: int, directory: Path, name: str, limit: StorageLimit | None, storage: int | None
) -> Steps:
    """One load of what is saved, by the candidate ``name``, from storage of so many MB/s (None: as fast as it is)."""
    ranks.call(_make_ready, directory)
    resident = page_cache.prepare(directory, warm=False)
    if limit is not None:
        limit.set(None if storage is None else storage * MB)
    if name == CEILING:
        parts: list[tuple[Timed, float | None]] = ranks.call(_read_raw, directory / "node0", size)[:1]
    else:
        parts = ranks.call(_load, name)
    if limit is not None:
        limit.set(None)
    shared = [part for _, part in parts if part is not None]
    of_ranks = sum(shared) / len(shared) if shared else None
    usage = together([part for part, _ in parts])
    return {"load": dataclasses.replace(usage, state_bytes=size, resident=resident, shared=of_ranks)}


# --- What ranks do


def _save(rank: Rank, state: State, dim: int | None, path: Path) -> None:
    vescale_ckpt.save(path, {"model": distributed(state, rank.mesh, dim)})


def _hold(rank: Rank, state: State, dim: int | None, places: Sequence[Path]) -> None:
    """Makes what is loaded into, and keeps what it has to be then."""
    os.chdir(places[rank.rank % len(places)])
    expected = distributed(state, rank.mesh, dim)
    targets = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    rank.kept.update(state=targets, expected=_local(expected), targets=_local(targets))


def _local(state: State) -> State:
    return {name: tensor.to_local() for name, tensor in state.items() if isinstance(tensor, DTensor)}


def _make_ready(rank: Rank, directory: Path) -> None:
    random_states.poison(rank.kept["targets"])
    settle(directory)


def _read_raw(rank: Rank, directory: Path, size: int) -> tuple[Timed, None]:
    file = RawFile()
    return timed(rank.barrier.wait, lambda: None if rank.rank else file.read(directory, size)), None


def _load(rank: Rank, name: str) -> tuple[Timed, float | None]:
    """What a load took, and how much of it was shared."""
    found: list[Any] = []
    state = {"model": dict(rank.kept["state"])}  # a tensor that is replaced in it is not loaded in place
    taken = timed(rank.barrier.wait, lambda: found.append(MODES[name](Path(CHECKPOINT), state)))
    if wrong := random_states.differences(rank.kept["expected"], rank.kept["targets"]):
        raise WrongContentsError(f"{name} loaded wrong contents: {len(wrong)} tensors, first {wrong[0]!r}")
    stats = found[0]
    return taken, None if stats is None or not stats.bytes else stats.shared_bytes / stats.bytes


# --- The command


def _rate(text: str) -> int | None:
    return None if text == "0" else positive(text)


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status: 1 where something could not be measured."""
    known = "\n".join(f"  {name:<22} {case.summary}" for name, case in CASES.items())
    parser = command.parser("benchmarks loading", __doc__, f"cases:\n{known}")
    add, modes = parser.add_argument, [CEILING, *MODES]
    add("--cases", type=listed(one_of(CASES)), default=["replicated", "rows-to-columns", "stacked"], metavar="A,B,…",
        help="(default all but rows)")  # fmt: skip
    add("--modes", type=listed(one_of(modes)), default=modes, metavar="A,B,…", help=f"(default {','.join(modes)})")
    add("--ranks", type=listed(positive), default=[4], metavar="N,N,…", help="processes that load (default 4)")
    add("--mib", type=command.size, default=600, metavar="N", help="size of the state in MiB (default %(default)s)")
    add("--throttle", type=listed(_rate), default=[None], metavar="N,N,…",
        help="storage in MB/s; 0: as fast as it is (default 0)")  # fmt: skip
    add("--network", type=listed(one_of(("node", "loopback"))), default=["node"], metavar="A,B",
        help="node: all ranks on one; loopback: each on its own (default node)")  # fmt: skip
    options = parser.parse_args(arguments)
    return command.run(options, partial(_samples, options))


def _samples(options: argparse.Namespace, directory: Path, alternate: Alternate) -> Iterator[Sample]:
    for size in options.ranks:
        for network in options.network:
            for name in options.cases:
                yield from _of_case(CASES[name], name, size, network, directory, alternate, options)


def _of_case(
    case: Case,
    name: str,
    size: int,
    network: str,
    directory: Path,
    alternate: Alternate,
    options: argparse.Namespace,
) -> Iterator[Sample]:
    """Storage that this machine cannot limit is left out, with a line that says why."""
    shapes = states.shapes_of(case.kind, options.mib / 1024)
    of_state, apart, storages = bytes_in(shapes), network == "loopback", options.throttle
    in_memory = of_state * (1 + (size if case.loaded is None else 2)) + size * 2**29
    check_room(directory, int(of_state * 1.05 * (size + 1 if apart else 2)) + 2**26, in_memory)
    with contextlib.ExitStack() as stack:
        limit = None
        try:
            if any(storages):
                limit = stack.enter_context(storage_limit(directory))
        except UnavailableError as error:
            print(f"left out: storage of {storages} MB/s: {error}", file=sys.stderr)
            storages = [storage for storage in storages if storage is None]
        ranks = stack.enter_context(ranks_on(size, apart=apart))
        if limit is not None:
            limit.add(ranks.pids)
        with _saved(ranks, apart, case, shapes, directory):
            for storage in storages:
                speed = "storage as it is" if storage is None else f"storage {storage} MB/s"
                turn = partial(_turn, ranks, of_state, directory, limit=limit, storage=storage)
                turns = {mode: partial(turn, mode) for mode in options.modes}
                yield from alternate(f"{name}: {size} ranks, {speed}, {network}", turns)
