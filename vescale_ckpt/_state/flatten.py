"""Flattens nested state into one dictionary with dotted keys, as DCP's `flatten_state_dict` does, and nests it for
loads.

Mappings are flattened, and so are lists that contain a tensor, a mapping, a `PerRank` or such a list. Every other value
stays whole. Keys become text; elements of lists get their index.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise
from operator import is_
from typing import Any

import torch

from .._engine import _C
from .._engine.torch_types import dtensor_type
from ..errors import UntrustedCheckpointError
from .per_rank import PerRank
from .structure import Path, Structure, any_number, is_number

logger = logging.getLogger(__name__)

#: These are common types, and so is DTensor. A lookup in a set is cheaper than `isinstance`.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_SCALARS = frozenset({int, float, str, bool, bytes, type(None), tuple})

_MOST_NAMED = 5  # a message names at most so many mappings
_MOST_GAPS = 1 << 20  # all lists together may lack so many elements


# --- From nested containers to dotted keys


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Returns {dotted key: value} and {dotted key: path} of `state`, both in the order of the state.

    Raises `ValueError` if two paths have one key.
    """
    flat, paths, _ = flatten_with_structure(state)
    return flat, paths


def flatten_with_structure(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path], Structure]:
    """Returns the same, and a `Structure` with the facts that paths leave out."""
    flattening = _Flattening()
    flattening.take_mapping(state, "", ())
    return flattening.flat, flattening.paths, flattening.structure


class Flattener:
    """Flattens one state after another. If the form of a state is that of the previous one, reads only the values.

    Not thread-safe. Holds no value between calls.
    """

    def __init__(self) -> None:
        self._form: _C.StateForm | None = None
        self._paths: dict[str, Path] = {}  # the paths of the last state; callers get copies
        self._structure = Structure()

    def flatten(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path], Structure]:
        """Returns the same as `flatten_with_structure`."""
        is_known = type(state) in (dict, OrderedDict)
        if is_known and self._form is not None and (values := self._form.values(state)) is not None:
            return dict(zip(self._paths, values, strict=True)), dict(self._paths), self._structure
        flat, paths, structure = flatten_with_structure(state)
        self._form = _C.StateForm.of(state, _TENSORS.union(dtensor_type()), _SCALARS) if is_known else None
        if self._form is not None:
            found = self._form.values(state)
            if found is None or len(found) != len(flat) or not all(map(is_, found, flat.values())):
                self._form = None
        self._paths, self._structure = dict(paths), structure
        return flat, paths, structure


class _Flattening:
    def __init__(self) -> None:
        self.flat: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.structure = Structure()
        self._leaves = _TENSORS.union(_SCALARS, dtensor_type())

    def take_mapping(self, mapping: Mapping[Any, Any], prefix: str, path: Path) -> None:
        flat, paths, leaves = self.flat, self.paths, self._leaves
        ordinary = bool(mapping)
        for name, value in mapping.items():
            if type(name) is not str:
                name, ordinary = str(name), False
            if type(value) in leaves:
                key = prefix + name
                if key in flat:
                    raise _duplicate(key)
                flat[key] = value
                paths[key] = (*path, name)
            else:
                self.take(value, prefix + name, (*path, name))
        if not ordinary:
            self.structure.see(mapping, path)

    def take(self, value: Any, key: str, path: Path) -> None:
        if type(value) is dict or isinstance(value, Mapping):
            self.take_mapping(value, key + ".", path)
        elif isinstance(value, list) and not stays_whole(value):
            for index, element in enumerate(value):
                self.take(element, f"{key}.{index}", (*path, index))
        else:
            if key in self.flat:
                raise _duplicate(key)
            self.flat[key] = value
            self.paths[key] = path


def stays_whole(values: list[Any]) -> bool:
    """Whether a list is one value, not flattened."""
    return _SCALARS.issuperset(map(type, values)) or not any(
        isinstance(value, (torch.Tensor, Mapping, PerRank)) or (isinstance(value, list) and not stays_whole(value))
        for value in values
    )


def _duplicate(key: str) -> ValueError:
    return ValueError(f"duplicated flatten key {key}")


# --- And back


class _Dict(dict[str, Any]):
    """A mapping that `nest` is building. A plain dict is a loaded value."""


class _List(dict[int, Any]):
    """A list that `nest` is building, by index."""


