"""Process groups as callers name them, and what is kept for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

Value = TypeVar("Value")


def resolved(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group itself where None stands for the default one; None if torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    return group


class PerGroup(Generic[Value]):
    """A value for each process group while it lives, and one for this process without any."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make
        self.forget()

    def of(self, process_group: dist.ProcessGroup | None) -> Value:
        group = resolved(process_group)
        return self._alone if group is None else self._of_groups.setdefault(group, self._make())

    def forget(self) -> None:
        self._alone = self._make()
        self._of_groups: WeakKeyDictionary[dist.ProcessGroup, Value] = WeakKeyDictionary()
