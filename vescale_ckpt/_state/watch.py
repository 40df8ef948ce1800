"""`Watch` finds for saves tensors that another thread changes while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._engine import torch_private
from .._engine.torch_types import is_dtensor, is_sharded_tensor
from ..errors import CheckpointError
from .tensor_table import TensorReads

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor


class Watch:
    """Finds changes of some tensors since this object was made.

    It compares torch's version counters and the addresses and sizes of storages. Only the counters of the given tensors
    count: a tensor made by `.data` has its own counter, and so do a DTensor and its local tensor. The storages are kept
    alive, so that the old memory of a tensor can still be read after it was given other memory (`.data =`).
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor], reads: TensorReads | None = None) -> None:
        """`reads`: the traits that were read of the tensors before anything else. All tensors have plain memory."""
        self._names, self._tensors = names, tensors
        if reads is None:
            self._storages = storages_of(tensors)
            self._versions, self._places = torch_private.versions(tensors), self._places_now()
        else:
            self._storages = reads.storages
            addresses = list(map(torch.UntypedStorage.data_ptr, reads.storages))
            self._versions, self._places = reads.versions.tolist(), (addresses, reads.storage_bytes.tolist())

    def changed(self) -> str | None:
        """Returns the name of a tensor that changed, or whose memory changed. None if none did."""
        versions, places = torch_private.versions(self._tensors), self._places_now()
        if versions == self._versions and places == self._places:
            return None
        before, now = zip(self._versions, *self._places, strict=True), zip(versions, *places, strict=True)
        return next(name for name, a, b in zip(self._names, before, now, strict=True) if a != b)

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` that names a tensor that was changed."""
        if (name := self.changed()) is not None:
            raise changed_meanwhile(name)

    def _places_now(self) -> tuple[list[int], list[int]]:
        storages = self._storages
        return list(map(torch.UntypedStorage.data_ptr, storages)), list(map(torch.UntypedStorage.nbytes, storages))


def watch_values(named: Iterable[tuple[str, Any]]) -> Watch:
    """Returns a `Watch` of all tensors in values with names."""
    found = [(name, tensor) for name, value in named for tensor in tensors_of(value)]
    return Watch([name for name, _ in found], [tensor for _, tensor in found])


def tensors_of(value: Any) -> Sequence[torch.Tensor]:
    """Returns the tensors to watch for a value. A DTensor and its local tensor have separate counters."""
    if is_dtensor(value):
        return value, *local_parts(value)
    return local_parts(value) if isinstance(value, torch.Tensor) or is_sharded_tensor(value) else ()


def local_parts(value: torch.Tensor | ShardedTensor) -> list[torch.Tensor]:
    """Returns the tensors that hold a value on this rank."""
    if is_sharded_tensor(value):  # checked first, because it is a torch.Tensor, too
        return [shard.tensor for shard in value.local_shards()]
    return torch_private.local_tensors([value]) if is_dtensor(value) else [value]


def changed_meanwhile(key: str) -> CheckpointError:
    return CheckpointError(
        f"{key} was changed while it was saved, or its memory was, by another thread: nothing is committed. Save when "
        "nothing else works on the state, or save a copy",
        key=key,
    )


def storages_of(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Returns the storage of each tensor; an empty one for tensors without storage: sparse tensors and some
    subclasses."""
    try:
        storages = list(map(torch.Tensor.untyped_storage, tensors))
        list(map(torch.UntypedStorage.data_ptr, storages))
        return storages
    except Exception:  # code of a subclass may raise anything
        return [_storage(tensor) for tensor in tensors]


def _storage(tensor: Any) -> torch.UntypedStorage:
    try:
        storage: torch.UntypedStorage = tensor.untyped_storage()
        storage.data_ptr()
        return storage
    except Exception:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
