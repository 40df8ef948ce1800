"""`StorageReader`: DCP's plug point for loading, backed by the C++ engine."""

from __future__ import annotations

import os
import uuid
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from . import directory_lock, engine, layout
from .errors import CheckpointError, CorruptCheckpointError
from .lazy_metadata import LazyMetadata
from .load import Load
from .pause import garbage_collector_paused
from .routed_read import RoutedRead
from .settings import DirectIO
from .stats import LoadStats


class StorageReader(DcpStorageReader):
    """Reads DCP checkpoints, ours and torch's of any version, at the speed of the disk, and verifies what it reads.

    Args:
        path: the checkpoint's directory. A path or a `file://` URL.
        thread_count: worker threads; None: `VESCALE_CKPT_THREADS`.
        verify: False skips checksums of data (never the checks of sizes, paths and pickles).
        weights_only: False lets objects run code while they are loaded, for checkpoints you trust.
        direct_io: "auto" goes past the page cache unless the file is in it, False never does, True raises where it
            cannot.

    Errors (inside DCP's `CheckpointException` under `dcp.load`): `CorruptCheckpointError`, `IncompatibleStateError`
    for a target of another dtype (unless the planner is `LoadPlanner(allow_cast=True)`), `UntrustedCheckpointError`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int | None = None,
        verify: bool = True,
        weights_only: bool = True,
        direct_io: DirectIO = "auto",
    ) -> None:
        super().__init__()
        if thread_count is not None and thread_count < 1:
            raise ValueError(f"thread_count={thread_count}: at least 1 is wanted")
        self.path = layout.local_path(path)
        self.thread_count = thread_count
        self.verify = verify
        self.weights_only = weights_only
        self.direct_io = engine.direct_io_setting(direct_io)
        self.last_stats: LoadStats | None = None
        self._load_id = uuid.uuid4().hex
        self._metadata: Metadata | None = None
        self._metadata_error: CheckpointError | None = None
        self._lock: layout.FileLock | None = None  # keeps clean-ups away from what is being read

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    # --- DCP's calls, in the order in which they come

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            layout.local_path(checkpoint_id)
        except ValueError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = layout.local_path(checkpoint_id)
        self._unlock()
        self._metadata = None
        self._metadata_error = None
        self._load_id = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> str:
        return self.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # DCP asks for `.metadata`, swallows whatever goes wrong, asks for the rank's own file, and then only says that
        # there is no metadata. So that the true error arrives it is kept, and raised at the next call. And a damaged
        # `.metadata` must not let an older one of a rank pass for it.
        rank = kwargs.get("rank")
        if rank is not None and self._metadata_error is not None and layout.has_metadata(self.path, None):
            return Metadata({})
        try:
            metadata = self._read_metadata(rank)
        except CheckpointError as error:
            if rank is None:
                self._metadata_error = error
                raise
            if self._metadata_error is None or layout.has_metadata(self.path, rank):
                raise
            return Metadata({})
        self._metadata_error = None
        return metadata

    def _read_metadata(self, rank: int | None) -> Metadata:
        self._unlock()
        self._lock = directory_lock.while_reading(self.path, rank)
        index = layout.read_index(self.path, rank) if type(self) is StorageReader else None
        if index is None:
            return _whole_metadata(self.path, rank, self._load_id)
        metadata = LazyMetadata(build=partial(_whole_metadata, self.path, rank, self._load_id))
        metadata.index = index
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
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
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.read(plan, planner, None)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read(self, plan: LoadPlan, planner: LoadPlanner, routed: RoutedRead | None) -> None:
        """The same with other ranks, where `routed` says who reads what for whom."""
        if self._metadata is None:
            raise CheckpointError("read_data was called before set_up_storage_reader")
        try:
            with garbage_collector_paused():
                Load(self, self._metadata, planner).run(plan.items, routed)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None


def _whole_metadata(directory: str, rank: int | None, load_id: str) -> Metadata:
    metadata = layout.read_metadata(directory, rank)
    if not isinstance(metadata.storage_meta, StorageMeta):
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = load_id
    return metadata
