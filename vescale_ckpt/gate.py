"""Gates: optimizers whose steps wait until parameters and state were copied, while forward and backward run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from . import stock
from .errors import CheckpointError
from .packed import PART_ROW, PackedItems, words

# What each optimizer has to wait for before its next step. Hooks stay: one that is removed while hooks run breaks them.
_waited_for: WeakKeyDictionary[Optimizer, list[Future[None]]] = WeakKeyDictionary()


class Gate:
    """One or more optimizers, for one save.

    They guard the tensors that only their steps change: parameters and what they keep for them. A tensor that is
    changed by anything else while it is copied is found by its version counter, and the save is refused.
    """

    def __init__(self, gate: Optimizer | Iterable[Optimizer]) -> None:
        self._optimizers = [gate] if isinstance(gate, Optimizer) else list(gate)
        for optimizer in self._optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"gate: a torch.optim.Optimizer is wanted, not {type(optimizer).__name__}")
        self._watched: list[tuple[str, torch.Tensor, int]] = []  # key, tensor, version

    def rows(self, items: PackedItems, candidates: Sequence[int]) -> list[int]:
        """Those of some rows of a part that may be copied later, which from now on are watched."""
        storages = {_storage(tensor) for optimizer in self._optimizers for tensor in _tensors(optimizer)}
        description = items.description
        guarded = [_storage(tensor) in storages and not tensor.is_inference() for tensor in description.tensors]
        part = words(items.part)
        rows, seen = [], set()
        for row in candidates:
            item = part[row * PART_ROW]
            number = description.tensor_number(item)
            if not guarded[number]:
                continue
            rows.append(row)
            if number not in seen:
                seen.add(number)
                tensor = description.tensors[number]
                self._watched.append((description.names[item], tensor, tensor._version))
        return rows

    def close(self, staged: Future[None]) -> None:
        """Lets steps wait for `staged`."""
        for optimizer in self._optimizers:
            if optimizer not in _waited_for:
                optimizer.register_step_pre_hook(_wait)
            _waited_for.setdefault(optimizer, []).append(staged)

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` naming what was changed since `rows`; lets go of the tensors."""
        watched, self._watched = self._watched, []
        for key, tensor, version in watched:
            if tensor._version != version:
                raise CheckpointError(
                    f"{key} was changed while it was copied, by something else than a step of the optimizer that is "
                    "the save's gate: nothing is committed",
                    key=key,
                )


def _wait(optimizer: Optimizer, *_: Any) -> None:
    for staged in _waited_for.pop(optimizer, []):
        staged.exception()  # waits; what went wrong is told by the save's handle, not by training
    _waited_for[optimizer] = []


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        (tensor,) = stock.local_tensors([tensor])
    return tensor.untyped_storage().data_ptr()
