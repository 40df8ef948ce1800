"""The candidates: every way of saving and loading a state that can be compared, in one registry.

Each saves to durability (the harness itself syncs the directory and its parent) and loads in place, into
tensors that exist. Each is at its best settings, and is kept over all rounds as a training job would keep it.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter

import vescale_ckpt
from benchmarks.harness import CEILING
from benchmarks.measure import Plain
from benchmarks.states import State
from vescale_ckpt._bench.page_cache import address_of
from vescale_ckpt._bench.raw_file import FILE_NAME, PIECE_BYTES, THREADS, RawFile, preallocate, whole_blocks
from vescale_ckpt._engine import _C


class Candidate(ABC):
    """One way of saving and loading."""

    keeps_state = True  # False where nothing of the state is written, so that a load has nothing to compare
    in_place = True  # False where loads make tensors of their own, and put these into the dict that they are given

    @abstractmethod
    def save(self, state: State, directory: Path) -> None:
        """Write ``state`` into the empty ``directory``; return when its files are durable."""

    @abstractmethod
    def load(self, into: State, directory: Path) -> None:
        """Fill the tensors of ``into``, in place, with what ``save`` left in ``directory`` (but see ``in_place``)."""

    def path_taken(self) -> str | None:
        """How the bytes of the last operation went (direct, buffered, …), where the candidate tells."""
        return None

    def stats(self) -> Plain:
        """What the candidate itself reports of its last operation."""
        return None


class Ceiling(Candidate):
    """Raw I/O of the same number of bytes."""

    keeps_state = False

    def __init__(self, *, warm: bool) -> None:
        self._raw = RawFile(buffered_reads=warm)

    def save(self, state: State, directory: Path) -> None:
        self._raw.write(directory, _bytes_of(state))

    def load(self, into: State, directory: Path) -> None:
        self._raw.read(directory, _bytes_of(into))

    def path_taken(self) -> str | None:
        return self._raw.path_taken


class Unavoidable(Candidate):
    """What a save with checksums and a verified load cannot do without, and nothing else.

    4 threads write all bytes from memory, or read them into it, with one checksum. The memory was touched before, in
    pages of 4 KiB, as that of torch's tensors is by default. With ``new_memory`` loads take theirs from the system, on
    huge pages, as loads into new tensors do. Warm reads take pieces that stay in the processor's cache.
    """

    keeps_state = False

    def __init__(self, *, new_memory: bool, warm: bool) -> None:
        self._new_memory = new_memory
        self._piece = 2**19 if warm else PIECE_BYTES
        self._direct = 0 if warm else os.O_DIRECT
        self._touched: mmap.mmap | None = None

    def save(self, state: State, directory: Path) -> None:
        size = whole_blocks(_bytes_of(state))
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
        size = whole_blocks(_bytes_of(into))
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


class Memcpy(Candidate):
    """A copy of as many bytes from memory to memory, by as many threads as there are processors."""

    keeps_state = False

    def __init__(self) -> None:
        self._source: npt.NDArray[np.uint8] | None = None
        self._target: npt.NDArray[np.uint8] | None = None

    def save(self, state: State, directory: Path) -> None:
        if self._source is None:
            self._source, self._target = (np.ones(_bytes_of(state), np.uint8) for _ in range(2))

    def load(self, into: State, directory: Path) -> None:
        assert self._source is not None and self._target is not None
        parts = os.cpu_count() or 1
        pairs = zip(np.array_split(self._target, parts), np.array_split(self._source, parts), strict=True)
        with ThreadPoolExecutor(parts) as pool:
            list(pool.map(lambda pair: np.copyto(*pair), pairs))


class Vescale(Candidate):
    """Our plug points under plain ``dcp.save`` and ``dcp.load``."""

    def __init__(self, *, with_stock_planners: bool = False, checksums: bool = True, verify: bool = True) -> None:
        self._with_stock_planners = with_stock_planners
        self._planner = stock_save_planner() if with_stock_planners else vescale_ckpt.SavePlanner()
        self._checksums = checksums
        self._verify = verify
        self._writer: StorageWriter | None = None
        self._stats: Any = None

    def save(self, state: State, directory: Path) -> None:
        if self._writer is None:
            self._writer = vescale_ckpt.StorageWriter(directory, checksums=self._checksums)
        _save_into(state, directory, self._writer, self._planner)
        self._stats = getattr(self._writer, "last_stats", None)

    def load(self, into: State, directory: Path) -> None:
        reader = vescale_ckpt.StorageReader(directory, verify=self._verify)
        planner = DefaultLoadPlanner() if self._with_stock_planners else vescale_ckpt.LoadPlanner()
        dcp_load({"model": into}, storage_reader=reader, planner=planner, no_dist=True)
        self._stats = reader.last_stats

    def path_taken(self) -> str | None:
        return self._stats.io_path

    def stats(self) -> Plain:
        return asdict(self._stats)


class VescaleFunctions(Candidate):
    """``vescale_ckpt.save`` and ``vescale_ckpt.load``."""

    def __init__(self) -> None:
        self._planner = vescale_ckpt.SavePlanner()
        self._stats: Any = None

    def save(self, state: State, directory: Path) -> None:
        self._stats = vescale_ckpt.save(directory, {"model": state}, planner=self._planner).stats

    def load(self, into: State, directory: Path) -> None:
        self._stats = vescale_ckpt.load(directory, {"model": into}).stats

    def path_taken(self) -> str | None:
        return self._stats.io_path

    def stats(self) -> Plain:
        return asdict(self._stats)


class StockDcp(Candidate):
    """torch's own file-system writer and reader."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._planner = stock_save_planner()
        self._writer: FileSystemWriter | None = None

    def save(self, state: State, directory: Path) -> None:
        if self._writer is None:
            self._writer = FileSystemWriter(directory, thread_count=self._threads, sync_files=True)
        _save_into(state, directory, self._writer, self._planner)

    def load(self, into: State, directory: Path) -> None:
        dcp_load({"model": into}, storage_reader=FileSystemReader(directory), no_dist=True)


