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
from itertools import chain
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import IncompatibleStateError
from .flatten import flatten
from .modules import form_of, give_form
from .optimizer_groups import StoredNames, in_groups
from .optimizers import OptimizerState, is_nothing, load_exactly, optimizers_in
from .per_rank import PerRank
from .stored_entries import StoredEntries
from .structure import Path, is_number

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
        self._stored: StoredEntries | None = None
        self._parts: list[_Part] = []
        self.form: dict[str, Any] = {}

    def prepare(self, stored: StoredEntries | None) -> None:
        """Makes `form`. Optimizers without state create it, because only an optimizer knows how its state is sharded.

        Optimizers ask for all that the checkpoint has of them. `stored`: None if the checkpoint is unknown.
        """
        self._parts = _find(self._state)
        self._stored = stored
        self.form = with_forms(self._state, {part.path: part.form_to_load(stored) for part in self._parts})

    def replace_targets(self, mismatched: Mapping[str, str]) -> bool:
        """Replaces targets in optimizers that are of another kind or shape than what is stored. Returns whether it has
        replaced one.

        A target with the shape of a parameter keeps it if another parameter's state may be stored instead: if
        parameters have numbers, and no state beside it has the shape of a parameter and fits. `mismatched`: {key of the
        state: key of the checkpoint}.
        """
        assert self._stored is not None
        replaced = False
        for part in self._parts:
            keys = [key for key in mismatched if part.is_optimizer and key.startswith(part.prefix)]
            if not keys:
                continue
            flat, paths = flatten(self.form)
            shapes = {parameter.shape for parameter in part.parameters_of("") if parameter.ndim}
            tensors = {key: value.shape for key, value in flat.items() if isinstance(value, torch.Tensor)}
            certain = {_parent(key) for key, shape in tensors.items() if shape in shapes and key not in mismatched}
            for key in keys:
                own, shape = tensors.get(key), self._stored.shape(mismatched[key])
                may_change = own is None or shape is None or own not in shapes or part.named or _parent(key) in certain
                if own != shape and may_change and not part.is_of_other_shape(key, tensors, self._stored):
                    self._stored.replace(self.form, paths[key], key, mismatched[key], part.parameters_of(key))
                    replaced = True
        return replaced

    def closed_prefixes(self, rename: Callable[[str, Path], str]) -> tuple[str, ...]:
        """Returns the checkpoint's prefixes of keys under which the form is complete: of modules, and of optimizers'
        state. `rename`: maps a key below a path of the state."""
        modules = [(part.prefix, part.path) for part in self._parts if isinstance(part, _ModulePart)]
        optimizers = [(f"{part.prefix}state.", part.path) for part in self._parts if isinstance(part, _OptimizerPart)]
        return tuple(rename(prefix, path) for prefix, path in (*modules, *optimizers))

    def closes(self, path: tuple[Any, ...]) -> bool:
        """Whether the value at a path of `form` belongs to a module or optimizer."""
        return any(part.contains(path) for part in self._parts if part.is_optimizer or isinstance(part, _ModulePart))

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
                if self._stored is not None and part.is_optimizer:
                    form = self._stored.without_unread(form, part.key, loaded)
                part.restore(form, loaded)
            else:
                part.abandon()

    def abandon(self) -> None:
        for part in self._parts:
            part.abandon()