def nest(values: Mapping[str, Any], paths: object, structure: Structure | None = None) -> dict[str, Any]:
    """Puts `values` into nested containers, at the `paths` of their keys in a checkpoint's metadata. A key without a
    path is at the top level.

    Elements of lists that are not among the values are None. `structure` gives the original keys of mappings. Without
    it, keys are text, except numbers of parameters in an optimizer's state; a warning names other mappings whose keys
    look like numbers. Raises `UntrustedCheckpointError` for paths that no state can have.
    """
    root = _Dict()
    known = paths if isinstance(paths, Mapping) else {}
    for key, value in values.items():
        top = (key,)
        path = known.get(key, top)
        if path == top and key not in root:  # the usual case, sooner
            root[key] = value
            continue
        if not is_path(path):
            raise UntrustedCheckpointError(f"{key}: metadata gives {path!r} as its place in the state", key=key)
        container = _container_of(root, path)
        if container is None or path[-1] in container:
            raise UntrustedCheckpointError(
                f"{key}: metadata gives its place in the state to something else, too", key=key
            )
        container[path[-1]] = value
    for path in () if structure is None else structure.empty:
        _add_empty(root, path)
    finishing = _Finishing(structure)
    result: dict[str, Any] = finishing.finished(root, ())
    if finishing.doubtful:
        shown = ", ".join(".".join(map(str, path)) or "the state itself" for path in finishing.doubtful[:_MOST_NAMED])
        logger.warning(
            "keys that look like numbers are text now, because the checkpoint does not record their types: in %s%s",
            shown,
            ", ..." if len(finishing.doubtful) > _MOST_NAMED else "",
        )
    return result


def place(root: Any, path: Path, value: Any) -> None:
    """Puts `value` at a path of `flatten`. A path has text for all keys, also for keys that are not text."""
    container = root
    for name in path[:-1]:
        container = container[own_name(container, name)]
    container[own_name(container, path[-1])] = value


def own_name(container: Any, name: str | int) -> Any:
    """Returns the container's key that `flatten` turned into `name`. Raises `ValueError` if a number and its text are
    keys."""
    if isinstance(container, list):
        return name
    if isinstance(name, str) and is_number(name) and (number := int(name)) in container:
        if name in container:
            raise ValueError(f"a mapping has the keys {number} and {name!r}, whose values a load cannot tell apart")
        return number
    if name in container:
        return name
    return next((key for key in container if str(key) == name), name)


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


def is_path(path: object) -> bool:
    """Whether it is a name followed by names and indices."""
    return (
        isinstance(path, tuple)
        and len(path) > 0
        and isinstance(path[0], str)
        and all(isinstance(name, str) or (type(name) is int and name >= 0) for name in path)
    )


def _container_of(root: _Dict, path: Path) -> Any:
    """Returns the container of the value at a path, and makes those that are not there. None if a container of another
    kind, or a value, is in the way."""
    container: Any = root
    for name, following in pairwise(path):
        kind = _Dict if isinstance(following, str) else _List
        container = container.setdefault(name, kind())
        if type(container) is not kind:
            return None
    return container


def _add_empty(root: _Dict, path: Path) -> None:
    """Adds a mapping without elements, unless there is a value at its path."""
    if not is_path(path):
        raise UntrustedCheckpointError(f"metadata gives {path!r} as a place in the state")
    if (container := _container_of(root, path)) is not None:
        container.setdefault(path[-1], _Dict())


class _Finishing:
    """Turns `_Dict` and `_List` into the containers of a state."""

    def __init__(self, structure: Structure | None) -> None:
        self._structure = structure
        self._gaps = _MOST_GAPS
        self.doubtful: list[Path] = []  #: mappings whose keys look like numbers, if there is no structure

    def finished(self, value: Any, path: Path) -> Any:
        if type(value) is _List:
            length = max(value) + 1
            self._gaps -= length - len(value)
            if self._gaps < 0:
                raise UntrustedCheckpointError("metadata speaks of lists longer than a state has")
            return [self.finished(value.get(index), (*path, index)) for index in range(length)]
        if type(value) is not _Dict:
            return value
        elements = dict(value)
        for name, element in value.items():
            if type(element) is _Dict or type(element) is _List:
                elements[name] = self.finished(element, (*path, name))
        if (structure := self._structure) is not None:
            result = {structure.key(path, name): element for name, element in elements.items()}
            return result if len(result) == len(elements) else elements
        if any_number(elements):
            self.doubtful.append(path)
        elif (state := (*path, "state")) in self.doubtful and _numbers_parameters(elements):
            self.doubtful.remove(state)
            of_parameters = elements["state"].items()
            elements["state"] = {int(name) if is_number(name) else name: element for name, element in of_parameters}
        return elements


def _numbers_parameters(optimizer: Mapping[str, Any]) -> bool:
    """Whether the mapping has the form of an optimizer's `state_dict`, with numbered parameters in groups."""
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    lists = [group.get("params") for group in groups]
    numbers = {number for params in lists if isinstance(params, list) for number in params if type(number) is int}
    return all(int(name) in numbers for name in optimizer["state"] if is_number(name))
