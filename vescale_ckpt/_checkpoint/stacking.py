"""Stacks, concatenates and splits tensors by rules on their names, for loads and conversions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .checkpoint import Read

if TYPE_CHECKING:
    import torch

#: `{"layers.*.w": "layers.w"}` stacks, `{"layers.w": "layers.*.w"}` splits; a `*` stands for a number. A tuple of names
#: on the left side: they are concatenated along their first dimension. Type checkers take no dict of both for a mapping
#: of texts or tuples, so keys are checked when they are used.
Stack = Mapping[Any, str]


@dataclass(frozen=True)
class Composite:
    """A tensor that is a stored tensor, one index of its first dimension, or several stored tensors: concatenated along
    their first dimension, stacked along a new first dimension, or both, as layers of concatenated tensors."""

    name: str
    shape: tuple[int, ...]
    stored_dtype: torch.dtype
    keys: tuple[str, ...]  #: of the stored tensors, layer by layer
    stacked: bool = False
    rows: tuple[int, ...] = ()  #: lengths of a layer's tensors along the dimension of concatenation; empty: it has one
    index: int | None = None

    @property
    def is_stored(self) -> bool:
        return self.index is None and not self.stacked and not self.rows

    def parts_of_layer(self, layer: int) -> Iterator[tuple[str, int, int | None]]:
        """Yields the stored tensors of a layer: key, first row in the layer, and number of rows (None: all)."""
        if not self.rows:
            yield self.keys[layer], 0, None
            return
        keys = self.keys[layer * len(self.rows) : (layer + 1) * len(self.rows)]
        yield from zip(keys, accumulate(self.rows, initial=0), self.rows)  # noqa: B905  # the last sum is no start

    def parts(self) -> Iterator[tuple[str, int, int]]:
        """Yields all stored tensors: key, layer, and first row in the layer."""
        for layer in range(len(self.keys) // max(1, len(self.rows))):
            for key, begin, _ in self.parts_of_layer(layer):
                yield key, layer, begin

    def reads(self, offsets: Sequence[int], target: torch.Tensor) -> Iterator[Read]:
        """Yields the reads of stored tensors that fill `target` with the box at `offsets` that has its sizes."""
        if self.index is not None:
            yield Read(self.keys[0], (self.index, *offsets), target.unsqueeze(0))
        elif self.stacked:
            for number in range(target.shape[0]):
                yield from self._reads_of_layer(offsets[0] + number, offsets[1:], target[number])
        else:
            yield from self._reads_of_layer(0, offsets, target)

    def _reads_of_layer(self, layer: int, offsets: Sequence[int], target: torch.Tensor) -> Iterator[Read]:
        for key, begin, rows in self.parts_of_layer(layer):
            if rows is None:
                yield Read(key, offsets, target)
                continue
            start, end = max(offsets[0], begin), min(offsets[0] + target.shape[0], begin + rows)
            if start < end:
                yield Read(key, (start - begin, *offsets[1:]), target[start - offsets[0] : end - offsets[0]])


def restacked(tensors: Iterable[Composite], stack: Stack) -> list[Composite]:
    """Applies each rule to the tensors that the rules before it have left.

    The side of a rule with one `*` more names single layers; its last `*` is the number of the layer. Other `*` stand
    for the same numbers on both sides. Raises ValueError for rules that are invalid, match no tensor or give two
    tensors one name, and `CheckpointError` for layers that are missing or differ from each other, or tensors without
    dimensions to split.
    """
    result = list(tensors)
    for left, new in checked_rules(stack).items():
        patterns = (left,) if isinstance(left, str) else left
        layers = patterns[0].count("*") - new.count("*")
        if any(text.count("*") != patterns[0].count("*") for text in patterns):
            raise ValueError(f"stack: {left!r}: names that are concatenated want equally many *")
        if layers not in (1, -1) and (len(patterns) == 1 or layers):
            raise ValueError(f"stack: {left!r} and {new!r}: one of them wants one * more than the other")
        if layers == -1 and len(patterns) > 1:
            raise ValueError(f"stack: {left!r} and {new!r}: several names are concatenated, and not split")
        made: list[Composite] = []
        groups: dict[str, dict[int, dict[str, Composite]]] = {}  # {new name: {layer: {pattern: tensor}}}
        for text in patterns:
            pattern = re.compile(r"(\d+)".join(map(re.escape, text.split("*"))))
            matches = [(tensor, match) for tensor in result if (match := pattern.fullmatch(tensor.name))]
            if not matches:
                raise ValueError(f"stack: no tensor is named {text!r}")
            taken = {tensor.name for tensor, _ in matches}
            result = [tensor for tensor in result if tensor.name not in taken]
            for tensor, match in matches:
                if not tensor.is_stored:
                    raise ValueError(f"stack: {tensor.name} was stacked or split by another rule")
                if layers == -1:
                    made += _split(tensor, new, match.groups())
                    continue
                others = match.groups()[: new.count("*")]
                number = int(match.groups()[-1]) if layers else 0
                layer = groups.setdefault(_filled(new, others), {}).setdefault(number, {})
                if (first := layer.setdefault(text, tensor)) is not tensor:
                    raise ValueError(f"stack: {first.name!r} and {tensor.name!r} have the same number")
        made += [_of_layers(name, group, patterns, layers == 1) for name, group in groups.items()]
        result += made
    check_names(result)
    return result


def checked_rules(stack: Stack) -> Mapping[str | tuple[str, ...], str]:
    """Raises ValueError if these are no rules of names."""
    wrong = not isinstance(stack, Mapping) or any(
        not isinstance(new, str)
        or not left
        or not isinstance(left, str | tuple)
        or not all(isinstance(text, str) for text in left)
        for left, new in stack.items()
    )
    if wrong:
        raise ValueError(f"stack: expected a mapping of names such as {{'layers.*.w': 'layers.w'}}, got {stack!r}")
    return dict(stack)


def check_names(tensors: Iterable[Composite], objects: Mapping[str, str] | None = None) -> None:
    """Raises ValueError if two tensors, or one and an object, have the same name. `objects`: {name: key}."""
    seen = dict(objects or {})
    for tensor in tensors:
        if tensor.name in seen:
            raise ValueError(f"{seen[tensor.name]!r} and {tensor.keys[0]!r} would both be {tensor.name!r}")
        seen[tensor.name] = tensor.keys[0]


def _filled(pattern: str, numbers: Sequence[str]) -> str:
    pieces = pattern.split("*")
    return "".join(text + number for text, number in zip(pieces, [*numbers, ""], strict=True))


def _of_layers(
    name: str, layers: Mapping[int, Mapping[str, Composite]], patterns: Sequence[str], stacked: bool
) -> Composite:
    count = max(layers) + 1
    if len(layers) != count:
        first_missing = islice((number for number in range(count) if number not in layers), 10)  # of trillions, maybe
        shown, others = ", ".join(map(str, first_missing)), count - len(layers) - 10
        more = f" and {others} more" if others > 0 else ""
        raise CheckpointError(f"{name}: layers {shown}{more} of {count} are missing", key=name)
    for number in range(count):
        for pattern in patterns:
            if pattern not in layers[number]:
                first = next(iter(layers[number].values())).name
                raise CheckpointError(f"{name}: beside {first} there is no {pattern!r}", key=name)
    return joined(
        name, [layers[number][pattern] for number in range(count) for pattern in patterns], len(patterns), stacked
    )


def joined(name: str, tensors: Sequence[Composite], in_layer: int, stacked: bool) -> Composite:
    """Makes a tensor of stored tensors, `in_layer` of which are concatenated. Raises `CheckpointError` if they do not
    fit each other."""
    firsts = tensors[:in_layer]
    for number, tensor in enumerate(tensors):
        first = firsts[number % in_layer]
        if (tensor.shape, tensor.stored_dtype) != (first.shape, first.stored_dtype):
            raise _differs(name, tensor, first)
    for tensor in firsts[1:]:
        of_one, of_first = ((of.shape[:1] != (), of.shape[1:], of.stored_dtype) for of in (tensor, firsts[0]))
        if of_one != of_first or not tensor.shape:
            raise _differs(name, tensor, firsts[0])
    shape = firsts[0].shape
    rows = tuple(tensor.shape[0] for tensor in firsts) if in_layer > 1 else ()
    if rows:
        shape = (sum(rows), *shape[1:])
    if stacked:
        shape = (len(tensors) // in_layer, *shape)
    return Composite(name, shape, firsts[0].stored_dtype, tuple(of.keys[0] for of in tensors), stacked, rows)


def _differs(name: str, tensor: Composite, first: Composite) -> CheckpointError:
    return CheckpointError(
        f"{name}: {tensor.name} has shape {tensor.shape} and {tensor.stored_dtype}, {first.name} has "
        f"{first.shape} and {first.stored_dtype}",
        key=tensor.name,
    )


def _split(tensor: Composite, pattern: str, numbers: Sequence[str]) -> list[Composite]:
    if not tensor.shape:
        raise CheckpointError(f"{tensor.name}: a tensor without dimensions cannot be split", key=tensor.name)
    if 0 in tensor.shape[1:]:
        raise CheckpointError(f"{tensor.name}: a tensor without elements cannot be split", key=tensor.name)
    return [
        replace(tensor, name=_filled(pattern, [*numbers, str(index)]), shape=tensor.shape[1:], index=index)
        for index in range(tensor.shape[0])
    ]
