"""Reads records that stock DCP wrote through a stream transform (compression), by its own reader."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ...errors import CheckpointError
from ..loadable import LoadableCheckpoint


class TargetPlanner(Protocol):
    """The methods of DCP's `LoadPlanner` that its reader calls."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor: ...
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None: ...


def read_transformed(
    checkpoint: LoadableCheckpoint, items: Sequence[ReadItem], planner: TargetPlanner, registry: Any = None
) -> None:
    """`registry`: torch's, of stream extensions; None: its own. Raises `CheckpointError`."""
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
