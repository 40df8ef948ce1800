"""The candidates: every way of saving and loading a state that can be compared, in one registry.

Each saves to durability (the harness itself syncs the directory and its parent) and loads in place, into tensors that
exist. Each is at its best settings, and is kept over all rounds as a training job would keep it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import vescale_ckpt
from benchmarks.harness import saves_and_loads
from benchmarks.harness.by_turns import CEILING
from benchmarks.harness.random_states import State
from benchmarks.harness.saves_and_loads import Candidate, bytes_of, sync


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
        sync(directory / "state.pt")

    def load(into: State, directory: Path) -> None:
        _copy(torch.load(directory / "state.pt", weights_only=True), into)

    return Candidate(save, load)


def plain_numpy() -> Candidate:
    """`tofile` and `readinto`, tensor after tensor, in one file without any description of it."""

    def save(state: State, directory: Path) -> None:
        with open(directory / "state.bin", "wb", buffering=0) as file:
            for tensor in state.values():
                _memory_of(tensor).tofile(file)
            os.fsync(file.fileno())

    def load(into: State, directory: Path) -> None:
        with open(directory / "state.bin", "rb", buffering=0) as file:
            for name, tensor in into.items():
                rest = _memory_of(tensor)
                while rest.size:
                    read = file.readinto(rest.data)
                    if not read:
                        raise EOFError(f"state.bin ends within {name}")
                    rest = rest[read:]

    return Candidate(save, load)


def library_safetensors() -> Candidate:
    """The safetensors library, with the sync that it leaves out."""

    def save(state: State, directory: Path) -> None:
        safetensors.torch.save_file(state, directory / "state.safetensors")
        sync(directory / "state.safetensors")

    def load(into: State, directory: Path) -> None:
        _copy(safetensors.torch.load_file(directory / "state.safetensors"), into)

    return Candidate(save, load)


def our_safetensors() -> Candidate:
    """Our functions in place of the library's: durable by themselves, into memory of their own, verified."""

    def save(state: State, directory: Path) -> None:
        vescale_ckpt.safetensors.save_file(state, directory / "state.safetensors")

    def load(into: State, directory: Path) -> None:
        into.update(vescale_ckpt.safetensors.load_file(directory / "state.safetensors"))

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
    "vescale-noverify": Entry("ours, loads without verifying", lambda _: plug_points(verify=False)),
    "vescale-nochecksum": Entry("ours, saves without checksums", lambda _: plug_points(checksums=False)),
    "dcp-1": Entry("stock DCP, 1 writer thread, cached plans", lambda _: saves_and_loads.stock(1)),
    "dcp-4": Entry("stock DCP, 4 writer threads, cached plans", lambda _: saves_and_loads.stock(4)),
    "torch": Entry("torch.save + fsync, torch.load", lambda _: torch_save()),
    "numpy": Entry("plain writes and reads: tofile + fsync, readinto", lambda _: plain_numpy()),
    "safetensors": Entry("save_file + fsync, load_file", lambda _: library_safetensors()),
    "vescale-safetensors": Entry("our safetensors functions, into new tensors", lambda _: our_safetensors()),
}


def _copy(loaded: State, into: State) -> None:
    for name, tensor in into.items():
        tensor.copy_(loaded[name])


def _memory_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous tensor (numpy has no bfloat16)."""
    array: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array
