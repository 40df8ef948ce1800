"""Records for loads what the dotted keys of a nested state leave out: keys that are no text, and empty mappings.

DCP turns all keys of mappings into text, and an empty mapping has no element to store. Both are recorded beside the
paths of the keys, in an attribute of `.metadata` that stock readers ignore (docs/format.md).
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import UntrustedCheckpointError

Path = tuple[str | int, ...]

ATTRIBUTE = "vescale_ckpt_structure"  #: name of the attribute of DCP's `Metadata`

_NUMBER = re.compile("0|-?[1-9][0-9]{0,3998}")  # longer ones are text: Python converts only so many digits
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _NotKept(Exception):
    """A key is of a kind that cannot be recorded."""


@dataclass
class Structure:
    """The record of one state. Paths are those of `flatten`: text for keys of mappings, numbers for elements of
    lists."""

    numbered: set[Path] = field(default_factory=set)  #: mappings with only whole numbers as keys
    keys: dict[Path, Any] = field(default_factory=dict)  #: {path: its last key} of other keys that are no text
    empty: set[Path] = field(default_factory=set)  #: mappings without elements
    lost: list[Path] = field(default_factory=list)  #: keys that will be loaded as text; not stored

    def see(self, mapping: Mapping[Any, Any], path: Path) -> None:
        if not mapping:
            if path:
                self.empty.add(path)
            return
        kinds = set(map(type, mapping))
        if kinds == {str}:
            return
        if kinds == {int}:
            self.numbered.add(path)
            return
        for key in mapping:
            if type(key) is not str:
                at = (*path, str(key))
                try:
                    self.keys[at] = _decoded(_encoded(key))
                except _NotKept:
                    self.lost.append(at)

    def key(self, path: Path, text: str) -> Any:
        """Returns the key of the mapping at `path` that became `text`."""
        if path in self.numbered and is_number(text):
            return int(text)
        return self.keys.get((*path, text), text) if self.keys else text

    def pack(self) -> str:
        """Returns the record as text; empty if it has no content."""
        if not (self.numbered or self.keys or self.empty):
            return ""
        numbered, empty = (sorted(map(list, paths), key=repr) for paths in (self.numbered, self.empty))
        keys = sorted(([*path, _encoded(key)] for path, key in self.keys.items()), key=repr)
        return json.dumps({"numbered": numbered, "keys": keys, "empty": empty})

    @staticmethod
    def unpack(text: str) -> Structure:
        """Reads a text of `pack`. Raises `UntrustedCheckpointError` for a text that `pack` does not write."""
        structure = Structure()
        try:
            record = json.loads(text) if text else {"numbered": [], "keys": [], "empty": []}
            structure.numbered = {_path(path) for path in record["numbered"]}
            structure.empty = {_path(path) for path in record["empty"] if path}
            structure.keys = {_path(path): _decoded(encoded) for *path, encoded in record["keys"]}
        except (ValueError, TypeError, KeyError, RecursionError, _NotKept) as error:
            raise UntrustedCheckpointError(
                f"metadata has a malformed record of the kinds of keys: {error!r}"
            ) from error
        return structure

    @staticmethod
    def merged(packed: Iterable[str]) -> str:
        distinct = [text for text in dict.fromkeys(packed) if text]
        if len(distinct) < 2:
            return "".join(distinct)
        result = Structure()
        for one in map(Structure.unpack, distinct):
            result.numbered |= one.numbered
            result.keys = {**one.keys, **result.keys}
            result.empty |= one.empty
        return result.pack()


def structure_of(metadata: object) -> Structure | None:
    """Returns the record in DCP's metadata of a checkpoint. None if it has none, because another tool wrote it."""
    noted = getattr(metadata, ATTRIBUTE, None)
    return Structure.unpack(noted) if isinstance(noted, str) else None


def is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def any_number(texts: Iterable[str]) -> bool:
    """Whether `is_number` is true of one of them, without Python code for each."""
    return any(map(_NUMBER.fullmatch, texts))


def _path(elements: list[Any]) -> Path:
    if not all(type(element) is str or (type(element) is int and element >= 0) for element in elements):
        raise ValueError(f"{elements!r} is no path")
    return tuple(elements)


def _encoded(key: Any) -> Any:
    """Returns a key in a form for JSON: text stays text, other keys become a list of kind and value. A key that is an
    integer by `operator.index`, as an `IntEnum`, becomes that number. Raises `_NotKept`."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, bool):
        return ["constant", key]
    if isinstance(key, float):
        return ["float", float.__repr__(key)]
    if type(key) in (tuple, torch.Size):
        return ["tuple", list(map(_encoded, key))]
    if isinstance(key, torch.dtype):
        return ["dtype", str(key)]
    try:
        if not isinstance(key, torch.Tensor):
            return ["int", str(operator.index(key))]  # works for numpy's integers, too
    except TypeError:
        pass
    raise _NotKept


_KINDS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": int,
    "tuple": lambda elements: tuple(map(_decoded, elements)),
    "dtype": _DTYPES.__getitem__,
}


def _decoded(encoded: Any) -> Any:
    if isinstance(encoded, str):
        return encoded
    kind, value = encoded
    if kind == "constant":
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{value!r} is no constant")
        return value
    return _KINDS[kind](value)
