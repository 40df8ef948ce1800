"""Reads DCP checkpoints, those of this package and those of torch, and writes them with all ranks, for conversions."""

from __future__ import annotations

import io
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from .._checkpoint.native.file_names import METADATA_NAME, checked_location, crc_of
from .._dcp.fill_planner import FillPlanner
from .._dcp.load_planner import item_targets
from .._engine import _C
from .._engine.dtypes import dtype_code
from .._engine.errors import named_errors
from .._engine.gc import gc_paused
from .._engine.options import direct_io_setting, engine_options
from .._engine.rows import (
    LOCATION_ROW,
    NO_LIMIT,
    OBJECT,
    PLAN_ROW,
    SHARD,
    TENSOR,
    in_first_file,
    int_table,
    words,
)
from .._ranks.message import pack, unpack
from .._read import contents
from .._read.by_items import ItemLoad, ItemTargets
from .._read.load import Load, ReadOptions
from .._read.seen_files import SeenFiles
from .._state import objects
from .._state.inventory_rows import packed_row
from .._state.shard_boxes import ShardBox
from .._state.structure import Path, structure_of
from .._storage.open_storage import checkpoint_path, read_twice, says_nothing, storage_at
from .._storage.paths import check_relative, data_path
from .._write.host_batches import write_table
from .._write.native_save import NativeSave
from .._write.rank_save import RankSave, SaveOptions
from ..errors import CheckpointError, CorruptCheckpointError
from .pipeline import Batch, Buffers, Piece, pieces_of, transfer
from .plan import Output
from .source import Read, Source, TensorInfo, parts_of

_TABLE_MAGIC, _FOOTER_BYTES = b"VSCKSUM1", 64  # of the table of block checksums: docs/format.md


class DcpSource(Source):
    """The DCP checkpoint in a directory, saved by any number of ranks.

    In files without block checksums a part of a chunk can only be verified by reading the whole chunk. That is done
    once for each chunk, before its first part is read.
    """

    format = "dcp"

    def __init__(self, path: str) -> None:
        self._path = checkpoint_path(path)
        self._lock = storage_at(self._path).share(METADATA_NAME)
        self._seen = SeenFiles(os.path.join(self._path, METADATA_NAME))
        try:
            with gc_paused():
                self._contents = contents.read(self._path, None, verify=True, by_index=False)
            self._metadata = self._contents.metadata
            if not isinstance(self._metadata.storage_data, dict):
                reason = f"the metadata of {self._path} does not say where anything is stored"
                raise CorruptCheckpointError(reason, key=None, file=self._path)
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

    def objects(self, names: Iterable[str]) -> dict[str, Any]:
        planner = FillPlanner(allow_cast=False)
        planner.set_up_planner(dict.fromkeys(names), self._metadata)
        self._load(item_targets(planner), planner.create_local_plan().items, verify=True)
        return planner.objects

    def read(self, reads: Sequence[Read]) -> None:
        verified, unverified = _Boxes(), _Boxes()
        for read in reads:
            for chunk, item, target in self._pieces(read):
                boxes = unverified if self._is_part_of_sound(chunk, item) else verified
                boxes.add(item, target)
        for boxes, verify in ((verified, True), (unverified, False)):
            if boxes.items:
                self._load(ItemTargets(boxes), boxes.items, verify)

    def _load(self, targets: ItemTargets, items: list[ReadItem], verify: bool) -> None:
        ItemLoad(Load(self._contents, ReadOptions(verify=verify), self._seen), targets).run(items)

    def _pieces(self, read: Read) -> Iterator[tuple[ChunkStorageMetadata, ReadItem, torch.Tensor]]:
        """For each chunk that holds a part of the box: the chunk, the item to read and its target. Chunks do not
        overlap: reading the metadata has checked that."""
        stored = self._metadata.state_dict_metadata[read.key]
        assert isinstance(stored, TensorStorageMetadata)
        for number, inside, target in parts_of([(chunk.offsets, chunk.sizes) for chunk in stored.chunks], read):
            chunk, origin = stored.chunks[number], torch.Size(inside)
            index = MetadataIndex(read.key, chunk.offsets, number)
            yield chunk, ReadItem(LoadItemType.TENSOR, index, origin, index, origin, target.shape), target

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
        path = data_path(self._path, name)
        self._seen.look(path)
        if self._has_table(name):
            return False
        if index not in self._sound:
            dtype = self.tensors[index.fqn].dtype
            row = (0, info.offset, info.length, crc_of(info), dtype_code(dtype, index.fqn))
            table = int_table((*row, len(chunk.sizes), *chunk.sizes))

            def check() -> list[int]:
                with named_errors(lambda row: index.fqn, self._path):
                    damaged, odd, _ = _C.check_tensors([path], table, self._options)
                for _, offset, reason, number in damaged:
                    if says_nothing(number, path):
                        raise CheckpointError(f"{index.fqn}: {reason}", key=index.fqn, path=path, errno=number)
                    raise CorruptCheckpointError(f"{index.fqn}: {reason}", key=index.fqn, file=path, offset=offset)
                return odd

            if read_twice(path, check):
                return False  # not a contiguous tensor: it is read as a whole in any case
            self._sound.add(index)
        return True

    def _has_table(self, name: str) -> bool:
        if name not in self._with_table:
            try:
                _, magic = storage_at(self._path).read_range(name, -_FOOTER_BYTES, len(_TABLE_MAGIC))
            except OSError:  # the read that follows raises the error
                return True
            self._with_table[name] = magic == _TABLE_MAGIC
        return self._with_table[name]


