"""`Gate` makes optimizer steps wait until parameters and state were copied, while forward and backward run."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._engine import torch_private
from .._engine.rows import PART_ROW, words
from .._engine.tensor_checks import is_plain_tensor
from .._plan.save_plan import PackedItems
from .._state.tensor_table import PLAIN_TYPES
from .._state.watch import Watch, storages_of
from ..errors import CheckpointError, CheckpointTimeoutError

# What each optimizer has to wait for before its next step. Hooks stay: one that is removed while hooks run breaks them.
_waited_for: WeakKeyDictionary[Optimizer, list[Future[None]]] = WeakKeyDictionary()
_copies: set[Future[None]] = set()  # of this process, while they go on


class Gate:
    """One or more optimizers, whose steps wait while an asynchronous save copies what they change: `save(gate=…)`.

    Args:
        optimizers: one, or several.
        allow_capturable: an optimizer with `capturable=True` is made for CUDA graphs. A graph that is replayed runs no
            hook, so that its step does not wait, and no version counter tells of it: the save would be torn and nobody
            would know. So such an optimizer is refused. True takes it: then either no step is replayed from a graph, or
            the training loop itself waits for `handle.staged` before it replays one.
    """

    def __init__(self, optimizers: Optimizer | Iterable[Optimizer], *, allow_capturable: bool = False) -> None:
        if not isinstance(optimizers, (Optimizer, Iterable)):
            raise TypeError(f"gate: a torch.optim.Optimizer is wanted, or several, not {type(optimizers).__name__}")
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"gate: a torch.optim.Optimizer is wanted, not {type(optimizer).__name__}")
            if not allow_capturable and any(group.get("capturable") for group in optimizer.param_groups):
                raise ValueError(
                    f"gate: {type(optimizer).__name__} has capturable=True. A step that is replayed from a CUDA graph "
                    "does not wait for the copy, and nothing tells of it. If no step is replayed before handle.staged "
                    "is done, say so: gate=vescale_ckpt.Gate(optimizer, allow_capturable=True)"
                )


class GatedCopy:
    """What one save copies behind a gate: tensors that only steps of the optimizers change, parameters and what is kept
    for them. One that is changed by anything else while it is copied is found, and the save is refused."""

    def __init__(self, gate: Gate) -> None:
        self._optimizers = gate.optimizers
        self._names: list[str] = []
        self._watch = Watch([])

    def rows(self, items: PackedItems, candidates: Sequence[int]) -> list[int]:
        """Those of some rows of a part that may be copied later, which from now on are watched."""
        own = self._own_tensors()
        uncounted = {place for place, tensor, _ in own if tensor.is_inference()}  # no counter tells of these
        places = {place for place, _, _ in own} - uncounted
        # A name by `.data` has a counter of its own, which tells nothing of a change of the parameter.
        by_address: dict[int, list[torch.Tensor]] = {}
        for place, tensor, address in own:
            if place in places:
                by_address.setdefault(address, []).append(tensor)
        description = items.description
        storages = _places(description.tensors)
        counted = map(operator.not_, map(torch.Tensor.is_inference, description.tensors))
        guarded = [place in places and is_counted for place, is_counted in zip(storages, counted, strict=True)]
        part = words(items.part)
        rows, watched, key_of_storage = [], dict[int, list[torch.Tensor]](), dict[int, str]()
        for row in candidates:
            item = part[row * PART_ROW]
            number = description.tensor_number(item)
            if not guarded[number]:
                continue
            rows.append(row)
            if number not in watched:
                tensor, key = description.tensors[number], description.names[item]
                watched[number] = [tensor, *by_address.pop(tensor.data_ptr(), [])]
                if number in description.wrappers:
                    watched[number].append(description.wrappers[number])
                self._names += [key] * len(watched[number])
                key_of_storage.setdefault(storages[number], key)
        others = [
            (tensor, f"what the optimizer has in the memory of {key_of_storage[place]}")
            for place, tensor, address in own
            if place in key_of_storage and address in by_address
        ]
        self._names += [name for _, name in others]
        self._watch = Watch([*chain.from_iterable(watched.values()), *(tensor for tensor, _ in others)])
        return rows

    def _own_tensors(self) -> list[tuple[int, torch.Tensor, int]]:
        """Of the optimizers, each with its storage and address. A DTensor and what it holds here count each alone."""
        tensors = list(chain.from_iterable(map(_tensors, self._optimizers)))
        local = tensors
        if any(issubclass(kind, DTensor) for kind in set(map(type, tensors))):
            local = [
                torch_private.local_tensors([tensor])[0] if isinstance(tensor, DTensor) else tensor
                for tensor in tensors
            ]
        return [
            (place, part, here.data_ptr())
            for place, tensor, here in zip(_places(local), tensors, local, strict=True)
            if place
            for part in ((here,) if tensor is here else (here, tensor))
        ]

    def close(self, staged: Future[None]) -> None:
        """Lets steps, and loads of this process, wait for `staged`."""
        _copies.add(staged)
        staged.add_done_callback(_copies.discard)
        for optimizer in self._optimizers:
            if optimizer not in _waited_for:
                optimizer.register_step_pre_hook(_wait)
            _waited_for.setdefault(optimizer, []).append(staged)

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` naming what was changed since `rows`; lets go of the tensors."""
        watch, self._watch = self._watch, Watch([])
        if changed := watch.changed():
            key = self._names[changed[0]]
            raise CheckpointError(
                f"{key} was changed while it was copied, or its memory was, by something else than a step of the "
                "optimizer that is the save's gate: nothing is committed",
                key=key,
            )


def wait_until_copied(phase: str, timeout: float) -> None:
    """Returns when no save of this process copies a state any more. Raises `CheckpointTimeoutError` with `phase`."""
    for staged in list(_copies):
        try:
            staged.exception(timeout)  # what went wrong is told by the save's handle
        except futures.TimeoutError:
            raise CheckpointTimeoutError(phase, [], f"{phase}: not done after {timeout:.0f} s") from None


def _wait(optimizer: Optimizer, *_: Any) -> None:
    for staged in _waited_for.pop(optimizer, []):
        staged.exception()  # waits; what went wrong is told by the save's handle, not by training
    _waited_for[optimizer] = []


def _forget_after_fork() -> None:
    """Copies that go on are the parent's, which has their threads."""
    _copies.clear()
    for optimizer in list(_waited_for):
        _waited_for[optimizer] = []


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The address of the memory that each lies in; 0 where that cannot be known: of sparse tensors and subclasses."""
    places = list(map(torch.UntypedStorage.data_ptr, storages_of(tensors)))
    if set(map(type, tensors)) <= set(PLAIN_TYPES):
        return places
    return [place if is_plain_tensor(tensor) else 0 for place, tensor in zip(places, tensors, strict=True)]


os.register_at_fork(after_in_child=_forget_after_fork)
