"""Finds for loads in which group the parameters of each group of an optimizer were saved."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from ..errors import IncompatibleStateError
from .flatten import flatten
from .stored_entries import StoredEntries

PARAMS_KEY = "param_groups.0.params"  #: a key that the state of each optimizer has


class StoredNames:
    """The names of an optimizer's parameters in a checkpoint with renamed keys.

    prefix: the prefix of the optimizer's keys in the state, with a dot at its end.
    parameter_key: returns the key of a parameter of that name in its module; None if parameters are numbered.
    loaded: the keys of the state that were loaded.
    """

    def __init__(
        self,
        prefix: str,
        stored: StoredEntries,
        parameter_key: Callable[[Any], str | None],
        loaded: AbstractSet[str],
    ) -> None:
        self._prefix, self._stored, self._parameter_key, self._loaded = prefix, stored, parameter_key, loaded
        start = stored.prefix(prefix, PARAMS_KEY)
        self._state_prefix = None if start is None else f"{start}state."  # the checkpoint's, of parameters' state

    def names(self, name: Any, values: Mapping[str, Any], known: Container[str]) -> list[str]:
        """Returns the names in `known` that a parameter may be stored as. `values`: its loaded state."""
        by_state = [of_state] if (of_state := self._by_state(name, values)) in known else []
        if by_state and values:
            return by_state
        return [*by_state, *(each for each in self._by_module(name) if each in known)]

    def _by_state(self, name: Any, values: Mapping[str, Any]) -> str:
        part = next(iter(flatten(values)[0]), "step")
        key = self._stored.key(f"{self._prefix}state.{name}.{part}")
        if self._state_prefix is None or not (key.startswith(self._state_prefix) and key.endswith(f".{part}")):
            return ""
        return key.removeprefix(self._state_prefix).removesuffix(f".{part}")

    def _by_module(self, name: Any) -> list[str]:
        """Returns possible names by the parameter's key in its module: names within a module lack the first parts."""
        key = self._parameter_key(name)
        parts = [] if key is None else self._stored.key(key).split(".")
        return [".".join(parts[at:]) for at in range(len(parts))]

    def is_stored(self, name: Any, values: Mapping[str, Any]) -> bool:
        """Whether some state of the parameter was loaded."""
        return any(f"{self._prefix}state.{name}.{part}" in self._loaded for part in flatten(values)[0])


def in_groups(
    own: list[dict[str, Any]],
    saved: list[dict[str, Any]],
    key: str,
    state: Mapping[Any, Mapping[str, Any]],
    stored: StoredNames | None,
) -> list[dict[str, Any]]:
    """Returns the optimizer's own groups with the saved settings.

    A saved group is found by the names of its parameters. If no group was saved with these names (they belong to
    another pipeline stage), it is found by the index of the group. With renamed keys, the names are those of the
    checkpoint, and the index counts only if the result is certain.

    `key`: the key of the optimizer. `state`: {name of a parameter: its state}. `stored`: None if keys are not renamed.
    Raises `IncompatibleStateError` if parameters of one group were saved in several groups, or the group is unknown.
    """
    group_of = {str(name): number for number, group in enumerate(saved) for name in group["params"]}
    groups = []
    by_number: list[int] = []
    for number, group in enumerate(own):
        sources: set[int] = set()
        for name in group["params"]:
            names = [str(name)] if stored is None else stored.names(name, state.get(name, {}), group_of)
            found = {group_of[each] for each in names if each in group_of}
            if len(found) > 1:
                raise _ambiguous(key, number, f"{name} may be in groups {sorted(found)}: rename= gives {names}")
            sources |= found
        if len(sources) > 1:
            raise IncompatibleStateError(
                f"{key}.param_groups.{number}", "parameters in one group", f"them in groups {sorted(sources)}"
            )
        if not sources:
            by_number.append(number)
        groups.append({**saved[min(sources, default=number)], "params": list(group["params"])})
    if stored is not None and not _settings_are_equal(saved):
        for number in by_number:
            names = own[number]["params"]
            if names and not any(stored.is_stored(name, state.get(name, {})) for name in names):
                raise _ambiguous(key, number, "none of its parameters is in a group, by the names that rename= gives")
    return groups


def _ambiguous(key: str, number: int, why: str) -> IncompatibleStateError:
    return IncompatibleStateError(f"{key}.param_groups.{number}", "to know its group in the checkpoint", why)


def _settings_are_equal(groups: list[dict[str, Any]]) -> bool:
    first, *others = ({name: value for name, value in group.items() if name != "params"} for group in groups)
    return all(str(other) == str(first) for other in others)
