"""Reads the values of tensors that torch has mapped from a file.

An access to mapped memory beyond the end of a file ends the process (SIGBUS), and any file may be cut short while it is
read. So the mapped memory is never touched: tensors in it tell where their values lie in the file.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from .._state.tensor_table import narrowed
from .archive_entries import damage_named
from .checkpoint import cut

_READ_BYTES = 64 << 20  # one read takes at most so many bytes, or one row


def read_mapped(path: str, key: str, begin: int, view: torch.Tensor, target: torch.Tensor) -> None:
    """Fills `target` with the values of `view`, whose storage begins at the byte `begin` of the file `path`.

    Raises `CorruptCheckpointError` if the file ends before them, and `CheckpointError` if it cannot be read.
    """
    view, target = view.detach(), target.detach()
    if not view.numel():
        return
    strides = view.stride()
    order = sorted(range(view.dim()), key=lambda dim: -strides[dim])  # so that a piece lies together in the file
    view, target = view.permute(order), target.permute(order)
    most = max(1, _READ_BYTES // view.itemsize * view.numel() // _extent(view))
    with damage_named(path, key, begin), open(path, "rb", buffering=0) as file:
        for offsets, sizes in cut(tuple(view.shape), most):
            piece = narrowed(view, offsets, sizes)
            at = begin + int(piece.storage_offset()) * piece.itemsize
            found = torch.empty(_extent(piece) * piece.itemsize, dtype=torch.uint8, device="cpu")
            _read(file.fileno(), at, found)
            values = found.view(piece.dtype).as_strided(piece.shape, piece.stride())
            values = values.conj() if piece.is_conj() else values
            narrowed(target, offsets, sizes).copy_(torch._neg_view(values) if piece.is_neg() else values)


def read_storage(path: str, key: str, begin: int, length: int) -> torch.UntypedStorage:
    """Returns a storage with `length` bytes of a file. Raises as `read_mapped`."""
    found = torch.empty(length, dtype=torch.uint8, device="cpu")
    with damage_named(path, key, begin), open(path, "rb", buffering=0) as file:
        _read(file.fileno(), begin, found)
    return found.untyped_storage()


def _extent(tensor: torch.Tensor) -> int:
    """The number of elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _read(descriptor: int, begin: int, target: torch.Tensor) -> None:
    """Fills a dense tensor of bytes from a file."""
    array: Any = (ctypes.c_ubyte * target.numel()).from_address(target.data_ptr())  # needs no numpy
    left = memoryview(array).cast("B")
    while left:
        count = os.preadv(descriptor, [left], begin)
        if not count:
            raise EOFError(f"the file ends at {begin:,}, before the end of the values")
        left, begin = left[count:], begin + count
