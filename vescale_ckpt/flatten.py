"""Nested containers become one dictionary with dotted keys: DCP's `flatten_state_dict`, fast.

Mappings are taken apart, and lists that hold a tensor, a mapping, a `PerRank` or such a list; all else stays whole.
Keys become text, list elements their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import stock
from .per_rank import PerRank
from .structure import Path as Path
from .structure import Structure

#: The common types, for which one look at a set replaces asking what they are instances of.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})
_SCALARS = frozenset({int, float, str, bool, bytes, type(None), tuple})
_LEAVES = _TENSORS | _SCALARS


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """The values of `state` by dotted key, and for each key the path that it stands for, both in the state's order.

    Raises `ValueError` if two paths have one key.
    """
    flat, paths, _ = flatten_with_structure(state)
    return flat, paths


def flatten_with_structure(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path], Structure]:
    """The same, and what the paths do not tell."""
    if stock.flattens_as_torch_2_3():
        return *stock.flatten_state_dict(dict(state)), Structure()
    flattening = _Flattening()
    flattening.take_mapping(state, "", ())
    return flattening.flat, flattening.paths, flattening.structure


class _Flattening:
    def __init__(self) -> None:
        self.flat: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.structure = Structure()

    def take_mapping(self, mapping: Mapping[Any, Any], prefix: str, path: Path) -> None:
        flat, paths = self.flat, self.paths
        ordinary = bool(mapping)
        for name, value in mapping.items():
            if type(name) is not str:
                name, ordinary = str(name), False
            if type(value) in _LEAVES:
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
        elif isinstance(value, list) and not _stays_whole(value):
            for index, element in enumerate(value):
                self.take(element, f"{key}.{index}", (*path, index))
        else:
            if key in self.flat:
                raise _duplicate(key)
            self.flat[key] = value
            self.paths[key] = path


def _stays_whole(values: list[Any]) -> bool:
    if _SCALARS.issuperset(map(type, values)):
        return True
    for value in values:
        if isinstance(value, (torch.Tensor, Mapping, PerRank)) or (isinstance(value, list) and not _stays_whole(value)):
            return False
    return True


def _duplicate(key: str) -> ValueError:
    return ValueError(f"duplicated flatten key {key}")
