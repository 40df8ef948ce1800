"""`NativeCheckpoint` opens checkpoints in DCP's layout, of this package and of every torch, for loads and tools."""

from __future__ import annotations

import math
import os
import posixpath
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..._engine import _C
from ..._engine.dtype_codes import dtype_code
from ..._engine.engine_errors import named_errors, named_system_errors
from ..._engine.gc import gc_paused
from ..._engine.options import direct_io_setting, engine_options
from ..._engine.rows import int_table
from ..._state import objects
from ..._state.structure import Path, Structure, structure_of
from ..._storage.open_storage import is_inconclusive, read_twice, storage_at
from ..._storage.paths import check_relative
from ..._storage.storage import Lease
from ...errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from ...reports import SavedBy
from ..checkpoint import Chunk, Read, TensorInfo
from ..load_index import crc_of, located
from ..loadable import LoadableCheckpoint, Part, fill_parts
from ..record_reader import ReadOptions, RecordReader
from ..seen_files import SeenFiles
from . import metadata_check, metadata_file
from .explain_missing import explained
from .file_names import NODE_MARKER, index_name, is_data_file, metadata_name
from .save_facts import unstamped

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_TABLE_MAGIC, _FOOTER_BYTES = b"VSCKSUM1", 64  # the footer of the table of block checksums: docs/format.md


