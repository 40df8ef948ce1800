"""Which tensors a conversion makes, of which, under which names and as which dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from ..errors import MissingKeysError
from ..flatten import Path
from ..selection import Selection, renamed
from ..structure import Structure
from .casting import DTypes, casting
from .renaming import RenameRules, renaming_by_rules
from .source import Read, Source
from .stacking import Stack, restacked


@dataclass(frozen=True)
class Output:
    """A tensor to write: a stored one, one index of its first dimension, or several along a new first dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_dtype: torch.dtype
    keys: tuple[str, ...]  #: of the source
    stacked: bool = False
    index: int | None = None

    @cached_property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def converts(self) -> bool:
        """Whether it is written as another dtype than it is stored as."""
        return self.dtype != self.stored_dtype

    def reads(self, offsets: Sequence[int], target: torch.Tensor) -> Iterator[Read]:
        """What fills `target` with the box of its sizes at `offsets`."""
        if self.stacked:
            for number in range(target.shape[0]):
                yield Read(self.keys[offsets[0] + number], offsets[1:], target[number])
        elif self.index is not None:
            yield Read(self.keys[0], (self.index, *offsets), target.unsqueeze(0))
        else:
            yield Read(self.keys[0], offsets, target)


@dataclass(frozen=True)
class Plan:
    """All that comes out. Equal on all ranks."""

    outputs: list[Output]
    objects: dict[str, str]  #: the source's key by the name that it gets
    paths: dict[str, Path]  #: what names stand for in a nested state, where it is more than themselves
    structure: str | None = None  #: what the paths do not tell (`Structure.pack`); None: nobody knows


def plan(
    source: Source,
    keys: str | Iterable[str] | None,
    rename: RenameRules | None,
    stack: Stack | None,
    dtype: DTypes | None,
) -> Plan:
    """Raises before anything is written: `MissingKeysError` for `keys` that select nothing, ValueError for what
    contradicts itself, with both sources where two tensors would get one name, `CheckpointError` for layers that
    cannot be stacked."""
    selection = Selection(keys)
    stored = [*source.tensors, *source.object_names]
    missing = selection.without_match(stored)
    if missing:
        raise MissingKeysError(missing)
    names = renamed([key for key in stored if key in selection], renaming_by_rules(rename))
    outputs = [
        Output(names[key], info.shape, info.dtype, info.dtype, (key,))
        for key, info in source.tensors.items()
        if key in names
    ]
    objects = {names[key]: key for key in source.object_names if key in names}
    outputs = restacked(outputs, stack or {})
    _check_names(outputs, objects)
    kept = {key: path for key, path in source.paths.items() if names.get(key) == key}
    of_dtype = casting(dtype)
    return Plan(
        [replace(output, dtype=of_dtype(output.name, output.stored_dtype)) for output in outputs],
        objects,
        {name: kept[name] for name in (*(output.name for output in outputs), *objects) if name in kept},
        _structure(source, selection, rename is not None),
    )


def _structure(source: Source, selection: Selection, with_other_names: bool) -> str | None:
    structure: Structure | None = getattr(source, "structure", None)  # formats of flat names have none
    if structure is None:
        return None
    empty = {path for path in structure.empty if not with_other_names and ".".join(map(str, path)) in selection}
    return replace(structure, empty=empty).pack()


def _check_names(outputs: Sequence[Output], objects: Mapping[str, str]) -> None:
    seen = dict(objects)
    for output in outputs:
        first = seen.setdefault(output.name, output.keys[0])
        if first != output.keys[0] or output.name in objects:
            raise ValueError(f"{first!r} and {output.keys[0]!r} would both be {output.name!r}")


def cut(shape: tuple[int, ...], most_elements: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes that are a tensor of that shape, one behind another in its memory, none of more
    elements than `most_elements`, which is at least 1."""
    if prod(shape) <= most_elements:
        yield (0,) * len(shape), shape
        return
    row = prod(shape[1:])
    if row <= most_elements:
        step = most_elements // row
        rest = (0,) * (len(shape) - 1)
        for start in range(0, shape[0], step):
            yield (start, *rest), (min(step, shape[0] - start), *shape[1:])
        return
    inner = list(cut(shape[1:], most_elements))
    for number in range(shape[0]):
        for offsets, sizes in inner:
            yield (number, *offsets), (1, *sizes)
