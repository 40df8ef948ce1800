"""Plans a conversion: which tensors to write, from which stored tensors, under which names and as which dtype."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import prod

import torch

from .._checkpoint.checkpoint import Checkpoint, Read
from .._checkpoint.quantized_tensors import check_cast
from .._state.key_selection import Rename, Selection, rename_function, rename_keys
from .._state.structure import Path
from ..errors import CheckpointError

#: The same as for `load`, or pairs of a regular expression and its replacement.
RenameRules = Rename | Sequence[tuple[str, str]]
#: `{"layers.*.w": "layers.w"}` stacks, `{"layers.w": "layers.*.w"}` splits; a `*` stands for a number.
Stack = Mapping[str, str]
DTypes = torch.dtype | str | Mapping[str, torch.dtype | str]

_SHORT = {"bf16": "bfloat16"} | {f"{kind}{bits}": f"float{bits}" for kind in ("fp", "f") for bits in (16, 32, 64)}
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)  # two values in a byte: torch has no conversion of this dtype


@dataclass(frozen=True)
class Output:
    """A tensor to write: a stored tensor, one index of its first dimension, or several stored tensors stacked along a
    new first dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_dtype: torch.dtype
    keys: tuple[str, ...]  #: the source's keys
    stacked: bool = False
    index: int | None = None

    @cached_property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def converts(self) -> bool:
        """Whether the written dtype differs from the stored one."""
        return self.dtype != self.stored_dtype

    def reads(self, offsets: Sequence[int], target: torch.Tensor) -> Iterator[Read]:
        """The reads that fill `target` with the box at `offsets` that has the sizes of `target`."""
        if self.stacked:
            for number in range(target.shape[0]):
                yield Read(self.keys[offsets[0] + number], offsets[1:], target[number])
        elif self.index is not None:
            yield Read(self.keys[0], (self.index, *offsets), target.unsqueeze(0))
        else:
            yield Read(self.keys[0], offsets, target)


@dataclass(frozen=True)
class Plan:
    """All that a conversion writes. Equal on all ranks."""

    outputs: list[Output]
    objects: dict[str, str]  #: the source's key, by new name
    paths: dict[str, Path]  #: path in the nested state, by name; nothing for names of the top level
    structure: str | None = None  #: structure that paths do not contain (`Structure.pack`); None: unknown


def plan(
    source: Checkpoint,
    keys: str | Iterable[str] | None,
    rename: RenameRules | None,
    stack: Stack | None,
    dtype: DTypes | None,
) -> Plan:
    """Makes the plan. Raises `MissingKeysError` for `keys` that select nothing, ValueError for options that contradict
    themselves or give two tensors one name, `CheckpointError` for layers that cannot be stacked."""
    selection = Selection(keys)
    of_dtype, new_name = casting(dtype), renaming_by_rules(rename)
    tensors = source.dequantized(lambda key: of_dtype(new_name(key), torch.float8_e4m3fn))
    stored = [*tensors, *source.objects]
    selection.check(stored)
    names = rename_keys([key for key in stored if key in selection], new_name)
    outputs = [
        Output(names[key], info.shape, info.dtype, info.dtype, (key,)) for key, info in tensors.items() if key in names
    ]
    objects = {names[key]: key for key in source.objects if key in names}
    outputs = restacked(outputs, stack or {})
    _check_names(outputs, objects)
    kept = {key: path for key, path in source.paths.items() if names.get(key) == key}
    outputs = [replace(output, dtype=of_dtype(output.name, output.stored_dtype)) for output in outputs]
    for output in outputs:
        for key in output.keys:
            check_cast(key, output.stored_dtype, output.dtype, source.tensors, source.not_dequantized)
    return Plan(
        outputs,
        objects,
        {name: kept[name] for name in (*(output.name for output in outputs), *objects) if name in kept},
        _structure(source, selection, rename is not None),
    )


def _structure(source: Checkpoint, selection: Selection, with_other_names: bool) -> str | None:
    structure = source.structure
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


# --- New names


