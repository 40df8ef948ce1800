"""`StorageWriter` writes checkpoints for DCP's saves, with the C++ engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import settings
from .._engine.gc import gc_paused
from .._engine.options import direct_io_setting
from .._observe import timeline
from .._observe.timeline import Timeline
from .._ranks.groups import check_alone_on_purpose
from .._storage.open_storage import checkpoint_path
from .._write.layout import SaveOptions, new_save_id
from .._write.safetensors_layout import Safetensors, SaveFormat, chosen_format
from ..errors import CheckpointError
from ..reports import SaveStats
from ..settings import MOST_THREADS, DirectIO, checked_count, checked_flag, checked_path
from .save_planner import NO_COLLECTIVES
from .save_planner import SavePlanner as OurSavePlanner
from .stager import Stager
from .writer_steps import NativeSteps, SafetensorsSteps, WriterSteps, write


class StorageWriter(DcpStorageWriter, Stager):
    """Writes a checkpoint that every DCP reads, with checksums and an atomic commit.

    Pass it as `storage_writer` of `dcp.save` or `dcp.async_save`, which are collective.

    Args:
        path: the checkpoint's directory, created if missing; a path or a `file://` URL.
        format: "dcp", torch's own layout, or "safetensors", Hugging Face's: `model.safetensors`, or several files and
            their index; a `Safetensors` has options. All ranks write into the same files, which any reader of that
            format reads. These hold only tensors, and always have checksums.
        thread_count: number of worker threads; None: `VESCALE_CKPT_THREADS`.
        single_file_per_rank: False writes each tensor and object to its own file, like DCP's option.
        sync_files: False skips syncing data; a machine crash may then tear a committed checkpoint.
        overwrite: False raises if the directory holds a checkpoint.
        checksums: False writes no checksums, so that loads cannot verify the data.
        direct_io: "auto" bypasses the page cache where the file system allows it, False never does, True raises if that
            is not possible.
        process_group: no effect: DCP passes the rank to the writer.

    `dcp.async_save` uses the writer as its `Stager` unless another stager is given: torch's own stager ignores the lazy
    conjugate or negation of a tensor, and saves wrong values.

    One object may be used for many saves, one at a time: `dcp.save(state, storage_writer=w, checkpoint_id=path)`.
    It can be pickled between saves. `last_stats` holds the statistics of this rank's last save.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: SaveFormat | Safetensors = "dcp",
        thread_count: int | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        overwrite: bool = True,
        checksums: bool = True,
        direct_io: DirectIO = "auto",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._safetensors = chosen_format(format)
        self.format = "dcp" if self._safetensors is None else "safetensors"
        self.options = SaveOptions(
            path=checkpoint_path(checked_path("path", path)),
            thread_count=checked_count("thread_count", thread_count, most=MOST_THREADS),
            direct_io=direct_io_setting(direct_io),
            checksums=checked_flag("checksums", checksums),
            sync_files=checked_flag("sync_files", sync_files),
            overwrite=checked_flag("overwrite", overwrite),
            single_file=checked_flag("single_file_per_rank", single_file_per_rank) or self._safetensors is not None,
        )
        self.last_stats: SaveStats | None = None
        self._is_coordinator = True
        self._steps: WriterSteps | None = None  # from `prepare_local_plan` to the end of that save
        self._timeline: Timeline | None = None  # from `set_up_storage_writer` to the end of that save

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
        path = self.path if checkpoint_id is None else checkpoint_path(checkpoint_id)
        self.options = replace(self.options, path=path, save_id=new_save_id())

    @property
    def path(self) -> str:
        return self.options.path

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @property
    def save_id(self) -> str:
        """The id of the save, as `storage_meta` of the checkpoint has it. Another one for each save."""
        return self.options.save_id

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """DCP calls it on each rank, before planning."""
        settings.check()
        check_alone_on_purpose()
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(NO_COLLECTIVES, path=self.path)
        rank = kwargs.get("rank") or 0
        self.options = replace(self.options, rank=rank)
        self._is_coordinator = is_coordinator
        self._timeline = None
        if timeline.current() is None:  # else `vescale_ckpt.save` measures
            ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
            self._timeline = Timeline("save", self.path, f"saving to {self.path}", rank, ranks)
            self._timeline.begin(" by dcp.save")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """DCP calls it on each rank, with the rank's local plan. Begins the save."""
        self._end()  # the save before this one
        wanted = self._safetensors
        self._steps = NativeSteps(self.options) if wanted is None else SafetensorsSteps(self.options, wanted)
        with self._in_phase("plan"):
            self._steps.layout.begin(self._is_coordinator)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """DCP calls it on the coordinator, with the answers to all ranks, which may be changed."""
        with self._in_phase("plan"):
            return self._this_save.answers(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """DCP calls it on each rank. The data is written and synced when this returns."""
        future: Future[list[WriteResult]] = Future()
        with gc_paused(), self._in_phase("write"):
            try:
                results, self.last_stats = write(self._this_save, plan, planner)
            except BaseException:
                self._end()
                raise
        if (measured := self._timeline) is not None:
            self.last_stats = measured.with_times(self.last_stats)
            if not self._is_coordinator:
                measured.end(self.last_stats)
        future.set_result(results)  # type: ignore[arg-type]  # looks like a list
        if isinstance(planner, OurSavePlanner):
            planner.forget_state()  # the planner outlives the save, and a staged state is as large as the model
        return future

    @gc_paused()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """DCP calls it on the coordinator, with the results of all ranks. Commits."""
        try:
            with self._in_phase("commit"):
                self._this_save.commit(metadata, results)
                self.options = replace(self.options, save_id=self._this_save.layout.options.save_id)
        finally:
            self._end()
        if (measured := self._timeline) is not None and self.last_stats is not None:
            self.last_stats = measured.with_times(self.last_stats)
            measured.end(self.last_stats)

    @property
    def _this_save(self) -> WriterSteps:
        if self._steps is None:
            raise CheckpointError("a save begins with StorageWriter.prepare_local_plan, which was not called")
        return self._steps

    @contextmanager
    def _in_phase(self, name: str) -> Iterator[None]:
        if self._timeline is None:
            yield
            return
        with self._timeline.here(), timeline.phase(name):
            yield

    def _end(self) -> None:
        if self._steps is not None:
            self._steps.layout.end()
        self._steps = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": None, "_timeline": None}
