"""Saves a state and loads it again by one candidate after the other, each load compared bit for bit."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.harness import random_states
from benchmarks.harness.page_cache import files_under
from benchmarks.harness.random_states import Shapes, State
from benchmarks.harness.raw_file import RawFile
from benchmarks.harness.room import WrongContentsError
from benchmarks.harness.usage import Usage, measure, opened, settle
from vescale_ckpt import api


@dataclass(frozen=True)
class Candidate:
    """One way of saving and loading. Both return their statistics, or the path that bytes took, or None."""

    save: Callable[[State, Any], object]  #: writes to an empty folder, or below a URL
    load: Callable[[State, Any], object]  #: fills tensors in place with what `save` left
    keeps_state: bool = True  #: False where nothing of the state is written, so that a load has nothing to compare
    in_place: bool = True  #: False where loads make tensors, and put these into the dict that they are given


class Disk:
    """A directory in which each save gets a folder of its own. `prepare` makes a folder's files cold, or warm.
    `durable`: whether saves end when all that they have written is synced, or as each candidate leaves it."""

    def __init__(self, directory: Path, prepare: Callable[[Path], float], durable: bool = True) -> None:
        self._directory = directory
        self.prepare = prepare
        self._durable = durable

    def settle(self) -> None:
        settle(self._directory)

    def make(self, name: str) -> Path:
        path = self._directory / name
        path.mkdir()
        return path

    def sync(self, path: Path) -> None:
        for each in (*files_under(path), path, self._directory) if self._durable else ():
            sync(each)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


class SavesAndLoads:
    """Holds a state and the tensors to load it into. `operations` are of "save" and "load"."""

    def __init__(
        self, shapes: Shapes, disk: Any, operations: Collection[str] = ("save", "load"), device: str = "cpu"
    ) -> None:
        self.state = random_states.build(shapes, device)
        self.bytes = random_states.bytes_in(shapes)
        self._targets = random_states.targets_for(self.state) if "load" in operations else {}
        self._disk = disk
        self._operations = operations
        self._turns = 0

    def turn(self, name: str, candidate: Candidate) -> Mapping[str, Usage]:
        """One save and, where asked for, one load, in a folder that is removed after."""
        self._turns += 1
        random_states.stamp(self.state, self._turns)
        folder = self._disk.make(f"{self._turns}-{name}")
        steps: dict[str, Usage] = {}
        try:
            self._disk.settle()
            steps["save"] = self._measured(lambda: candidate.save(self.state, folder), lambda: self._disk.sync(folder))
            if "load" in self._operations:
                random_states.poison(self._targets)
                self._disk.settle()
                resident = self._disk.prepare(folder)
                into = dict(self._targets)  # a tensor that a candidate replaces here is not loaded in place
                loaded = self._measured(lambda: candidate.load(into, folder))
                steps["load"] = dataclasses.replace(loaded, resident=resident)
                if candidate.keeps_state:
                    self._compare(name, self._targets if candidate.in_place else into)
        finally:
            self._disk.remove(folder)
        return {operation: steps[operation] for operation in self._operations}

    def _measured(self, operation: Callable[[], object], behind: Callable[[], object] = lambda: None) -> Usage:
        found: object = None

        def run() -> None:
            nonlocal found
            found = operation()
            behind()

        usage = measure(run)
        path = found if isinstance(found, str) else getattr(found, "io_path", None)
        return dataclasses.replace(usage, state_bytes=self.bytes, path=path)

    def _compare(self, name: str, loaded: State) -> None:
        if wrong := random_states.differences(self.state, loaded):
            count = f"{len(wrong)} of {len(self.state)} tensors"
            raise WrongContentsError(f"{name} loaded something else than was saved: {count}, first {wrong[0]!r}")


def sync(path: Path) -> None:
    """Makes a file or directory durable."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


# --- Candidates that users ask for. Each is kept over all rounds as a training job would keep it.


def raw(*, buffered_reads: bool = False) -> Candidate:
    """Raw I/O of the same number of bytes."""
    file = RawFile(buffered_reads=buffered_reads)

    def save(state: State, folder: Path) -> str:
        file.write(folder, bytes_of(state))
        return file.path_taken

    def load(into: State, folder: Path) -> str:
        file.read(folder, bytes_of(into))
        return file.path_taken

    return Candidate(save, load, keeps_state=False)


def ours(form: Literal["dcp", "safetensors"] = "dcp", *, fingerprint: bool = False) -> Candidate:
    """`vescale_ckpt.save` and `vescale_ckpt.load`."""
    return Candidate(
        lambda state, folder: api.save(folder, {"model": state}, format=form, fingerprint=fingerprint).stats,
        lambda into, folder: api.load(folder, {"model": into}).stats,
    )


def stock(threads: int) -> Candidate:
    """DCP's own writer of files, with so many threads and cached plans, and its reader."""
    planner = stock_save_planner()
    writers: list[FileSystemWriter] = []

    def save(state: State, folder: Path) -> None:
        if not writers:
            writers.append(FileSystemWriter(folder, thread_count=threads, sync_files=True))
        # `checkpoint_id` points the writer, which is kept, at the new folder.
        dcp_save({"model": state}, checkpoint_id=folder, storage_writer=writers[0], planner=planner)

    def load(into: State, folder: Path) -> None:
        dcp_load({"model": into}, storage_reader=FileSystemReader(folder))

    return Candidate(save, load)


def stock_save_planner() -> DefaultSavePlanner:
    """DCP's planner with cached plans of its own.

    DCP keys cached plans by the name of the planner's class, for the whole process, and a cached plan carries what the
    storage writer put into it: without a class for each, one candidate would save by another's plan.
    """
    own_class = type(f"SavePlanner{time.perf_counter_ns()}", (DefaultSavePlanner,), {})
    planner: DefaultSavePlanner = own_class(enable_plan_caching=True)
    return planner


def bytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())
