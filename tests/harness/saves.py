"""Saves and loads by DCP's calls: on one rank, of parts of stored chunks, and loads of damaged checkpoints.

The rule that tests of damage check: after any damage a load gives exactly the saved values or an error of this package,
and nothing else. `outcome` is that rule.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import vescale_ckpt
from harness.states import State, blank, same
from vescale_ckpt import CheckpointError, LoadPlanner, SaveHandle, SavePlanner, Stager, StorageReader, StorageWriter
from vescale_ckpt._collective.start_save import start_save
from vescale_ckpt._plan.planner import Planner
from vescale_ckpt._write.node_layout import NodeLayout


class ShardingPlanner(SavePlanner):
    """Saves matrices as two shards of rows, as two ranks would: checkpoints of several chunks from one process."""

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for item in super().create_local_plan().items:
            data = item.tensor_data
            if data is None or len(data.size) != 2 or data.size[0] < 2:
                items.append(item)
                continue
            half = data.size[0] // 2
            for start, rows in ((0, half), (half, data.size[0] - half)):
                offsets, sizes = torch.Size([start, 0]), torch.Size([rows, data.size[1]])
                chunk = TensorWriteData(ChunkStorageMetadata(offsets, sizes), data.properties, data.size)
                items.append(WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=chunk))
        self.plan = SavePlan(items, planner_data=self.plan.planner_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is not WriteItemType.SHARD:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        value: torch.Tensor = self.state_dict[write_item.index.fqn]
        return value.narrow(0, chunk.offsets[0], chunk.sizes[0])


# --- Saves and loads


def save(directory: Path | str, values: State, *, sharded: bool = False, **options: Any) -> None:
    planner = ShardingPlanner() if sharded else SavePlanner()
    dcp.save(values, storage_writer=StorageWriter(directory, **options), planner=planner, no_dist=True)


def stock_save(directory: Path | str, values: State, **options: Any) -> None:
    """Saves with DCP's own writer and planner."""
    writer = FileSystemWriter(directory, **({"sync_files": False} | options))
    dcp.save(values, storage_writer=writer, no_dist=True)


def load(directory: Path | str, like: State, *, planner: LoadPlanner | None = None, **options: Any) -> State:
    """What `dcp.load` does on one rank, without its wrapping of errors (which costs more than the load)."""
    values = blank(like)
    reader, planner = StorageReader(directory, **options), planner or LoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(values, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return values


def outcome(directory: Path | str, *expected: State, **options: Any) -> CheckpointError | None:
    """None if a load gives one of the expected states bit for bit, the error if it gives one of this package.

    Anything else, wrong values above all, is an AssertionError.
    """
    try:
        found = load(directory, expected[0], **options)
    except CheckpointError as error:
        return error
    except Exception as error:
        raise AssertionError(f"an error without a name: {type(error).__name__}: {error}") from error
    assert any(same(found, values) for values in expected), "a load gave wrong values and no error"
    return None


def error_of(call: Callable[[], object]) -> CheckpointError | None:
    """The error of this package that a call raises; None if it raises none."""
    try:
        call()
    except CheckpointError as error:
        return error
    return None


def cause(error: BaseException, rank: int | None = None) -> BaseException:
    """What a rank, or whichever failed first, raised inside DCP's CheckpointException."""
    failures = error.failures  # type: ignore[attr-defined]
    failure: BaseException = failures[next(iter(failures)) if rank is None else rank][0]
    return failure


def loaded(path: str | os.PathLike[str], like: State) -> State:
    """What `vescale_ckpt.load` puts into a blank copy of `like`."""
    values: State = blank(like)
    vescale_ckpt.load(path, values)
    return values


def loads(path: str | os.PathLike[str], state: State) -> bool:
    """Whether this state is loaded from there."""
    return same(loaded(path, state), state)


# --- By dcp.save and dcp.load themselves


def stock_load(path: str | os.PathLike[str], like: State, **options: Any) -> State:
    """What DCP's own reader and planner put into a blank copy of `like`."""
    values: State = blank(like)
    dcp.load(values, storage_reader=FileSystemReader(path), **options)
    return values


def dcp_save(
    path: str | os.PathLike[str], state: dict[str, Any], *, no_dist: bool = False, **options: Any
) -> StorageWriter:
    """Saves with our writer and planner; options are the writer's."""
    writer = StorageWriter(path, **options)
    dcp.save(state, storage_writer=writer, planner=SavePlanner(), no_dist=no_dist)
    return writer


def dcp_load(path: str | os.PathLike[str], state: dict[str, Any], **options: Any) -> StorageReader:
    """Loads with our reader and planner; options are the reader's."""
    reader = StorageReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=LoadPlanner())
    return reader


