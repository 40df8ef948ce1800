"""Replaces modules, optimizers and other stateful objects by their state for saves, and gives loaded state back to
them.

A module's state has its `state_dict()` names, without the prefixes of wrappers (DDP, `torch.compile`, FSDP1). An
optimizer's state has the names of the parameters if modules of the same state own them. Then a job that numbers its
parameters in another way, or shards them over other ranks, finds them by name.
`torch.distributed.checkpoint.state_dict` gives the same names. For any other object, `state_dict` and `load_state_dict`
are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .flatten import flatten
from .key_selection import same_key
from .modules import form_of, give_form
from .optimizer_groups import StoredNames, renamed_if_known
from .optimizers import OptimizerState
from .per_rank import PerRank
from .structure import Path

# These types are known to be no `Stateful`. A check against a protocol takes ten microseconds: for a flat dictionary,
# that is more than planning takes.
_LEAVES = frozenset(
    {torch.Tensor, torch.nn.Parameter, DTensor, ShardedTensor, PerRank}
    | {int, float, str, bool, bytes, type(None), tuple, set}
)


def saved_form(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `state` with each module, optimizer and `Stateful` replaced by its state, at any depth of dicts and
    lists.

    Changes no object: an optimizer that has taken no step yet is saved with an empty state.
    """
    parts = _find(state)
    return with_forms(state, {part.path: part.form() for part in parts})


def optimizer_keys(state: Mapping[str, Any]) -> list[str]:
    """Returns the keys of all optimizers, and of wrappers of some."""
    return [".".join(map(str, path)) for path, value in _objects(state, ()) if hasattr(value, "param_groups")]


def trained_tensors(state: Mapping[str, Any], optimizers: Iterable[Optimizer]) -> dict[str, torch.Tensor]:
    """Returns {name: tensor} of all tensors that training may change: in `state`, in its modules and optimizers, and in
    `optimizers`."""
    found: dict[str, torch.Tensor] = {}
    parts = _find(state)
    for part in parts:
        if isinstance(part, _ModulePart):
            found.update({part.prefix + name: tensor for name, tensor in part.value.named_parameters()})
    for optimizer in (*optimizers, *(part.value for part in parts if isinstance(part, _OptimizerPart))):
        for index, tensor in enumerate(tensor for group in optimizer.param_groups for tensor in group["params"]):
            found.setdefault(f"parameter {index} of a {type(optimizer).__name__}", tensor)
    values, _ = flatten(with_forms(state, {part.path: {} for part in parts}))
    return {**found, **{key: value for key, value in values.items() if isinstance(value, torch.Tensor)}}


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
        self._parts: list[_Part] = []
        self.form: dict[str, Any] = {}

    def prepare(self) -> None:
        """Makes `form`. Optimizers without state create it, because only an optimizer knows the tensors of its
        state."""
        self._parts = _find(self._state)
        self.form = with_forms(self._state, {part.path: part.form_to_load() for part in self._parts})

    def closed_prefixes(self, rename: Callable[[str, Path], str]) -> tuple[str, ...]:
        """Returns the checkpoint's prefixes of keys under which the form is complete: of modules, and of optimizers'
        state. `rename`: maps a key below a path of the state."""
        modules = [(part.prefix, part.path) for part in self._parts if isinstance(part, _ModulePart)]
        optimizers = [(f"{part.prefix}state.", part.path) for part in self._parts if isinstance(part, _OptimizerPart)]
        return tuple(rename(prefix, path) for prefix, path in (*modules, *optimizers))

    def ask_for_all_groups(self, stored: AbstractSet[str], rename: Callable[[str, Path], str]) -> None:
        """Changes the optimizers in `form` to ask for all stored parameter groups. `stored`: the keys of the
        checkpoint. `rename`: maps a key below a path of the state to its key in the checkpoint."""
        for part in self._parts:
            if isinstance(part, _OptimizerPart):
                part.ask_for_all_groups(stored, partial(lambda path, key: rename(key, path), part.path))

    def drop_absent_state(self, stored: AbstractSet[str]) -> None:
        """Changes the optimizers in `form` to ask only for stored state. `stored`: the keys of the checkpoint.

        - Parameters get numbers if the stored keys have numbers and no names: then a plain `optimizer.state_dict()` was
          saved.
        - The state of a parameter is left out if the parameter is stored without any state: it had no state when the
          optimizer was saved, and gets it at its first step.
        """
        for part in self._parts:
            if isinstance(part, _OptimizerPart):
                part.drop_absent_state(stored)

    def number_as_stored(self, stored: AbstractSet[str], rename: Callable[[str], str]) -> None:
        """Numbers the parameters of optimizers in `form` whose state is stored by numbers, under renamed keys."""
        for part in self._parts:
            if isinstance(part, _OptimizerPart):
                part.number_as_stored(stored, rename)

    def closes(self, path: tuple[Any, ...]) -> bool:
        """Whether the value at a path of `form` belongs to a module or optimizer."""
        return any(part.contains(path) for part in self._parts if isinstance(part, (_ModulePart, _OptimizerPart)))

    def owns(self, path: Path) -> bool:
        """Whether the value at a path of `form` belongs to one of the objects."""
        return any(part.contains(path) for part in self._parts)

    def restore(self, loaded: set[str], rename: Callable[[str], str] | None = None) -> None:
        """Gives `form` to the objects with at least one key in `loaded`. Modules come first. `rename`: maps a key of
        the state to its key in the checkpoint; None: they are equal."""
        for part in sorted(self._parts, key=lambda part: part.order):
            form: Any = self.form
            for name in part.path:
                form = form[name]
            keys = flatten({part.key: form})[0].keys()
            if not keys or part.key in loaded or not loaded.isdisjoint(keys):
                part.restore(form, loaded, rename)
            else:
                part.abandon()

    def abandon(self) -> None:
        for part in self._parts:
            part.abandon()


class _Part:
    """A stateful object and its path in the state."""

    order = 2  #: objects of lower order are restored first

    def __init__(self, path: tuple[Any, ...], value: Any) -> None:
        self.path = path
        self.value = value
        self.key = ".".join(map(str, path))
        self.prefix = self.key + "."

    def contains(self, path: Path) -> bool:
        return len(path) >= len(self.path) and all(
            mine == theirs or str(mine) == theirs for mine, theirs in zip(self.path, path, strict=False)
        )

    def form(self) -> Any:
        return self.value.state_dict()

    def form_to_load(self) -> Any:
        return self.form()

    def restore(self, form: Any, loaded: set[str], rename: Callable[[str], str] | None) -> None:
        self.value.load_state_dict(form)

    def abandon(self) -> None:
        pass


class _ModulePart(_Part):
    order = 0

    def form(self) -> Any:
        return form_of(self.value)

    def restore(self, form: Any, loaded: set[str], rename: Callable[[str], str] | None) -> None:
        give_form(self.value, form, {name for name in form if self.prefix + name in loaded}, self.key)


class _OptimizerPart(_Part):
    order = 1

    def __init__(self, path: tuple[Any, ...], value: Optimizer, modules: Mapping[str, torch.nn.Module]) -> None:
        super().__init__(path, value)
        self.state = OptimizerState(value, modules)
        self.asked: dict[str, Any] = {}  # the form that the load fills

    def form(self) -> Any:
        return self.state.form()

    def form_to_load(self) -> Any:
        self.state.give_state()
        self.asked = _with_own_settings(self.form())
        return self.asked

    def drop_absent_state(self, stored: AbstractSet[str]) -> None:
        if self.number_as_stored(stored, same_key):
            return
        finds = self._finds(self.asked, stored, same_key)
        if finds or self.state.named or not any(key.startswith(f"{self.prefix}state.") for key in stored):
            self._drop_absent(stored, same_key)

    def number_as_stored(self, stored: AbstractSet[str], rename: Callable[[str], str]) -> bool:
        if self.state.named and self._finds(self.asked, stored, rename):
            return False
        by_number = self.value.state_dict()
        if not self._finds(by_number, stored, rename):
            return False
        self.state.number()
        self.asked.update(_with_own_settings(by_number))
        self._drop_absent(stored, rename)
        return True

    def ask_for_all_groups(self, stored: AbstractSet[str], rename: Callable[[str], str]) -> None:
        groups = self.asked["param_groups"]
        while groups:
            prefix = f"{self.prefix}param_groups.{len(groups)}."
            found = {
                name: value for name, value in groups[-1].items() if renamed_if_known(rename, prefix + name) in stored
            }
            if "params" not in found:
                break
            groups.append({**{name: deepcopy(value) for name, value in found.items()}, "params": []})

    def _drop_absent(self, stored: AbstractSet[str], rename: Callable[[str], str]) -> None:
        for name, values in list(self.asked["state"].items()):
            saved_with = self.state.key_of(name) or renamed_if_known(rename, f"{self.prefix}param_groups.0.params")
            keys = [renamed_if_known(rename, key) for key in self._keys(name, values)]
            if saved_with in stored and stored.isdisjoint(keys):
                del self.asked["state"][name]

    def restore(self, form: Any, loaded: set[str], rename: Callable[[str], str] | None) -> None:
        stored = None if rename is None else StoredNames(self.prefix, rename, self.state.key_of, loaded)
        self.state.restore(form, lambda name, values: not loaded.isdisjoint(self._keys(name, values)), self.key, stored)

    def _finds(self, form: Mapping[str, Any], stored: AbstractSet[str], rename: Callable[[str], str]) -> bool:
        keys = chain.from_iterable(self._keys(name, values) for name, values in form["state"].items())
        return any(renamed_if_known(rename, key) in stored for key in keys)

    def _keys(self, name: Any, values: Mapping[str, Any]) -> list[str]:
        return [f"{self.prefix}state.{name}.{key}" for key in flatten(values)[0]]

    def abandon(self) -> None:
        self.state.take_back()


