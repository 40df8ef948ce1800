"""One tensor for each layer becomes one tensor for all layers, or the other way round."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from ..errors import CheckpointError

if TYPE_CHECKING:
    from .plan import Output

#: `{"layers.*.w": "layers.w"}` stacks, `{"layers.w": "layers.*.w"}` splits; a `*` stands for a number.
Stack = Mapping[str, str]


def restacked(outputs: Sequence[Output], stack: Stack) -> list[Output]:
    """Applies each rule to the tensors as they are named by then.

    The side with one `*` more than the other is that of single layers, whose number its last `*` is; the others stand
    for the same numbers on both sides. Raises ValueError for rules that are none or fit nothing, `CheckpointError` for
    layers that are missing or unlike each other, or tensors without a first dimension.
    """
    if not isinstance(stack, Mapping) or not all(isinstance(text, str) for pair in stack.items() for text in pair):
        raise ValueError("stack: a mapping of names is wanted, such as {'layers.*.w': 'layers.w'}")
    result = list(outputs)
    for old, new in stack.items():
        layers = old.count("*") - new.count("*")
        if layers not in (1, -1):
            raise ValueError(f"stack: {old!r} and {new!r}: one of them wants one * more than the other")
        pattern = re.compile(r"(\d+)".join(map(re.escape, old.split("*"))))
        matches = [(output, match) for output in result if (match := pattern.fullmatch(output.name))]
        if not matches:
            raise ValueError(f"stack: no tensor is named {old!r}")
        taken = {output.name for output, _ in matches}
        result = [output for output in result if output.name not in taken]
        if layers == 1:
            groups: dict[str, dict[int, Output]] = {}
            for output, match in matches:
                *others, number = match.groups()
                group = groups.setdefault(_filled(new, others), {})
                if (first := group.setdefault(int(number), output)) is not output:
                    raise ValueError(f"stack: {first.name!r} and {output.name!r} have the same number")
            result += [_stacked(name, group) for name, group in groups.items()]
        else:
            for output, match in matches:
                result += _split(output, new, match.groups())
    return result


def _filled(pattern: str, numbers: Sequence[str]) -> str:
    pieces = pattern.split("*")
    return "".join(text + number for text, number in zip(pieces, [*numbers, ""], strict=True))


def _stacked(name: str, layers: Mapping[int, Output]) -> Output:
    count = max(layers) + 1
    if len(layers) != count:
        first_missing = islice((number for number in range(count) if number not in layers), 10)  # all may be trillions
        shown, others = ", ".join(map(str, first_missing)), count - len(layers) - 10
        more = f" and {others} more" if others > 0 else ""
        raise CheckpointError(f"{name}: layers {shown}{more} of {count} are missing", key=name)
    ordered = [layers[number] for number in range(len(layers))]
    first = ordered[0]
    for output in ordered:
        if output.index is not None or output.stacked:
            raise ValueError(f"stack: {output.name} was stacked or split by another rule")
        if (output.shape, output.stored_dtype) != (first.shape, first.stored_dtype):
            raise CheckpointError(
                f"{name}: {output.name} has shape {output.shape} and {output.stored_dtype}, {first.name} has "
                f"{first.shape} and {first.stored_dtype}",
                key=output.name,
            )
    keys = tuple(output.keys[0] for output in ordered)
    return replace(first, name=name, shape=(len(keys), *first.shape), keys=keys, stacked=True)


def _split(output: Output, pattern: str, numbers: Sequence[str]) -> list[Output]:
    if output.index is not None or output.stacked:
        raise ValueError(f"stack: {output.name} was stacked or split by another rule")
    if not output.shape:
        raise CheckpointError(f"{output.name}: a tensor without dimensions cannot be split", key=output.name)
    return [
        replace(output, name=_filled(pattern, [*numbers, str(index)]), shape=output.shape[1:], index=index)
        for index in range(output.shape[0])
    ]
