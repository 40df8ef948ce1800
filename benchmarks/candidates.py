"""The candidates: every way of saving and loading a state that can be compared, in one registry.

Each loads in place, into tensors that exist; the harness syncs what a candidate has not. Each is at its best settings,
and is kept over all rounds as a training job would keep it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import vescale_ckpt
from benchmarks.first_loads import load_fastsafetensors
from benchmarks.harness import page_cache, saves_and_loads
from benchmarks.harness.by_turns import CEILING
from benchmarks.harness.random_states import State
from benchmarks.harness.saves_and_loads import Candidate, bytes_of


def memcpy() -> Candidate:
    """A copy of as many bytes from memory to memory, by as many threads as there are processors."""
    memory: list[npt.NDArray[np.uint8]] = []

    def save(state: State, directory: Path) -> None:
        if not memory:
            memory.extend(np.ones(bytes_of(state), np.uint8) for _ in range(2))

    def load(into: State, directory: Path) -> None:
        parts = os.cpu_count() or 1
        source, target = (np.array_split(whole, parts) for whole in memory)
        with ThreadPoolExecutor(parts) as pool:
            list(pool.map(np.copyto, target, source))

    return Candidate(save, load, keeps_state=False)


def plug_points(*, checksums: bool = True, verify: bool = True) -> Candidate:
    """Our plug points under plain `dcp.save` and `dcp.load`."""
    planner = vescale_ckpt.SavePlanner()
    writers: list[vescale_ckpt.StorageWriter] = []

    def save(state: State, directory: Path) -> object:
        if not writers:
            writers.append(vescale_ckpt.StorageWriter(directory, checksums=checksums))
        # `checkpoint_id` points the writer, which is kept, at the new directory.
        dcp_save({"model": state}, checkpoint_id=directory, storage_writer=writers[0], planner=planner)
        return writers[0].last_stats

    def load(into: State, directory: Path) -> object:
        reader = vescale_ckpt.StorageReader(directory, verify=verify)
        dcp_load({"model": into}, storage_reader=reader, planner=vescale_ckpt.LoadPlanner())
        return reader.last_stats

    return Candidate(save, load)


def torch_save() -> Candidate:
    """`torch.save` and `torch.load` of the whole state in one file."""

    def save(state: State, directory: Path) -> None:
        torch.save(state, directory / "state.pt")

    def load(into: State, directory: Path) -> None:
        _copy(torch.load(directory / "state.pt", weights_only=True), into)

    return Candidate(save, load)


def plain_numpy() -> Candidate:
    """`np.save` and `np.load` of the bytes of each tensor, one after another, in one file without names."""

    def save(state: State, directory: Path) -> None:
        with open(directory / "state.npy", "wb") as file:
            for tensor in state.values():  # numpy has no bfloat16
                np.save(file, tensor.view(-1).view(torch.uint8).cpu().numpy())

    def load(into: State, directory: Path) -> None:
        with open(directory / "state.npy", "rb") as file:
            for tensor in into.values():
                tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(np.load(file)))

    return Candidate(save, load)


def library_safetensors() -> Candidate:
    """The safetensors library."""

    def save(state: State, directory: Path) -> None:
        safetensors.torch.save_file(state, directory / "state.safetensors")

    def load(into: State, directory: Path) -> None:
        _copy(safetensors.torch.load_file(directory / "state.safetensors"), into)

    return Candidate(save, load)


def fastsafetensors() -> Candidate:
    """The saver of fastsafetensors, which writes 16 files from 8 threads, and its reader without direct storage."""
    saver = import_module("fastsafetensors").ParallelSaver()
    return Candidate(
        lambda state, folder: saver.save(state, str(folder / "state")),
        lambda into, folder: _copy(load_fastsafetensors(*sorted(map(str, page_cache.files_under(folder)))), into),
    )


def our_safetensors() -> Candidate:
    """Our functions in place of the library's: durable by themselves, into memory of their own, verified."""

    def save(state: State, directory: Path) -> None:
        vescale_ckpt.safetensors.save_file(state, directory / "state.safetensors")

    def load(into: State, directory: Path) -> None:
        device = next(iter(into.values())).device
        into.update(vescale_ckpt.safetensors.load_file(directory / "state.safetensors", device))

    return Candidate(save, load, in_place=False)


class Entry(NamedTuple):
    """A line of the registry. `make` is told whether loads of this run are warm."""

    summary: str
    make: Callable[[bool], Candidate]


REGISTRY: dict[str, Entry] = {
    CEILING: Entry("raw direct I/O of as many bytes, 4 threads", lambda warm: saves_and_loads.raw(buffered_reads=warm)),
    "memcpy": Entry("for loads: a copy in memory, on all processors", lambda _: memcpy()),
    "vescale": Entry("our writer, reader and planners", lambda _: plug_points()),
    "vescale-functions": Entry("our save and load", lambda _: saves_and_loads.ours()),
    "vescale-fingerprint": Entry("our save(fingerprint=True)", lambda _: saves_and_loads.ours(fingerprint=True)),
    "vescale-noverify": Entry("ours, loads without verifying", lambda _: plug_points(verify=False)),
    "vescale-nochecksum": Entry("ours, saves without checksums", lambda _: plug_points(checksums=False)),
    "dcp-1": Entry("stock DCP, 1 writer thread, cached plans", lambda _: saves_and_loads.stock(1)),
    "dcp-4": Entry("stock DCP, 4 writer threads, cached plans", lambda _: saves_and_loads.stock(4)),
    "torch": Entry("torch.save, torch.load", lambda _: torch_save()),
    "numpy": Entry("np.save, np.load", lambda _: plain_numpy()),
    "safetensors": Entry("the library's save_file, load_file", lambda _: library_safetensors()),
    "fastsafetensors": Entry("its ParallelSaver, fastsafe_open", lambda _: fastsafetensors()),
    "vescale-safetensors": Entry("our safetensors functions, into new tensors", lambda _: our_safetensors()),
    "vescale-export": Entry('our save(format="safetensors"), load', lambda _: saves_and_loads.ours("safetensors")),
}
#: Ways to files that others read, of those that are installed.
FILES = (CEILING, "torch", "numpy", "safetensors", "fastsafetensors", "vescale-safetensors", "vescale-export")
FILES = tuple(name for name in FILES if name != "fastsafetensors" or find_spec(name) is not None)


def _copy(loaded: State, into: State) -> None:
    for name, tensor in into.items():
        tensor.copy_(loaded[name])
