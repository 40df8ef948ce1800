"""The pickle in a file of torch.save, without the data of its tensors: on the meta device, and where that lies.

torch can say so, too, but takes most of a millisecond for each tensor.
"""

from __future__ import annotations

import collections
import io
import pickle
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .. import _C

_STORAGES = {storage: getattr(torch, name) for name, storage, _ in _C.dtypes() if storage and hasattr(torch, name)}
_REBUILD = "torch._utils"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    tensor: torch.Tensor  #: on the meta device
    key: str  #: of its storage: the entry `data/{key}`
    offset: int  #: of its first byte in that


def unpickled(data: bytes) -> tuple[Any, dict[int, Stored]] | None:
    """The value, and by `id` each tensor in it. None unless it is made of plain tensors, parameters, containers,
    numbers and text alone: of all else torch knows more."""
    if _C.check_pickle(data, storages=True)[0]:
        return None
    unpickler = _Unpickler(io.BytesIO(data))
    try:
        return unpickler.load(), unpickler.found
    except Exception:  # a damaged pickle raises nearly anything
        return None


class _NotPlain(Exception):
    pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.found: dict[int, Stored] = {}
        self._known = {
            (_REBUILD, "_rebuild_tensor_v2"): self._tensor,
            (_REBUILD, "_rebuild_tensor_v3"): self._tensor_of_bytes,
            (_REBUILD, "_rebuild_parameter"): lambda tensor, requires_grad, hooks: tensor,
            ("collections", "OrderedDict"): collections.OrderedDict,
        }

    def find_class(self, module: str, name: str) -> Any:
        known = self._known.get((module, name))
        if known is not None:
            return known
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return None
        raise _NotPlain

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or type(key) is not str:
            raise _NotPlain
        return dtype, key

    def _tensor(self, storage: Any, start: int, size: Any, stride: Any, *others: Any) -> torch.Tensor:
        dtype, key = storage
        if len(others) > 2:  # lazily conjugated or negated
            raise _NotPlain
        return self._found(dtype, key, start, size, stride)

    def _tensor_of_bytes(
        self, storage: Any, start: int, size: Any, stride: Any, gradient: bool, hooks: Any, dtype: Any, *others: Any
    ) -> torch.Tensor:
        if others or storage[0] is not None:
            raise _NotPlain
        return self._found(dtype, storage[1], start, size, stride)

    def _found(self, dtype: Any, key: str, start: int, size: Any, stride: Any) -> torch.Tensor:
        numbers = (start, *size, *stride)
        if not isinstance(dtype, torch.dtype) or any(type(number) is not int or number < 0 for number in numbers):
            raise _NotPlain
        if len(size) != len(stride) or prod(max(1, length) for length in size) >= 1 << 62:
            raise _NotPlain
        tensor = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        self.found[id(tensor)] = Stored(tensor, key, start * dtype.itemsize)
        return tensor
