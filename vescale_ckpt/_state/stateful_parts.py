"""The stateful objects in a state: modules, optimizers, and all others with `state_dict` and `load_state_dict`.

A part makes the form of its object, for saves and for loads, and restores the object from a form that was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from .._engine.torch_types import Stateful, dtensor_type, sharded_tensor_type
from ..errors import IncompatibleStateError
from .flatten import flatten, place
from .modules import form_of, give_form
from .optimizer_groups import PARAMS_KEY, StoredNames, in_groups
from .optimizers import OptimizerState, is_nothing, load_exactly, optimizers_in
from .per_rank import PerRank
from .stored_entries import StoredEntries
from .structure import Path, any_number, is_number

# These types are known to be no `Stateful`. A check against a protocol takes ten microseconds: for a flat dictionary,
# that is more than planning takes. So are DTensor and ShardedTensor.
_LEAVES: frozenset[Any] = frozenset(
    {torch.Tensor, torch.nn.Parameter, PerRank} | {int, float, str, bool, bytes, type(None), tuple, set}
)


class Part:
    """A stateful object and its path in the state."""

    order = 2  #: objects of lower order are restored first
    is_optimizer = False  #: whether it gets all that was saved of it, known after `form_to_load`
    complete_under: str | None = None  #: the prefix of its keys under which its form names all that it takes

    def __init__(self, path: tuple[Any, ...], value: Any) -> None:
        self.path = path
        self.value = value
        self.key = ".".join(map(str, path))
        self.prefix = self.key + "."

    @property
    def named(self) -> bool:
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

    def form_to_load(self, stored: StoredEntries) -> Any:
        form = self.form()
        self.is_optimizer = _has_optimizer(self.value, form)
        if not self.is_optimizer:
            return form
        self.order = OptimizerPart.order
        form = _copied(form, self.key, stored)
        names = flatten(form)[0]
        parameters = self.parameters_of("")
        probe = next(iter(names), "state")
        for suffix, key in stored.under(self.prefix, probe).items():
            if suffix not in names:
                stored.add_target(form, self.prefix, suffix, key, parameters)
        stored.add_empty(form, self.prefix, probe)
        return form

    def replace_targets(self, form: dict[str, Any], mismatched: Mapping[str, str], stored: StoredEntries) -> bool:
        """Replaces this optimizer's targets in the state's `form` that are of another kind or shape than the stored
        value. Returns whether it has replaced one.

        A target with the shape of a parameter keeps it if another parameter's state may be stored instead: if
        parameters have numbers, and no state beside it has the shape of a parameter and fits. `mismatched`: {key of the
        state: key of the checkpoint}.
        """
        keys = [key for key in mismatched if key.startswith(self.prefix)]
        if not keys:
            return False
        flat, paths = flatten(form)
        shapes = {parameter.shape for parameter in self.parameters_of("") if parameter.ndim}
        tensors = {key: value.shape for key, value in flat.items() if isinstance(value, torch.Tensor)}
        certain = {_parent(key) for key, shape in tensors.items() if shape in shapes and key not in mismatched}
        replaced = False
        for key in keys:
            own, shape = tensors.get(key), stored.shape(mismatched[key])
            may_change = own is None or shape is None or own not in shapes or self.named or _parent(key) in certain
            if own != shape and may_change and not self.is_of_other_shape(key, tensors, stored):
                place(form, paths[key], stored.target(mismatched[key], self.parameters_of(key)))
                stored.added.add(key)
                replaced = True
        return replaced

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


class ModulePart(Part):
    order = 0
    complete_under = ""

    def form(self) -> Any:
        return form_of(self.value)

    def restore(self, form: Any, loaded: set[str]) -> None:
        give_form(self.value, form, {name for name in form if self.prefix + name in loaded}, self.key)


class OptimizerPart(Part):
    order = 1
    is_optimizer = True
    complete_under = "state."

    def __init__(self, path: tuple[Any, ...], value: Optimizer, modules: Mapping[str, torch.nn.Module]) -> None:
        super().__init__(path, value)
        self.state = OptimizerState(value, modules)
        self._had: set[Any] = set()  # names of parameters with a state before the load
        self._names: dict[Any, Any] = {}  # {name: parameter}
        self._groups: list[dict[str, Any]] = []  # the optimizer's own
        self._of_parameters: dict[Any, dict[str, str]] = {}  # {name: {end of the key: key}} of what is stored
        self._without_state: set[Any] = set()  # names of parameters that were saved with an empty state
        self._stored: StoredEntries  # from `form_to_load` on

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

    def form_to_load(self, stored: StoredEntries) -> Any:
        own = self.form()
        self._stored = stored
        found = stored.under(self.prefix, PARAMS_KEY)
        of_parameters = self._of_parameters = self._find_stored_state(own, found, stored)
        is_unmatched = bool(
            not of_parameters and not self.state.named and any(suffix.startswith("state.") for suffix in found)
        )

        def may_have_state(name: Any) -> bool:
            if name in of_parameters or is_unmatched or (self.state.named and not stored.same_names):
                return True
            return (self.state.key_of(name) or stored.key(f"{self.prefix}{PARAMS_KEY}")) not in stored.keys

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
        self._add_targets(form, found, stored)
        stored.add_empty(form, self.prefix, PARAMS_KEY)
        return form

    def _find_stored_state(
        self, own: Mapping[str, Any], found: Mapping[str, str], stored: StoredEntries
    ) -> dict[Any, dict[str, str]]:
        """Returns `_stored_state` by the names of parameters, or by their numbers if it is stored so: then parameters
        have numbers from now on."""
        if self.named and any_number(self.state.by_name(own)) and _is_by_number(found, stored):
            self.state.number()  # else "1" would be taken for a name
            own = self.form()
        of_parameters = self._stored_state(own, found, stored)
        if not of_parameters and self.named:
            by_number = self.value.state_dict()
            if numbered := self._stored_state(by_number, found, stored):
                self.state.number()
                own, of_parameters = by_number, numbered
        self._names = self.state.by_name(own)
        self._had = {name for name, values in own["state"].items() if not is_nothing(values)}
        return of_parameters

    def _stored_state(
        self, form: Mapping[str, Any], found: Mapping[str, str], stored: StoredEntries
    ) -> dict[Any, dict[str, str]]:
        """Returns {name: {suffix of the key: key of the checkpoint}} of the stored state of parameters in `form`."""
        names = {str(name): name for group in form["param_groups"] for name in group["params"]}
        if not stored.same_names:
            start = f"{stored.prefix(self.prefix, PARAMS_KEY) or ''}state."
            renamed = {stored.key(f"{self.prefix}state.{name}.step"): name for name in names.values()}
            names = {key.removeprefix(start).removesuffix(".step"): name for key, name in renamed.items()}
        result: dict[Any, dict[str, str]] = {}
        for suffix, key in found.items():
            if suffix.startswith("state."):
                end = len(suffix)
                while end > 0 and suffix[6:end] not in names:
                    end = suffix.rfind(".", 6, end)
                if end > 0:
                    name, part = names[suffix[6:end]], suffix[end:]
                    if part.count(".") > 1 and str(stored.names(key, suffix)[0][1]) != suffix[6:end]:
                        continue  # of a parameter whose name begins like this one, as 0.weight for 0
                    if stored.key(f"{self.prefix}state.{name}{part}") == key:
                        result.setdefault(name, {})[part] = key
        return result

    def _add_targets(self, form: dict[str, Any], found: Mapping[str, str], stored: StoredEntries) -> None:
        names = flatten({self.key: form})[0]
        is_larger = False  # whether some parameter is stored with more than this optimizer makes
        for name, parts in self._of_parameters.items():
            prefix = f"{self.prefix}state.{name}"
            for part, key in parts.items():
                if prefix + part not in names:
                    stored.add_target(form["state"], prefix, part, key, self.parameters_of(prefix), name)
                    is_larger = True
        for index, group in enumerate(form["param_groups"]):
            prefix = f"{self.prefix}param_groups.{index}."
            if not is_larger and stored.key(f"{prefix}params") in stored.keys:  # else another class may have saved it
                for name in [name for name, value in group.items() if not stored.has(prefix + name, value)]:
                    del group[name]
        taken = {key for parts in self._of_parameters.values() for key in parts.values()}
        for suffix, key in found.items():
            if key in taken or self.prefix + suffix in names or stored.key(self.prefix + suffix) != key:
                continue
            first, *others = suffix.split(".", 2)
            if first == "param_groups" and len(others) == 2:
                index = int(others[0])
                form["param_groups"] += [{} for _ in range(len(form["param_groups"]), index + 1)]
                stored.add_target(form["param_groups"][index], f"{self.prefix}{first}.{index}.", others[1], key, ())
            elif first != "state" or self._is_of_no_parameter(suffix[len("state.") :], stored):
                stored.add_target(form, self.prefix, suffix, key, ())

    def _is_of_no_parameter(self, suffix: str, stored: StoredEntries) -> bool:
        """Whether stored state that is not of the optimizer's parameters is of no parameter of other ranks either.
        `suffix`: the end of its key."""
        if not self.state.named:
            name, dot, _ = suffix.partition(".")
            return not is_number(name) and (bool(self._of_parameters) or not dot)
        keys = [self.state.key_of(suffix[:end]) for end, letter in enumerate(f"{suffix}.") if letter == "."]
        return stored.keys.isdisjoint(key for key in keys if key is not None)

    def restore(self, form: Any, loaded: set[str]) -> None:
        stored = self._stored
        renamed = None if stored.same_names else StoredNames(self.prefix, stored, self.state.key_of, loaded)
        state = form["state"]
        # leaves out state that was made to load into and was not filled
        names = {
            name
            for name in state.keys() & self._names.keys()
            if name in self._had | self._without_state
            or not loaded.isdisjoint(flatten({f"{self.prefix}state.{name}": state[name]})[0])
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

    def abandon(self) -> None:
        self.state.take_back()


def _is_by_number(found: Mapping[str, str], stored: StoredEntries) -> bool:
    """Whether an optimizer's parameters are stored by numbers. `found`: {suffix of the key: key} of its entries."""
    of_groups = [
        key for suffix, key in found.items() if suffix.startswith("param_groups.") and suffix.endswith(".params")
    ]
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


