"""Looks up the stored keys below a name, and makes targets for those that an object's state lacks before a load."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .._engine.torch_types import is_dtensor, is_tensor_metadata
from .flatten import flatten
from .key_selection import renamed_if_known
from .structure import Path, Structure, is_number, structure_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


class StoredEntries:
    """The keys of a checkpoint. Reads its metadata only where an object's own state lacks a key: metadata of thousands
    of ranks take seconds to build."""

    def __init__(
        self,
        keys: Sequence[str],
        metadata: Callable[[], Metadata],
        rename: Callable[[str], str],
        same_names: bool,
        load: Callable[[str], Any],
    ) -> None:
        """`rename`: maps a key of the state to its key in the checkpoint. `same_names`: the caller renames no keys.
        `load`: reads an object, by its key in the checkpoint."""
        self._rows = {key: row for row, key in enumerate(keys)}
        self.keys = self._rows.keys()
        self.same_names = same_names
        self.load = load
        self.added: set[str] = set()  #: keys of the state whose targets were made from the metadata
        self._read_metadata = metadata
        self._rename = rename

    @cached_property
    def _metadata(self) -> Metadata:
        return self._read_metadata()

    @cached_property
    def paths(self) -> Mapping[str, Any]:
        """The path of each key, as the metadata has it: it may be anything."""
        paths = self._metadata.planner_data
        return paths if isinstance(paths, Mapping) else {}

    @cached_property
    def structure(self) -> Structure | None:
        return structure_of(self._metadata)

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self.keys)

    def below(self, prefix: str) -> list[str]:
        """Returns the checkpoint's keys with a prefix, sorted."""
        begin = bisect_left(self._sorted, prefix)
        end = bisect_right(self._sorted, prefix, begin, key=lambda key: key[: len(prefix)])
        return self._sorted[begin:end]

    def key(self, key: str) -> str:
        """Returns the checkpoint's key for a key that the state may lack. Empty if `rename` raises for such a key."""
        return renamed_if_known(self._rename, key)

    def has(self, key: str, value: Any) -> bool:
        """Whether any part of `value`, which the state has under `key`, is stored."""
        return any(self.key(part) in self.keys for part in flatten({key: value})[0])

    def shape(self, key: str) -> torch.Size | None:
        """Returns the shape of a stored tensor; None if the checkpoint's `key` is an object."""
        stored = self._metadata.state_dict_metadata[key]
        return stored.size if is_tensor_metadata(stored) else None

    def is_empty(self, key: str) -> bool:
        return key in self._empty

    @cached_property
    def _empty(self) -> dict[str, Path]:
        return {} if self.structure is None else {".".join(map(str, path)): path for path in self.structure.empty}

    def add_empty(self, form: Any, prefix: str, probe: str) -> None:
        """Adds to `form`, which the state has under `prefix`, the empty mappings in containers of which a part was made
        from the metadata. `probe`: as in `prefix`."""
        start = self.prefix(prefix, probe)
        if not self.added or start is None:
            return
        below = [key for key in self._empty if key.startswith(start)]
        for key in sorted(below, key=lambda key: [(type(name) is str, name) for name in self._empty[key]]):
            names, are_indices = self.names(key, key[len(start) :])
            if names[0] == "state" and (len(names) == 2 or not self.same_names):
                continue  # of another rank's parameter, or of one that has another name
            container = form
            for inner in names[:-1]:
                container = _get(container, inner) if isinstance(container, (dict, list)) else None
            if isinstance(container, dict) and not are_indices[-1]:
                container.setdefault(names[-1], {})
            elif isinstance(container, list) and names[-1] == len(container):
                container.append({})

    def prefix(self, prefix: str, probe: str) -> str | None:
        """Returns the checkpoint's prefix for a prefix of the state's keys; None if keys are renamed in another way.
        `probe`: the suffix of a key that the object there is likely to have."""
        stored = self.key(prefix + probe)
        return stored.removesuffix(probe) if stored.endswith(probe) else None

    def under(self, prefix: str, probe: str) -> dict[str, str]:
        """Returns {suffix: key of the checkpoint} of all that is stored of the object under `prefix`, in the
        checkpoint's order. `probe`: as in `prefix`."""
        start = self.prefix(prefix, probe)
        below = [] if start is None else sorted(self.below(start), key=self._rows.__getitem__)
        return {key.removeprefix(start or ""): key for key in below}

    def add_target(
        self, container: Any, prefix: str, suffix: str, key: str, like: Iterable[torch.Tensor], first: Any = None
    ) -> None:
        """Adds a target for the checkpoint's `key` to `container`, under the name `first` if it is given, then under
        the names that `suffix` was made of. `prefix`: of the key in the state, before `suffix`.

        `like`: as in `target`.
        """
        names, are_indices = self.names(key, suffix.removeprefix(".")) if suffix else ((), ())
        if first is not None:
            names, are_indices = (first, *names), (False, *are_indices)
        for name, follows_index in zip(names[:-1], are_indices[1:], strict=True):
            kind = list if follows_index else dict
            inner = _get(container, name)
            if not isinstance(inner, kind):
                inner = kind()
                _set(container, name, inner)
            container = inner
        _set(container, names[-1], self.target(key, like))
        self.added.add(prefix + suffix)

    def without_unread(self, form: Any, key: str, loaded: set[str]) -> Any:
        """Returns `form` without the targets that were made from the metadata and not loaded."""
        if isinstance(form, dict):
            kept = {name: self.without_unread(value, f"{key}.{name}", loaded) for name, value in form.items()}
            return {name: value for name, value in kept.items() if value is not _UNREAD} if form else form
        if isinstance(form, list):
            elements = [self.without_unread(value, f"{key}.{index}", loaded) for index, value in enumerate(form)]
            return [value for value in elements if value is not _UNREAD] if form else form
        return _UNREAD if key in self.added and key not in loaded else form

    def names(self, key: str, suffix: str) -> tuple[Path, tuple[bool, ...]]:
        """Returns the names that `suffix`, of the checkpoint's `key`, was made of, and which of them are indices of
        lists."""
        path = self.paths.get(key, self._empty.get(key))
        path = path if isinstance(path, tuple) else ()
        start = next((at for at in range(len(path)) if ".".join(map(str, path[at:])) == suffix), None)
        if start is None:
            parts = tuple(suffix.split("."))
            return parts, (False,) * len(parts)
        are_indices = tuple(type(name) is int for name in path[start:])
        names = []
        for at in range(start, len(path)):
            name = path[at]
            if isinstance(name, str):
                if self.structure is not None:
                    name = self.structure.key(path[:at], name)
                elif at and path[at - 1] == "state" and is_number(name):  # as an optimizer numbers its parameters
                    name = int(name)
            names.append(name)
        return tuple(names), are_indices

    def target(self, key: str, like: Iterable[torch.Tensor]) -> Any:
        """Returns a target for the checkpoint's `key`: a tensor on the meta device, sharded as the DTensors in `like`
        if they have its shape; None for an object."""
        stored = self._metadata.state_dict_metadata[key]
        if not is_tensor_metadata(stored):
            return None
        size, dtype = stored.size, stored.properties.dtype
        sharded = [each for each in like if is_dtensor(each) and each.shape == size and size]
        if sharded and len({(each.device_mesh, each.placements) for each in sharded}) == 1:
            return torch.empty_like(sharded[0].detach(), dtype=dtype, device="meta")
        return torch.empty(size, dtype=dtype, device="meta")


_UNREAD = object()


def _get(container: Any, name: Any) -> Any:
    if isinstance(container, list):
        return container[name] if name < len(container) else None
    return container.get(name)


def _set(container: Any, name: Any, value: Any) -> None:
    if isinstance(container, list):
        while name >= len(container):
            container.append({})  # an element without a key of its own can only be an empty mapping
    container[name] = value
