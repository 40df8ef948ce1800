"""What changed from one inventory (csrc/plan/inventory.h) to the next, in words, for the log."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from . import _C

_HEADER_BYTES = 48


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
    _, items, row_words, _, _, _ = struct.unpack_from("6q", inventory)
    rows = memoryview(inventory)[_HEADER_BYTES : _HEADER_BYTES + 8 * row_words].cast("q")
    ends_at = _HEADER_BYTES + 8 * row_words
    ends = memoryview(inventory)[ends_at : ends_at + 4 * items].cast("I")
    names = inventory[ends_at + (4 * items + 7) // 8 * 8 :]
    keys: dict[str, _Key] = {}
    row = begin = 0
    for end in ends:
        name = names[begin:end].decode("utf-8", "surrogatepass")
        head, dims = rows[row], rows[row] >> 32
        shape, offset, size = (tuple(rows[at : at + dims]) for at in (row + 2, row + 2 + dims, row + 2 + 2 * dims))
        key = keys.get(name)
        if key is None:
            kind = ("an object", "a tensor", "a shard")[head & 0xFF]
            dtype = dtypes[head >> 8 & 0xFF]
            key = keys[name] = _Key(kind, dtype, bool(head >> 16 & 1), shape, [])
        key.boxes.append((offset, size))
        row, begin = row + 2 + 3 * dims, end
    return keys
