"""The rounds of a run: every candidate once a round, in random order, each in a directory of its own."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cache, states
from benchmarks.candidates import Candidate, Plain
from benchmarks.measure import Usage, available_memory, measure, settle
from benchmarks.states import Shapes


class WrongContentsError(RuntimeError):
    """A candidate loaded something else than it saved."""


class NoRoomError(RuntimeError):
    """The disk or the memory is too small for this run."""


@dataclass(frozen=True)
class Sample:
    """One timed operation of one candidate.

    ``resident`` is the fraction of the files in the page cache just before a load. Rounds below zero are
    warm-up.
    """

    state: str
    candidate: str
    operation: str
    round: int
    state_bytes: int
    usage: Usage
    resident: float | None
    path_taken: str | None
    stats: Plain


@dataclass(frozen=True)
class Plan:
    """How a run goes: ``warmup`` uncounted rounds, then ``rounds``; ``operations`` of save and load."""

    rounds: int
    warmup: int
    operations: frozenset[str]
    warm: bool
    seed: int


@contextmanager
def working_directory(parent: Path) -> Iterator[Path]:
    """An empty directory on the file system of ``parent`` that is gone afterwards, whatever happens."""
    directory = Path(tempfile.mkdtemp(prefix="vescale-ckpt-benchmark-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists():
            print(f"could not remove {directory}", file=sys.stderr)


def check_room(parent: Path, state_bytes: int, tensors: int) -> None:
    """Raise ``NoRoomError`` unless a save fits the disk and all copies that are in use fit the memory."""
    on_disk = int(state_bytes * 1.05) + tensors * 4096 + 64 * 2**20
    disk = os.statvfs(parent)
    free = disk.f_bavail * disk.f_frsize
    if free < on_disk:
        raise NoRoomError(f"{parent} has {free:,} bytes free; a save of this state may need {on_disk:,}")
    in_memory = 3 * state_bytes + 512 * 2**20  # the state, the targets, what a candidate copies
    if cache.file_system_of(parent) in cache.MEMORY_FILE_SYSTEMS:
        in_memory += on_disk
    if available_memory() < in_memory:
        raise NoRoomError(f"{available_memory():,} bytes of memory are free; this run may need {in_memory:,}")


class Runner:
    """Runs candidates on one state, which is built here together with the tensors to load into."""

    def __init__(self, kind: str, shapes: Shapes, plan: Plan, directory: Path) -> None:
        self._kind = kind
        self._plan = plan
        self._directory = directory
        self._state = states.build(shapes, plan.seed)
        self._targets = states.targets_for(self._state)
        self._state_bytes = states.bytes_in(shapes)

    def run(self, candidates: dict[str, Candidate]) -> Iterator[list[Sample]]:
        """Yield the samples of each round.

        A round in which a load could not be made cold is dropped whole, with a line on stderr. Raises
        ``WrongContentsError`` as soon as any load gives other bits than were saved.
        """
        order = random.Random(self._plan.seed)
        for number in range(-self._plan.warmup, self._plan.rounds):
            states.stamp(self._state, number)
            samples: list[Sample] = []
            try:
                for name in order.sample(sorted(candidates), len(candidates)):
                    samples += self._turn(name, candidates[name], number)
            except cache.StillResidentError as error:
                print(f"{self._kind}: round {number} is dropped: {error}", file=sys.stderr)
            else:
                yield samples

    def _turn(self, name: str, candidate: Candidate, number: int) -> list[Sample]:
        """One save and, where asked for, one load of one candidate, in a directory that is removed after."""
        directory = self._directory / f"{self._kind}-{number}-{name}"
        directory.mkdir()
        samples: list[Sample] = []

        def take(operation: str, usage: Usage, resident: float | None) -> None:
            if operation in self._plan.operations:
                outcome = (usage, resident, candidate.path_taken(), candidate.stats())
                samples.append(Sample(self._kind, name, operation, number, self._state_bytes, *outcome))

        try:
            settle()
            take("save", measure(lambda: self._save(candidate, directory)), None)
            if "load" in self._plan.operations:
                states.poison(self._targets)
                settle()
                resident = _prepare_cache(directory, warm=self._plan.warm)
                into = dict(self._targets)  # a tensor that a candidate replaces here is not loaded in place
                take("load", measure(lambda: candidate.load(into, directory)), resident)
                if candidate.keeps_state:
                    self._compare(name, self._targets if candidate.in_place else into, number)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return samples

    def _save(self, candidate: Candidate, directory: Path) -> None:
        candidate.save(self._state, directory)
        for made in (directory, directory.parent):
            _sync_directory(made)

    def _compare(self, name: str, loaded: states.State, number: int) -> None:
        wrong = states.differences(self._state, loaded)
        if wrong:
            count = f"{len(wrong)} of {len(self._state)} tensors"
            raise WrongContentsError(f"{name} loaded wrong contents in round {number}: {count}, first {wrong[0]!r}")


def _prepare_cache(directory: Path, *, warm: bool) -> float:
    if cache.file_system_of(directory) in cache.MEMORY_FILE_SYSTEMS:
        return cache.resident_fraction(directory)
    return cache.fill(directory) if warm else cache.drop(directory)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
