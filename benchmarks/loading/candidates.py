"""Ways to load on several ranks, and to save what they load."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import vescale_ckpt
from benchmarks.timing import STOCK
from vescale_ckpt.stats import LoadStats

Load = Callable[[Path, dict[str, Any]], LoadStats | None]


def _ours(broadcast: Any) -> Load:
    return lambda path, state: vescale_ckpt.load(path, state, broadcast_checkpoint=broadcast).stats


def _plugged(**options: Any) -> Load:
    def load(path: Path, state: dict[str, Any]) -> LoadStats | None:
        reader = vescale_ckpt.StorageReader(path, **options)
        dcp_load(state, storage_reader=reader, planner=vescale_ckpt.LoadPlanner())
        return reader.last_stats

    return load


def _stock(path: Path, state: dict[str, Any]) -> None:
    dcp_load(state, storage_reader=FileSystemReader(path))


MODES: dict[str, tuple[str, Load]] = {
    "auto": ("vescale_ckpt.load, by the rule", _ours("auto")),
    "true": ("vescale_ckpt.load, ranks read for each other", _ours(True)),
    "false": ("vescale_ckpt.load, each rank for itself", _ours(False)),
    "reader": ("dcp.load with our StorageReader and LoadPlanner", _plugged()),
    STOCK: ("dcp.load with FileSystemReader", _stock),
}
if "broadcast_checkpoint" in inspect.signature(vescale_ckpt.StorageReader).parameters:
    MODES["plug"] = ("reader, ranks read for each other", _plugged(broadcast_checkpoint=True))
    MODES["plug-auto"] = ("reader, by the rule", _plugged(broadcast_checkpoint="auto"))

WRITERS: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "vescale": lambda path, state: vescale_ckpt.save(path, state),
    STOCK: lambda path, state: dcp_save(state, storage_writer=FileSystemWriter(path)),
}
