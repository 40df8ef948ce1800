"""Resolves the process groups that users give, and keeps a value for each group."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import settings
from ..errors import CheckpointError

Value = TypeVar("Value")

_NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER  # `new_group` returns this on ranks outside the group


def resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the group; for None the default group. None if torch.distributed is not initialised."""
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        if process_group == _NO_MEMBER:
            raise ValueError("process_group: this rank is not in it: only its ranks save and load with it")
        hint = ": its mesh.get_group()" if isinstance(process_group, DeviceMesh) else ""
        raise ValueError(f"process_group: expected a group or None, got {type(process_group).__name__}{hint}")
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    return group


def place_in(process_group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns this rank's number in the group, and how many ranks the group has."""
    group = resolve_group(process_group)
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def check_alone_on_purpose() -> None:
    """Raises `CheckpointError` if a job has several processes and torch.distributed is not initialised: each process
    would save alone to the same directory, and the last one would replace the saves of the others."""
    size = os.environ.get("WORLD_SIZE", "")
    if resolve_group(None) is not None or not size.isdecimal() or int(size) < 2 or settings.number("alone"):
        return
    raise CheckpointError(
        f"this process is one of {size} (WORLD_SIZE), but torch.distributed is not initialised: each would save alone, "
        "and the last would replace what the others have saved. Call torch.distributed.init_process_group before; or, "
        "if each has a directory of its own, set VESCALE_CKPT_ALONE=1"
    )


class PerGroup(Generic[Value]):
    """Keeps one value for each process group as long as the group lives, and one for a process without groups."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make = make
        self.forget()

    def of(self, process_group: dist.ProcessGroup | None) -> Value:
        group = resolve_group(process_group)
        return self._alone if group is None else self._of_groups.setdefault(group, self._make())

    def forget(self) -> None:
        self._alone = self._make()
        self._of_groups: WeakKeyDictionary[dist.ProcessGroup, Value] = WeakKeyDictionary()
