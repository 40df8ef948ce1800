"""`LiveObjects` lists the objects of a kind that are alive, for clean-ups that run while other threads make more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

_Object = TypeVar("_Object")


class LiveObjects(Generic[_Object]):
    """Does not keep them alive. Unlike a `WeakSet`, it may be iterated while other threads add objects."""

    def __init__(self) -> None:
        self._by_id: WeakValueDictionary[int, _Object] = WeakValueDictionary()

    def add(self, item: _Object) -> None:
        self._by_id[id(item)] = item

    def discard(self, item: _Object) -> None:
        self._by_id.pop(id(item), None)

    def clear(self) -> None:
        self._by_id.clear()

    def __iter__(self) -> Iterator[_Object]:
        return iter([item for reference in self._by_id.valuerefs() if (item := reference()) is not None])
