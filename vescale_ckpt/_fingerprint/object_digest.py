"""Digests of Python objects: equal values have equal digests, on every rank and in every process.

A pickle does not serve: its bytes depend on which equal objects are one object, and on the order of sets and mappings.
"""

from __future__ import annotations

import copyreg
import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch

from .._engine.wrapper_tensors import is_wrapper

DIGEST_BYTES = 16

_MOST_LOOPS = 1_000_000  # references of parts to what holds them; the ways through a dense graph are without number


def bytes_of_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in C's order as one row of bytes, on their device. A contiguous tensor is not copied."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def differing_elements(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns which elements differ in a bit, as one row. Both tensors are of as many elements of one size."""
    rows = [bytes_of_elements(tensor).view(-1, tensor.itemsize) for tensor in (one, other)]
    return (rows[0] != rows[1]).any(-1)


def digest_of(value: Any) -> bytes:
    """Returns 128 bits of a value: of its type, and of what it holds, without regard to identity, to the order of
    mappings and sets, and to the device of tensors.

    Containers, numbers, text, tensors, the inner tensors of wrappers and NumPy arrays are walked; any other object is
    what `__reduce_ex__` says of it, as for `copy` and `pickle`. Raises TypeError for one that says nothing.
    """
    return _Walk().digest(value)


class _Walk:
    def __init__(self) -> None:
        self._above: list[int] = []  # containers that are being walked, so that one that holds itself ends
        self._loops = 0  # ends of that kind
        self._known: dict[int, tuple[Any, bytes]] = {}  # by id; the value is kept alive, so that no other gets its id

    def digest(self, value: Any) -> bytes:
        encode = _SCALARS.get(type(value))
        if encode is not None:
            return _hashed(type(value).__name__.encode(), [encode(value)])
        if id(value) in self._above:
            self._loops += 1
            if self._loops > _MOST_LOOPS:
                raise TypeError("its parts refer to each other in too many ways")
            return _hashed(b"above", [str(self._above[::-1].index(id(value))).encode()])
        if id(value) in self._known:
            return self._known[id(value)][1]
        loops = self._loops
        self._above.append(id(value))
        try:
            found = self._of_container(value)
        finally:
            self._above.pop()
        if self._loops == loops:  # where there are loops, the digest depends on what is above
            self._known[id(value)] = value, found
        return found

    def _of_container(self, value: Any) -> bytes:
        kind = _name_of(type(value))
        if is_wrapper(value):
            return _hashed(kind, self._parts_of_wrapper(value))
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
            return _hashed(kind, _parts_of_tensor(value))
        if type(value) in (list, tuple):
            return _hashed(kind, map(self.digest, value))
        if isinstance(value, (set, frozenset)):
            attributes = [self.digest(vars(value))] if hasattr(value, "__dict__") else []
            return _hashed(kind, [*sorted(map(self.digest, value)), *attributes])
        if isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
            # An OrderedDict equals a dict in other languages' JSON and in DCP's flattening: all mappings are alike.
            return _hashed(b"mapping", sorted(self.digest(key) + self.digest(of) for key, of in value.items()))
        if isinstance(value, (type, FunctionType)):
            return _hashed(b"name", [_name_of(value)])
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            return self._of_array(value, kind)
        return self._of_reduced(value, kind)

    def _parts_of_wrapper(self, tensor: Any) -> list[bytes]:
        names, context = tensor.__tensor_flatten__()
        inner = [part for name in names for part in (name.encode(), self.digest(getattr(tensor, name)))]
        return [repr((str(tensor.dtype), tuple(tensor.shape))).encode(), self.digest(context), *inner]

    def _of_array(self, value: Any, kind: bytes) -> bytes:
        if value.dtype.hasobject:
            return _hashed(kind, [repr(value.shape).encode(), *map(self.digest, value.reshape(-1).tolist())])
        return _hashed(kind, [repr((value.dtype.descr, value.shape)).encode(), value.tobytes()])

    def _of_reduced(self, value: Any, kind: bytes) -> bytes:
        registered = copyreg.dispatch_table.get(type(value))  # as pickle looks, for patterns and ufuncs
        reduced = value.__reduce_ex__(4) if registered is None else registered(value)
        if isinstance(reduced, str):
            return _hashed(kind, [f"{getattr(value, '__module__', '')}.{reduced}".encode()])
        make, arguments, *rest = reduced
        state, elements, items = (*rest, None, None, None)[:3]
        parts = [_name_of(make), self.digest(arguments), self.digest(state)]
        parts += [self.digest(list(elements)) if elements is not None else b""]
        parts += [self.digest(dict(items)) if items is not None else b""]
        return _hashed(kind, parts)


def _hashed(kind: bytes, parts: Iterable[bytes]) -> bytes:
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (kind, *parts):
        hashed.update(struct.pack("<Q", len(part)))
        hashed.update(part)
    return hashed.digest()


def _name_of(value: Any) -> bytes:
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}".encode()


def _parts_of_tensor(tensor: torch.Tensor) -> list[bytes]:
    if tensor.is_quantized:
        raise TypeError("its bytes are not all that a quantized tensor is")
    content = bytes(bytes_of_elements(tensor.to("cpu")).numpy())
    return [repr((str(tensor.dtype), tuple(tensor.shape))).encode(), content]


_SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"",
    bool: lambda value: b"%d" % value,
    int: lambda value: str(value).encode(),
    float: lambda value: struct.pack("<d", value),
    complex: lambda value: struct.pack("<dd", value.real, value.imag),
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    bytes: bytes,
    bytearray: bytes,
    torch.dtype: lambda value: str(value).encode(),
    torch.layout: lambda value: str(value).encode(),
    torch.device: lambda value: b"",  # a resumed run may use another
}