def renaming_by_rules(rename: RenameRules | None) -> Callable[[str], str]:
    """The function from a key of the source to its new name. Rules apply one after another, each to the result of the
    one before, with `re.sub`. Raises ValueError for an invalid rule."""
    if rename is None or callable(rename) or hasattr(rename, "keys"):
        return rename_function(rename)  # type: ignore[arg-type]
    if isinstance(rename, str) or not isinstance(rename, Iterable):
        kind = type(rename).__name__
        raise ValueError(f"rename: expected a function, a mapping of names, pairs of texts or None, got {kind}")
    rules = []
    for rule in rename:
        try:
            pattern, replacement = rule
            rules.append((re.compile(pattern), replacement))
        except (TypeError, ValueError, re.error) as error:
            raise ValueError(f"rename: {rule!r} is no pair of a regular expression and a text: {error}") from None

    def of(key: str) -> str:
        for pattern, replacement in rules:
            key = pattern.sub(replacement, key)
        return key

    return of


# --- Stacked and split layers


def restacked(outputs: Sequence[Output], stack: Stack) -> list[Output]:
    """Applies each rule to the tensors that the rules before it have left.

    The side of a rule with one `*` more names single layers; its last `*` is the number of the layer. Other `*` stand
    for the same numbers on both sides. Raises ValueError for rules that are invalid or match no tensor, and
    `CheckpointError` for layers that are missing or differ from each other, or tensors without dimensions to split.
    """
    if not isinstance(stack, Mapping) or not all(isinstance(text, str) for pair in stack.items() for text in pair):
        raise ValueError(f"stack: expected a mapping of names such as {{'layers.*.w': 'layers.w'}}, got {stack!r}")
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
        first_missing = islice((number for number in range(count) if number not in layers), 10)  # of trillions, maybe
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


# --- Other dtypes


def casting(dtype: DTypes | None) -> Callable[[str, torch.dtype], torch.dtype]:
    """The function from a name and a stored dtype to the dtype to write.

    Floating-point tensors are converted to another floating-point dtype. Other tensors are converted only if a mapping
    has their exact name. Of a mapping's patterns (those of `keys`) the first match counts.

    Raises ValueError for an unknown dtype. The function raises TypeError for a conversion that torch does not have.
    """
    if dtype is None:
        return lambda name, stored: stored
    if not isinstance(dtype, Mapping):
        wanted = dtype_named(dtype)
        if not wanted.is_floating_point:
            raise ValueError(f"dtype: expected a floating-point dtype for all tensors, got {wanted}")
        if wanted == _PACKED:
            raise TypeError(f"dtype={wanted}: torch has no conversion to it")
        return lambda name, stored: wanted if stored.is_floating_point and stored != _PACKED else stored
    rules = [(pattern, Selection(pattern), dtype_named(value)) for pattern, value in dtype.items()]

    def of(name: str, stored: torch.dtype) -> torch.dtype:
        for pattern, selection, wanted in rules:
            if name in selection:
                if name != pattern and not (stored.is_floating_point and wanted.is_floating_point):
                    return stored
                if wanted != stored and not _converts(stored, wanted):
                    raise TypeError(f"{name}: torch has no conversion from {stored} to {wanted}")
                return wanted
        return stored

    return of


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=wanted, device="cpu").copy_(torch.zeros((), dtype=stored, device="cpu"))
    except (RuntimeError, TypeError):
        return False
    return True


def dtype_named(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype that `torch.bfloat16`, "bfloat16", "torch.bfloat16" or "bf16" names. Raises ValueError otherwise."""
    if not isinstance(dtype, str):
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype: expected a dtype of torch or its name, got {dtype!r}")
        return dtype
    name = dtype.removeprefix("torch.")
    found = getattr(torch, _SHORT.get(name.lower(), name), None)
    if not isinstance(found, torch.dtype):
        names = [name for name, value in vars(torch).items() if isinstance(value, torch.dtype)]
        alike = difflib.get_close_matches(name.lower(), names)
        raise ValueError(
            f"dtype={dtype!r}: torch has no such dtype" + (f"; it has {', '.join(alike)}" if alike else "")
        )
    return found
