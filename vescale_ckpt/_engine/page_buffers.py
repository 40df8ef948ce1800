"""`PageBuffers` keeps memory for pieces of files, of which the engine moves whole pages straight to and from a disk."""

from __future__ import annotations

import mmap

import torch


class PageBuffers:
    """Buffers of `bytes` bytes each, which begin at a page. What is given back is taken again."""

    def __init__(self, bytes: int) -> None:
        self.bytes = bytes
        self.made = 0  #: how many there are
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        memory = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.made += 1
        return torch.frombuffer(memory, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)
