"""Replaces modules, optimizers and other stateful objects by their state for saves, and gives loaded state back to
them.

A module's state has its `state_dict()` names, without the prefixes of wrappers (DDP, `torch.compile`, FSDP1). An
optimizer's state has the names of the parameters if modules of the same state own them. Then a job that numbers its
parameters in another way, or shards them over other ranks, finds them by name.
`torch.distributed.checkpoint.state_dict` gives the same names. For any other object, `state_dict` and `load_state_dict`
are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from .._engine.torch_types import Stateful
from .flatten import flatten, with_forms
from .stateful_parts import Part, find_parts, stateful_objects
from .stored_entries import StoredEntries
from .structure import Path


def saved_form(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `state` with each module, optimizer and `Stateful` replaced by its state, at any depth of dicts and
    lists.

    Changes no object: an optimizer that has taken no step yet is saved with an empty state.
    """
    parts = find_parts(state)
    return with_forms(state, {part.path: part.form() for part in parts})


def optimizer_keys(state: Mapping[str, Any]) -> list[str]:
    """Returns the keys of all optimizers, and of wrappers of some."""
    return [".".join(map(str, path)) for path, value in stateful_objects(state, ()) if hasattr(value, "param_groups")]


def check_is_mapping(state: object, function: str) -> None:
    """Raises `TypeError` with advice if `state` is no mapping."""
    if isinstance(state, Mapping):
        return
    kind = type(state).__name__
    if isinstance(state, (torch.nn.Module, Optimizer, Stateful)):
        name = (
            "model" if isinstance(state, torch.nn.Module) else "optimizer" if isinstance(state, Optimizer) else "name"
        )
        path = f'{function}({"" if function == "prepare" else "path, "}{{"{name}": {name}}}'
        hint = f"{path})"
        if function == "load":
            hint += ", under the name by which it was saved"
            hint += f'; if that was its state_dict() alone, {path}, rename={{"{name}": ""}})'
    else:
        hint = f'such as {function}(..., {{"name": value}})'
    raise TypeError(f"state: expected a mapping of names to values, got a {kind}: {hint}")


class Application:
    """The stateful objects in a state that is being loaded.

    In `form`, the state of each object replaces the object. If possible, its tensors are the objects' own. After the
    load has filled `form`, `restore` gives the state back to the objects. `abandon` undoes the changes of `prepare`.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._stored: StoredEntries  # from `prepare` on
        self._parts: list[Part] = []
        self.form: dict[str, Any] = {}

    def prepare(self, stored: StoredEntries) -> None:
        """Makes `form`. Optimizers without state create it, because only an optimizer knows how its state is sharded.

        Optimizers ask for all that the checkpoint has of them.
        """
        self._parts = find_parts(self._state)
        self._stored = stored
        self.form = with_forms(self._state, {part.path: part.form_to_load(stored) for part in self._parts})

    def replace_targets(self, mismatched: Mapping[str, str]) -> bool:
        """Replaces targets in optimizers as `Part.replace_targets` does. Returns whether it has replaced one."""
        optimizers = [part for part in self._parts if part.is_optimizer]
        return any([part.replace_targets(self.form, mismatched, self._stored) for part in optimizers])

    def closed_prefixes(self, rename: Callable[[str, Path], str]) -> tuple[str, ...]:
        """Returns the checkpoint's prefixes of keys under which the form is complete: of modules, and of optimizers'
        state. `rename`: maps a key below a path of the state."""
        closed = [(part, part.complete_under) for part in self._parts]
        return tuple(rename(part.prefix + end, part.path) for part, end in closed if end is not None)

    def closes(self, path: tuple[Any, ...]) -> bool:
        """Whether the value at a path of `form` belongs to a module or optimizer."""
        return any(part.contains(path) for part in self._parts if part.is_optimizer or part.complete_under is not None)

    def owns(self, path: Path) -> bool:
        """Whether the value at a path of `form` belongs to one of the objects."""
        return any(part.contains(path) for part in self._parts)

    def restore(self, loaded: set[str]) -> None:
        """Gives `form` to the objects with at least one key in `loaded`. Modules come first."""
        for part in sorted(self._parts, key=lambda part: part.order):
            form: Any = self.form
            for name in part.path:
                form = form[name]
            keys = flatten({part.key: form})[0].keys()
            if not keys or part.key in loaded or not loaded.isdisjoint(keys):
                if part.is_optimizer:
                    form = self._stored.without_unread(form, part.key, loaded)
                part.restore(form, loaded)
            else:
                part.abandon()

    def abandon(self) -> None:
        for part in self._parts:
            part.abandon()