class NativeCheckpoint(LoadableCheckpoint):
    """A checkpoint of all ranks; with `rank`, of one rank that saved without collectives.

    In files without block checksums, a part of a chunk can only be verified by reading the whole chunk. This is done
    once for each chunk, before its first part is read.
    """

    format = "dcp"
    _lock = Lease()

    def __init__(
        self, path: str, rank: int | None, read_metadata: Callable[[], Metadata], index: _C.Index | None = None
    ) -> None:
        super().__init__(path, path, read_metadata, index)
        self._seen = SeenFiles(is_written_once=is_data_file)
        self.rank = rank
        self.is_of_one_rank = rank is not None
        self._with_table: dict[str, bool] = {}  # {file name: whether it has a table of block checksums}
        self._sound: set[Chunk] = set()  # chunks that were verified as a whole

    @classmethod
    def of(cls, path: str, rank: int | None, metadata: Metadata) -> NativeCheckpoint:
        return cls(path, rank, lambda: metadata)

    @classmethod
    def by_metadata(cls, path: str, rank: int | None) -> NativeCheckpoint:
        with explained(path):
            return cls.of(path, rank, metadata_file.read_metadata(path, rank))

    @classmethod
    def by_index(cls, path: str, rank: int | None) -> NativeCheckpoint:
        """Opens the checkpoint. Reads the metadata at once only if there is no index."""
        index = metadata_file.read_index(path, rank)
        return cls.by_metadata(path, rank) if index is None else cls._of_index(path, rank, index)

    @classmethod
    def unpack(cls, path: str, index: bytes, metadata: bytes) -> NativeCheckpoint:
        """Makes the checkpoint from the index, or the whole metadata, that another rank has read."""
        if not index:
            from .metadata_pickle import loads

            return cls.of(path, None, loads(metadata, os.path.join(path, metadata_name(None))))
        file = os.path.join(path, index_name(None))
        with named_errors(str, file):  # raises only for damage on the way: the coordinator has checked the bytes
            return cls._of_index(path, None, _C.Index.from_bytes(index, f"{file}, as the coordinator sent it,"))

    @classmethod
    def _of_index(cls, path: str, rank: int | None, index: _C.Index) -> NativeCheckpoint:
        # The metadata must be of the same save as the index: a later save may replace it during the load.
        return cls(path, rank, lambda: metadata_file.read_metadata_of(path, rank, index.save_id), index)

    @classmethod
    def open(cls, path: str, rank: int | None = None) -> NativeCheckpoint:
        """Opens the checkpoint for listing and reading. Clean-ups leave its files until `close`."""
        lock = storage_at(path).share(metadata_name(rank))
        seen = SeenFiles(os.path.join(path, metadata_name(rank)), is_data_file)
        try:
            with gc_paused():
                opened = cls.by_metadata(path, rank)
        except BaseException:
            lock.release()
            raise
        opened._lock, opened._seen = lock, seen
        return opened

    def close(self) -> None:
        self._lock.release()

    # --- What it holds

    @property
    def described_in(self) -> str:
        return os.path.join(self.path, metadata_name(self.rank))

    @cached_property
    def _id(self) -> tuple[str, SavedBy | None]:
        meta = self.metadata.storage_meta if self.index is None else self.index
        save_id = getattr(meta, "save_id", None)
        return unstamped(save_id) if isinstance(save_id, str) else ("", None)

    @cached_property
    def save_id(self) -> str:
        return self._id[0]

    @cached_property
    def saved_by(self) -> SavedBy | None:
        return self._id[1]

    @property
    def is_node_part(self) -> bool:
        return storage_at(self.path).has(NODE_MARKER)

    @cached_property
    def writer(self) -> str:
        length = metadata_check.TRAILER_BYTES
        with named_system_errors(self.path):
            _, end = storage_at(self.path).read_range(metadata_name(self.rank), -length, length)
        if metadata_check.has_checksum(end):
            return "vescale_ckpt"
        version = getattr(self.metadata, "version", None)
        return f"torch.distributed.checkpoint {version}" if isinstance(version, str) else "torch.distributed.checkpoint"

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return self._listing.tensors

    @cached_property
    def objects(self) -> dict[str, Chunk]:
        return self._listing.objects

    @cached_property
    def malformed(self) -> list[CheckpointError]:
        return self._listing.malformed

    def named_files(self) -> set[str]:
        """Returns all files that the index or the metadata names, also for keys that are malformed or missing. Raises
        `UntrustedCheckpointError` if one lies outside of the checkpoint's directory."""
        if self.index is not None:
            with suppress(_C.EngineError):  # the index is damaged
                return {posixpath.normpath(check_relative(path, self.path)) for path in self.index.files}
        storage = self.metadata.storage_data
        values = storage.values() if isinstance(storage, dict) else ()
        paths = (getattr(info, "relative_path", None) for info in values)
        return {posixpath.normpath(check_relative(path, self.path)) for path in paths if isinstance(path, str)}

    @cached_property
    def _listing(self) -> _Listing:
        return _Listing(self.metadata, self.described_in)

    def places(self) -> tuple[object, Structure | None]:
        if self.index is None:
            return super().places()
        found = metadata_file.read_places_of(self.path, self.rank, self.index.save_id)
        return found.planner_data, structure_of(found)

    @cached_property
    def paths(self) -> dict[str, Path]:
        paths = self.metadata.planner_data
        return dict(paths) if isinstance(paths, dict) else {}

    @cached_property
    def structure(self) -> Structure | None:
        return structure_of(self.metadata)

    # --- Reading

    def load_objects(self, names: Iterable[str]) -> dict[str, Any]:
        reader = RecordReader(self, ReadOptions(), self._seen)
        stored = {name: self.objects[name] for name in names}
        for name in stored:
            self.check_malformed(name)
        records = [reader.record(name, chunk) for name, chunk in stored.items()]
        found = {
            record.key: objects.load(data, weights_only=True, key=record.key)
            for record, data in reader.objects(records, {})
        }
        reader.finish()
        return {name: found[name] for name in stored}

    def checksum(self, chunk: Chunk) -> int:
        return chunk.crc

    def read(self, reads: Sequence[Read]) -> None:
        verified, unverified = list[Part](), list[Part]()
        for part in self.parts(reads):
            (unverified if self._is_part_of_sound(part) else verified).append(part)
        for parts, verify in ((verified, True), (unverified, False)):
            if parts:
                fill_parts(RecordReader(self, ReadOptions(verify=verify), self._seen), parts)

    def _is_part_of_sound(self, part: Part) -> bool:
        """Whether the part is less than its chunk, in a file without block checksums. Verifies the chunk then; raises
        `CorruptCheckpointError` if it is damaged."""
        chunk = part.chunk
        if tuple(part.target.shape) == chunk.sizes:
            return False
        path = os.path.join(self.root, chunk.file)
        self._seen.look(path)
        if self._has_table(chunk.file):
            return False
        if chunk not in self._sound:
            row = (0, chunk.offset, chunk.bytes, chunk.crc, dtype_code(part.dtype, part.key))
            table = int_table((*row, len(chunk.sizes), *chunk.sizes))

            def check() -> list[int]:
                with named_errors(lambda row: part.key, self.path):
                    options = engine_options(None, direct_io_setting("auto"))
                    damaged, odd, _ = _C.check_tensors([path], table, options)
                for _, offset, reason, number in damaged:
                    if is_inconclusive(number, path):
                        raise CheckpointError(f"{part.key}: {reason}", key=part.key, path=path, errno=number)
                    raise CorruptCheckpointError(f"{part.key}: {reason}", key=part.key, file=path, offset=offset)
                return odd

            if read_twice(path, check):
                return False  # the tensor is not contiguous, so it is read as a whole in any case
            self._sound.add(chunk)
        return True

    def _has_table(self, name: str) -> bool:
        if name not in self._with_table:
            try:
                _, magic = storage_at(self.path).read_range(name, -_FOOTER_BYTES, len(_TABLE_MAGIC))
            except OSError:  # the later read raises the error
                return True
            self._with_table[name] = magic == _TABLE_MAGIC
        return self._with_table[name]


