"""`StorageWriter`: DCP's plug point for saving, backed by the C++ engine."""

from __future__ import annotations

import os
import uuid
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from . import _C, engine, metadata_file, objects, packed, settings
from ._native import commit
from ._storage import locks
from ._storage.directory import directory_at, local_path
from .arguments import checked_count, checked_flag, checked_path
from .data_file import DataFiles
from .errors import CheckpointError
from .lazy_metadata import LazyMetadata
from .one_place import separate
from .packed import PackedItems, PackedResults, body_bytes, write_result
from .pause import garbage_collector_paused
from .process_groups import check_alone_on_purpose
from .safetensors import checked_metadata
from .save_planner import SavePlanner as OurSavePlanner
from .settings import MOST_THREADS, DirectIO
from .shard_size import shard_bytes
from .stager import Stager
from .stats import SaveStats
from .stock import CURRENT_DCP_VERSION
from .watch import WatchedState
from .waves import write_rows

FORMATS = ("dcp", "safetensors")


def check_format(format: str, metadata: Mapping[str, str] | None = None) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: one of {', '.join(FORMATS)} is wanted")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ValueError(f"metadata: a mapping of texts is wanted, or None, not {type(metadata).__name__}")
    if metadata is not None and format != "safetensors":
        raise ValueError(f"metadata: only files of format='safetensors' have it, not {format!r}: put it into the state")


