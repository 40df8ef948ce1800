"""What changed from one inventory (csrc/state/inventory.h) to the next, in words, for the log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from . import _C

_KINDS = ("an object", "a tensor", "a shard")


class _Key(NamedTuple):
    """All items of one key."""

    kind: str
    dtype: str
    requires_grad: bool
    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]  # offset and size


def what_changed(old: bytes, new: bytes, most: int = 5) -> str:
    """The first differences between two inventories: keys, dtypes, shapes, shards. Sizes of objects are none."""
    before, after = _keys(old), _keys(new)
    differences = list(_differences(before, after))
    if not differences:
        return "the order of the keys" if list(before) != list(after) else "nothing that planning depends on"
    shown = "; ".join(islice(differences, most))
    return shown if len(differences) <= most else f"{shown}; and {len(differences) - most} more"


def _differences(before: dict[str, _Key], after: dict[str, _Key]) -> Iterator[str]:
    for name, was in before.items():
        now = after.get(name)
        if now is None:
            yield f"{name!r} is gone"
        elif was != now:
            yield f"{name!r}: {_difference(was, now)}"
    for name in after:
        if name not in before:
            yield f"{name!r} is new"


def _difference(was: _Key, now: _Key) -> str:
    for name in ("kind", "dtype", "shape"):
        if getattr(was, name) != getattr(now, name):
            return f"{name} {_shown(getattr(was, name))}, now {_shown(getattr(now, name))}"
    if was.boxes != now.boxes:
        return f"this rank held {_boxes(was)}, now {_boxes(now)}"
    return f"requires_grad {was.requires_grad}, now {now.requires_grad}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _boxes(key: _Key) -> str:
    shown = ", ".join(f"{size} at {offset}" for offset, size in key.boxes[:2])
    return shown if len(key.boxes) <= 2 else f"{shown} and {len(key.boxes) - 2} boxes more"


def _keys(inventory: bytes) -> dict[str, _Key]:
    dtypes = [name for name, _, _ in _C.dtypes()]
    keys: dict[str, _Key] = {}
    for name, kind, code, requires_grad, _, shape, offset, size in _C.inventory_items(inventory):
        key = keys.setdefault(name, _Key(_KINDS[kind], dtypes[code], requires_grad, shape, []))
        key.boxes.append((offset, size))
    return keys
