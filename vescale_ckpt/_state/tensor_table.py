"""Makes tables of tensors for the engine: where each lies in memory, and whether its memory may be used as it is.

A table is rows of 64-bit integers, one behind another: address, dtype code or -1, device or -1, dimensions n, n sizes,
n strides (elements). A device is DLPack's code, 1 for host memory, and its number times 2^32. Address and device are -1
for what has no memory of its own to be read: meta and sparse tensors, quantized ones, subclasses. The dtype is -1 if no
checkpoint can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._engine import _C
from .._engine.dtypes import DTYPE_CODES
from .._engine.tensor_checks import is_host_memory, is_plain_tensor

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
HOST_DEVICE, CUDA_DEVICE = 1, 2  # DLPack's codes

# What `ready_tensors` says of each tensor. From ON_DEVICE on: on the CUDA device of that number less ON_DEVICE.
NOT_READY, ON_HOST, ON_DEVICE = 0, 1, 2


def tensor_table(tensors: list[torch.Tensor]) -> bytes:
    """The table of all `tensors`, read in one call. No tensor raises; which row is of what use its numbers say."""
    return _C.tensor_table(tensors, PLAIN_TYPES, DTYPE_CODES, tensor_row)


def tensor_row(tensor: torch.Tensor) -> list[int]:
    """One row, through torch's Python interface instead of DLPack."""
    try:
        shape = [int(size) for size in tensor.shape]
    except Exception:  # nested tensors have none; subclasses may do anything
        return [-1, -1, -1, 0]
    code = DTYPE_CODES.get(tensor.dtype, -1)
    device = _device(tensor) if code >= 0 and is_plain_tensor(tensor) else -1
    if device < 0:
        strides, stride = [0] * len(shape), 1
        for dim in reversed(range(len(shape))):
            strides[dim] = stride
            stride *= max(shape[dim], 1)
        return [-1, code, -1, len(shape), *shape, *strides]
    return [tensor.data_ptr(), code, device, len(shape), *shape, *tensor.stride()]


def _device(tensor: torch.Tensor) -> int:
    if tensor.is_meta or tensor.layout is not torch.strided:
        return -1
    if tensor.is_cpu:
        return HOST_DEVICE
    try:
        kind, number = tensor.__dlpack_device__()
        return int(kind) + (int(number) << 32)
    except (BufferError, ValueError):  # a device that DLPack has no code for
        return -1


def narrowed(tensor: torch.Tensor, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """A view of a box of it."""
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        if start != 0 or tensor.size(dim) != length:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def ready_tensors(tensors: list[torch.Tensor], table: bytes) -> bytes:
    """For each tensor, whether it may be used where it is. `table` is the `tensor_table` of them.

    ON_HOST: as `is_host_memory`, by all of the engine. ON_DEVICE and above: the same of memory of a CUDA device,
    which snapshots copy. CUDA is not touched unless there are tensors on it.

    Maps over torch's C methods: no Python runs for a tensor in host memory.
    """
    return ready_tensors_and_storages(tensors, table)[0]


def ready_tensors_and_storages(
    tensors: list[torch.Tensor], table: bytes
) -> tuple[bytes, list[torch.UntypedStorage], list[int]]:
    """The same, and the storages that were asked for it, with the bytes of each."""
    devices = _C.tensor_devices(table)
    asked, with_cuda = tensors, False
    if devices.count(HOST_DEVICE) != len(tensors):
        wanted = {HOST_DEVICE}
        on_cuda = set(filter(_is_cuda, devices))
        if on_cuda and _C.copies_from_cuda():
            with_cuda = True
            wanted |= on_cuda
        asked = [tensor for tensor, device in zip(tensors, devices, strict=True) if device in wanted]
    lazy = bytes(map(torch.Tensor.is_neg, asked))
    if _C.any_complex(table):  # nothing else is lazily conjugated
        lazy = bytes(tensor.is_conj() or tensor.is_neg() for tensor in asked)
    offsets: list[int] = list(map(torch.Tensor.storage_offset, asked))  # type: ignore[arg-type]
    storages = list(map(torch.Tensor.untyped_storage, asked))
    sizes = list(map(torch.UntypedStorage.nbytes, storages))
    ready = _C.ready_tensors(table, with_cuda, lazy, offsets, sizes)
    if -1 in devices:
        ready = bytes(
            is_host_memory(tensor) if device == -1 else flag
            for tensor, device, flag in zip(tensors, devices, ready, strict=True)
        )
    return ready, storages, sizes


def _is_cuda(device: int) -> bool:
    return device & 0xFFFFFFFF == CUDA_DEVICE


def device_number(ready: int) -> int:
    """The CUDA device that `ready_tensors` speaks of; -1 for none."""
    return ready - ON_DEVICE if ready >= ON_DEVICE else -1
