"""Stores and fills wrapper subclasses: tensors that consist of inner tensors, as quantized weights and states do.

They tell their inner tensors by torch's protocol, `__tensor_flatten__`. The values that they show, in their own dtype,
are computed from these, so that a copy of the values loses bits. What is kept is the inner tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import CheckpointError
from . import _C
from .torch_types import distributed_tensor_types, is_dtensor


def is_wrapper_type(kind: type) -> bool:
    """Whether tensors of a type consist of inner tensors and can be made again from these."""
    return (
        hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        and issubclass(kind, torch.Tensor)
        # These have places of their own in this package.
        and not issubclass(kind, (FakeTensor, *distributed_tensor_types()))
        and not kind.__module__.startswith("torch.nested.")
    )


def is_wrapper(value: object) -> bool:
    kind = type(value)
    return kind is not torch.Tensor and is_wrapper_type(kind)  # most are plain


def any_wrapper(values: Sequence[object]) -> bool:
    return any(map(is_wrapper_type, set(map(type, values))))


def type_name(value: object) -> str:
    """The class of a tensor, with its module."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def map_inner(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The same wrapper over other inner tensors: what `change` makes of each."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {}
    for name in names:
        part = getattr(tensor, name)
        inner[name] = map_inner(part, change) if is_wrapper(part) else change(part)
    kind: Any = type(tensor)
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made


def stored_form(tensor: torch.Tensor) -> torch.Tensor:
    """The wrapper over inner tensors in host memory, each in a storage that holds nothing else: `torch.save` writes
    whole storages. Raises `CheckpointError` for inner tensors without values."""
    try:
        with torch.no_grad():
            return map_inner(tensor if tensor.is_cpu else tensor.cpu(), _in_own_storage)
    except CheckpointError:
        raise
    except Exception as error:  # code of the class: it may raise anything
        raise CheckpointError(
            f"the inner tensors of a {type_name(tensor)} cannot be copied ({type(error).__name__}: {error}): save the "
            "tensors that it is made of"
        ) from error


def _in_own_storage(part: torch.Tensor) -> torch.Tensor:
    plain = part.detach()
    if is_dtensor(plain) or plain.is_meta or plain.layout is not torch.strided:
        what = "a DTensor" if is_dtensor(plain) else f"on {plain.device} in layout {plain.layout}"
        raise CheckpointError(f"one of its inner tensors is {what}: save the tensors that it is made of")
    plain = plain.cpu().resolve_conj().resolve_neg()
    if plain.untyped_storage().nbytes() == plain.nbytes:
        return plain
    if plain.untyped_storage().nbytes() == 0:
        raise CheckpointError("the storage of one of its inner tensors was freed: there are no values to store")
    return plain.clone()


def copy_inner(target: torch.Tensor, stored: torch.Tensor) -> str:
    """Fills a wrapper with the bits of the inner tensors of a wrapper of the same class. Returns what keeps it from
    that; empty if nothing does."""
    try:
        with torch.no_grad():
            pairs = list(inner_pairs(target, stored))
            if _same_context(target, stored):
                for _, part, other in pairs:
                    _copy_bits(part, other)
                return ""
            # The class decides whether the contexts fit; it may convert what does not.
            target.copy_(stored)
            converted = [name for name, part, other in pairs if checksum(part) != checksum(other)]
    except Exception as error:  # code of the class: it may raise anything
        return f"{type(error).__name__}: {error}"
    return f"its class converts {', '.join(converted)} between settings" if converted else ""


def inner_pairs(target: torch.Tensor, stored: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The inner tensors of both, with their names. Raises ValueError if they do not fit."""
    names, other_names = (tensor.__tensor_flatten__()[0] for tensor in (target, stored))  # type: ignore[attr-defined]
    if list(names) != list(other_names):
        raise ValueError(f"expected inner tensors {', '.join(names)}, got {', '.join(other_names)}")
    for name in names:
        part, other = getattr(target, name), getattr(stored, name)
        if type(part) is type(other) and is_wrapper(part):
            yield from ((f"{name}.{inner}", one, two) for inner, one, two in inner_pairs(part, other))
        elif (part.dtype, part.shape) != (other.dtype, other.shape):
            raise ValueError(
                f"{name}: expected {part.dtype} {tuple(part.shape)}, got {other.dtype} {tuple(other.shape)}"
            )
        else:
            yield name, part, other


def _same_context(a: torch.Tensor, b: torch.Tensor) -> bool:
    (names, one), (_, other) = a.__tensor_flatten__(), b.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = ((getattr(a, name), getattr(b, name)) for name in names)
    return bool(one == other) and all(_same_context(x, y) for x, y in inner if is_wrapper(x))


def _copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.itemsize == 1:  # torch copies not all of these dtypes
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)


def checksum(tensor: torch.Tensor) -> int:
    """A CRC-32 of the values of a plain tensor, or of the inner tensors of a wrapper."""
    if not is_wrapper(tensor):
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return _C.crc32_of_memory(plain.data_ptr(), plain.nbytes)
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return hash(tuple(checksum(getattr(tensor, name)) for name in names))