def load_blank(path: str | os.PathLike[str], state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What loading into a blank copy of `state` gives."""
    target: dict[str, Any] = blank(state)
    dcp_load(path, target, **options)
    return target


# --- Boxes: reads of parts of stored chunks


class BoxPlanner(LoadPlanner):
    """Reads boxes of stored chunks into tensors of their own: what resharding does, without ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.items: list[ReadItem] = []
        self.targets: list[torch.Tensor] = []

    def want(self, index: MetadataIndex, box: tuple[slice, ...]) -> None:
        offsets = torch.Size([part.start for part in box])
        lengths = torch.Size([part.stop - part.start for part in box])
        number = MetadataIndex(str(len(self.items)))
        self.items.append(ReadItem(LoadItemType.TENSOR, number, offsets, index, offsets, lengths))
        self.targets.append(torch.full(lengths, 77).to(self.dtype))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.targets[int(read_item.dest_index.fqn)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert tensor.data_ptr() == self.resolve_tensor(read_item).data_ptr()


def load_boxes(directory: Path, key: str, boxes: list[tuple[slice, ...]], **options: Any) -> list[torch.Tensor]:
    """Boxes of the only chunk of a tensor."""
    reader = StorageReader(directory, **options)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    (index,) = (index for index in metadata.storage_data if index.fqn == key)
    planner = BoxPlanner(metadata.state_dict_metadata[key].properties.dtype)
    for box in boxes:
        planner.want(index, box)
    reader.read_data(LoadPlan(planner.items), planner).wait()
    return planner.targets


def save_as(way: str, path: Path, state: State, **options: Any) -> SaveHandle:
    """`way`: "dcp", "async", "safetensors", or "nodes", a folder of each node, as managers have it."""
    if way == "nodes":
        return save_on_nodes(path, state, **options)
    of_way: dict[str, Any] = {"async": {"async_checkpoint": True}, "safetensors": {"format": "safetensors"}}
    return vescale_ckpt.save(path, state, **of_way.get(way, {}), **options)


def save_by(how: str, path: Path | str, state: State) -> Any:
    """`how`: "ours", "async", "safetensors"; or by `dcp.save` with both parts of ours, "dcp.save" and, of a copy,
    "staged", with one, "our writer" or "our planner", or with none, "stock"."""
    if how in ("ours", "async", "safetensors"):
        return save_as(how, Path(path), state).result()
    writer = (FileSystemWriter if how in ("stock", "our planner") else StorageWriter)(path)
    planner = (DefaultSavePlanner if how in ("stock", "our writer") else SavePlanner)()
    return dcp.save(Stager().stage(state) if how == "staged" else state, storage_writer=writer, planner=planner)


def load_by(how: str, path: Path | str, state: State) -> None:
    """`how`: "ours"; or by `dcp.load`: "dcp.load", "our reader", "our planner", "stock"."""
    if how == "ours":
        vescale_ckpt.load(path, state)
        return
    reader = (FileSystemReader if how in ("stock", "our planner") else StorageReader)(path)
    planner = (DefaultLoadPlanner if how in ("stock", "our reader") else LoadPlanner)()
    dcp.load(state, storage_reader=reader, planner=planner)


def save_on_nodes(folder: Path, state: State, *, async_checkpoint: bool = False, **options: Any) -> SaveHandle:
    """Saves into a folder of each node, as managers do. The folders need not have the same path."""
    return start_save(
        "a folder of each node", str(folder), state, NodeLayout, Planner("local"),
        async_checkpoint=async_checkpoint, process_group=None, **options,
    )  # fmt: skip
