"""Finds targets that lie in the same memory, and decides for loads which of them is loaded.

A load fills tensors in any order and in several threads. Two targets in the same memory would become a mixture of both
values. Stock DCP fills one after the other, so the last one counts. So here only the last of equal targets is loaded,
and targets that overlap in part are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from .._engine.tensor_checks import is_plain_tensor
from .._engine.torch_private import local_tensors
from .._engine.torch_types import dtensor_type, is_sharded_tensor
from ..errors import CheckpointError
from .shared_memory import sharing_memory
from .state import State

logger = logging.getLogger(__name__)

_MOST_RUNS = 1 << 24  # of a tensor whose memory is compared with that of others


def replaced_targets(state: State, stored_alike: Callable[[str, str], bool]) -> set[str]:
    """Returns the keys that are not loaded, because the tensors of a later key are the same memory.

    Warns of each of them, unless it has the layout of the later key and `stored_alike` says that both are stored with
    equal bytes. Raises `CheckpointError` with both keys for targets that overlap in part.
    """
    groups = state.for_engine.items_that_share_memory()
    if not groups:
        return set()
    left_out: set[str] = set()
    for group in groups:
        tensors: dict[str, dict[int, torch.Tensor]] = {}
        for item in group:
            index = state.tensor_index(item)
            tensors.setdefault(state.names[item], {})[index] = state.tensors[index]
        left_out |= _replaced({name: list(found.values()) for name, found in tensors.items()}, stored_alike)
    return left_out


def replaced_in_state(
    state: Mapping[str, Any], loaded: Container[str], stored_alike: Callable[[str, str], bool]
) -> set[str]:
    """Returns the same for a state that is not described. `loaded`: the keys that are loaded."""
    tensors: dict[tuple[str, int], torch.Tensor] = {}
    for key, value in state.items():
        if key in loaded:
            tensors.update({(key, index): tensor for index, tensor in enumerate(_memory_of(value))})
    left_out: set[str] = set()
    for group in sharing_memory(tensors):
        members, found = set(group), dict[str, list[torch.Tensor]]()
        for name in filter(members.__contains__, tensors):  # keeps the order of the state, not of addresses
            found.setdefault(name[0], []).append(tensors[name])
        left_out |= _replaced(found, stored_alike)
    return left_out


def _memory_of(value: Any) -> Sequence[torch.Tensor]:
    if is_sharded_tensor(value):
        return [shard.tensor for shard in value.local_shards()]
    if type(value) in dtensor_type():
        value = local_tensors([value])[0]
    return [value] if is_plain_tensor(value) and value.layout is torch.strided else []


def _replaced(group: Mapping[str, Sequence[torch.Tensor]], stored_alike: Callable[[str, str], bool]) -> set[str]:
    """Returns the keys of one group that are not loaded. `group`: {key: tensors}, which may overlap."""
    if len(group) < 2:
        return set()
    equal: dict[tuple[int, int, int], list[tuple[torch.Tensor, list[str]]]] = {}  # [(memory, keys with this memory)]
    for key, tensors in group.items():
        memory = _merged([_runs(tensor, key) for tensor in tensors])
        alike = equal.setdefault((len(memory), int(memory[0, 0]), int(memory[-1, 1])), [])
        keys = next((keys for runs, keys in alike if torch.equal(runs, memory)), None)
        if keys is None:
            alike.append((memory, keys := []))
        keys.append(key)
    found = [(runs, keys) for alike in equal.values() for runs, keys in alike]
    _refuse_overlap([runs for runs, _ in found], [keys[-1] for _, keys in found])
    left_out = [(key, keys[-1]) for _, keys in found for key in keys[:-1]]
    for key, last in left_out:
        if list(map(_layout, group[key])) != list(map(_layout, group[last])) or not stored_alike(key, last):
            logger.warning(
                "%s and %s are the same memory in the state to load into, but may be stored with different values: "
                "both get the value of %s",
                key,
                last,
                last,
            )
    return {key for key, _ in left_out}


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _runs(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """Returns the ranges of memory that hold the elements of a tensor, in any order, as rows (first byte, end)."""
    length, many = tensor.itemsize, 1
    starts = torch.tensor([tensor.data_ptr()], dtype=torch.int64, device="cpu")
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size == 1 or stride == 0:
            continue
        if many == 1 and stride * tensor.itemsize == length:
            length *= size
            continue
        many *= size
        if many > _MOST_RUNS:
            raise CheckpointError(
                f"{key}: the tensor to load into lies in the same memory as others, in too many pieces to find out "
                "whether they overlap: load into a clone of it",
                key=key,
            )
        places = torch.arange(size, dtype=torch.int64, device="cpu") * (stride * tensor.itemsize)
        starts = (starts.unsqueeze(-1) + places).flatten()
    return torch.stack([starts, starts + length], dim=1)


def _merged(runs: list[torch.Tensor]) -> torch.Tensor:
    """Returns the same memory in ascending order, as few ranges as possible."""
    starts, order = torch.cat([part[:, 0] for part in runs]).sort()
    ends = torch.cat([part[:, 1] for part in runs])[order].cummax(dim=0).values
    apart = starts[1:] > ends[:-1]
    edge = torch.ones(1, dtype=torch.bool, device="cpu")
    return torch.stack([starts[torch.cat([edge, apart])], ends[torch.cat([apart, edge])]], dim=1)


def _refuse_overlap(memory: list[torch.Tensor], keys: list[str]) -> None:
    starts, order = torch.cat([runs[:, 0] for runs in memory]).sort()
    ends = torch.cat([runs[:, 1] for runs in memory])[order]
    overlap = (starts[1:] < ends[:-1]).nonzero()  # if any two ranges overlap, two neighbours do
    if len(overlap):
        owners = torch.cat([torch.full((len(runs),), at, device="cpu") for at, runs in enumerate(memory)])[order]
        at = int(overlap[0])
        first, second = keys[int(owners[at])], keys[int(owners[at + 1])]
        raise CheckpointError(
            f"{first} and {second}: the tensors to load into overlap in part, so that not both values would be whole: "
            "load into a clone of one of them",
            key=first,
        )
