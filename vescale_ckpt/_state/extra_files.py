"""Keeps small files (a configuration, a loop's state) in a checkpoint for its users, as objects under special keys.

The content is an object of the checkpoint: it is committed with the tensors and has a checksum. The file of that name
beside the data files is a copy for programs that do not use this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UntrustedCheckpointError
from ..reports import EXTRA_FILES


def key_of(name: str) -> str:
    return EXTRA_FILES + name


def is_extra(key: str) -> bool:
    return key.startswith(EXTRA_FILES)


def names_in(keys: Iterable[str]) -> list[str]:
    return [key[len(EXTRA_FILES) :] for key in keys if key.startswith(EXTRA_FILES)]


def with_files(state: dict[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns a state to save with the files in it. Raises ValueError if the state itself has keys of such files."""
    first = EXTRA_FILES.removesuffix(".")
    if taken := [key for key in state if isinstance(key, str) and (key == first or is_extra(key))]:
        raise ValueError(f"{taken[0]!r}: keys that begin with {first!r} are reserved for extra_files=")
    return {**state, **{key_of(name): content for name, content in files.items()}} if files else state


def contents_in(objects: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns {name: content} of the files among loaded objects. Raises `UntrustedCheckpointError` for a content that
    is not bytes."""
    found = {}
    for name in names_in(objects):
        content = objects[key_of(name)]
        if type(content) is not bytes:
            raise UntrustedCheckpointError(
                f"{key_of(name)}: expected a file's content as bytes, got {type(content).__name__}", key=key_of(name)
            )
        found[name] = content
    return found
