"""Memory for tensors to load into that have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from .engine import is_plain_tensor, reach


def with_memory(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """For each tensor on the meta device a new one: on the CPU, a DTensor with the same placements on the device of its
    mesh. A ShardedTensor gets new shards, on the CPU. Storages that were freed, or never filled, are allocated in
    place."""
    new = {}
    for key, value in values.items():
        if isinstance(value, ShardedTensor):  # itself it knows what it is made of only if that is one shard
            for shard in value.local_shards():
                if shard.tensor.is_meta:
                    shard.tensor = torch.empty_like(shard.tensor, device="cpu")
                else:
                    _allocate(shard.tensor)
        elif isinstance(value, torch.Tensor):
            if value.is_meta:
                new[key] = _real(value)
            else:
                _allocate(value.to_local() if type(value) is DTensor else value)
    return new


def _real(value: torch.Tensor) -> torch.Tensor:
    real: torch.Tensor
    if isinstance(value, DTensor):
        mesh, local = value.device_mesh, value.to_local()
        device = mesh.device_type
        if device not in ("cpu", "meta"):
            device = f"{device}:{torch.get_device_module(device).current_device()}"
        local = torch.empty_like(local, device="cpu" if device == "meta" else device)
        real = DTensor.from_local(
            local, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    else:
        real = torch.empty_like(value, device="cpu")
    if isinstance(value, torch.nn.Parameter):
        real = torch.nn.Parameter(real, requires_grad=value.requires_grad)
    return real


def _allocate(tensor: torch.Tensor) -> None:
    if is_plain_tensor(tensor) and tensor.layout is torch.strided:
        storage, needed = tensor.untyped_storage(), reach(tensor)
        if storage.nbytes() < needed and storage.resizable():
            storage.resize_(needed)
