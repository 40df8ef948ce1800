"""Tables of tensors for the engine: where each lies in memory, and whether its memory may be used as it is.

A table is rows of 64-bit integers, one behind another: address, dtype code or -1, device or -1, dimensions n, n sizes,
n strides (elements). A device is DLPack's code, 1 for host memory. Address and device are -1 for what has no memory of
its own to be read: meta and sparse tensors, quantized ones, subclasses. The dtype is -1 if no checkpoint can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _C, engine

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
HOST_DEVICE = 1  # DLPack's code


def tensor_table(tensors: list[torch.Tensor]) -> bytes:
    """The table of all `tensors`, read in one call. No tensor raises; which row is of what use its numbers say."""
    return _C.tensor_table(tensors, PLAIN_TYPES, engine.DTYPE_CODES, tensor_row)


def tensor_table_in_python(tensors: Sequence[torch.Tensor]) -> bytes:
    """The same without DLPack."""
    table = engine.int_table()
    for tensor in tensors:
        table.extend(tensor_row(tensor))
    return table.tobytes()


def tensor_row(tensor: torch.Tensor) -> list[int]:
    """One row, through torch's Python interface."""
    try:
        shape = [int(size) for size in tensor.shape]
    except Exception:  # nested tensors have none; subclasses may do anything
        return [-1, -1, -1, 0]
    code = engine.DTYPE_CODES.get(tensor.dtype, -1)
    device = _device(tensor) if code >= 0 and engine.is_plain_tensor(tensor) else -1
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
        return int(tensor.__dlpack_device__()[0])
    except (BufferError, ValueError):  # a device that DLPack has no code for
        return -1


def host_ready(tensors: list[torch.Tensor], table: bytes) -> bytes:
    """For each tensor, 1 if it `engine.is_host_memory`, else 0. `table` is the `tensor_table` of them.

    Maps over torch's C methods: no Python runs for a tensor in host memory.
    """
    devices = _C.tensor_devices(table)
    host = tensors
    if devices.count(HOST_DEVICE) != len(tensors):
        host = [tensor for tensor, device in zip(tensors, devices, strict=True) if device == HOST_DEVICE]
    methods = torch.Tensor.is_conj, torch.Tensor.is_neg, torch.Tensor._is_zerotensor
    lazy = bytes(len(host))
    if any(True in map(method, host) for method in methods):
        lazy = bytes(any(method(tensor) for method in methods) for tensor in host)
    offsets: list[int] = list(map(torch.Tensor.storage_offset, host))  # type: ignore[arg-type]
    storages = map(torch.Tensor.untyped_storage, host)
    ready = _C.ready_tensors(table, lazy, offsets, list(map(torch.UntypedStorage.nbytes, storages)))
    if -1 not in devices:
        return ready
    return bytes(
        engine.is_host_memory(tensor) if device == -1 else flag
        for tensor, device, flag in zip(tensors, devices, ready, strict=True)
    )