class _Listing:
    """The chunks and objects that metadata names. Malformed keys have no chunks."""

    def __init__(self, metadata: Metadata, where: str) -> None:
        """`where`: the metadata's file, for errors. Raises `CorruptCheckpointError` if it has no locations at all."""
        self._where = where
        self.tensors: dict[str, TensorInfo] = {}
        self.objects: dict[str, Chunk] = {}
        self.malformed: list[CheckpointError] = []
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

        if not isinstance(metadata.storage_data, dict):
            raise CorruptCheckpointError(f"{where} does not say where anything is stored", key=None, file=where)
        # {key: {offset in the tensor: unchecked location}}. Objects have no offset. A tensor without one is not found,
        # because no load looks there, of stock DCP neither.
        locations: dict[str, dict[tuple[int, ...] | None, Any]] = {}
        for index, info in metadata.storage_data.items():
            if type(index) is MetadataIndex and type(index.fqn) is str:
                at = None if index.offset is None else tuple(index.offset)
                locations.setdefault(index.fqn, {})[at] = info
            else:
                reason = f"the metadata places {index!r}, which is no name"
                self.malformed.append(CorruptCheckpointError(reason, key=None, file=where))
        for key, stored in metadata.state_dict_metadata.items():
            of_key, chunks = locations.get(key, {}), list[Chunk]()
            if isinstance(stored, TensorStorageMetadata):
                self.tensors[key] = TensorInfo(tuple(stored.size), stored.properties.dtype, chunks)
            try:
                if isinstance(stored, TensorStorageMetadata):
                    itemsize = stored.properties.dtype.itemsize
                    for chunk in stored.chunks:
                        at, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                        if math.prod(sizes) * itemsize >= 1 << 62:
                            raise UntrustedCheckpointError(f"{key}: no file holds a chunk of shape {sizes}", key=key)
                        chunks.append(self._chunk(key, of_key.get(at), at, sizes))
                else:
                    self.objects[key] = Chunk((), (), "", -1, -1)
                    self.objects[key] = self._chunk(key, of_key.get(None), (), ())
            except CheckpointError as error:
                chunks.clear()
                self.malformed.append(error)

    def _chunk(self, key: str, info: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
        info = located(info, key, self._where)
        return Chunk(offsets, sizes, info.relative_path, info.offset, info.length, crc_of(info))
