"""Finds tensors that share memory, for formats that store each tensor once, under one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .._engine import _C
from .._engine.rows import OBJECT
from .._engine.tensor_checks import is_plain_tensor, reach
from ..errors import some

if TYPE_CHECKING:
    from .state import State
    from .tensor_table import TensorReads

_Name = TypeVar("_Name", str, tuple[str, int])


def shared_names(state: State) -> dict[str, str]:
    """Returns {key: first key} of shared (tied) weights: keys whose tensor is the same memory as that of an earlier
    key. The first key is stored.

    Raises RuntimeError for tensors that share memory but differ in any trait.
    """
    groups = state.for_engine.items_that_share_memory()
    if not groups:
        return {}
    names = state.names
    involved = {names[item] for group in groups for item in group}
    traits: dict[str, list[Any]] = {name: [] for name in involved}
    for item, name in enumerate(names):
        if name in involved:
            traits[name].append(_traits(state, item))
    shared: dict[str, str] = {}
    refused = []
    for group in groups:
        of_group = list(dict.fromkeys(names[item] for item in group))
        kept, *others = of_group
        if all(traits[other] == traits[kept] for other in others):
            shared.update(dict.fromkeys(others, kept))
        else:
            refused.append(of_group)
    if refused:
        raise shared_memory_error(refused)
    return shared


def share_no_memory(names: list[str], reads: TensorReads) -> bool:
    """Whether no two of these tensors overlap, which must be ready. False for a dtype that cannot be stored, too."""
    described = _C.inventory_of_tensors(names, reads.table, reads.requires_grad, [], 0)
    if described is None:
        return False
    return not _C.State(*described, reads.table, reads.ready).items_that_share_memory()


def empty_duplicates(state: State) -> set[str]:
    """Returns the keys of which this rank has only empty chunks, without the first key of each shape and dtype.

    An empty chunk has no memory that shows whether the tensor shares weights. If it does, other ranks do not store it
    under this key, so this rank must not store it, either. If it does not, other ranks hold all elements, and leaving
    out the empty chunk loses nothing.
    """
    if all(tensor.numel() for tensor in state.tensors):
        return set()
    kinds: dict[str, tuple[Any, ...] | None] = {}
    for name, (_, kind, dtype, _, _, shape, _, size) in zip(state.names, state.items, strict=True):
        is_empty = kind != OBJECT and 0 in size and 0 not in shape
        kinds[name] = (dtype, shape) if is_empty and kinds.get(name, ()) is not None else None
    first: dict[tuple[Any, ...], str] = {}
    return {name for name, kind in kinds.items() if kind is not None and first.setdefault(kind, name) != name}


def _traits(state: State, item: int) -> tuple[Any, ...]:
    _, _, dtype, _, _, shape, offset, size = state.items[item]
    tensor, local_offset = state.source(item)
    memory = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return dtype, shape, offset, size, memory, local_offset


def sharing_memory(tensors: Mapping[_Name, torch.Tensor]) -> list[list[_Name]]:
    """Returns groups of tensors whose memory overlaps between first and last byte. Disjoint parts of one storage do not
    overlap."""
    ranges: dict[torch.device, list[tuple[int, int, _Name]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() != 0 and is_plain_tensor(tensor) and not tensor.is_meta:
            start = tensor.data_ptr()
            stop = start - int(tensor.storage_offset()) * tensor.itemsize + reach(tensor)
            ranges.setdefault(tensor.device, []).append((start, stop, name))
    groups: list[list[_Name]] = []
    for of_device in ranges.values():
        end = 0
        for start, stop, name in sorted(of_device):
            if start < end:
                groups[-1].append(name)
            else:
                groups.append([name])
            end = max(end, stop)
    return [group for group in groups if len(group) > 1]


def shared_memory_error(groups: Sequence[Sequence[str]]) -> RuntimeError:
    return RuntimeError(
        f"tensors that share memory would be stored separately, and would share no memory after a load: "
        f"{'; '.join(some(group) for group in groups)}. Save one of each group and tie the others again after "
        "loading, or save copies (clone())"
    )