class TorchSave(Candidate):
    """``torch.save`` and ``torch.load`` of the whole state in one file."""

    def __init__(self, *, mapped: bool = False) -> None:
        self._mapped = mapped

    def save(self, state: State, directory: Path) -> None:
        path = directory / "state.pt"
        torch.save(state, path)
        sync(path)

    def load(self, into: State, directory: Path) -> None:
        _copy(torch.load(directory / "state.pt", mmap=self._mapped, weights_only=True), into)


class Numpy(Candidate):
    """``tofile`` and ``readinto``, tensor after tensor, in one file without any description of it."""

    def save(self, state: State, directory: Path) -> None:
        with open(directory / "state.bin", "wb", buffering=0) as file:
            for tensor in state.values():
                _memory_of(tensor).tofile(file)
            os.fsync(file.fileno())

    def load(self, into: State, directory: Path) -> None:
        with open(directory / "state.bin", "rb", buffering=0) as file:
            for name, tensor in into.items():
                rest = _memory_of(tensor)
                while rest.size:
                    read = file.readinto(rest.data)
                    if not read:
                        raise EOFError(f"state.bin ends within {name}")
                    rest = rest[read:]


class Safetensors(Candidate):
    """The safetensors library, with the sync that it leaves out."""

    def save(self, state: State, directory: Path) -> None:
        path = directory / "state.safetensors"
        safetensors.torch.save_file(state, path)
        sync(path)

    def load(self, into: State, directory: Path) -> None:
        _copy(safetensors.torch.load_file(directory / "state.safetensors"), into)


class SafetensorsInMemory(Candidate):
    """The safetensors library, to bytes in memory: nothing is written."""

    keeps_state = False

    def save(self, state: State, directory: Path) -> None:
        safetensors.torch.save(state)

    def load(self, into: State, directory: Path) -> None:
        raise NotImplementedError("nothing was written: time saves only, with --ops save")


class VescaleSafetensors(Candidate):
    """Our functions in place of the library's: durable by themselves, into memory of their own, verified."""

    in_place = False

    def __init__(self, *, verify: bool = True) -> None:
        self._verify = verify

    def save(self, state: State, directory: Path) -> None:
        vescale_ckpt.safetensors.save_file(state, directory / "state.safetensors")

    def load(self, into: State, directory: Path) -> None:
        into.update(vescale_ckpt.safetensors.load_file(directory / "state.safetensors", verify=self._verify))


