"""The candidates: every way of saving and loading a state that can be compared, in one registry.

Each saves to durability (the harness itself syncs the directory and its parent) and loads in place, into tensors that
exist. Each is at its best settings, and is kept over all rounds as a training job would keep it.
"""

from __future__ import annotations

import mmap
import os
import random
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
from benchmarks.harness.page_cache import address_of
from benchmarks.harness.random_states import State
from benchmarks.harness.raw_file import FILE_NAME, PIECE_BYTES, THREADS, preallocate, whole_blocks
from benchmarks.harness.saves_and_loads import Candidate, bytes_of, sync
from vescale_ckpt._engine import _C


class Unavoidable:
    """What a save with checksums and a verified load cannot do without, and nothing else.

    4 threads write all bytes from memory, or read them into it, with one checksum. The memory was touched before, in
    pages of 4 KiB, as that of torch's tensors is by default. With `new_memory` loads take theirs from the system, on
    huge pages, as loads into new tensors do. Warm reads take pieces that stay in the processor's cache.
    """

    def __init__(self, *, new_memory: bool, warm: bool) -> None:
        self._new_memory = new_memory
        self._piece = 2**19 if warm else PIECE_BYTES
        self._direct = 0 if warm else os.O_DIRECT
        self._touched: mmap.mmap | None = None

    def save(self, state: State, directory: Path) -> None:
        size = whole_blocks(bytes_of(state))
        descriptor = os.open(directory / FILE_NAME, os.O_WRONLY | os.O_CREAT | self._direct, 0o644)

        def write(piece: memoryview, at: int, address: int) -> None:
            _C.crc32_of_memory(address, len(piece))
            os.pwritev(descriptor, [piece], at)

        try:
            preallocate(descriptor, size)
            self._in_pieces(self._memory(size), write)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def load(self, into: State, directory: Path) -> None:
        size = whole_blocks(bytes_of(into))
        descriptor = os.open(directory / FILE_NAME, os.O_RDONLY | self._direct)

        def read(piece: memoryview, at: int, address: int) -> None:
            os.preadv(descriptor, [piece], at)
            _C.crc32_of_memory(address, len(piece))

        try:
            self._in_pieces(_huge_pages(size) if self._new_memory else self._memory(size), read)
        finally:
            os.close(descriptor)

    def _memory(self, size: int) -> mmap.mmap:
        """Touched memory, the same from call to call."""
        if self._touched is None:
            self._touched = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            content = random.Random(0).randbytes(2**20)  # storage may compress what is less random
            for at in range(0, size, len(content)):
                self._touched[at : at + len(content)] = content[: size - at]
        return self._touched

    def _in_pieces(self, memory: mmap.mmap, move: Callable[[memoryview, int, int], None]) -> None:
        start = address_of(memory)
        with memoryview(memory) as view, ThreadPoolExecutor(THREADS) as pool:
            starts = range(0, len(view), self._piece)
            list(pool.map(lambda at: move(view[at : at + self._piece], at, start + at), starts))


def _huge_pages(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def unavoidable(*, new_memory: bool, warm: bool) -> Candidate:
    made = Unavoidable(new_memory=new_memory, warm=warm)
    return Candidate(made.save, made.load, keeps_state=False)


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
        dcp_save({"model": state}, checkpoint_id=directory, storage_writer=writers[0], planner=planner, no_dist=True)
        return writers[0].last_stats

    def load(into: State, directory: Path) -> object:
        reader = vescale_ckpt.StorageReader(directory, verify=verify)
        dcp_load({"model": into}, storage_reader=reader, planner=vescale_ckpt.LoadPlanner(), no_dist=True)
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


def numpy_save() -> Candidate:
    """`numpy.save` and `numpy.load`, tensor after tensor, in one file."""

    def save(state: State, directory: Path) -> None:
        with open(directory / "state.npy", "wb") as file:
            for tensor in state.values():
                np.save(file, _memory_of(tensor))
            file.flush()
            os.fsync(file.fileno())

    def load(into: State, directory: Path) -> None:
        with open(directory / "state.npy", "rb") as file:
            for tensor in into.values():
                _memory_of(tensor)[:] = np.load(file)

    return Candidate(save, load)


def library_safetensors() -> Candidate:
    """The safetensors library, with the sync that it leaves out."""

    def save(state: State, directory: Path) -> None:
        safetensors.torch.save_file(state, directory / "state.safetensors")
        sync(directory / "state.safetensors")

    def load(into: State, directory: Path) -> None:
        _copy(safetensors.torch.load_file(directory / "state.safetensors"), into)

    return Candidate(save, load)


def safetensors_in_memory() -> Candidate:
    """The safetensors library, to bytes in memory: nothing is written."""

    def load(into: State, directory: Path) -> None:
        raise NotImplementedError("nothing was written: time saves only, with --ops save")

    return Candidate(lambda state, directory: len(safetensors.torch.save(state)), load, keeps_state=False)


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
    "unavoidable": Entry(
        "as many bytes with one checksum, from and into touched memory in pages of 4 KiB",
        lambda warm: unavoidable(new_memory=False, warm=warm),
    ),
    "unavoidable-new": Entry("the same, loads into new memory", lambda warm: unavoidable(new_memory=True, warm=warm)),
    "memcpy": Entry("for loads: a copy in memory, on all processors", lambda _: memcpy()),
    "vescale": Entry("our writer, reader and planners", lambda _: plug_points()),
    "vescale-functions": Entry("our save and load", lambda _: saves_and_loads.ours()),
    "vescale-noverify": Entry("ours, loads without verifying", lambda _: plug_points(verify=False)),
    "vescale-nochecksum": Entry("ours, saves without checksums", lambda _: plug_points(checksums=False)),
    "dcp-1": Entry("stock DCP, 1 writer thread, cached plans", lambda _: saves_and_loads.stock(1)),
    "dcp-4": Entry("stock DCP, 4 writer threads, cached plans", lambda _: saves_and_loads.stock(4)),
    "torch": Entry("torch.save + fsync, torch.load", lambda _: torch_save()),
    "numpy": Entry("plain writes and reads: tofile + fsync, readinto", lambda _: plain_numpy()),
    "numpy-save": Entry("numpy.save + fsync, numpy.load", lambda _: numpy_save()),
    "safetensors": Entry("save_file + fsync, load_file", lambda _: library_safetensors()),
    "safetensors-memory": Entry("safetensors.torch.save to bytes, written nowhere", lambda _: safetensors_in_memory()),
    "vescale-safetensors": Entry("our safetensors functions, into new tensors", lambda _: our_safetensors()),
}


def _copy(loaded: State, into: State) -> None:
    for name, tensor in into.items():
        tensor.copy_(loaded[name])


def _memory_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous tensor (numpy has no bfloat16)."""
    array: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array