class _Part:
    """A stateful object and its path in the state."""

    order = 2  #: objects of lower order are restored first
    is_optimizer = False  #: whether it gets all that was saved of it, known after `form_to_load`

    def __init__(self, path: tuple[Any, ...], value: Any) -> None:
        self.path = path
        self.value = value
        self.key = ".".join(map(str, path))
        self.prefix = self.key + "."

    @property
    def named(self) -> bool:
        """Whether its keys have the names of parameters."""
        return False

    def is_of_other_shape(self, key: str, shapes: Mapping[str, torch.Size], stored: StoredEntries) -> bool:
        """Whether the state under `key` is of a parameter that the checkpoint has with another shape than `shapes`,
        those of the state's tensors: then it fits none here."""
        return False

    def contains(self, path: Path) -> bool:
        return len(path) >= len(self.path) and all(
            mine == theirs or str(mine) == theirs for mine, theirs in zip(self.path, path, strict=False)
        )

    def form(self) -> Any:
        return self.value.state_dict()

    def form_to_load(self, stored: StoredEntries | None) -> Any:
        form = self.form()
        self.is_optimizer = stored is not None and _has_optimizer(self.value, form)
        if stored is None or not self.is_optimizer:
            return form
        self.order = _OptimizerPart.order
        form = _copied(form, self.key, stored)
        names = flatten(form)[0]
        parameters = self.parameters_of("")
        probe = next(iter(names), "state")
        for rest, key in stored.under(self.prefix, probe).items():
            if rest not in names:
                stored.ask(form, self.prefix, rest, key, parameters)
        stored.add_empty(form, self.prefix, probe)
        return form

    def parameters_of(self, key: str) -> list[torch.Tensor]:
        """Returns the parameters that may have the state under `key`."""
        groups = chain(*(each.param_groups for each in optimizers_in(self.value)))
        return [parameter for group in groups for parameter in group["params"]]

    def restore(self, form: Any, loaded: set[str]) -> None:
        if self.is_optimizer:
            load_exactly(self.value, form)
        else:
            self.value.load_state_dict(form)

    def abandon(self) -> None:
        pass


class _ModulePart(_Part):
    order = 0

    def form(self) -> Any:
        return form_of(self.value)

    def restore(self, form: Any, loaded: set[str]) -> None:
        give_form(self.value, form, {name for name in form if self.prefix + name in loaded}, self.key)


