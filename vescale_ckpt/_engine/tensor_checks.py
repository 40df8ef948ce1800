"""Finds out which tensors the engine can read or fill directly, and copies other tensors to host memory for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import CheckpointError
from .torch_copies import to_host
from .torch_types import is_async_collective


def is_plain_tensor(value: object) -> bool:
    """Whether it is exactly a torch.Tensor or Parameter: no DTensor and no other subclass."""
    return type(value) is torch.Tensor or type(value) is torch.nn.Parameter


def holds_any(flat: Mapping[Any, Any], kind: tuple[type, ...]) -> bool:
    """Whether one of the values is an instance of `kind`. It checks each distinct type once."""
    return any(issubclass(type_, kind) for type_ in set(map(type, flat.values())))


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Whether the engine can use the tensor's memory directly: dense, on the CPU, without lazy conjugation or negation,
    and with a storage that is large enough (frameworks free and resize storages of living tensors)."""
    return (
        is_plain_tensor(tensor)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and (tensor.numel() == 0 or not tensor._is_zerotensor())
        and _is_backed(tensor)
    )


def _is_backed(tensor: torch.Tensor) -> bool:
    return reach(tensor) <= tensor.untyped_storage().nbytes()


def reach(tensor: torch.Tensor) -> int:
    """The number of bytes of its storage up to the end of a strided tensor."""
    elements = tensor.numel()
    if elements == 0:
        return 0
    if not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + elements) * tensor.itemsize


def overlapping(tensors: Sequence[torch.Tensor], numbers: Iterable[int] | None = None) -> list[int]:
    """The numbers of the tensors that overlap themselves: several elements are the same memory, as in expanded tensors
    and overlapping windows. Counts those, too, whose dimensions lie between each other, as only `as_strided` makes
    them. A load into such a tensor would keep only the last value that is written; `copy_` of torch refuses expanded
    tensors, too. `numbers`: those of tensors that may; all others are known to be contiguous."""
    numbers = range(len(tensors)) if numbers is None else numbers
    return [number for number in numbers if _overlaps_itself(tensors[number])]


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if not is_plain_tensor(tensor) or tensor.layout is not torch.strided:
        return False  # torch fills it and checks it itself
    if tensor.is_contiguous() or tensor.numel() == 0:
        return False
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    last = 0  # how far the dimensions before this one reach
    for stride, size in dims:
        if stride <= last:
            return True
        last += (size - 1) * stride
    return False


def can_be_filled(tensor: torch.Tensor) -> bool:
    """Whether `copy_` can write to a tensor that is not `is_host_memory`. True for subclasses, which check
    themselves."""
    if tensor.is_meta:  # there `copy_` does nothing, without an error
        return False
    return not is_plain_tensor(tensor) or tensor.layout is not torch.strided or _is_backed(tensor)


def as_host_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A tensor of the same values that is `is_host_memory`, and whether it is a copy.

    Raises `CheckpointError` for tensors whose values are not in one dense storage.
    """
    if is_host_memory(tensor):
        return tensor, False
    plain = dense(tensor)
    is_conj, is_neg = plain.is_conj(), plain.is_neg()
    if not (plain.is_cpu or is_conj or is_neg):
        return to_host(plain), True
    memory = plain.data_ptr()
    # What is lazy is done in host memory: not all backends of torch can do it while they copy.
    plain = torch._neg_view(plain) if is_neg else plain
    plain = (plain.conj() if is_conj else plain).to("cpu")
    plain = (plain.conj() if is_conj else plain).resolve_conj()
    plain = (torch._neg_view(plain) if is_neg else plain).resolve_neg()
    return plain, plain.data_ptr() != memory


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor, on its device. Waits for a collective that fills it.

    Raises `CheckpointError` for tensors whose values are not in one dense storage.
    """
    plain = tensor.detach()
    if is_async_collective(plain):
        plain = plain.wait()
    if plain.is_meta:
        raise CheckpointError("a tensor on the meta device has no values to store")
    if plain.is_nested:
        raise CheckpointError("a nested tensor has no shape: save the tensors that it is made of")
    if hasattr(plain, "__tensor_flatten__") or isinstance(plain, FakeTensor):
        raise CheckpointError(
            f"a {type(plain).__name__} cannot be stored as one tensor: save the tensors that it is made of"
        )
    if not is_plain_tensor(plain):
        plain = plain.as_subclass(torch.Tensor)
    if plain.layout is not torch.strided or plain.is_quantized:
        raise CheckpointError(f"a tensor of layout {plain.layout} and dtype {plain.dtype} cannot be stored: not dense")
    if plain._is_zerotensor() or not _is_backed(plain):
        raise CheckpointError("its storage was freed, or is smaller than the tensor: there are no values to store")
    return plain
