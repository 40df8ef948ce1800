"""`LazyList` builds the items of plans and results for DCP at their first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload


class LazyList(Sequence[Any]):
    """A sequence whose items are built at the first access. Pickles as a list."""

    _built: list[Any] | None = None

    def _build(self) -> list[Any]:
        raise NotImplementedError

    def _items(self) -> list[Any]:
        if self._built is None:
            self._built = self._build()
        return self._built

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._items()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items())

    def __len__(self) -> int:
        return len(self._items())

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self._items()),)