class _OptimizerPart(_Part):
    order = 1
    is_optimizer = True

    def __init__(self, path: tuple[Any, ...], value: Optimizer, modules: Mapping[str, torch.nn.Module]) -> None:
        super().__init__(path, value)
        self.state = OptimizerState(value, modules)
        self._had: set[Any] = set()  # names of parameters with a state before the load
        self._names: dict[Any, Any] = {}  # {name: parameter}
        self._groups: list[dict[str, Any]] = []  # the optimizer's own
        self._of_parameters: dict[Any, dict[str, str]] = {}  # {name: {end of the key: key}} of what is stored
        self._without_state: set[Any] = set()  # names of parameters that were saved with an empty state
        self._renames: Callable[[str], str] | None = None  # maps keys of the state to those of the checkpoint

    def parameters_of(self, key: str) -> list[torch.Tensor]:
        of_key = [each for name, each in self._names.items() if f"{key}.".startswith(f"{self.prefix}state.{name}.")]
        return [parameter for parameter in (of_key if key else self._names.values()) if parameter is not None]

    @property
    def named(self) -> bool:
        return self.state.named

    def is_of_other_shape(self, key: str, shapes: Mapping[str, torch.Size], stored: StoredEntries) -> bool:
        names = (name for name in self._names if key.startswith(f"{self.prefix}state.{name}."))
        known = {own: stored.key(own) for own in map(self.state.key_of, names) if own is not None and own in shapes}
        return any(name in stored.keys and stored.shape(name) != shapes[own] for own, name in known.items())

    def form(self) -> Any:
        return self.state.form()

    def form_to_load(self, stored: StoredEntries | None) -> Any:
        own = self.form()
        if stored is None:
            self._know(own)
            self.state.give_state({each for each in self._names.values() if each is None or each.requires_grad})
            form = _with_own_settings(self.form())
            self._groups = form["param_groups"]
            return form
        self._renames = None if stored.same_names else stored.key
        found = stored.under(self.prefix, "param_groups.0.params")
        if self.named and any(map(is_number, self.state.by_name(own))) and _is_by_number(found, stored):
            self.state.number()  # else "1" would be taken for a name
            own = self.form()
        of_parameters = self._stored_state(own, found, stored)
        if not of_parameters and self.state.named:
            by_number = self.value.state_dict()
            if numbered := self._stored_state(by_number, found, stored):
                self.state.number()
                own, of_parameters = by_number, numbered
        self._know(own)
        self._of_parameters = of_parameters
        strange = bool(not of_parameters and not self.state.named and any(rest.startswith("state.") for rest in found))

        def may_have_state(name: Any) -> bool:
            if name in of_parameters or strange or (self.state.named and not stored.same_names):
                return True
            return (self.state.key_of(name) or stored.key(f"{self.prefix}param_groups.0.params")) not in stored.keys

        self.state.give_state(
            {
                parameter
                for name, parameter in self._names.items()
                if name in of_parameters or ((parameter is None or parameter.requires_grad) and may_have_state(name))
            }
        )
        form = _with_own_settings(_copied(self.form(), self.key, stored))
        self._groups = [dict(group) for group in form["param_groups"]]
        for name in self._names.keys() - of_parameters.keys():
            if not may_have_state(name):
                form["state"].pop(name, None)
                if stored.is_empty(stored.key(f"{self.prefix}state.{name}")):
                    form["state"][name] = {}
                    self._without_state.add(name)
        self._ask_for_all(form, found, stored)
        stored.add_empty(form, self.prefix, "param_groups.0.params")
        return form

    def _know(self, form: Mapping[str, Any]) -> None:
        self._names = self.state.by_name(form)
        self._had = {name for name, values in form["state"].items() if not is_nothing(values)}

    def _stored_state(
        self, form: Mapping[str, Any], found: Mapping[str, str], stored: StoredEntries
    ) -> dict[Any, dict[str, str]]:
        """Returns {name: {rest of the key: key of the checkpoint}} of the stored state of parameters in `form`."""
        names = {str(name): name for group in form["param_groups"] for name in group["params"]}
        if not stored.same_names:
            start = stored.key(f"{self.prefix}param_groups.0.params").removesuffix("param_groups.0.params") + "state."
            renamed = {stored.key(f"{self.prefix}state.{name}.step"): name for name in names.values()}
            names = {key.removeprefix(start).removesuffix(".step"): name for key, name in renamed.items()}
        result: dict[Any, dict[str, str]] = {}
        for rest, key in found.items():
            if rest.startswith("state."):
                end = len(rest)
                while end > 0 and rest[6:end] not in names:
                    end = rest.rfind(".", 6, end)
                if end > 0:
                    name, part = names[rest[6:end]], rest[end:]
                    if part.count(".") > 1 and str(stored.names(key, rest)[0][1]) != rest[6:end]:
                        continue  # of a parameter whose name begins like this one, as 0.weight for 0
                    if stored.key(f"{self.prefix}state.{name}{part}") == key:
                        result.setdefault(name, {})[part] = key
        return result

    def _ask_for_all(
        self,
        form: dict[str, Any],
        found: Mapping[str, str],
        stored: StoredEntries,
    ) -> None:
        names = flatten({self.key: form})[0]
        is_larger = False  # whether some parameter is stored with more than this optimizer makes
        for name, parts in self._of_parameters.items():
            prefix = f"{self.prefix}state.{name}"
            for part, key in parts.items():
                if prefix + part not in names:
                    stored.ask(form["state"], prefix, part, key, self.parameters_of(prefix), name)
                    is_larger = True
        for index, group in enumerate(form["param_groups"]):
            prefix = f"{self.prefix}param_groups.{index}."
            if not is_larger and stored.key(f"{prefix}params") in stored.keys:  # else another class may have saved it
                for name in [name for name, value in group.items() if not stored.has(prefix + name, value)]:
                    del group[name]
        taken = {key for parts in self._of_parameters.values() for key in parts.values()}
        for rest, key in found.items():
            if key in taken or self.prefix + rest in names or stored.key(self.prefix + rest) != key:
                continue
            first, *others = rest.split(".", 2)
            if first == "param_groups" and len(others) == 2:
                index = int(others[0])
                form["param_groups"] += [{} for _ in range(len(form["param_groups"]), index + 1)]
                stored.ask(form["param_groups"][index], f"{self.prefix}{first}.{index}.", others[1], key, ())
            elif first != "state" or self._is_of_no_parameter(rest[len("state.") :], stored):
                stored.ask(form, self.prefix, rest, key, ())

    def _is_of_no_parameter(self, rest: str, stored: StoredEntries) -> bool:
        """Whether stored state that is not of the optimizer's parameters is of no parameter of other ranks either.
        `rest`: the end of its key."""
        if not self.state.named:
            name, dot, _ = rest.partition(".")
            return not is_number(name) and (bool(self._of_parameters) or not dot)
        keys = [self.state.key_of(rest[:end]) for end, letter in enumerate(f"{rest}.") if letter == "."]
        return stored.keys.isdisjoint(key for key in keys if key is not None)

    def restore(self, form: Any, loaded: set[str]) -> None:
        renamed = None if self._renames is None else StoredNames(self.prefix, self._renames, self.state.key_of, loaded)
        state = form["state"]
        # leaves out state that was made to load into and was not filled
        names = {
            name
            for name in state.keys() & self._names.keys()
            if name in self._had | self._without_state or not loaded.isdisjoint(self._keys(name, state[name]))
        }
        saved = form["param_groups"]
        for index, own in enumerate([] if f"{self.prefix}param_groups" in loaded else self._groups):
            if loaded.isdisjoint(flatten({f"{self.prefix}param_groups.{index}": saved[index]})[0]):
                saved[index] = own
        saved = [group for group in saved if "params" in group]  # parts of groups may have been selected
        own_names = [{"params": group["params"]} for group in self._groups]
        text = {name for group in saved for name in group["params"] if isinstance(name, str)}
        if not self.named and (alike := text.intersection(map(str, self._names))):
            raise IncompatibleStateError(f"{self.key}.param_groups", "numbers of parameters", f"{min(alike)!r}, a name")
        groups = in_groups(
            own_names, saved, self.key, {n: state[n] for n in names if isinstance(state[n], dict)}, renamed
        )
        kept = {name: values for name, values in state.items() if name in names or name not in self._names}
        self.state.restore({**form, "state": kept, "param_groups": groups}, names)

    def _keys(self, name: Any, values: Any) -> list[str]:
        return list(flatten({f"{self.prefix}state.{name}": values})[0])

    def abandon(self) -> None:
        self.state.take_back()


