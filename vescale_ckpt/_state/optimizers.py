"""Names an optimizer's state by parameters for saves, and gives loaded state back to the optimizer."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._engine.torch_types import has_fsdp1
from ..errors import CheckpointError

#: Wrappers (DDP, torch.compile, activation checkpointing, FSDP1) hold the wrapped module as a child of such a name.
_WRAPPED = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

#: A step with gradients, learning rate and weight decay of zero changes no bit of a parameter: no copy is needed.
_KEEPS_PARAMETERS = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD})


def is_wrapped(module: nn.Module) -> bool:
    """Whether the module's names may differ from those of the same model without wrappers. Then torch's functions make
    the names, which takes ten times as long."""
    return any(not _WRAPPED.isdisjoint(part._modules) or hasattr(part, "_fqn_modifiers") for part in module.modules())


def plain(name: str) -> str:
    """Removes what torch leaves of a compiled module inside another wrapper."""
    return name.replace("_orig_mod.", "")


class OptimizerState:
    """The state of an optimizer, with names of parameters if modules of the same application state own all of them.

    `modules`: {key: module}. If one module owns all parameters, the names are those within the first such module. If
    several modules own them together, the names start with the keys of the modules. Otherwise, and after `number`,
    parameters have numbers as in `state_dict()`.
    """

    def __init__(self, optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> None:
        self._optimizer = optimizer
        self._before: dict[Any, Any] | None = None  # the state before `give_state`, if that changed it
        self._module: nn.Module | None = None
        self._prefixes: dict[str, str] = {}  # {prefix of names: key of the module}
        parameters = set(self._parameters())
        for key, module in modules.items():
            if parameters and parameters.issubset(module.parameters()):
                self._module, self._prefixes = module, {"": f"{key}."}
                return
        owners = {key: module for key, module in modules.items() if not parameters.isdisjoint(module.parameters())}
        if len(owners) > 1 and parameters.issubset(chain(*(module.parameters() for module in owners.values()))):
            self._module = nn.Module()
            for key, module in owners.items():
                name = key.replace(".", "_")
                while hasattr(self._module, name):
                    name += "_"
                self._module.add_module(name, module)
                self._prefixes[f"{name}."] = f"{key}."

    def key_of(self, name: Any) -> str | None:
        """Returns the key under which the parameter of that name is saved. None if parameters are numbered."""
        for prefix, key in self._prefixes.items():
            if str(name).startswith(prefix):
                return key + str(name)[len(prefix) :]
        return None

    @property
    def named(self) -> bool:
        return self._module is not None

    def number(self) -> None:
        """Gives parameters numbers instead of names from now on."""
        self._module, self._prefixes = None, {}

    def form(self) -> dict[str, Any]:
        """`{"state": {name: …}, "param_groups": [{"params": [name, …], …}, …]}`, and what else the optimizer saves.

        State of no parameter, as under `optimizer.state["k"]`, keeps its key. Raises `CheckpointError` if such a key is
        the name of a parameter.
        """
        optimizer, module = self._optimizer, self._module
        form = optimizer.state_dict()
        if module is None:
            return form
        named = {**form, "state": {number: of for number, of in form["state"].items() if type(number) is int}}
        if is_wrapped(module):
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            by_torch: Any = get_optimizer_state_dict(module, [_SeenByTorch(optimizer, named)])  # type: ignore[list-item]
            named = _renamed(by_torch, plain)
        else:
            named = _renamed(named, self._names(module).__getitem__)
        others = {name: values for name, values in form["state"].items() if type(name) is not int}
        if twice := others.keys() & named["state"].keys():
            raise CheckpointError(
                f"{type(optimizer).__name__}.state has a parameter and something else as {min(twice)!r}"
            )
        return {**form, **named, "state": {**named["state"], **others}}

    def restore(self, form: dict[str, Any], names: AbstractSet[Any]) -> None:
        """Gives the optimizer a form that a load has filled. `names`: the names of parameters in it.

        The optimizer gets the whole of it by its own `load_state_dict`. Settings of its groups that are not in `form`,
        and that `load_state_dict` does not set, stay.
        """
        optimizer, module = self._optimizer, self._module
        own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        named = {**form, "state": {name: values for name, values in form["state"].items() if name in names}}
        others = {name: values for name, values in form["state"].items() if name not in names}
        if module is not None and has_fsdp1(module):
            from torch.distributed.checkpoint.state_dict import (
                StateDictOptions,
                get_model_state_dict,
                set_optimizer_state_dict,
            )

            seen_by_torch = _SeenByTorch(optimizer, {})
            names_of_torch = {plain(name): name for name in get_model_state_dict(module)}
            named = _renamed(named, lambda name: names_of_torch.get(name, name))
            options = StateDictOptions(strict=False)  # parameters without state are no error
            set_optimizer_state_dict(module, [seen_by_torch], named, options=options)  # type: ignore[list-item]
            form = {**form, **seen_by_torch.loaded}
        else:
            in_order = chain(*(group["params"] for group in form["param_groups"]))
            numbers = {name: number for number, name in enumerate(in_order)}
            form = {**form, **_renamed(named, numbers.__getitem__)}
        self._before = None
        load_exactly(optimizer, {**form, "state": {**form["state"], **others}})
        for group, settings in zip(optimizer.param_groups, own, strict=True):
            for name, value in settings.items():
                group.setdefault(name, value)

    def give_state(self, lacking: AbstractSet[Any]) -> None:
        """Creates the state of the parameters `lacking` that have none, without changing the parameters. Takes a step
        with gradients, learning rate and weight decay of zero, without hooks and schedulers. An optimizer that cannot
        take such a step is left as it was."""
        optimizer = self._optimizer
        if None in lacking:  # names of parts of flat parameters
            lacking = {parameter for parameter in self._parameters() if parameter.requires_grad}
        lacking = {parameter for parameter in lacking if is_nothing(optimizer.state.get(parameter))}
        if not lacking:
            return
        self._before = dict(optimizer.state)
        attributes = dict(vars(optimizer))
        gradients = {parameter: parameter.grad for parameter in self._parameters()}
        settings = [dict(group) for group in optimizer.param_groups]
        # Others may change parameters by other settings than these, or infinite ones.
        may_change = () if type(optimizer) in _KEEPS_PARAMETERS else gradients
        values = {parameter: parameter.detach().clone() for parameter in may_change}
        step = type(optimizer).step
        if getattr(step, "hooked", False):
            step = getattr(step, "__wrapped__", step)
        try:
            for group in optimizer.param_groups:
                # "maximize" would make gradients of -0.0, which change parameters of -0.0.
                for name in {"lr", "weight_decay", "maximize"} & group.keys():
                    group[name] = torch.zeros_like(group[name]) if isinstance(group[name], torch.Tensor) else 0.0
            for parameter in gradients:
                parameter.grad = torch.zeros_like(parameter) if parameter in lacking else None
            # The step makes its counters on the default device. On "meta" it could not read them.
            with torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext():
                step(optimizer)
        except Exception:
            self.take_back()
        finally:
            vars(optimizer).clear()
            vars(optimizer).update(attributes)  # counters beside the state
            for group, before in zip(optimizer.param_groups, settings, strict=True):
                group.clear()
                group.update(before)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            with torch.no_grad():
                for parameter, value in values.items():
                    parameter.copy_(value)

    def take_back(self) -> None:
        """Undoes `give_state`."""
        if self._before is not None:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._before)
            self._before = None

    def by_name(self, form: Mapping[str, Any]) -> dict[Any, nn.Parameter | None]:
        """Returns {name: parameter} of all names in `form`. None for a name that is a part of a flat parameter."""
        names = list(chain(*(group["params"] for group in form["param_groups"])))
        parameters = self._parameters()
        return dict(zip(names, parameters, strict=True)) if len(names) == len(parameters) else dict.fromkeys(names)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _names(self, module: nn.Module) -> list[str]:
        names = {parameter: name for name, parameter in module.named_parameters()}
        return [names[parameter] for parameter in self._parameters()]


def _renamed(form: Mapping[str, Any], of: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        "state": {of(name): values for name, values in form["state"].items()},
        "param_groups": [{**group, "params": [*map(of, group["params"])]} for group in form["param_groups"]],
    }


def is_nothing(state: Any) -> bool:
    """Whether a parameter's state is absent or empty. It may be anything, a tensor as well."""
    return state is None or (isinstance(state, Mapping) and not state)


