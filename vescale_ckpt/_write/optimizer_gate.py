"""`Gate` makes optimizer steps wait until an asynchronous save has copied parameters and optimizer state."""

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
from torch.optim import Optimizer

from .._engine import torch_private
from .._engine.tensor_checks import is_plain_tensor
from .._engine.torch_types import dtensor_type
from .._plan.local_plan import LocalPlan
from .._state.tensor_table import PLAIN_TYPES
from .._state.watch import Watch, storages_of
from ..errors import CheckpointError, CheckpointTimeoutError

logger = logging.getLogger(__name__)

# The copies that each optimizer's next step waits for. Hooks are never removed: that is not safe while hooks run.
_waited_for: WeakKeyDictionary[Optimizer, list[Future[None]]] = WeakKeyDictionary()
_copies: set[Future[None]] = set()  # the running copies of this process


class Gate:
    """Optimizers whose next step waits until an asynchronous save has copied what they update: `save(gate=…)`.

    Args:
        optimizers: one optimizer, or several.
        allow_capturable: whether to accept optimizers with `capturable=True`, which are meant for CUDA graphs. The
            replay of a graph runs no hook, so the step does not wait, and increments no version counter, so the save
            would mix values of two steps without an error. Pass True only if no step is replayed from a graph, or if
            the training loop itself waits for `handle.staged` before a replay.

    Raises:
        TypeError: an element is not a `torch.optim.Optimizer`.
        ValueError: an optimizer has `capturable=True`, and `allow_capturable` is False.
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
    """Returns `gate`, with optimizers wrapped into a `Gate`."""
    return gate if gate is None or isinstance(gate, Gate) else Gate(gate)


class GatedCopy:
    """The tensors that one save copies in the background: parameters and optimizer state, which only steps of the
    gate's optimizers may change. If anything else changes one before it is copied, the save fails."""

    def __init__(self, gate: Gate) -> None:
        self._optimizers = gate.optimizers
        self._watch = Watch([], [])

    def rows(self, plan: LocalPlan, candidates: Sequence[int]) -> list[int]:
        """Returns the rows of `candidates` that may be copied later. Their tensors are watched from now on."""
        own = self._own_tensors()
        uncounted = {place for place, tensor, _ in own if tensor.is_inference()}  # without a version counter
        places = {place for place, _, _ in own} - uncounted
        # A tensor made by `.data` has its own counter, which a change of the parameter does not increment.
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
        """Returns (address of the storage, tensor, address of the data) for the optimizers' tensors. A DTensor and its
        local tensor are two entries."""
        tensors = list(chain.from_iterable(map(_tensors, self._optimizers)))
        local, dtensor = tensors, dtensor_type()
        if any(issubclass(kind, dtensor) for kind in set(map(type, tensors))):
            local = [
                torch_private.local_tensors([tensor])[0] if isinstance(tensor, dtensor) else tensor
                for tensor in tensors
            ]
        return [
            (place, part, here.data_ptr())
            for place, tensor, here in zip(_places(local), tensors, local, strict=True)
            if place
            for part in ((here,) if tensor is here else (here, tensor))
        ]

    def close(self, staged: Future[None]) -> None:
        """Makes the optimizers' steps, and loads of this process, wait for `staged`."""
        _copies.add(staged)
        staged.add_done_callback(_copies.discard)
        for optimizer in self._optimizers:
            if optimizer not in _waited_for:
                optimizer.register_step_pre_hook(_wait)
            _waited_for.setdefault(optimizer, []).append(staged)

    def check_unchanged(self) -> None:
        """Raises a `CheckpointError` that names a tensor changed since `rows` was called. Releases the tensors."""
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
    """Waits until no save of this process is copying a state. Raises `CheckpointTimeoutError` with `phase`."""
    for staged in list(_copies):
        try:
            staged.exception(timeout)  # the save's handle reports the error
        except futures.TimeoutError:
            raise CheckpointTimeoutError(phase, [], f"{phase}: not done after {timeout:.0f} s") from None


# The host waits, not the CUDA streams. On the device, a step starts after the copies either way; waiting on the stream
# would only let the host run ahead by the time to queue one step. In exchange, all copies would have to be queued at
# once (now three groups are in flight), none could be cancelled, and version counters could not be compared after the
# copies, because the step would have incremented them.
def _wait(optimizer: Optimizer, *_: Any) -> None:
    waiting = _waited_for.get(optimizer, [])
    while waiting:  # removed one by one: if Ctrl-C ends the wait, the next step waits again
        waiting[0].exception()  # waits; the save's handle reports the error, not the step
        del waiting[0]


def _forget_after_fork() -> None:
    """Forgets running copies in a forked child: their threads exist only in the parent."""
    _copies.clear()
    for optimizer in list(_waited_for):
        _waited_for[optimizer] = []


def _tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the address of each tensor's storage; 0 if unknown (sparse tensors, subclasses)."""
    places = list(map(torch.UntypedStorage.data_ptr, storages_of(tensors)))
    if set(map(type, tensors)) <= set(PLAIN_TYPES):
        return places
    return [place if is_plain_tensor(tensor) else 0 for place, tensor in zip(places, tensors, strict=True)]


os.register_at_fork(after_in_child=_forget_after_fork)