class NumpySave(Candidate):
    """``numpy.save`` and ``numpy.load``, tensor after tensor, in one file."""

    def save(self, state: State, directory: Path) -> None:
        with open(directory / "state.npy", "wb") as file:
            for tensor in state.values():
                np.save(file, _memory_of(tensor))
            file.flush()
            os.fsync(file.fileno())

    def load(self, into: State, directory: Path) -> None:
        with open(directory / "state.npy", "rb") as file:
            for tensor in into.values():
                _memory_of(tensor)[:] = np.load(file)


@dataclass(frozen=True)
class Entry:
    """A line of the registry. ``make`` is told whether loads of this run are warm."""

    summary: str
    make: Callable[[bool], Candidate]


REGISTRY: dict[str, Entry] = {
    CEILING: Entry("raw direct I/O of as many bytes, 4 threads", lambda warm: Ceiling(warm=warm)),
    "unavoidable": Entry(
        "as many bytes with one checksum, from and into touched memory in pages of 4 KiB",
        lambda warm: Unavoidable(new_memory=False, warm=warm),
    ),
    "unavoidable-new": Entry("the same, loads into new memory", lambda warm: Unavoidable(new_memory=True, warm=warm)),
    "memcpy": Entry("for loads: a copy in memory, on all processors", lambda _: Memcpy()),
    "vescale": Entry("our writer, reader and planners", lambda _: Vescale()),
    "vescale-functions": Entry("our save and load", lambda _: VescaleFunctions()),
    "vescale-stock-planner": Entry(
        "our writer and reader, torch's planners", lambda _: Vescale(with_stock_planners=True)
    ),
    "vescale-noverify": Entry("ours, loads without verifying", lambda _: Vescale(verify=False)),
    "vescale-nochecksum": Entry("ours, saves without checksums", lambda _: Vescale(checksums=False)),
    "dcp-1": Entry("stock DCP, 1 writer thread, cached plans", lambda _: StockDcp(1)),
    "dcp-4": Entry("stock DCP, 4 writer threads, cached plans", lambda _: StockDcp(4)),
    "torch": Entry("torch.save + fsync, torch.load", lambda _: TorchSave()),
    "torch-mmap": Entry("torch.save + fsync, torch.load(mmap=True)", lambda _: TorchSave(mapped=True)),
    "numpy": Entry("plain writes and reads: tofile + fsync, readinto", lambda _: Numpy()),
    "numpy-save": Entry("numpy.save + fsync, numpy.load", lambda _: NumpySave()),
    "safetensors": Entry("save_file + fsync, load_file", lambda _: Safetensors()),
    "safetensors-memory": Entry("safetensors.torch.save to bytes, written nowhere", lambda _: SafetensorsInMemory()),
    "vescale-safetensors": Entry("our safetensors functions, into new tensors", lambda _: VescaleSafetensors()),
    "vescale-safetensors-noverify": Entry(
        "the same, loads without verifying", lambda _: VescaleSafetensors(verify=False)
    ),
}


def stock_save_planner() -> DefaultSavePlanner:
    """torch's planner with cached plans of its own.

    torch keys cached plans by the name of the planner's class, for the whole process, and a cached plan
    carries what the storage writer put into it: without a class for each, one candidate would save by
    another's plan.
    """
    own_class = type(f"SavePlanner{time.perf_counter_ns()}", (DefaultSavePlanner,), {})
    planner: DefaultSavePlanner = own_class(enable_plan_caching=True)
    return planner


def sync(path: Path) -> None:
    """Makes a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save_into(state: State, directory: Path, writer: StorageWriter, planner: SavePlanner) -> None:
    """``checkpoint_id`` points the kept writer at the new directory."""
    dcp_save({"model": state}, checkpoint_id=directory, storage_writer=writer, planner=planner, no_dist=True)


def _bytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _huge_pages(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _copy(loaded: State, into: State) -> None:
    for name, tensor in into.items():
        tensor.copy_(loaded[name])


def _memory_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous tensor (numpy has no bfloat16)."""
    array: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array
