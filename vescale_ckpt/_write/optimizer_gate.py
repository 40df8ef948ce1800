"""`Gate` makes optimizer steps wait until an asynchronous save has copied parameters and state."""

from __future__ import annotations

import logging
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
from .._engine.tensor_checks import is_plain_tensor
from .._plan.local_plan import LocalPlan
from .._state.tensor_table import PLAIN_TYPES
from .._state.watch import Watch, storages_of
from ..errors import CheckpointError, CheckpointTimeoutError

logger = logging.getLogger(__name__)

# What each optimizer waits for before its next step. Hooks stay: a hook must not be removed while hooks run.
_waited_for: WeakKeyDictionary[Optimizer, list[Future[None]]] = WeakKeyDictionary()
_copies: set[Future[None]] = set()  # those of this process that go on


class Gate:
    """One or more optimizers, whose steps wait while an asynchronous save copies what they change: `save(gate=…)`.

    Args:
        optimizers: one, or several.
        allow_capturable: whether optimizers with `capturable=True` are accepted. They are made for CUDA graphs. The
            replay of a graph runs no hook, so its step does not wait, and it raises no version counter: the save would
            mix values of two steps without an error. With True, either no step is replayed from a graph, or the
            training loop itself waits for `handle.staged` before a replay.
    """

    def __init__(self, optimizers: Optimizer | Iterable[Optimizer], *, allow_capturable: bool = False) -> None:
        if not isinstance(optimizers, (Optimizer, Iterable)):
            raise TypeError(f"gate: expected a torch.optim.Optimizer or several, got {type(optimizers).__name__}")
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"gate: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
            if not allow_capturable and any(group.get("capturable") for group in optimizer.param_groups):
                raise ValueError(
                    f"gate: {type(optimizer).__name__} has capturable=True. A step that is replayed from a CUDA graph "
                    "does not wait for the copy, and nothing tells of it. If no step is replayed before handle.staged "
                    "is done, say so: gate=vescale_ckpt.Gate(optimizer, allow_capturable=True)"
                )


def as_gate(gate: Optimizer | Iterable[Optimizer] | Gate | None) -> Gate | None:
    """The gate that a caller has given, or one of the optimizers."""
    return gate if gate is None or isinstance(gate, Gate) else Gate(gate)


class GatedCopy:
    """The tensors that one save copies behind a gate: parameters and optimizer state, which only steps of the
    optimizers change. If anything else changes one while it is copied, the save fails."""

    def __init__(self, gate: Gate) -> None:
        self._optimizers = gate.optimizers
        self._watch = Watch([], [])

    def rows(self, plan: LocalPlan, candidates: Sequence[int]) -> list[int]:
        """The rows of `candidates` that may be copied later. Their tensors are watched from now on."""
        own = self._own_tensors()
        uncounted = {place for place, tensor, _ in own if tensor.is_inference()}  # these have no version counter
        places = {place for place, _, _ in own} - uncounted
        # A tensor made by `.data` has its own counter, which does not rise when the parameter changes.
        by_address: dict[int, list[torch.Tensor]] = {}
        for place, tensor, address in own:
            if place in places:
                by_address.setdefault(address, []).append(tensor)
        state = plan.state
        storages = _places(state.tensors)
        counted = map(operator.not_, map(torch.Tensor.is_inference, state.tensors))
        guarded = [place in places and is_counted for place, is_counted in zip(storages, counted, strict=True)]
        if own and guarded and not any(guarded):
            logger.warning("gate: no tensor of the state belongs to the optimizers: all is copied before save returns")
        rows, names, watched, key_of_storage = [], list[str](), dict[int, list[torch.Tensor]](), dict[int, str]()
        for row in candidates:
            item = plan.item(row)
            index = state.tensor_index(item)
            if not guarded[index]:
                continue
            rows.append(row)
            if index not in watched:
                tensor, key = state.tensors[index], state.names[item]
                watched[index] = [tensor, *by_address.pop(tensor.data_ptr(), [])]
                if index in state.wrappers:
                    watched[index].append(state.wrappers[index])
                names += [key] * len(watched[index])
                key_of_storage.setdefault(storages[index], key)
        others = [
            (tensor, f"what the optimizer has in the memory of {key_of_storage[place]}")
            for place, tensor, address in own
            if place in key_of_storage and address in by_address
        ]
        tensors = [*chain.from_iterable(watched.values()), *(tensor for tensor, _ in others)]
        self._watch = Watch([*names, *(name for _, name in others)], tensors)
        return rows

    def _own_tensors(self) -> list[tuple[int, torch.Tensor, int]]:
        """The optimizers' tensors, each with its storage and address. A DTensor and its local tensor are two
        entries."""
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
        """Makes steps of the optimizers and loads of this process wait for `staged`."""
        _copies.add(staged)
        staged.add_done_callback(_copies.discard)
        for optimizer in self._optimizers:
            if optimizer not in _waited_for:
                optimizer.register_step_pre_hook(_wait)
            _waited_for.setdefault(optimizer, []).append(staged)

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` that names a tensor that was changed since `rows`. Releases the tensors."""
        watch, self._watch = self._watch, Watch([], [])
        if (name := watch.changed()) is not None:
            raise changed_behind_gate(name)


def changed_behind_gate(key: str) -> CheckpointError:
    return CheckpointError(
        f"{key} was changed while it was copied, or its memory was, by something else than a step of the optimizer "
        "that is the save's gate: nothing is committed",
        key=key,
    )


def wait_until_copied(phase: str, timeout: float) -> None:
    """Waits until no save of this process copies a state. Raises `CheckpointTimeoutError` with `phase`."""
    for staged in list(_copies):
        try:
            staged.exception(timeout)  # the save's handle reports the error
        except futures.TimeoutError:
            raise CheckpointTimeoutError(phase, [], f"{phase}: not done after {timeout:.0f} s") from None


# The host waits, not the streams of CUDA devices. A step that is queued behind the copies starts no earlier than one
# that is queued after them: the host would only keep its lead over the device, the time to queue a step. In exchange
# all copies would have to be queued at once (three groups are in flight now), none of them could be cancelled, and
# version counters could no longer be compared after the copies: the step would have raised them.
def _wait(optimizer: Optimizer, *_: Any) -> None:
    waiting = _waited_for.get(optimizer, [])
    while waiting:  # removed one by one: Ctrl-C may end the wait, and the next step has to wait again
        waiting[0].exception()  # waits; the save's handle reports the error, not the step
        del waiting[0]


def _forget_after_fork() -> None:
    """Forgets running copies in a forked child: their threads are in the parent."""
    _copies.clear()
    for optimizer in list(_waited_for):
        _waited_for[optimizer] = []


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The address of each tensor's storage; 0 for sparse tensors and subclasses, where it is not known."""
    places = list(map(torch.UntypedStorage.data_ptr, storages_of(tensors)))
    if set(map(type, tensors)) <= set(PLAIN_TYPES):
        return places
    return [place if is_plain_tensor(tensor) else 0 for place, tensor in zip(places, tensors, strict=True)]


os.register_at_fork(after_in_child=_forget_after_fork)
