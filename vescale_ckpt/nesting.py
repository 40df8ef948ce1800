"""From dotted keys back to nested containers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from .errors import UntrustedCheckpointError
from .flatten import Path

_MOST_GAPS = 1 << 20  # elements of lists, over all of them, that were not loaded


class _Dict(dict[str, Any]):
    """A container under way: a dict that was loaded is a value."""


class _List(dict[int, Any]):
    """A list under way, by index."""


def nested(values: Mapping[str, Any], paths: object) -> dict[str, Any]:
    """`values` by the paths that their keys stand for in a checkpoint's metadata; at the top level if there is none.

    Elements of lists that are not among the values are None. Raises `UntrustedCheckpointError` for paths that no state
    can have had.
    """
    root = _Dict()
    known = paths if isinstance(paths, Mapping) else {}
    for key, value in values.items():
        path = known.get(key, (key,))
        if not _is_path(path):
            raise UntrustedCheckpointError(f"{key}: metadata gives {path!r} as its place in the state", key=key)
        container: Any = root
        for name, following in pairwise(path):
            kind = _Dict if isinstance(following, str) else _List
            container = container.setdefault(name, kind())
            if type(container) is not kind:
                raise _conflict(key)
        if path[-1] in container:
            raise _conflict(key)
        container[path[-1]] = value
    result: dict[str, Any] = _finished(root, [_MOST_GAPS])
    return result


def place(root: Any, path: Path, value: Any) -> None:
    """Puts `value` where `flatten` found one: elements of the path are text, also of keys that are not."""
    container = root
    for name in path[:-1]:
        container = container[_own_name(container, name)]
    container[_own_name(container, path[-1])] = value


def _own_name(container: Any, name: str | int) -> Any:
    if isinstance(container, list) or name in container:
        return name
    return next(key for key in container if str(key) == name)


def _is_path(path: object) -> bool:
    """A name, then names and indices."""
    return (
        isinstance(path, tuple)
        and len(path) > 0
        and isinstance(path[0], str)
        and all(isinstance(name, str) or (type(name) is int and name >= 0) for name in path)
    )


def _conflict(key: str) -> UntrustedCheckpointError:
    return UntrustedCheckpointError(f"{key}: metadata gives its place in the state to something else, too", key=key)


def _finished(value: Any, gaps: list[int]) -> Any:
    if type(value) is _List:
        length = max(value) + 1
        gaps[0] -= length - len(value)
        if gaps[0] < 0:
            raise UntrustedCheckpointError("metadata speaks of lists longer than a state has")
        return [_finished(value.get(index), gaps) for index in range(length)]
    if type(value) is _Dict:
        return {name: _finished(element, gaps) for name, element in value.items()}
    return value