def _is_by_number(found: Mapping[str, str], stored: StoredEntries) -> bool:
    """Whether an optimizer's parameters are stored by numbers. `found`: {rest of the key: key} of its entries."""
    of_groups = [key for rest, key in found.items() if rest.startswith("param_groups.") and rest.endswith(".params")]
    lists = [value for value in map(stored.load, of_groups) if isinstance(value, list)]
    return any(type(name) is int for name in chain(*lists))


def _copied(form: Any, key: str, stored: StoredEntries) -> Any:
    """Returns a form with containers of its own. Lists, except that of the groups, end where the stored ones do."""
    if isinstance(form, Mapping):
        return {name: _copied(value, f"{key}.{name}", stored) for name, value in form.items()}
    if type(form) is not list:
        return form
    elements = [_copied(value, f"{key}.{index}", stored) for index, value in enumerate(form)]
    if key.endswith(".param_groups") or key in flatten({key: elements})[0]:
        return elements  # that list, or one that is saved whole
    while elements and not stored.has(f"{key}.{len(elements) - 1}", elements[-1]):
        del elements[-1]
    return elements


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
    if not isinstance(form, Mapping) or not {"state", "param_groups"} <= form.keys():
        return False
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    return all(number in range(count) for group in form["param_groups"] for number in group["params"])


def _parent(key: str) -> str:
    return key.rpartition(".")[0]


def _has_optimizer(value: Any, form: Any) -> bool:
    """Whether an object of another class is or holds optimizers: wrappers of them, and what other libraries call one.
    Not if its keys are those of torch's functions with dots: these name all that this rank holds."""
    if not isinstance(form, Mapping) or any(str(name).startswith(("state.", "param_groups.")) for name in form):
        return False
    return hasattr(value, "param_groups") or _nests_state(form)


def _nests_state(form: Any) -> bool:
    if isinstance(form, Mapping):
        return {"state", "param_groups"} <= form.keys() or any(map(_nests_state, form.values()))
    return type(form) is list and any(map(_nests_state, form))


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
