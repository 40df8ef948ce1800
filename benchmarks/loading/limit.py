"""The least that a load by the ranks of one node needs: each byte is read once, into memory that all ranks share, and
each rank copies what it holds from there. No checksums, no format, memory that is mapped already."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import torch

from benchmarks.harness.random_states import ITEM_BYTES, Shapes, State
from benchmarks.loading.cases import Held

_FILE = "limit.bin"
_PIECE = 8 << 20  # bytes of a read; rank after rank reads one
_POLL_SECONDS = 0.0002


def _layout(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Where each tensor begins, and where the last ends, in bytes."""
    begins, at = {}, 0
    for name, shape in shapes.items():
        begins[name] = at
        at += -(-torch.Size(shape).numel() * ITEM_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    return begins, at


def write(state: State, shapes: Shapes, directory: Path) -> None:
    """Writes the bytes of a state, and makes the memory that ranks share."""
    begins, end = _layout(shapes)
    content = torch.zeros(end, dtype=torch.uint8)
    for name, tensor in state.items():
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        content[begins[name] : begins[name] + len(flat)] = flat
    content.numpy().tofile(directory / _FILE)
    with open(_memory(directory), "wb") as file:
        file.write(bytes(end + mmap.PAGESIZE))


def remove(directory: Path) -> None:
    _memory(directory).unlink(missing_ok=True)


def _memory(directory: Path) -> Path:
    return Path("/dev/shm", "-".join(["vescale-ckpt-limit", *directory.parts[1:]]))


class LeastLoad:
    """One rank's part of such loads. All ranks begin each together, and none before all have ended the one before."""

    def __init__(self, directory: Path, shapes: Shapes, held: Held, targets: State, rank: int, size: int) -> None:
        begins, self._end = _layout(shapes)
        path = str(_memory(directory))
        memory = torch.from_file(path, shared=True, size=self._end + mmap.PAGESIZE, dtype=torch.uint8)
        self._read_pieces = memory[self._end :].view(torch.int64)[:size]  # by each rank, in all loads
        self._memory, self._rank, self._size, self._loads = memory, rank, size, 0
        self._file = os.open(directory / _FILE, os.O_RDONLY | os.O_DIRECT)
        state = {}
        for name, shape in shapes.items():
            count = torch.Size(shape).numel() * ITEM_BYTES
            state[name] = memory[begins[name] : begins[name] + count].view(torch.bfloat16).view(shape)
        self._copies = [
            (begins[name] + state[name].nbytes, piece, targets[name])
            for name, piece in held.pieces(state, rank, size).items()
        ]
        memory.max()  # maps every page

    def load(self) -> None:
        reader = threading.Thread(target=self._read)
        reader.start()
        for end, piece, target in self._copies:
            self._wait(-(-end // _PIECE))
            target.copy_(piece)
        reader.join()
        self._loads += 1

    def _read(self) -> None:
        with memoryview(self._memory.numpy()) as memory:
            for begin in range(self._rank * _PIECE, self._end, self._size * _PIECE):
                at, end = begin, min(begin + _PIECE, self._end)
                while at < end:
                    at += os.preadv(self._file, [memory[at:end]], at)
                self._read_pieces[self._rank] += 1

    def _wait(self, pieces: int) -> None:
        """Until all ranks have read their part of the first `pieces` pieces of this load."""
        of_load = -(-self._end // _PIECE)
        for rank in range(self._size):
            earlier = self._loads * len(range(rank, of_load, self._size))
            wanted = earlier + len(range(rank, pieces, self._size))
            while self._read_pieces[rank] < wanted:
                time.sleep(_POLL_SECONDS)
