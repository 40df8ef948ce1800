"""`save` and `prepare`: the short way, with exchanges between ranks of our own in place of DCP's."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from . import _C, memory_budget, settings
from ._storage.directory import local_path
from .application import check_is_mapping, saved_form
from .arguments import checked_flag, checked_path
from .collective_export import CollectiveExport
from .collective_plan import CollectivePlan
from .collective_save import CollectiveSave
from .errors import CheckpointTimeoutError, SaveInProgressError
from .exchange import Exchange
from .gate import Gate
from .lane import ON_BUSY, Lane, OnBusy
from .local_export import LocalExport
from .packed import words
from .pause import garbage_collector_paused
from .process_groups import PerGroup
from .save_handle import SaveHandle
from .save_planner import SavePlanner
from .shard_size import shard_bytes
from .store_clerk import PATIENCE
from .tensors import NOT_READY, device_number
from .writer import check_format

logger = logging.getLogger(__name__)

# What they keep is compared exactly before it is used.
_planners = PerGroup(SavePlanner)


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    async_checkpoint: bool = False,
    format: str = "dcp",
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    overwrite: bool = True,
    gate: Optimizer | Iterable[Optimizer] | Gate | None = None,
    timeout: float | None = None,
    on_busy: OnBusy = "wait",
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
) -> SaveHandle:
    """Saves `state` as a checkpoint in the directory `path`; all ranks of the group call it together.

    What `dcp.save` writes, in the same files, with less talk between ranks: while the state keeps its form, one small
    reduction before data is written, and one gather of where it was written after it.

    With `async_checkpoint` it returns when what this rank will write has been copied, and goes on in the background;
    the state may change then. What went wrong later is raised by the handle's `result()`, or, if nobody asked, by the
    next save of the group, on all ranks.

    Args:
        path: a path or `file://` URL; a relative one means where it is now, whatever the working directory is later.
        state: nested containers of tensors, DTensors, ShardedTensors, `PerRank` and other objects; of a top-level value
            with `state_dict` and `load_state_dict` it is its state that is saved.
        async_checkpoint: whether training goes on while data is written.
        format: "dcp", or "safetensors": the files of a model as Hugging Face's tools know them, each written by all
            ranks at once. The state holds tensors only then. Of tensors in the same memory the first is stored, and the
            header of its file says under the other names which that is. What stands under the name "" (a module, say)
            keeps its own names.
        planner: who writes what; a planner of a class of its own is used in the steps of `dcp.save`. None: one that is
            kept for the process group.
        process_group: None: all ranks, or this process alone where torch.distributed is not initialised.
        overwrite: False raises if the directory holds a checkpoint.
        gate: optimizers. An asynchronous save then returns at once, and copies their parameters and state while forward
            and backward run; their next `step` waits for it. What else the state holds is copied before it returns. An
            optimizer with `capturable=True` takes a `Gate` that allows it.
        timeout: seconds to wait for other ranks at each step; None: `VESCALE_CKPT_TIMEOUT`.
        on_busy: what to do while the group's last asynchronous save goes on, on any rank: "wait" for it, "skip" this
            one (a finished handle with `.skipped`, and a warning), or "raise" `SaveInProgressError`.
        max_shard_size: of safetensors, bytes of tensors in a file, or text like "5GB"; a tensor that is larger is alone
            in its file.
        metadata: of safetensors, texts for the headers; None: `{"format": "pt"}`.

    Returns a handle, finished unless `async_checkpoint`. Raises `CheckpointError` on all ranks if any fails, in bounded
    time; nothing is committed then. `SaveFailedError` names the rank and its cause, `CheckpointTimeoutError` the ranks
    that did not come, and says with `committed` if the new checkpoint may be there all the same.
    """
    checked_path("path", path)
    checked_flag("async_checkpoint", async_checkpoint)
    checked_flag("overwrite", overwrite)
    if on_busy not in ON_BUSY:
        raise ValueError(f"on_busy={on_busy!r}: one of {', '.join(ON_BUSY)} is wanted")
    if gate is not None and not async_checkpoint:
        raise ValueError("gate: only an asynchronous save copies while training goes on")
    check_is_mapping(state, "save")
    if planner is not None and not isinstance(planner, SavePlanner):
        raise TypeError(
            f"planner: a vescale_ckpt.SavePlanner is wanted, or one derived from it, not {type(planner).__name__}. "
            "Others go with dcp.save(state, storage_writer=vescale_ckpt.StorageWriter(path), planner=planner)"
        )
    check_format(format, metadata)
    shard_bytes(max_shard_size)
    where = local_path(path)  # whatever the working directory is later
    guard = gate if gate is None or isinstance(gate, Gate) else Gate(gate)
    lane = Lane.of(process_group)
    with lane.lock:
        if on_busy != "wait" and not lane.all_free(process_group, timeout):
            busy = SaveInProgressError(f"saving to {os.fspath(path)}: the save before this one goes on")
            if on_busy == "raise":
                raise busy
            logger.warning("%s: this one is skipped", busy)
            return SaveHandle.of_skipped(busy)
        limit = settings.timeout(timeout)
        began = time.monotonic()
        lane.wait_until_done(limit)
        failed_before = lane.take_failure()
        if failed_before is not None and isinstance(failed_before.cause, CheckpointTimeoutError):
            # Its ranks waited in vain, and may do so again: the call has one timeout for both.
            limit = max(limit - (time.monotonic() - began), min(limit, PATIENCE))
        exchange = Exchange.of(process_group, limit)
        if planner is None:
            planner = _planners.of(process_group)
        save: CollectiveSave
        if format == "safetensors":
            kind = LocalExport if planner.placement == "local" else CollectiveExport
            save = kind(exchange, planner, path, overwrite, process_group, max_shard_size, metadata)
        else:
            save = CollectiveSave(exchange, planner, path, overwrite, process_group)
        save.path = where
        try:
            with garbage_collector_paused():
                packed = save.begin(state, failed_before, gated=guard is not None)
                if packed and async_checkpoint:
                    save.stage(guard)
                elif packed:
                    save.finish()
        finally:
            save.let_go_of_state()
        if packed and async_checkpoint:
            return lane.go_on(save)
        if async_checkpoint:
            logger.warning("the save to %s was made before training went on: DCP planned it", os.fspath(path))
        assert save.writer.last_stats is not None
        return SaveHandle.of_finished(save.writer.last_stats)


def prepare(
    state: Mapping[str, Any],
    *,
    async_checkpoint: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> None:
    """Plans saves of `state` and takes the memory of their snapshots, so that the first one need not.

    All ranks of the group call it together, before training or after a load. Nothing is written. `async_checkpoint`:
    False only plans. `state`, `timeout` and errors are those of `save`; what went wrong with the save before is left to
    the next one.
    """
    check_is_mapping(state, "prepare")
    checked_flag("async_checkpoint", async_checkpoint)
    planner = _planners.of(process_group)
    lane = Lane.of(process_group)
    with lane.lock:
        limit = settings.timeout(timeout)
        lane.wait_until_done(limit)
        plan = CollectivePlan(Exchange.of(process_group, limit), planner, "preparing to save")
        failure: Exception | None = None
        try:
            try:
                settings.check()
                plan.describe(saved_form(state), None)
            except Exception as error:
                failure = error
            planned = plan.make(failure)
            if planned is not None and async_checkpoint:
                needed = sum(words(planned.items.body_bytes()))
                device = device_number(max(planned.items.description.ready, default=NOT_READY))
                if device >= 0:
                    _C.page_lock_snapshots(device)
                _C.prepare_snapshots(min(needed, memory_budget.snapshot_bytes()), settings.number("threads"))
        finally:
            planner.forget_state()
