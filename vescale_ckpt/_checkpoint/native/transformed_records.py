"""Reads records with stream transforms (compression), which stock DCP writes, by DCP's own reader for loads."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from ..._state import objects
from ...errors import CheckpointError
from ..loadable import LoadableCheckpoint, Part


class TargetPlanner(Protocol):
    """The methods of DCP's `LoadPlanner` that its reader calls."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor: ...
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None: ...


def read_transformed(
    checkpoint: LoadableCheckpoint, items: Sequence[ReadItem], planner: TargetPlanner, registry: Any = None
) -> None:
    """Reads the items. `registry`: torch's registry of stream extensions; None: torch's default. Raises
    `CheckpointError`."""
    stock = FileSystemReader(checkpoint.path, **({} if registry is None else {"_extension_registry": registry}))
    stock.storage_data = checkpoint.metadata.storage_data
    try:
        stock.read_data(LoadPlan(list(items)), planner).wait()  # type: ignore[arg-type]
    except CheckpointError:
        raise
    except Exception as error:
        names = ", ".join(item.storage_index.fqn for item in items[:3])
        raise CheckpointError(
            f"{names}: stored through a stream transform (compression) that cannot be undone here: "
            f"{type(error).__name__}: {error}"
        ) from error


class TransformedReads:
    """The planner that gives stock DCP's reader its targets: chunks and objects."""

    def __init__(self) -> None:
        self._items: list[ReadItem] = []
        self._targets: list[torch.Tensor] = []
        self.objects: dict[str, Any] = {}

    def add_tensor(self, part: Part) -> None:
        if not part.is_whole:
            raise CheckpointError(
                f"{part.key}: a part of it cannot be read, because it was stored through a stream transform "
                "(compression): load the checkpoint and save it again",
                key=part.key,
            )
        stored = MetadataIndex(part.key, torch.Size(part.chunk.offsets))
        own, origin = MetadataIndex(part.key, None, len(self._targets)), torch.Size([0] * len(part.chunk.sizes))
        sizes = torch.Size(part.chunk.sizes)
        self._items.append(ReadItem(LoadItemType.TENSOR, own, origin, stored, origin, sizes))
        self._targets.append(part.target)

    def add_object(self, key: str) -> None:
        index, none = MetadataIndex(key), torch.Size([0])
        self._items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, torch.Size([1])))

    def read(self, checkpoint: LoadableCheckpoint) -> None:
        if self._items:
            read_transformed(checkpoint, self._items, self)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        return self._targets[number]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.storage_index.fqn
        self.objects[key] = objects.load(value.getvalue(), weights_only=True, key=key)