class _SeenByTorch:
    """What torch's functions see of an optimizer: they name its state, but neither step nor load it."""

    def __init__(self, optimizer: Optimizer, form: dict[str, Any]) -> None:
        self.param_groups = optimizer.param_groups
        self.state = {None: None}  # torch takes a step if it is empty
        self.loaded: dict[str, Any] = {}
        self._form = form

    def state_dict(self) -> dict[str, Any]:
        return self._form

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


# --- What was saved is what is loaded


def load_exactly(optimizer: Any, form: Mapping[str, Any]) -> None:
    """Calls `optimizer.load_state_dict(form)`, without the casts of torch's own.

    That casts state to the dtype of its parameter, which loses float32 copies beside bfloat16 parameters, and makes
    text and queues anew from their elements. This is undone as soon as it is done, so that what a subclass does before
    and after it counts.
    """
    given: dict[int, dict[str, Any]] = {}

    def note(each: Optimizer, form: dict[str, Any]) -> None:
        given[id(each)] = form

    def put_back(each: Optimizer) -> None:
        form = given.pop(id(each), None)
        if form is None:  # done: a wrapper hands its hooks on
            return
        names, parameters = (
            chain(*(group["params"] for group in groups)) for groups in (form["param_groups"], each.param_groups)
        )
        for name, parameter in zip(names, parameters, strict=True):
            if name in form["state"] and parameter in each.state:
                each.state[parameter] = _as_given(form["state"][name], each.state[parameter])

    with contextlib.ExitStack() as hooks:
        for each in optimizers_in(optimizer):
            with contextlib.suppress(AttributeError):  # it did not call the constructor of torch's class
                hooks.callback(each.register_load_state_dict_pre_hook(note).remove)
                hooks.callback(each.register_load_state_dict_post_hook(put_back, prepend=True).remove)
        optimizer.load_state_dict(form)


def _as_given(given: Any, cast: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return given.to(cast.device) if isinstance(cast, torch.Tensor) and cast.dtype != given.dtype else cast
    if isinstance(given, dict) and isinstance(cast, dict):
        cast.update({name: _as_given(value, cast[name]) for name, value in given.items() if name in cast})
        return cast
    if isinstance(given, (list, tuple, deque)) and type(given) is type(cast) and len(given) == len(cast):
        elements = map(_as_given, given, cast)
        return deque(elements, given.maxlen) if isinstance(given, deque) else type(given)(elements)
    return given if isinstance(given, str) else cast


def optimizers_in(value: Any) -> list[Any]:
    """Returns `value` if it has parameter groups, and all such objects among its attributes and theirs."""
    found: list[Any] = []
    pending, seen = [value], set()
    while pending:
        each = pending.pop()
        if id(each) not in seen and (each is value or hasattr(each, "param_groups")):
            seen.add(id(each))
            if hasattr(each, "param_groups"):
                found.append(each)
            for part in vars(each).values() if hasattr(each, "__dict__") else ():
                pending += part if type(part) in (list, tuple) else part.values() if type(part) is dict else [part]
    return found
