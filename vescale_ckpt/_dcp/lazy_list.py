"""`LazyList` looks like one of DCP's lists of items, and builds them only if someone looks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any


class LazyList(Sequence[Any]):
    """A sequence whose items are built at the first access. Pickles as a list."""

    def _build(self) -> list[Any]:
        raise NotImplementedError

    @cached_property
    def built(self) -> list[Any]:
        return self._build()

    def __getitem__(self, index: Any) -> Any:
        return self.built[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.built)

    def __len__(self) -> int:
        return len(self.built)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.built,)