def find_parts(state: Mapping[str, Any]) -> list[Part]:
    found = list(stateful_objects(state, ()))
    modules = {".".join(map(str, path)): value for path, value in found if isinstance(value, torch.nn.Module)}
    parts: list[Part] = []
    for path, value in found:
        if isinstance(value, torch.nn.Module):
            parts.append(ModulePart(path, value))
        elif isinstance(value, Optimizer) and _has_usual_state(value):
            parts.append(OptimizerPart(path, value, modules))
        else:
            parts.append(Part(path, value))
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
    """Whether an object of another class is or holds optimizers: a wrapper, or an optimizer of another library. Not if
    its keys are the dotted ones of torch's functions: these name all that this rank holds."""
    if not isinstance(form, Mapping) or any(str(name).startswith(("state.", "param_groups.")) for name in form):
        return False
    return hasattr(value, "param_groups") or _nests_state(form)


def _nests_state(form: Any) -> bool:
    if isinstance(form, Mapping):
        return {"state", "param_groups"} <= form.keys() or any(map(_nests_state, form.values()))
    return type(form) is list and any(map(_nests_state, form))


def stateful_objects(
    container: Any, path: tuple[Any, ...], leaves: frozenset[Any] | None = None
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    values = container if isinstance(container, list) else container.values()
    leaves = leaves or _LEAVES.union(dtensor_type(), sharded_tensor_type())
    if leaves.issuperset(map(type, values)):
        return
    for name, value in enumerate(container) if isinstance(container, list) else container.items():
        kind = type(value)
        if kind in leaves:
            continue
        if kind is dict or kind is list:
            yield from stateful_objects(value, (*path, name), leaves)
        elif isinstance(value, Stateful):
            yield (*path, name), value
        elif isinstance(value, (Mapping, list)):
            yield from stateful_objects(value, (*path, name), leaves)
