"""`StorageReader`: DCP's plug point for loading, backed by the C++ engine."""

from __future__ import annotations

import logging
import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from . import _C, engine, metadata_file, safetensors_checkpoint, settings
from ._native.names import INDEX_NAME, METADATA_NAME, metadata_name
from ._storage.directory import directory_at, local_path
from ._storage.locks import FileLock
from .arguments import checked_count, checked_flag, checked_path
from .errors import CheckpointError, CorruptCheckpointError
from .exchange import Exchange
from .lazy_metadata import LazyMetadata
from .load import Load
from .message import pack, unpack
from .no_checkpoint import explained
from .pause import garbage_collector_paused
from .process_groups import resolved
from .safetensors_checkpoint import Contents
from .seen_files import SeenFiles
from .settings import MOST_THREADS, Broadcast, DirectIO
from .shared_reading import SharedReading
from .stats import LoadStats

logger = logging.getLogger(__name__)

_MOST_INDEX_BYTES = 16 << 20  # of larger ones each rank reads the few pages that it needs


@dataclass(frozen=True)
class _ReadTogether:
    """The coordinator's word to all ranks that they read for each other, and which way: ranks that disagreed would wait
    for each other in vain."""

    broadcast: Literal["auto", True]


class StorageReader(DcpStorageReader):
    """Reads DCP checkpoints, ours and torch's of any version, and directories of safetensors files, at the speed of the
    disk, and verifies what it reads.

    Args:
        path: the checkpoint's directory, or one safetensors file. A path or a `file://` URL.
        thread_count: worker threads; None: `VESCALE_CKPT_THREADS`.
        verify: False skips checksums of data (never the checks of sizes, paths and pickles).
        weights_only: False lets objects run code while they are loaded, for checkpoints you trust.
        broadcast_checkpoint: True has each byte that several ranks need read by one of them, which sends it to the
            others; "auto" does so where the rule of docs/tuning.md says that it pays. For loads that all ranks of the
            group make together: what DCP's coordinator says counts for all of them. See docs/loading.md.
        direct_io: "auto" goes past the page cache unless the file is in it, False never does, True raises where it
            cannot.
        process_group: whose ranks read for each other: the group of the load. None: the default group.

    Errors (inside DCP's `CheckpointException` under `dcp.load`): `CorruptCheckpointError`, `IncompatibleStateError`
    for a target of another dtype (unless the planner is `LoadPlanner(allow_cast=True)`), `UntrustedCheckpointError`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int | None = None,
        verify: bool = True,
        broadcast_checkpoint: Broadcast = False,
        weights_only: bool = True,
        direct_io: DirectIO = "auto",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.path = local_path(checked_path("path", path))
        #: The path as given, which is equal on all ranks where a relative one names different disks.
        self.given_path = os.fspath(path)
        self.thread_count = checked_count("thread_count", thread_count, most=MOST_THREADS)
        self.verify = checked_flag("verify", verify)
        self.broadcast_checkpoint = settings.broadcast(broadcast_checkpoint)
        self.process_group = process_group
        self.weights_only = checked_flag("weights_only", weights_only)
        self.direct_io = engine.direct_io_setting(direct_io)
        self.timeout: float | None = None  #: seconds to wait for a save that copies what is filled; None: the setting's
        self.last_stats: LoadStats | None = None
        self._load_id = uuid.uuid4().hex
        self._metadata: Metadata | None = None
        self._metadata_error: CheckpointError | None = None
        self.safetensors: Contents | None = None  #: what is read, if it is of this kind
        self.seen = SeenFiles()  #: what the files of this load are
        self._lock: FileLock | None = None  # keeps clean-ups away from what is being read

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "process_group": None}

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
            self.given_path = os.fspath(checkpoint_id)
        self._unlock()
        self._metadata = None
        self._metadata_error = None
        self.safetensors = None
        self._load_id = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @property
    def directory(self) -> str:
        """The directory that names of files are relative to."""
        return self.path if self.safetensors is None else self.safetensors.root

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # DCP asks for `.metadata`, swallows whatever goes wrong, asks for the rank's own file, and then only says that
        # there is no metadata. So that the true error arrives it is kept, and raised at the next call. And a damaged
        # `.metadata` must not let an older one of a rank pass for it.
        rank = kwargs.get("rank")
        if rank is not None and self._metadata_error is not None and metadata_file.has_metadata(self.path, None):
            return Metadata({})
        try:
            with explained(self.path):
                metadata = self._read_metadata(rank)
        except CheckpointError as error:
            if rank is None:
                self._metadata_error = error
                raise
            if self._metadata_error is None or metadata_file.has_metadata(self.path, rank):
                raise
            return Metadata({})
        self._metadata_error = None
        return metadata

    def _read_metadata(self, rank: int | None) -> Metadata:
        self.safetensors = None
        self._begin(rank)
        if rank is None and safetensors_checkpoint.is_one(self.path):
            return self._on_safetensors(Contents.read(self.path, self.verify))
        self._lock_checkpoint(rank)
        index = metadata_file.read_index(self.path, rank) if type(self) is StorageReader else None
        if index is None:
            return _whole_metadata(self.path, rank, self._load_id)
        return self._on_index(index, rank)

    def mark(self) -> str:
        """Tells this checkpoint's metadata from that of another, cheaply; empty if there is none. Raises OSError."""
        self._begin(None)
        if safetensors_checkpoint.is_one(self.path):
            return safetensors_checkpoint.mark(self.path)
        return metadata_file.metadata_mark(self.path)

    def pack_metadata(self) -> bytes:
        """The checkpoint's metadata for readers of other ranks: its index, or all of it if it has none. Empty if it is
        better that each reads what it needs of it."""
        if safetensors_checkpoint.is_one(self.path):
            return pack(b"", b"", Contents.read(self.path, self.verify).pack())
        with suppress(OSError):
            if directory_at(self.path).stat(INDEX_NAME).size > _MOST_INDEX_BYTES:
                return b""
        index = metadata_file.index_bytes(self.path)
        if index is not None:
            return pack(index, b"", b"")
        with explained(self.path):
            return pack(b"", metadata_file.metadata_bytes(self.path, None), b"")

    def unpack_metadata(self, message: bytes) -> Metadata:
        """The metadata that another rank has packed, of this very checkpoint. Raises as `read_metadata` does."""
        index, whole, safetensors = unpack(message)
        if safetensors:
            return self._on_safetensors(Contents.unpack(self.path, safetensors))
        self.safetensors = None
        self._lock_checkpoint(None)
        if not index:
            path = os.path.join(self.path, METADATA_NAME)
            return _with_load_id(metadata_file.loads(whole, path), self._load_id)
        path = os.path.join(self.path, INDEX_NAME)
        with engine.named_errors(str, path):  # it was sound when it was sent
            return self._on_index(_C.Index.from_bytes(index, f"{path}, as the coordinator sent it,"), None)

    def _begin(self, rank: int | None) -> None:
        self.seen = SeenFiles(os.path.join(self.path, metadata_name(rank)))

    def _lock_checkpoint(self, rank: int | None) -> None:
        self._unlock()
        self._lock = directory_at(self.path).share(metadata_name(rank))

    def _on_index(self, index: _C.Index, rank: int | None) -> Metadata:
        # Without the reader: together they would be a cycle that keeps files open.
        metadata = LazyMetadata(build=partial(_metadata_of, self.path, rank, self._load_id, index.save_id))
        metadata.index = index
        return metadata

    def _on_safetensors(self, contents: Contents) -> Metadata:
        self.safetensors = contents
        load_id = self._load_id
        metadata = LazyMetadata(build=lambda: _with_load_id(contents.metadata(), load_id))
        metadata.index = contents.index()
        metadata.aliases = contents.aliases
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        settings.check()
        if self._metadata_error is not None:
            raise self._metadata_error
        planned_on_index = isinstance(metadata, LazyMetadata) and metadata.index is not None
        if not planned_on_index and not isinstance(metadata.storage_data, dict):
            raise CorruptCheckpointError(
                f"the metadata of {self.path} does not say where anything is stored",
                key=None,
                file=self.path,
            )
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        # Only here it is known whether all ranks take part: with `no_dist`, or metadata of each rank, each plans alone.
        if self.broadcast_checkpoint is False or len(plans) == 1:
            return plans
        group = resolved(self.process_group)
        ranks = 1 if group is None else dist.get_world_size(group)
        if len(plans) != ranks:
            logger.warning(
                "loading %s: each rank reads all for itself: %d ranks load, but the reader's process group has %d",
                self.path, len(plans), ranks,
            )  # fmt: skip
            return plans
        return [replace(plan, storage_data=_ReadTogether(self.broadcast_checkpoint)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        sharing = None
        if isinstance(plan.storage_data, _ReadTogether):
            exchange = Exchange.of(self.process_group, purpose="load")
            phase = f"loading {self.given_path}: read for each other"
            sharing = SharedReading(exchange, plan.storage_data.broadcast, phase)
        self.read(plan, planner, sharing)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read(self, plan: LoadPlan, planner: LoadPlanner, sharing: SharedReading | None) -> None:
        """The same, with the ranks of `sharing` if they read for each other."""
        if self._metadata is None:
            raise CheckpointError("read_data was called before set_up_storage_reader")
        try:
            with garbage_collector_paused():
                Load(self, self._metadata, planner).run(plan.items, sharing)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None


def _whole_metadata(directory: str, rank: int | None, load_id: str) -> Metadata:
    return _with_load_id(metadata_file.read_metadata(directory, rank), load_id)


def _metadata_of(directory: str, rank: int | None, load_id: str, save_id: str) -> Metadata:
    """Of the save that the index is of: other ranks may go by that, while a later save takes its place."""
    return _with_load_id(metadata_file.read_metadata_of(directory, rank, save_id), load_id)


def _with_load_id(metadata: Metadata, load_id: str) -> Metadata:
    if not isinstance(metadata.storage_meta, StorageMeta):
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = load_id
    return metadata
