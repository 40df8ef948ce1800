"""Finds containers that torch before 2.4 saved as one object each: all mappings and lists in which there is no tensor.

Later versions save each of their values under a key of its own, and so does this package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .._engine.torch_types import is_tensor_metadata
from .flatten import flatten, with_forms

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


def saved_as_objects(metadata: Metadata) -> list[str]:
    """Returns the keys of all objects if torch before 2.4 may have saved them; none if a container without a tensor
    is saved value by value."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    entries = metadata.state_dict_metadata
    objects = [key for key, stored in entries.items() if not is_tensor_metadata(stored)]
    holds_tensor: set[Any] = set()
    for key in entries.keys() - set(objects):
        path = paths.get(key, ())
        holds_tensor.update(path[:depth] for depth in range(1, len(path)))
    inside = (path[:depth] for path in map(paths.get, objects) if path for depth in range(1, len(path)))
    return objects if holds_tensor.issuperset(inside) else []


def split(metadata: Metadata, containers: Mapping[str, Any]) -> tuple[Metadata, dict[str, Any]]:
    """Returns the metadata with a key for each value in `containers` in place of their own keys, and {key: value}."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    values: dict[str, Any] = {}
    entries, places = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
    paths = dict(metadata.planner_data or {})
    for container, content in containers.items():
        inside, inner_paths = flatten({container: content})
        del entries[container]
        path = paths.pop(container, (container,))
        for key, value in inside.items():
            values[key], entries[key] = value, BytesStorageMetadata()
            paths[key] = (*path, *inner_paths[key][1:])
            places[MetadataIndex(key)] = places[MetadataIndex(container)]
    return replace(metadata, state_dict_metadata=entries, planner_data=paths, storage_data=places), values


def ask_for_whole(form: dict[str, Any], is_stored: Callable[[str], bool]) -> dict[str, Any]:
    """Returns `form` with None in the place of each container without a tensor whose own key is stored."""
    found = [
        path
        for path, container in _containers(form, ())
        if is_stored(".".join(map(str, path)))
        and not any(isinstance(value, torch.Tensor) for value in flatten({"": container})[0].values())
    ]
    return with_forms(form, dict.fromkeys(found)) if found else form


def _containers(outer: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Collection[Any]]]:
    for name, inner in outer.items() if isinstance(outer, Mapping) else enumerate(outer):
        if isinstance(inner, (Mapping, list)):
            yield (*path, name), inner
            yield from _containers(inner, (*path, name))
