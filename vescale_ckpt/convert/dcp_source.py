"""Reads DCP checkpoints for conversions, those of this package and those of torch."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from .._dcp.fill_planner import FillPlanner
from .._dcp.load_planner import item_targets
from .._engine import _C
from .._engine.dtypes import dtype_code
from .._engine.errors import named_errors
from .._engine.gc import gc_paused
from .._engine.options import direct_io_setting, engine_options
from .._engine.rows import int_table
from .._native import metadata_file
from .._native.names import METADATA_NAME, checked_location, crc_of
from .._read.by_items import ItemLoad
from .._read.contents import Contents
from .._read.load import Load, ReadOptions
from .._read.match import not_all_there
from .._read.no_checkpoint import explained
from .._read.seen_files import SeenFiles
from .._state.structure import Path, structure_of
from .._storage.directory import check_relative, directory_at, local_path
from ..errors import CheckpointError, CorruptCheckpointError
from .source import Read, TensorInfo, parts_of

_TABLE_MAGIC, _FOOTER_BYTES = b"VSCKSUM1", 64  # of the table of block checksums: docs/format.md


class DcpSource:
    """The DCP checkpoint in a directory, saved by any number of ranks.

    In files without block checksums a part of a chunk can only be verified by reading the whole chunk. That is done
    once for each chunk, before its first part is read.
    """

    def __init__(self, path: str) -> None:
        self._path = local_path(path)
        self._lock = directory_at(self._path).share(METADATA_NAME)
        self._seen = SeenFiles(os.path.join(self._path, METADATA_NAME))
        try:
            self._metadata = self._read_metadata()
        except BaseException:
            self.close()
            raise
        stored = self._metadata.state_dict_metadata
        self.tensors = {
            key: TensorInfo(tuple(value.size), value.properties.dtype)
            for key, value in stored.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self.object_names = [key for key in stored if key not in self.tensors]
        paths = self._metadata.planner_data
        self.paths: dict[str, Path] = dict(paths) if isinstance(paths, dict) else {}
        self.structure = structure_of(self._metadata)
        self._options = engine_options(None, direct_io_setting("auto"))
        self._with_table: dict[str, bool] = {}  # by file name
        self._sound: set[MetadataIndex] = set()  # chunks that have been verified as a whole

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _read_metadata(self) -> Metadata:
        with gc_paused(), explained(self._path):
            metadata = metadata_file.read_metadata(self._path)
        if not isinstance(metadata.storage_data, dict):
            raise CorruptCheckpointError(
                f"the metadata of {self._path} does not say where anything is stored", key=None, file=self._path
            )
        return metadata

    def objects(self, names: Iterable[str]) -> dict[str, Any]:
        planner = FillPlanner(allow_cast=False)
        planner.set_up_planner(dict.fromkeys(names), self._metadata)
        self._load(planner, planner.create_local_plan().items, verify=True)
        return planner.objects

    def read(self, reads: Sequence[Read]) -> None:
        verified, unverified = _Boxes(), _Boxes()
        for read in reads:
            for chunk, item, target in self._pieces(read):
                boxes = unverified if self._is_part_of_sound(chunk, item) else verified
                boxes.add(item, target)
        for boxes, verify in ((verified, True), (unverified, False)):
            if boxes.items:
                self._load(boxes, boxes.items, verify)

    def _load(self, planner: LoadPlanner, items: list[ReadItem], verify: bool) -> None:
        contents = Contents(self._path, self._path, lambda: self._metadata)
        load = Load(contents, ReadOptions(verify=verify), self._seen)
        ItemLoad(load, item_targets(planner)).run(items)

    def _pieces(self, read: Read) -> Iterator[tuple[ChunkStorageMetadata, ReadItem, torch.Tensor]]:
        """For each chunk that holds a part of the box: the chunk, the item to read and its target. Chunks do not
        overlap: reading the metadata has checked that."""
        stored = self._metadata.state_dict_metadata[read.key]
        assert isinstance(stored, TensorStorageMetadata)
        found = 0
        for number, inside, target in parts_of([(chunk.offsets, chunk.sizes) for chunk in stored.chunks], read):
            chunk, origin = stored.chunks[number], torch.Size(inside)
            index = MetadataIndex(read.key, chunk.offsets, number)
            yield chunk, ReadItem(LoadItemType.TENSOR, index, origin, index, origin, target.shape), target
            found += target.numel()
        if found != read.target.numel():
            raise not_all_there(read.key)

    def _is_part_of_sound(self, chunk: ChunkStorageMetadata, item: ReadItem) -> bool:
        """Whether an item is a part of a chunk in a file without block checksums. The chunk is then verified first;
        raises `CorruptCheckpointError` if it is damaged."""
        index = item.storage_index
        info = self._metadata.storage_data.get(index)
        if item.lengths == chunk.sizes or info is None:
            return False
        name = check_relative(checked_location(info, index.fqn).relative_path, index.fqn)
        if info.transform_descriptors:
            raise CheckpointError(
                f"{index.fqn}: a part of it is wanted, but it was stored through a stream transform (compression): "
                "load the checkpoint and save it again",
                key=index.fqn,
            )
        path = os.path.join(self._path, name)
        self._seen.look(path)
        if self._has_table(path):
            return False
        if index not in self._sound:
            dtype = self.tensors[index.fqn].dtype
            row = (0, info.offset, info.length, crc_of(info), dtype_code(dtype, index.fqn))
            with named_errors(lambda row: index.fqn, self._path):
                damaged, odd, _ = _C.check_tensors(
                    [path], int_table((*row, len(chunk.sizes), *chunk.sizes)), self._options
                )
            if odd:
                return False  # not a contiguous tensor: it is read as a whole in any case
            for _, offset, reason in damaged:
                raise CorruptCheckpointError(f"{index.fqn}: {reason}", key=index.fqn, file=path, offset=offset)
            self._sound.add(index)
        return True

    def _has_table(self, path: str) -> bool:
        if path not in self._with_table:
            try:
                with open(path, "rb") as file:
                    file.seek(-_FOOTER_BYTES, os.SEEK_END)
                    self._with_table[path] = file.read(len(_TABLE_MAGIC)) == _TABLE_MAGIC
            except OSError:  # the read that follows raises the error
                return True
        return self._with_table[path]


class _Boxes(LoadPlanner):
    """A planner that gives each item its own target."""

    def __init__(self) -> None:
        self.items: list[ReadItem] = []
        self._targets: dict[int, torch.Tensor] = {}

    def add(self, item: ReadItem, target: torch.Tensor) -> None:
        number = len(self.items)
        index = MetadataIndex(item.storage_index.fqn, None, number)
        self.items.append(
            ReadItem(item.type, index, item.dest_offsets, item.storage_index, item.storage_offsets, item.lengths)
        )
        self._targets[number] = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        return self._targets[number]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...

    # `DcpSource` plans: these steps of DCP are not called

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError
