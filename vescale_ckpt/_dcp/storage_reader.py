"""`StorageReader` reads and verifies checkpoints for DCP's loads, with the C++ engine."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from .. import settings
from .._checkpoint.loadable import LoadableCheckpoint
from .._checkpoint.native import metadata_file
from .._checkpoint.native.lazy_metadata import LazyMetadata
from .._checkpoint.native.native_checkpoint import NativeCheckpoint
from .._checkpoint.record_reader import ReadOptions
from .._load.load_packed import load_packed
from .._load.rank_load import RankLoad
from .._load.source import Source
from .._observe.timeline import Timeline
from .._ranks.exchange import Exchange
from .._ranks.groups import place_in
from .._routes.broadcast_load import BroadcastLoad
from .._storage.open_storage import checkpoint_path
from ..errors import CheckpointError
from ..reports import LoadStats
from ..settings import MOST_THREADS, Broadcast, DirectIO, checked_count, checked_flag, checked_path
from .item_load import ItemLoad
from .load_planner import LoadPlanner as OurLoadPlanner
from .load_planner import item_targets

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _BroadcastDecision:
    """The coordinator's decision that all ranks broadcast reads, and how. It is sent to all ranks, because ranks with
    different decisions would wait for each other until the timeout."""

    broadcast: Literal["auto", True]


class StorageReader(DcpStorageReader):
    """Reads and verifies DCP checkpoints, of this package and of any version of torch, and safetensors files.

    Pass it as `storage_reader` of `dcp.load`, which is collective and wraps errors in DCP's `CheckpointException`.

    Args:
        path: the checkpoint's directory, or one safetensors file, as a path or a `file://` URL.
        thread_count: number of worker threads; None: `VESCALE_CKPT_THREADS`.
        verify: False skips the checksums of data. Sizes, paths and pickles are always checked.
        weights_only: False lets objects run code while they are loaded. Use it only for checkpoints that you trust.
        broadcast_checkpoint: True: each byte that several ranks need is read by one of them, which sends it to the
            others. "auto": the rule of docs/tuning.md decides. Only for loads that all ranks of the group make
            together; the value on DCP's coordinator applies to all ranks. See docs/loading.md.
        direct_io: "auto" bypasses the page cache unless the file is in it, False never does, True raises if that is not
            possible.
        process_group: the group of the load, whose ranks broadcast to each other. None: the default group.

    Raises:
        CorruptCheckpointError: data is damaged.
        IncompatibleStateError: a target has another dtype (unless the planner is `LoadPlanner(allow_cast=True)`).
        UntrustedCheckpointError: the checkpoint is unsafe to load.
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
        options = ReadOptions(
            checked_count("thread_count", thread_count, most=MOST_THREADS),
            checked_flag("verify", verify),
            checked_flag("weights_only", weights_only),
            direct_io,
        )
        self._source = Source(os.fspath(checked_path("path", path)), options)
        self.broadcast_checkpoint = settings.broadcast(broadcast_checkpoint)
        self.process_group = process_group
        self.last_stats: LoadStats | None = None
        self._checkpoint: LoadableCheckpoint | None = None  # the one that is read
        self._metadata_error: CheckpointError | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}

    @property
    def path(self) -> str:
        return self._source.path

    @property
    def verify(self) -> bool:
        return self._source.options.verify

    # --- DCP's calls, in the order in which they come

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            checkpoint_path(checkpoint_id)
        except ValueError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP calls it first, on each rank."""
        self._source.release()
        if checkpoint_id is not None:
            self._source = Source(os.fspath(checkpoint_id), self._source.options)
        self._checkpoint = None
        self._metadata_error = None

    @property
    def checkpoint_id(self) -> str:
        return self.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP calls it on the coordinator, or with `rank=` on a rank that loads for itself."""
        # DCP asks for `.metadata`, ignores any error, asks for the rank's own file, and then only reports that there is
        # no metadata. The first error is therefore kept, and raised by `set_up_storage_reader`. A damaged `.metadata`
        # must not be replaced by an older file of a rank.
        rank = kwargs.get("rank")
        if rank is not None and self._metadata_error is not None and metadata_file.has_metadata(self.path, None):
            return Metadata({})
        try:
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
        """The checkpoint as DCP's `Metadata`, which planners may change. Its objects are built on the first access."""
        self._checkpoint = None
        found = self._source.open(rank)
        if type(self) is not StorageReader:  # a subclass may change the metadata that it gets
            found = found.without_index()
        self._checkpoint = found
        if found.index is None:
            return found.metadata
        # The function must not refer to the reader or the checkpoint: a reference cycle would keep files open.
        metadata = LazyMetadata(build=found.read_metadata)
        metadata.index = found.index
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """DCP calls it on each rank, with the metadata that the rank has read or got from the coordinator."""
        settings.check()
        if self._metadata_error is not None:
            raise self._metadata_error
        # Others may have changed the metadata that this reader has read: theirs counts.
        found = self._checkpoint or NativeCheckpoint.of(self.path, None, metadata)
        index = metadata.index if isinstance(metadata, LazyMetadata) else None
        self._checkpoint = found.with_metadata(metadata, index)
        self._checkpoint.check_places()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """DCP calls it on the coordinator, with the plans of all ranks. Adds the decision to broadcast."""
        # Only here is it known whether all ranks take part: with `no_dist`, or metadata of each rank, each plans alone.
        if self.broadcast_checkpoint is False or len(plans) == 1:
            return plans
        _, ranks = place_in(self.process_group)
        if len(plans) != ranks:
            logger.warning(
                "loading %s: each rank reads all for itself: %d ranks load, but the reader's process group has %d",
                self.path, len(plans), ranks,
            )  # fmt: skip
            return plans
        return [replace(plan, storage_data=_BroadcastDecision(self.broadcast_checkpoint)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """DCP calls it last, on each rank. The data is in place when this returns."""
        if self._checkpoint is None:
            raise CheckpointError("read_data was called before set_up_storage_reader")
        phase = f"loading {self._source.given_path}"
        broadcast = None
        if isinstance(plan.storage_data, _BroadcastDecision):
            exchange = Exchange.of(self.process_group, purpose="load")
            broadcast = BroadcastLoad(exchange, plan.storage_data.broadcast, f"{phase}: read for each other", self.path)
        allow_cast = bool(getattr(planner, "allow_cast", False))
        self._source.options = replace(self._source.options, allow_cast=allow_cast)
        measured = Timeline("load", self.path, phase, *place_in(self.process_group))
        measured.begin(" by dcp.load")
        with measured.here():
            stats = self._source.read(self._checkpoint, lambda load: _loaded(load, plan, planner, broadcast))
        self.last_stats = measured.with_times(stats)
        measured.end(self.last_stats)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _loaded(load: RankLoad, plan: LoadPlan, planner: LoadPlanner, broadcast: BroadcastLoad | None) -> LoadStats:
    """Loads the items of a plan: as tables if our planner has packed them, else one by one."""
    if isinstance(planner, OurLoadPlanner) and (reads := planner.reads_of(plan)) is not None:
        return load_packed(load, reads, planner.state_dict, planner.put_object, broadcast)
    return ItemLoad(load, item_targets(planner)).run(plan.items, broadcast)