def _with_own_settings(form: dict[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's form with copies of the tensors among its settings. Groups may share such a tensor
    (`lr=torch.tensor(...)`), and `load_state_dict` gives them new ones."""
    groups = [
        {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
        for group in form["param_groups"]
    ]
    return {**form, "param_groups": groups}


def _find(state: Mapping[str, Any]) -> list[_Part]:
    found = list(_objects(state, ()))
    modules = {".".join(map(str, path)): value for path, value in found if isinstance(value, torch.nn.Module)}
    parts: list[_Part] = []
    for path, value in found:
        if isinstance(value, torch.nn.Module):
            parts.append(_ModulePart(path, value))
        elif isinstance(value, Optimizer) and _has_usual_state(value):
            parts.append(_OptimizerPart(path, value, modules))
        else:
            parts.append(_Part(path, value))
    return parts


def _has_usual_state(optimizer: Optimizer) -> bool:
    """Whether the state consists of parameters and groups. A container of optimizers (torchtitan has them) may have
    another state; then it is treated like any other stateful object."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return True
    form = optimizer.state_dict()
    return isinstance(form, Mapping) and "state" in form and "param_groups" in form


def _objects(container: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    values = container if isinstance(container, list) else container.values()
    if _LEAVES.issuperset(map(type, values)):
        return
    for name, value in enumerate(container) if isinstance(container, list) else container.items():
        kind = type(value)
        if kind in _LEAVES:
            continue
        if kind is dict or kind is list:
            yield from _objects(value, (*path, name))
        elif isinstance(value, Stateful):
            yield (*path, name), value
        elif isinstance(value, (Mapping, list)):
            yield from _objects(value, (*path, name))


def with_forms(state: Mapping[str, Any], forms: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """Returns `state` with `forms` in place of the values at their paths. Copies the containers on these paths, and
    shares the rest."""
    result = dict(state)
    copies: dict[tuple[Any, ...], Any] = {(): result}
    for path, form in forms.items():
        for depth in range(1, len(path)):
            if path[:depth] not in copies:
                parent, name = copies[path[: depth - 1]], path[depth - 1]
                original = parent[name]
                copies[path[:depth]] = parent[name] = list(original) if isinstance(original, list) else dict(original)
        copies[path[:-1]][path[-1]] = form
    return result
