"""Makes tables of tensors for the engine: the address of each, and whether the engine may use its memory directly.

A table has one row a tensor, all of 64-bit integers: address, dtype code, device, number of dimensions n, n sizes, n
strides (elements). A device is DLPack's code, 1 for host memory, plus its number times 2^32. Address and device are -1
for tensors without plain memory: meta, sparse and quantized tensors, subclasses. The dtype code is -1 if no checkpoint
can hold the dtype.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._engine import _C
from .._engine.device_streams import copies_from_cuda
from .._engine.dtype_codes import DTYPE_CODES
from .._engine.tensor_checks import is_host_memory, is_plain_tensor
from .._engine.wrapper_tensors import is_wrapper, type_name
from ..errors import CheckpointError

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
HOST_DEVICE = 1  #: DLPack's code

# These are the flags of `TensorReads.ready`. ON_DEVICE + i means CUDA device i.
NOT_READY, ON_HOST, ON_DEVICE = 0, 1, 2


def tensor_row(tensor: torch.Tensor) -> list[int]:
    """Returns the row of one tensor by torch's Python interface instead of DLPack."""
    try:
        shape = [int(size) for size in tensor.shape]
    except Exception:  # nested tensors have no shape, and code of subclasses may raise anything
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
    except (BufferError, ValueError):  # DLPack has no code for the device
        return -1


def narrowed(tensor: torch.Tensor, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Returns a view of a box of a tensor. Raises `CheckpointError` if the class of a wrapper cannot make it."""
    if is_wrapper(tensor):
        return _narrowed_wrapper(tensor, offset, size)
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        if start != 0 or tensor.size(dim) != length:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _narrowed_wrapper(tensor: torch.Tensor, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    part = tensor
    try:
        with torch.no_grad():
            for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
                if start != 0 or part.size(dim) != length:
                    part = part.narrow(dim, start, length)
            if type(part) is not type(tensor) or tuple(part.shape) != tuple(size):
                raise TypeError(f"expected its own type, got a {type_name(part)} of shape {tuple(part.shape)}")
    except Exception as error:  # code of the class may raise anything
        raise CheckpointError(
            f"a {type_name(tensor)} of shape {tuple(tensor.shape)} cannot be cut to {tuple(size)} at {tuple(offset)} "
            f"({type(error).__name__}: {error}): load it with the sharding that it was saved with"
        ) from error
    return part


@dataclass(frozen=True)
class TensorReads:
    """The traits of tensors that planning and writing need."""

    table: bytes  #: of the tensors
    #: One flag for each tensor: whether its memory may be used directly. ON_HOST: the whole engine may use it (see
    #: `is_host_memory`). ON_DEVICE and above: it is memory of a CUDA device, which snapshots copy.
    ready: bytes
    versions: array[int]  #: torch's counter of changes of each tensor; -1 in inference mode
    requires_grad: bytes  #: 1 or 0 for each tensor
    storages: list[torch.UntypedStorage]  #: storages of the tensors with plain memory
    storage_bytes: array[int]  #: bytes of each storage


def read_tensors(tensors: list[torch.Tensor]) -> TensorReads:
    """Reads all tensors in one pass. Runs no Python code for a tensor in plain memory. Raises for no kind of tensor."""
    table, ready, versions, requires_grad, storages, sizes = _C.tensor_reads(
        tensors, PLAIN_TYPES, DTYPE_CODES, tensor_row, copies_from_cuda, is_host_memory
    )
    return TensorReads(table, ready, array("q", versions), requires_grad, storages, array("q", sizes))


def place_of(tensor: torch.Tensor) -> int:
    return read_tensors([tensor]).ready[0]


_LEAST_RUN = 4 << 10  # bytes


def is_fast_to_fill(tensor: torch.Tensor) -> bool:
    """Whether a tensor on a device lies in runs that are long enough for separate copies."""
    run = tensor.itemsize
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size == 0:
            return True
        if size > 1 and stride * tensor.itemsize != run:
            return run >= _LEAST_RUN
        run *= size
    return True


def device_number(ready: int) -> int:
    """Returns the CUDA device of a flag of `TensorReads.ready`; -1 for none."""
    return ready - ON_DEVICE if ready >= ON_DEVICE else -1