class _Boxes:
    """Gives each item its own target, as a planner does."""

    def __init__(self) -> None:
        self.items: list[ReadItem] = []
        self._targets: list[torch.Tensor] = []

    def add(self, item: ReadItem, target: torch.Tensor) -> None:
        self.items.append(replace(item, dest_index=MetadataIndex(item.storage_index.fqn, None, len(self.items))))
        self._targets.append(target)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        return self._targets[number]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError  # the items are parts of tensors


# --- Writing


def pieces_of_rank(outputs: Sequence[Output], most_bytes: int, rank: int, ranks: int) -> list[Piece]:
    """The consecutive pieces of all outputs that this rank writes. Ranks get about equally many bytes."""
    total = sum(output.bytes for output in outputs)
    mine = []
    at = 0
    for output in outputs:
        for piece in pieces_of(output, most_bytes):
            middle = at + piece.bytes // 2
            if min(ranks - 1, middle * ranks // total if total else 0) == rank:
                mine.append(piece)
            at += piece.bytes
    return mine


class DcpRankFiles:
    """The data file of one rank. It is durable after `write`, and belongs to the checkpoint after `commit`."""

    def __init__(self, directory: str, rank: int, overwrite: bool) -> None:
        self._save = NativeSave(SaveOptions(directory, rank, overwrite=overwrite))
        self._save.begin()
        if rank == 0:
            self._save.clean_up()

    def write(
        self,
        pieces: Sequence[Piece],
        values: Mapping[str, Any],
        paths: Mapping[str, Path],
        source: Source,
        buffers: Buffers,
    ) -> bytes:
        """Writes the pieces and then the objects. Returns the message that `commit` needs from each rank."""
        with self._save as save:
            contents = [objects.dump(value, key) for key, value in values.items()]
            names = [*(piece.output.name for piece in pieces), *values]
            if not names:
                return pack(_C.pack_inventory([], [], 0), b"", b"", b"")
            save.open(array("q", [piece.bytes for piece in pieces]))
            written = _Written(save)
            transfer(pieces, source, written, buffers)
            placed = written.placed + save.write_contents(contents, list(values))
            save.finish(len(pieces), len(values))
        rows = [_row(piece) for piece in pieces]
        rows += [packed_row(OBJECT, 0, False, len(content), ShardBox((), (), ()), ()) for content in contents]
        own = dict.fromkeys(names)
        inventory = _C.pack_inventory(names, rows, 0)
        known = _C.pack_paths(list(own), [paths.get(name, (name,)) for name in own])
        return pack(inventory, known, in_first_file(placed), save.name.encode())

    def commit(self, messages: Sequence[bytes], path: str, structure: str | None) -> None:
        """Commits the files of all ranks, on the coordinator. `messages`: the messages of `write`, by rank. `path`: the
        final path of the directory."""
        inventories, paths, locations, names = zip(*map(unpack, messages), strict=True)
        with named_errors(str, path):
            plan = _C.GlobalPlan(inventories, "lowest_rank", least_piece_bytes=NO_LIMIT)
            ordered = [_in_order_of(plan.local_plan(rank), own) for rank, own in enumerate(locations)]
            files = [[name.decode()] if name else [] for name in names]
            save_id = self._save.options.save_id
            content, index = _C.checkpoint_files(plan.catalog(), ordered, files, paths, path, save_id, structure)
        self._save.commit(content, index)

    def discard(self) -> None:
        """Removes the files that this rank has written."""
        self._save.discard()

    def end(self) -> None:
        self._save.end()


class _Written:
    """Writes batches to a data file and collects their record locations."""

    def __init__(self, save: RankSave) -> None:
        self._save = save
        self.placed: list[int] = []

    def prepare(self, batch: Batch) -> None: ...

    def write(self, batch: Batch) -> None:
        segments = batch.segments
        names = [placed.segment.output.name for placed in segments if isinstance(placed.segment, Piece)]
        if segments:
            table, rows = write_table([placed.target for placed in segments]), range(len(segments))
            self.placed += self._save.write_table(table, names.__getitem__, rows)


def _row(piece: Piece) -> bytes:
    output = piece.output
    kind = TENSOR if piece.sizes == output.shape else SHARD
    code = dtype_code(output.dtype, output.name)
    return packed_row(kind, code, False, output.dtype.itemsize, ShardBox(piece.offsets, piece.sizes, ()), output.shape)


def _in_order_of(local_plan: bytes, locations: bytes) -> bytes:
    """Reorders record locations from the inventory's order to that of the local plan, which splits no item."""
    row_bytes = LOCATION_ROW * struct.calcsize("q")
    return b"".join(locations[item * row_bytes : (item + 1) * row_bytes] for item in words(local_plan)[::PLAN_ROW])
