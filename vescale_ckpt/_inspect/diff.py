"""Compares two checkpoints of any format: keys, shapes, dtypes, and the values if asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field

import torch

from .._convert.formats import open_source
from .._convert.source import Source, TensorInfo
from .._state.key_selection import Selection
from .._storage.directory import checkpoint_path
from ..errors import MissingKeysError
from .boxes import as_numbers, values


@dataclass
class ValueDifference:
    """How the values of one tensor differ. NaN at the same place in both counts as equal."""

    key: str
    elements: int = 0
    different: int = 0  #: elements
    max_abs: float = 0.0  #: largest absolute difference of finite values
    max_rel: float = 0.0  #: the same, divided by the larger magnitude of the two values
    not_finite_a: int = 0  #: NaN and infinite values
    not_finite_b: int = 0
    unknown: bool = False  #: torch cannot tell the values of the dtype: only bytes were compared

    @property
    def equal(self) -> bool:
        return self.different == 0


@dataclass
class Diff:
    """The result of `diff`."""

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)  #: kind, dtype or shape differs: in a and in b
    objects: list[str] = field(default_factory=list)  #: objects of another value, or that cannot be compared
    values: list[ValueDifference] = field(default_factory=list)  #: of tensors whose values differ
    compared: int = 0  #: tensors whose values were compared
    compared_bytes: int = 0

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.kinds or self.objects or self.values)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    with_values: bool = False,
    keys: str | Iterable[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Diff:
    """Compares two checkpoints, whose formats may differ. Memory is bounded; data is verified while it is read.

    Args:
        with_values: compares values too, also of tensors that differ in dtype alone.
        keys: which keys: names, prefixes up to a dot, or `fnmatch` patterns; with `!` before it, all but these.
        progress: called with the bytes compared so far and in total.

    Raises `MissingKeysError` for `keys` that match nothing in both, and the errors of reading.
    """
    with closing(open_source(checkpoint_path(a))) as first, closing(open_source(checkpoint_path(b))) as second:
        return _diff(first, second, with_values, Selection(keys), progress)


def _diff(
    a: Source, b: Source, with_values: bool, selection: Selection, progress: Callable[[int, int], None] | None
) -> Diff:
    every = dict.fromkeys((*a.tensors, *a.object_names, *b.tensors, *b.object_names))
    if missing := selection.without_match(list(every)):
        raise MissingKeysError(missing)
    kinds_a, kinds_b = _kinds(a), _kinds(b)
    result = Diff()
    common = []
    for key in every:
        if key not in selection:
            continue
        if key not in kinds_b:
            result.only_a.append(key)
        elif key not in kinds_a:
            result.only_b.append(key)
        else:
            if kinds_a[key] != kinds_b[key]:
                result.kinds[key] = kinds_a[key], kinds_b[key]
            common.append(key)
    if not with_values:
        return result
    tensors = [key for key in common if _same_shape(a.tensors.get(key), b.tensors.get(key))]
    found = {key: ValueDifference(key) for key in tensors}
    for key, (one, other) in values([a, b], tensors, progress):
        compare(found[key], one, other)
    result.values = [difference for difference in found.values() if not difference.equal]
    result.objects = _differing_objects(a, b, [key for key in common if key not in a.tensors | b.tensors])
    result.compared, result.compared_bytes = len(tensors), sum(a.tensors[key].bytes for key in tensors)
    return result


def _kinds(source: Source) -> dict[str, str]:
    tensors = {
        key: f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}" for key, info in source.tensors.items()
    }
    return tensors | dict.fromkeys(source.object_names, "an object")


def _same_shape(a: TensorInfo | None, b: TensorInfo | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape


def compare(result: ValueDifference, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds the comparison of two flat tensors of equally many elements."""
    result.elements += a.numel()
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) and not a.dtype.is_floating_point:
        return
    try:
        one, other = as_numbers(a), as_numbers(b)
    except TypeError:
        result.unknown = True
        rows = a.view(torch.uint8).view(a.numel(), -1) != b.view(torch.uint8).view(b.numel(), -1)
        result.different += int(rows.any(1).sum())
        return
    finite_a, finite_b = torch.isfinite(one), torch.isfinite(other)
    result.not_finite_a += int((~finite_a).sum())
    result.not_finite_b += int((~finite_b).sum())
    # int64 and uint64 beyond 2**53 are not exact in float64: whether they are equal is asked of the values themselves.
    same = a == b if a.dtype == b.dtype and not a.dtype.is_floating_point and not a.is_complex() else one == other
    differs = ~(same | (torch.isnan(one) & torch.isnan(other)))
    count = int(differs.sum())
    if count == 0:
        return
    result.different += count
    where = differs & finite_a & finite_b
    if bool(where.any()):
        one, other = one[where], other[where]
        apart = (one - other).abs()
        result.max_abs = max(result.max_abs, float(apart.max()))
        result.max_rel = max(result.max_rel, float((apart / torch.maximum(one.abs(), other.abs())).max()))


def _differing_objects(a: Source, b: Source, keys: list[str]) -> list[str]:
    ours, theirs = a.objects(keys), b.objects(keys)
    return [key for key in keys if not _same(ours[key], theirs[key])]


def _same(a: object, b: object) -> bool:
    """Whether two objects are equal, as far as they say so themselves."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:  # arrays of numpy, say, compare element by element
        return bool(getattr(a == b, "all", lambda: False)())
