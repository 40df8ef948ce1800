"""One checkpoint, loaded by every candidate in every round, in random order, at every speed of storage."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import cache, states
from benchmarks.loading.candidates import MODES, WRITERS
from benchmarks.loading.cases import Case, Held
from benchmarks.loading.ranks import ONE_NODE, Rank, Ranks
from benchmarks.loading.storage import MB, StorageLimit
from benchmarks.measure import Usage, measure, settle
from benchmarks.rounds import WrongContentsError
from benchmarks.states import Shapes, State

CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Place:
    """Where a load happens: on how many ranks, from storage of how many MB/s (None: as fast as it is), over what."""

    ranks: int
    storage: int | None
    network: str

    def __str__(self) -> str:
        storage = "storage as it is" if self.storage is None else f"storage {self.storage} MB/s"
        network = f"{self.network} MB/s between nodes" if self.network.isdecimal() else self.network
        return f"{self.ranks} ranks, {storage}, {network}"


@dataclass(frozen=True)
class Sample:
    """One load by all ranks: seconds from the first that began to the last that ended; sums, and the greatest peak.

    ``shared`` is the part of the bytes needed by a rank that it had from another's reading, or read for another; None
    where the candidate does not tell. ``resident`` is the part of the files in the page cache before.
    """

    case: str
    place: Place
    candidate: str
    round: int
    seconds: float
    needed_bytes: int
    disk_read_bytes: int
    call_read_bytes: int
    cpu_seconds: float
    peak_extra_bytes: int | None
    shared: float | None
    resident: float


@dataclass(frozen=True)
class _Part:
    """One rank's."""

    start: float
    end: float
    usage: Usage
    wrong: list[str]
    shared: float | None


@dataclass(frozen=True)
class Plan:
    """What is run of each case. Rounds below zero are warm-up, and not counted."""

    candidates: Sequence[str]
    rounds: int
    warmup: int
    seed: int
    warm: bool
    writer: str


class Trial:
    """Loads on these ranks. What is saved lies in ``directory``, and is gone afterwards.

    Ranks on nodes of their own have each its own copy of the checkpoint, because nodes share no page cache: what stock
    reads on one is in the memory of that one. They are told a relative path, and stand in different directories.
    """

    def __init__(self, ranks: Ranks, network: str, limit: StorageLimit | None, directory: Path, plan: Plan) -> None:
        self._ranks = ranks
        self._network = network
        self._limit = limit
        self._directory = directory
        self._plan = plan

    def run(self, case: Case, storages: Sequence[int | None]) -> Iterator[Sample]:
        """Saves it, loads it in all rounds.

        A round in which the files could not be dropped from memory is dropped whole, with a line on stderr. Raises
        WrongContentsError as soon as a rank has other bits than were saved.
        """
        places = [
            self._directory / f"node{node}" for node in range(1 if self._network == ONE_NODE else self._ranks.size)
        ]
        path = places[0] / CHECKPOINT
        state = states.build(case.shapes, self._plan.seed)
        for tensor in state.values():
            tensor.share_memory_()
        try:
            places[0].mkdir()
            if case.saved is None:
                WRITERS[self._plan.writer](path, {"model": state})
            else:
                self._ranks.call(save, state, case.saved, path, self._plan.writer)
            for place in places[1:]:
                shutil.copytree(path, place / CHECKPOINT)
            self._ranks.call(hold, state, case.shapes, case.loaded, places)
            for storage in storages:
                yield from self._rounds(case, storage)
        finally:
            for place in places:
                shutil.rmtree(place, ignore_errors=True)

    def _rounds(self, case: Case, storage: int | None) -> Iterator[Sample]:
        order = random.Random(self._plan.seed)
        place = Place(self._ranks.size, storage, self._network)
        for number in range(-self._plan.warmup, self._plan.rounds):
            names = order.sample(list(self._plan.candidates), len(self._plan.candidates))
            try:
                samples = [self._turn(case, place, name, number) for name in names]
            except cache.StillResidentError as error:
                print(f"{case.name}, {place}: round {number} is dropped: {error}", file=sys.stderr)
            else:
                yield from samples

    def _turn(self, case: Case, place: Place, name: str, number: int) -> Sample:
        self._ranks.call(make_ready)
        resident = _prepare_cache(self._directory, self._plan.warm)
        if self._limit is not None:
            self._limit.set(None if place.storage is None else place.storage * MB)
        parts: list[_Part] = self._ranks.call(load, name)
        if self._limit is not None:
            self._limit.set(None)
        for rank, part in enumerate(parts):
            if part.wrong:
                what = f"{len(part.wrong)} tensors, first {part.wrong[0]!r}"
                raise WrongContentsError(f"{case.name}, {place}: {name} loaded wrong contents on rank {rank}: {what}")
        usages = [part.usage for part in parts]
        peaks = [usage.peak_extra_bytes for usage in usages if usage.peak_extra_bytes is not None]
        shared = [part.shared for part in parts if part.shared is not None]
        return Sample(
            case=case.name,
            place=place,
            candidate=name,
            round=number,
            seconds=max(part.end for part in parts) - min(part.start for part in parts),
            needed_bytes=case.bytes,
            disk_read_bytes=sum(usage.disk_read_bytes for usage in usages),
            call_read_bytes=sum(usage.call_read_bytes for usage in usages),
            cpu_seconds=sum(usage.cpu_seconds for usage in usages),
            peak_extra_bytes=max(peaks) if len(peaks) == len(usages) else None,
            shared=sum(shared) / len(shared) if shared else None,
            resident=resident,
        )


def _prepare_cache(directory: Path, warm: bool) -> float:
    if cache.file_system_of(directory) in cache.MEMORY_FILE_SYSTEMS:
        return cache.resident_fraction(directory)
    return cache.fill(directory) if warm else cache.drop(directory)


# --- What ranks do


def save(rank: Rank, state: State, held: Held, path: Path, writer: str) -> None:
    pieces = {name: piece.contiguous() for name, piece in held.pieces(state, rank.rank, rank.size).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    WRITERS[writer](path, {"model": held.wrapped(pieces, shapes, rank.mesh)})


def hold(rank: Rank, state: State, shapes: Shapes, held: Held, places: Sequence[Path]) -> None:
    """Makes what is loaded into, every page touched, and keeps what it has to be then."""
    rank.kept.clear()
    os.chdir(places[rank.rank % len(places)])
    pieces = held.pieces(state, rank.rank, rank.size)
    expected = {name: piece.contiguous() for name, piece in pieces.items()}  # a copy, unless it is whole rows
    targets = states.targets_for(expected)
    rank.kept.update(expected=expected, targets=targets, state=held.wrapped(targets, shapes, rank.mesh))


def make_ready(rank: Rank) -> None:
    states.poison(rank.kept["targets"])
    settle()


def load(rank: Rank, name: str) -> _Part:
    """One load, that begins on all ranks at the same time, compared bit for bit."""
    times: list[float] = []
    told: list[Any] = []
    state = {"model": dict(rank.kept["state"])}  # a tensor that is replaced in it is not loaded in place
    candidate = MODES[name][1]

    def timed() -> None:
        rank.barrier.wait()
        times.append(perf_counter())
        told.append(candidate(Path(CHECKPOINT), state))
        times.append(perf_counter())

    usage = measure(timed)
    stats = told[0]
    shared = None if stats is None or not stats.bytes else stats.shared_bytes / stats.bytes
    return _Part(*times, usage, states.differences(rank.kept["expected"], rank.kept["targets"]), shared)
