"""CUDA's runtime called as the engine calls it, without the engine: for checks of what CUDA itself does."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p

MiB, GiB = 1 << 20, 1 << 30
PIECE = 64 * MiB  # of host memory, which the engine locks at a time
_HUGE_PAGE = 2 * MiB
_TO_DEVICE, _TO_HOST = 1, 2
_PORTABLE = 1
_NON_BLOCKING = 1

Copy = tuple[int, int, int]  # to, from, bytes


class Cuda:
    """The runtime that torch has loaded, and a stream. `GPU_CHECK_CUDART` names a library that stands for it."""

    def __init__(self) -> None:
        path = os.environ.get("GPU_CHECK_CUDART")
        if path is None:
            import torch

            torch.zeros(1, device="cuda")
            path = f"libcudart.so.{str(torch.version.cuda).split('.')[0]}"
        self.library = ctypes.CDLL(path)
        self.library.cudaGetErrorName.restype = ctypes.c_char_p
        self._mapped: list[mmap.mmap] = []
        self._stream = c_void_p()
        self.must(self.library.cudaStreamCreateWithPriority(byref(self._stream), c_uint(_NON_BLOCKING), c_int(0)))
        version = c_int()
        self.must(self.library.cudaRuntimeGetVersion(byref(version)))
        self._version = version.value

    def name(self, code: int) -> str:
        return "ok" if code == 0 else f"{self.library.cudaGetErrorName(code).decode()} ({code})"

    def must(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"CUDA: {self.name(code)}")

    def forget_error(self) -> None:
        self.library.cudaGetLastError()

    # --- Memory

    def allocate(self, size: int) -> int:
        """Memory of the device."""
        address = c_void_p()
        self.must(self.library.cudaMalloc(byref(address), c_size_t(size)))
        return address.value or 0

    def allocate_on_host(self, size: int) -> int:
        """Page-locked memory as CUDA makes it."""
        address = c_void_p()
        self.must(self.library.cudaHostAlloc(byref(address), c_size_t(size), c_uint(_PORTABLE)))
        return address.value or 0

    def map_on_host(self, size: int) -> int:
        """Memory as the engine takes it: mapped, on huge pages, touched, not yet locked."""
        memory = mmap.mmap(-1, size + _HUGE_PAGE)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._mapped.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        address = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        ctypes.memset(address, 1, size)
        return address

    def lock(self, address: int, size: int) -> None:
        self.must(self.library.cudaHostRegister(c_void_p(address), c_size_t(size), c_uint(_PORTABLE)))

    def map_locked(self, size: int) -> int:
        address = self.map_on_host(size)
        self.lock(address, size)
        return address

    def free_bytes(self) -> int:
        """Of the device."""
        free, total = c_size_t(), c_size_t()
        self.must(self.library.cudaMemGetInfo(byref(free), byref(total)))
        return free.value

    # --- Copies. Each returns CUDA's status.

    def copy_to_host(self, copy: Copy) -> int:
        return self._copy(copy, _TO_HOST)

    def copy_to_device(self, copy: Copy) -> int:
        return self._copy(copy, _TO_DEVICE)

    def _copy(self, copy: Copy, kind: int) -> int:
        to, source, size = copy
        return int(
            self.library.cudaMemcpyAsync(c_void_p(to), c_void_p(source), c_size_t(size), c_int(kind), self._stream)
        )

    def copy_batch(self, copies: Sequence[Copy], *, to_device: bool, overlap: bool = True) -> int:
        """By one call, as csrc/device/cuda_stream.cpp makes it."""
        count = len(copies)
        to, source = ((c_void_p * count)(*(copy[end] for copy in copies)) for end in (0, 1))
        sizes = (c_size_t * count)(*(copy[2] for copy in copies))
        host, device = (2, 0), (1, 0)  # kind and number of a place
        places = (*host, *device) if to_device else (*device, *host)
        attributes = (c_int * 6)(1, *places, int(overlap))  # 1: sources are read in the order of the stream
        first, failed = c_size_t(0), c_size_t(0)
        more = () if self._version >= 13000 else (byref(failed),)
        return int(
            self.library.cudaMemcpyBatchAsync(
                to, source, sizes, c_size_t(count), attributes, byref(first), c_size_t(1), *more, self._stream
            )
        )

    def wait(self) -> int:
        return int(self.library.cudaStreamSynchronize(self._stream))