class StorageWriter(DcpStorageWriter, AsyncStager):
    """Writes a DCP checkpoint that every DCP reads, at the speed of the disk, checksummed and committed atomically.

    Args:
        path: the checkpoint's directory, made if missing. A path or a `file://` URL.
        format: "dcp", torch's own layout, or "safetensors", Hugging Face's: `model.safetensors`, or several files and
            their index. All ranks write into the same files, which any reader of that format takes; they hold tensors
            only, and have checksums whatever `checksums` says.
        thread_count: worker threads; None: `VESCALE_CKPT_THREADS`.
        single_file_per_rank: False writes each tensor and object to a file of its own, as DCP's option does.
        sync_files: False skips syncing data; a crash of the machine may then tear a committed checkpoint.
        overwrite: False raises if the directory holds a checkpoint.
        checksums: False leaves them out, and with them all verification.
        direct_io: "auto" goes past the page cache where the file system lets it, False never does, True raises where
            it cannot.
        max_shard_size: of safetensors, bytes of tensors in a file, or text like "5GB"; a tensor that is larger is alone
            in its file.
        metadata: of safetensors, texts for the headers; None: `{"format": "pt"}`.

    `dcp.async_save` takes its copies by this package's `Stager` if it is given no other: torch's own forgets that a
    tensor is lazily conjugated or negated, and saves other values.

    One object may be used for many saves, one at a time: `dcp.save(state, storage_writer=w, checkpoint_id=path)`.
    It can be pickled between saves. `last_stats` tells what this rank's last save did.
    """

    def __new__(cls, *args: Any, format: str = "dcp", **kwargs: Any) -> StorageWriter:
        if cls is StorageWriter and format == "safetensors":
            from .export_writer import SafetensorsWriter  # which is derived from this class

            cls = SafetensorsWriter
        return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "dcp",
        thread_count: int | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        overwrite: bool = True,
        checksums: bool = True,
        direct_io: DirectIO = "auto",
        max_shard_size: int | str = "5GB",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        check_format(format, metadata)
        self.most_file_bytes = shard_bytes(max_shard_size)
        self.texts = checked_metadata({"format": "pt"} if metadata is None else dict(metadata))
        self.path = local_path(checked_path("path", path))
        self.thread_count = checked_count("thread_count", thread_count, most=MOST_THREADS)
        self.single_file_per_rank = checked_flag("single_file_per_rank", single_file_per_rank)
        self.sync_files = checked_flag("sync_files", sync_files)
        self.overwrite = checked_flag("overwrite", overwrite)
        self.checksums = checked_flag("checksums", checksums)
        self.direct_io = engine.direct_io_setting(direct_io)
        self.last_stats: SaveStats | None = None
        self._save_id = _new_id()
        self._rank = 0
        self._use_collectives = True
        self._superseded: set[str] = set()  # files that the metadata named which this save replaces
        self._lock: locks.FileLock | None = None  # marks this save's files as such

    # --- DCP's calls, in the order in which they come

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            local_path(checkpoint_id)
        except ValueError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = local_path(checkpoint_id)
        self._save_id = _new_id()

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @property
    def rank(self) -> int:
        return self._rank

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.path, save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        settings.check()
        check_alone_on_purpose()
        rank = kwargs.get("rank")
        self._rank = 0 if rank is None else rank
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._unlock()  # the save before this one is over
        locks.drop_dead_locks(self.path)
        directory_at(self.path).make()
        if not self.overwrite and metadata_file.has_metadata(self.path, self._metadata_rank):
            raise CheckpointError(f"{self.path} holds a checkpoint already and overwrite=False", path=self.path)
        if not self._use_collectives and metadata_file.has_metadata(self.path, None):
            raise CheckpointError(
                f"{self.path} holds a checkpoint that all ranks saved together, which loads would go on to find: "
                "ranks that save without collectives need a directory of their own",
                path=self.path,
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # No rank writes before this returns, so what nothing names is left from a save that died: without its space
        # this one might not fit.
        self._superseded = commit.named_files(self.path, self._metadata_rank)
        commit.remove_leftovers(self.path, only_rank=self._metadata_rank)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        with garbage_collector_paused():
            future.set_result(self._write(plan.items, planner))  # type: ignore[arg-type]  # looks like a list
        if isinstance(planner, OurSavePlanner):
            planner.forget_state()  # planners live on, and a staged state takes as much memory as the model
        return future

    @garbage_collector_paused()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            planned = metadata.planned if isinstance(metadata, LazyMetadata) else None
            if planned is not None:
                places, names = zip(*map(_places, results), strict=True)
                self._check_one_place(names)
                content, index = planned.files(list(places), list(names), self.path, self._save_id)
                assert isinstance(metadata, LazyMetadata)
                if metadata.was_changed():  # by a writer derived from this one, say
                    self.commit(_with_changes(content, metadata), None)
                else:
                    self.commit(content, index)
                metadata.become(metadata_file.read_metadata_of, self.path, self._metadata_rank, self._save_id)
            else:
                self._check_one_place(
                    [{result.storage_data.relative_path for result in of_rank} for of_rank in results]
                )
                metadata.version = CURRENT_DCP_VERSION
                metadata.storage_data = {
                    result.index: result.storage_data for rank_results in results for result in rank_results
                }
                metadata.storage_meta = self.storage_meta()
                self.commit(metadata_file.dumps(metadata), None)
        finally:
            self.end()

    def _check_one_place(self, names: Sequence[Iterable[str]]) -> None:
        """Before the commit: that the files which ranks have written, their `names` by rank, are in this directory."""
        storage = directory_at(self.path)
        here = set(storage.names())
        missing = [
            rank for rank, of_rank in enumerate(names) if not all(name in here or storage.has(name) for name in of_rank)
        ]
        if missing:
            raise separate(self.path, missing)

    def hold(self, lock: locks.FileLock | None) -> None:
        """`lock`: on the first data file of this save, which marks all of them."""
        self._lock = lock

    def end(self) -> None:
        """Committed or not, this save is over."""
        self._unlock()

    def commit(self, content: bytes, index: bytes | None) -> None:
        """Makes `content` the metadata of the directory, atomically and durably, and removes what it does not name."""
        try:
            with engine.named_system_errors(self.path):
                commit.commit(self.path, self._metadata_rank, content, index)
        except BaseException:
            self._unlock()  # what this rank has written goes, unless the metadata that is there names it
            commit.remove_leftovers(self.path, only_rank=self._metadata_rank)
            raise
        commit.remove_leftovers(self.path, self._superseded, only_rank=self._metadata_rank)
        self._superseded = set()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    # --- What dcp.async_save asks of a stager

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return Stager().stage(state_dict)

    def synchronize_staging(self) -> None:
        """`stage` has copied all when it returns."""

    def close(self) -> None:
        Stager().close()

    # --- Writing this rank's part

    @property
    def _metadata_rank(self) -> int | None:
        return None if self._use_collectives else self._rank

    def data_files(self) -> DataFiles:
        """What a save of this rank writes to."""
        return DataFiles(self)

    def _write(self, items: Sequence[WriteItem], planner: SavePlanner) -> Sequence[WriteResult]:
        with self.data_files() as files:
            if self.single_file_per_rank and isinstance(items, PackedItems) and items.is_of(planner):
                tensors = items.count_tensors()
                results: Sequence[WriteResult] = self._write_packed(items, planner, files)
            else:
                tensors = sum(item.type != WriteItemType.BYTE_IO for item in items)
                results = self._write_items(items, planner, files)
            self.last_stats = files.finish(tensors, len(items) - tensors)
        return results

    def _write_items(self, items: Sequence[WriteItem], planner: SavePlanner, files: DataFiles) -> list[WriteResult]:
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
        if self.single_file_per_rank:
            parts = [(tensors, objects)] if items else []
        else:
            parts = [([item], []) for item in tensors] + [([], [item]) for item in objects]
        results: list[WriteResult] = []
        state = getattr(planner, "state_dict", None)
        watch = WatchedState(state if isinstance(state, dict) else {})
        for number, (part_tensors, part_objects) in enumerate(parts):
            file = files.open(body_bytes(part_tensors), None if self.single_file_per_rank else number)
            placed = file.write_tensors(part_tensors, planner) + file.write_objects(part_objects, planner)
            for row, item in enumerate(part_tensors + part_objects):
                results.append(write_result(item.index, [file.name], 0, *placed[3 * row : 3 * row + 3]))
            file.finish()
        watch.check_unchanged()
        return results

    def _write_packed(self, items: PackedItems, planner: SavePlanner, files: DataFiles) -> PackedResults:
        if not items:
            return PackedResults(b"", [], items)
        description = items.description
        if description.all_ready:
            table = items.write_table()
            file = files.open(_C.body_bytes(table))
            placed = file.write_table(table, items.key, range(items.count_tensors()))
        else:
            file = files.open(items.body_bytes())
            rows = range(items.count_tensors())
            of_row: dict[int, list[int]] = {}
            for some, of_some in write_rows(file, items, planner, rows, engine.thread_count(self.thread_count)):
                of_row.update((row, of_some[3 * at : 3 * at + 3]) for at, row in enumerate(some))
            placed = [number for row in rows for number in of_row[row]]
        keys = items.objects()
        placed += file.write_contents([objects.dump(description.objects[key], key) for key in keys], keys)
        items.check_unchanged()
        file.finish()
        return PackedResults(packed.in_first_file(placed), [file.name], items)


def _places(results: Sequence[WriteResult]) -> tuple[bytes, list[str]]:
    """Where a rank wrote the rows of its part, and the names of its files."""
    if isinstance(results, PackedResults):
        return results.places, results.names
    names: dict[str, int] = {}
    table = array("q")
    for result in results:
        info = result.storage_data
        file = names.setdefault(info.relative_path, len(names))
        table.extend((file, info.offset, info.length, getattr(info, "crc", -1)))
    return table.tobytes(), list(names)


def _with_changes(content: bytes, changed: Metadata) -> bytes:
    metadata = metadata_file.loads(content, "the metadata of this save")
    metadata.state_dict_metadata = changed.state_dict_metadata
    metadata.planner_data = changed.planner_data
    metadata.storage_data = {**metadata.storage_data, **(changed.storage_data or {})}
    return metadata_file.dumps(metadata)


def _new_id() -> str:
    return uuid.uuid4().hex
