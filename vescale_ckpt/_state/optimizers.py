"""Names an optimizer's state by parameters for saves, and gives loaded state back to the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from ..errors import CheckpointError
from .optimizer_groups import StoredNames, in_groups

#: Wrappers (DDP, torch.compile, activation checkpointing, FSDP1) hold the wrapped module as a child of such a name.
_WRAPPED = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def is_wrapped(module: nn.Module) -> bool:
    """Whether the module's names may differ from those of the same model without wrappers. Then torch's functions make
    the names, which takes ten times as long."""
    return any(not _WRAPPED.isdisjoint(part._modules) or hasattr(part, "_fqn_modifiers") for part in module.modules())


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
        """`{"state": {name: …}, "param_groups": [{"params": [name, …], …}, …]}`."""
        optimizer, module = self._optimizer, self._module
        if module is not None and is_wrapped(module):
            with _StateLeftAlone(optimizer):
                return get_optimizer_state_dict(module, optimizer)
        form = optimizer.state_dict()
        if module is None:
            return form
        names = self._names(module)
        form["state"] = {names[number]: values for number, values in form["state"].items()}
        for group in form["param_groups"]:
            group["params"] = [names[number] for number in group["params"]]
        return form

    def restore(
        self,
        form: dict[str, Any],
        was_loaded: Callable[[Any, Mapping[str, Any]], bool],
        key: str,
        stored_names: StoredNames | None,
    ) -> None:
        """Gives the optimizer the state that was loaded into `form`. Older state that was not loaded stays.

        `stored_names`: None if keys are not renamed. Raises `IncompatibleStateError` if the saved parameters were
        grouped in another way, or if the renamed names do not show how.
        """
        optimizer, module = self._optimizer, self._module
        of_parameters = form["state"]
        if self._before is not None:  # leaves out state that `give_state` made and the load did not fill
            had = self._named_before()
            of_parameters = {
                name: values for name, values in of_parameters.items() if name in had or was_loaded(name, values)
            }
        own = self.form()["param_groups"]
        groups = in_groups(own, form["param_groups"], key, of_parameters, stored_names)
        form = {"state": of_parameters, "param_groups": groups}
        if module is not None and is_wrapped(module):
            with _StateLeftAlone(optimizer):
                options = StateDictOptions(strict=False)  # parameters without state are no error
                set_optimizer_state_dict(module, optimizer, form, options=options)
        else:
            numbers = {name: number for number, name in enumerate(chain(*(group["params"] for group in groups)))}
            form["state"] = {numbers[name]: values for name, values in of_parameters.items()}
            for group in groups:
                group["params"] = [numbers[name] for name in group["params"]]
            optimizer.load_state_dict(form)
        self._before = None

    def give_state(self) -> None:
        """Creates the state of parameters that have none, without changing the parameters. Takes a step with gradients,
        learning rate and weight decay of zero, without hooks and schedulers."""
        optimizer = self._optimizer
        lacking = {p for p in self._parameters() if p.requires_grad and not optimizer.state.get(p)}
        if not lacking:
            return
        self._before = dict(optimizer.state)
        gradients = {parameter: parameter.grad for parameter in self._parameters()}
        settings = [dict(group) for group in optimizer.param_groups]
        # In a group without a learning rate a step may change parameters: their values are copied back afterwards.
        values = {
            parameter: parameter.detach().clone()
            for group in optimizer.param_groups
            if "lr" not in group
            for parameter in group["params"]
        }
        step = type(optimizer).step
        if getattr(step, "hooked", False):
            step = getattr(step, "__wrapped__", step)
        try:
            for group in optimizer.param_groups:
                for name in {"lr", "weight_decay"} & group.keys():
                    group[name] = torch.zeros_like(group[name]) if isinstance(group[name], torch.Tensor) else 0.0
            for parameter in gradients:
                parameter.grad = torch.zeros_like(parameter) if parameter in lacking else None
            # The step makes its counters on the default device. On "meta" it could not read them.
            with torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext():
                step(optimizer)
        except Exception as error:
            self.take_back()
            raise CheckpointError(
                f"a {type(optimizer).__name__} without state cannot be loaded into, because a step with gradients of "
                f"zero fails: take a step before ({type(error).__name__}: {error})"
            ) from error
        finally:
            for group, before in zip(optimizer.param_groups, settings, strict=True):
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

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _names(self, module: nn.Module) -> list[str]:
        """The names of all parameters, by number."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        return [names[parameter] for parameter in self._parameters()]

    def _named_before(self) -> set[Any]:
        """Names of parameters that had a state before `give_state`."""
        assert self._before is not None
        had = [bool(self._before.get(parameter)) for parameter in self._parameters()]
        names = chain(*(group["params"] for group in self.form()["param_groups"]))
        return {name for name, it_had in zip(names, had, strict=True) if it_had}


class _StateLeftAlone:
    """A context in which torch's functions take no step with an optimizer without state. One parameter gets a gradient
    meanwhile: if any parameter has one, torch takes no step."""

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        needed = not optimizer.state and all(parameter.grad is None for parameter in parameters)
        self._marked = min(parameters, key=torch.Tensor.numel) if needed and parameters else None

    def __enter__(self) -> None:
        if self._marked is not None:
            self._marked.grad = torch.zeros_like(self._marked)

    def __exit__(self, *error: object) -> None:
        if self._marked is not None:
            self._marked.grad = None
