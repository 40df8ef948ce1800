"""Plans a conversion: which tensors to write, from which stored tensors, under which names and as which dtype."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch

from .._checkpoint.checkpoint import Checkpoint
from .._checkpoint.quantized_names import config_for
from .._checkpoint.stacking import Composite
from .._checkpoint.stacking import Stack as Stack
from .._checkpoint.view import View
from .._state.key_selection import Rename, Selection, rename_function, rename_keys
from .._state.structure import Path

DTypes = torch.dtype | str | Mapping[str, torch.dtype | str]

_SHORT = {"bf16": "bfloat16"} | {f"{kind}{bits}": f"float{bits}" for kind in ("fp", "f") for bits in (16, 32, 64)}
_PACKED = torch.float4_e2m1fn_x2  # two values in a byte: torch has no conversion of this dtype


@dataclass(frozen=True, kw_only=True)
class Output(Composite):
    """A tensor to write."""

    dtype: torch.dtype

    @cached_property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def converts(self) -> bool:
        """Whether the written dtype differs from the stored one."""
        return self.dtype != self.stored_dtype


@dataclass(frozen=True)
class Plan:
    """All that a conversion writes. Equal on all ranks."""

    view: View = field(repr=False)  #: of the source; it has a tensor for each output
    outputs: list[Output]
    objects: dict[str, str]  #: the source's key, by new name
    paths: dict[str, Path]  #: path in the nested state, by name; nothing for names of the top level
    ties: dict[str, str]  #: {name: name of an earlier output} of outputs with the same values, as of tied weights
    structure: str | None = None  #: structure that paths do not contain (`Structure.pack`); None: unknown

    @property
    def changes_nothing(self) -> bool:
        """Whether it writes all of the source, under its keys and as it is stored."""
        source = self.view.source
        tensors = {of.name: of.dtype for of in self.outputs if of.is_stored and of.keys == (of.name,)}
        return tensors == {key: info.dtype for key, info in source.tensors.items()} and self.objects == {
            key: key for key in source.objects
        }


def plan(
    source: Checkpoint,
    keys: str | Iterable[str] | None,
    rename: Rename | None,
    stack: Stack | None,
    dtype: DTypes | None,
) -> Plan:
    """Makes the plan. Raises `MissingKeysError` for `keys` that select nothing, ValueError for options that contradict
    themselves or give two tensors one name, `CheckpointError` for layers that cannot be stacked."""
    selection = Selection(keys)
    of_dtype, new_name = casting(dtype), rename_function(rename)

    def choose(stored: Sequence[str]) -> dict[str, str]:
        selection.check(stored)
        return rename_keys(selection.of(stored), new_name)

    view = View.of(
        source, choose, {} if stack is None else stack, lambda key, numbers: of_dtype(new_name(key), numbers)
    )
    objects = {view.names[key]: key for key in source.objects if key in view.names}
    kept = {key: path for key, path in source.paths.items() if view.names.get(key) == key}
    outputs = [Output(**vars(of), dtype=of_dtype(of.name, of.stored_dtype)) for of in view.tensors.values()]
    for output in outputs:
        for key in output.keys:
            view.check_cast(key, output.stored_dtype, output.dtype)
    return Plan(
        view,
        outputs,
        objects,
        {name: kept[name] for name in (*(output.name for output in outputs), *objects) if name in kept},
        _ties(source, outputs),
        _structure(source, selection, rename is not None),
    )


def _ties(source: Checkpoint, outputs: Iterable[Output]) -> dict[str, str]:
    first: dict[tuple[str, torch.dtype], str] = {}
    ties: dict[str, str] = {}
    for output in outputs if source.ties else ():
        if output.is_stored:
            (key,) = output.keys
            if (name := first.setdefault((source.ties.get(key, key), output.dtype), output.name)) != output.name:
                ties[output.name] = name
    return ties


def _structure(source: Checkpoint, selection: Selection, with_other_names: bool) -> str | None:
    structure = source.structure
    if structure is None:
        return None
    empty = {path for path in structure.empty if not with_other_names and ".".join(map(str, path)) in selection}
    return replace(structure, empty=empty).pack()


def fitting(content: bytes, planned: Plan) -> bytes:
    """Returns a model's `config.json` as it fits the weights that a plan writes. Raises ValueError if it is no JSON."""
    kinds = {output.name: str(output.dtype).removeprefix("torch.") for output in planned.outputs}
    return config_for(content, kinds)


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
