"""Allocates memory for tensors without memory, and finds shared (tied) weights, for loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

import torch

from .._engine import torch_private
from .._engine.tensor_checks import is_plain_tensor, reach
from .._engine.torch_types import dtensor_type, is_dtensor, sharded_tensor_type
from .._engine.wrapper_tensors import is_wrapper, map_inner
from .chunks import chunks_to_read, copy_protocol, tells_chunks
from .tensor_table import NOT_READY, PLAIN_TYPES, read_tensors


def allocate_targets(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns {key: new tensor} for each tensor on the meta device.

    The new tensor is on the CPU; a DTensor is on the device of its mesh, with the same placements. A ShardedTensor gets
    new shards on the CPU in place. Storages that were freed or never allocated are allocated in place. Shared weights
    on the meta device get one new tensor.
    """
    new: dict[str, torch.Tensor] = {}
    of_place: dict[Any, torch.Tensor] = {}
    dtensor, sharded = dtensor_type(), sharded_tensor_type()
    for key, value in _without_plain_memory(values):
        if isinstance(value, sharded):  # its own methods work only with exactly one shard
            for shard in value.local_shards():
                if shard.tensor.is_meta:
                    shard.tensor = torch.empty_like(shard.tensor, device="cpu")
                else:
                    _allocate(shard.tensor)
        elif isinstance(value, torch.Tensor):
            if value.is_meta:
                place = _place(key, value)
                new[key] = of_place[place] if place in of_place else _real(value)
                if place is not None:
                    of_place[place] = new[key]
            else:
                _allocate(value.to_local() if type(value) in dtensor else value)  # type: ignore[attr-defined]
    return new


def _without_plain_memory(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    plain = [value for value in values.values() if type(value) in PLAIN_TYPES]
    ready = read_tensors(plain).ready
    if NOT_READY not in ready and len(plain) == len(values):
        return []
    known = set(map(id, compress(plain, ready)))
    return [(key, value) for key, value in values.items() if id(value) not in known]


def find_shared(missing: Iterable[str], values: Mapping[str, Any]) -> dict[str, str]:
    """Returns {key of `missing`: other key of `values`} for shared (tied) weights: both have the same elements of the
    same memory. A file may hold shared weights under only one of their names."""
    absent = set(missing)
    if not absent:
        return {}
    kept: dict[Any, str] = {}
    for key, value in values.items():
        if key not in absent and (place := _place(key, value)) is not None:
            kept.setdefault(place, key)
    places = {key: _place(key, values.get(key)) for key in absent}
    return {key: kept[place] for key, place in places.items() if place in kept}


def _place(key: str, value: Any) -> Any:
    """Returns a value that is equal for tensors with the same elements of one storage, also on the meta device. None
    for values without a storage."""
    layout: Any = repr(chunks_to_read(key, value)[:2]) if tells_chunks(value, loading=True) else None
    if type(value) in dtensor_type():
        layout = layout, value.placements, value.shape
        value = torch_private.local_tensors([value])[0]
    if not is_plain_tensor(value) or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return None
    storage = torch_private.storage_identity(value)
    return storage, value.storage_offset(), value.shape, value.stride(), value.dtype, layout


def _real(value: torch.Tensor) -> torch.Tensor:
    real: torch.Tensor
    if is_dtensor(value):
        from torch.distributed.tensor import DTensor

        mesh, local = value.device_mesh, value.to_local()
        device = mesh.device_type
        if device not in ("cpu", "meta"):
            device = f"{device}:{torch.get_device_module(device).current_device()}"
        local = _empty(local, "cpu" if device == "meta" else device)
        real = DTensor.from_local(
            local, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    else:
        real = _empty(value, "cpu")
    if isinstance(value, torch.nn.Parameter):
        real = torch.nn.Parameter(real, requires_grad=value.requires_grad)
    copy_protocol(value, real)
    return real


def _empty(value: torch.Tensor, device: str) -> torch.Tensor:
    if is_wrapper(value):
        return map_inner(value, lambda inner: torch.empty_like(inner, device=device))
    return torch.empty_like(value, device=device)


def _allocate(tensor: torch.Tensor) -> None:
    if is_plain_tensor(tensor) and tensor.layout is torch.strided:
        storage, needed = tensor.untyped_storage(), reach(tensor)
        if storage.nbytes() < needed and storage.resizable():
            storage.resize_(needed)
