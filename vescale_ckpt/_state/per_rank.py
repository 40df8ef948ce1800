"""`PerRank` saves and restores an object that differs from rank to rank, such as a random state or a data position.

DCP stores one value per key. So a `PerRank` under the key `data` is saved under `data.rank_0_of_8`,
`data.rank_1_of_8` …. Each is an ordinary object (`{"state": value}`), which every reader of DCP checkpoints can load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from .._engine.torch_types import Stateful
from ..errors import IncompatibleStateError

_STATE = "state"  # key in the stored dict; a tensor under it is a part of the object, not stored separately
Reshard = Callable[[list[Any], int, int], Any]


class PerRank:
    """Wraps an object that every rank saves and restores for itself. It may be nested in dictionaries and lists. In a
    tuple or a set, which are saved as one object, it is refused.

    Args:
        obj: any object that can be pickled. If it has `state_dict` and `load_state_dict`, its state is saved, and a
            load calls `load_state_dict`. Otherwise a load replaces `.obj`.
        reshard: called as `reshard(objects, rank, size)` if the number of ranks differs between save and load.
            `objects` lists the saved objects by rank; the result is this rank's object. None: the method
            `reshard_state` of `obj`, if it has one, as `RandomState` does; otherwise such a load raises
            `IncompatibleStateError`.
    """

    def __init__(self, obj: Any, *, reshard: Reshard | None = None) -> None:
        self.obj = obj
        self.reshard: Reshard | None = getattr(obj, "reshard_state", None) if reshard is None else reshard

    def state(self) -> Any:
        return self.obj.state_dict() if isinstance(self.obj, Stateful) else self.obj

    def restore(self, value: Any) -> None:
        if isinstance(self.obj, Stateful):
            self.obj.load_state_dict(value)
        else:
            self.obj = value


_rank_and_size: ContextVar[tuple[int, int] | None] = ContextVar("_rank_and_size", default=None)


@contextmanager
def set_rank(rank: int, size: int) -> Iterator[None]:
    """A context manager in which `this_rank` returns `rank` and `size`."""
    token = _rank_and_size.set((rank, size))
    try:
        yield
    finally:
        _rank_and_size.reset(token)


def this_rank() -> tuple[int, int]:
    """Returns (rank, number of ranks) in the process group of the save or load, if known, otherwise in the job."""
    if (known := _rank_and_size.get()) is not None:
        return known
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def name_part(rank: int, size: int) -> str:
    return f"rank_{rank}_of_{size}"


def is_name_part(text: str) -> bool:
    return re.fullmatch(r"rank_\d+_of_\d+", text) is not None


def unwrap_per_rank(flat: dict[str, Any], paths: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replaces each `PerRank` in a flattened state to save by this rank's value under this rank's name."""
    if not _any_in(flat):
        return flat, paths
    part = name_part(*this_rank())
    state: dict[str, Any] = {}
    state_paths: dict[str, Any] = {}
    for key, value in flat.items():
        path = paths.get(key, (key,))
        if isinstance(value, PerRank):
            key, value, path = f"{key}.{part}", {_STATE: value.state()}, (*path, part)
        if key in state:
            raise ValueError(f"duplicated flatten key {key}: such names are reserved for state of each rank")
        state[key] = value
        state_paths[key] = path
    return state, state_paths


class Restoring:
    """The `PerRank` objects of a state that is being loaded, and the values that were read for them."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Collected] = {}

    def unwrap(self, flat: dict[str, Any], stored: Callable[[], Iterable[str]]) -> dict[str, Any]:
        """Replaces each `PerRank` in a flattened state to load by the keys from which it is loaded. `stored` returns
        the checkpoint's keys."""
        if not _any_in(flat):
            return flat
        keys = set(stored())
        rank, size = this_rank()
        state: dict[str, Any] = {}
        for key, value in flat.items():
            if not isinstance(value, PerRank):
                state[key] = value
                continue
            mine = f"{key}.{name_part(rank, size)}"
            names = [mine]
            if mine not in keys and (saved := _ranks_that_saved(key, keys)):
                if value.reshard is None:
                    raise IncompatibleStateError(
                        key, f"state of {size} ranks", f"that of {saved} (PerRank takes a function to reshard it)"
                    )
                names = [f"{key}.{name_part(number, saved)}" for number in range(saved)]
            state.update(dict.fromkeys(names))
            collected = _Collected(value, names, None if names == [mine] else (rank, size))
            self._waiting.update(dict.fromkeys(names, collected))
        return state

    def take(self, name: str, value: Any) -> bool:
        if name not in self._waiting:
            return False
        self._waiting.pop(name).take(name, value)
        return True


class _Collected:
    def __init__(self, target: PerRank, names: list[str], reshard_for: tuple[int, int] | None) -> None:
        self.target = target
        self.values: dict[str, Any] = dict.fromkeys(names)
        self.missing = len(names)
        self.reshard_for = reshard_for

    def take(self, name: str, value: Any) -> None:
        self.values[name] = value[_STATE]
        self.missing -= 1
        if self.missing:
            return
        objects = list(self.values.values())
        if self.reshard_for is None:
            self.target.restore(objects[0])
        else:
            assert self.target.reshard is not None
            self.target.restore(self.target.reshard(objects, *self.reshard_for))


def _any_in(flat: dict[str, Any]) -> bool:
    """Whether one of the values is a `PerRank`. Raises for one inside a tuple or a set: DCP saves such a container as
    one object of one rank."""
    kinds = set(map(type, flat.values()))
    if any(map(_is_container, kinds)):
        for key, value in flat.items():
            if _is_container(type(value)) and _hides_one(value, set()):
                raise ValueError(
                    f"{key}: a PerRank is part of a value that is saved as one object ({type(value).__name__}). "
                    "Put it in dictionaries and lists only"
                )
    return any(issubclass(kind, PerRank) for kind in kinds)


def _is_container(kind: type) -> bool:
    return issubclass(kind, (tuple, list, set, frozenset, Mapping))


def _hides_one(container: Any, seen: set[int]) -> bool:
    seen.add(id(container))  # it may contain itself
    values = container.values() if isinstance(container, Mapping) else container
    kinds = set(map(type, values))
    if any(issubclass(kind, PerRank) for kind in kinds):
        return True
    if not any(map(_is_container, kinds)):
        return False
    return any(_is_container(type(value)) and id(value) not in seen and _hides_one(value, seen) for value in values)


def _ranks_that_saved(key: str, keys: set[str]) -> int:
    pattern = re.compile(re.escape(key) + r"\.rank_(\d+)_of_(\d+)")
    sizes = {int(match[2]) for name in keys if (match := pattern.fullmatch(name))}
    complete = [size for size in sizes if all(f"{key}.{name_part(number, size)}" in keys for number in range(size))]
    return max(complete, default=0)
