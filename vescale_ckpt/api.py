"""`save`, `load` and `prepare`: the short way, with exchanges between ranks of our own in place of DCP's."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, overload

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner
from torch.optim import Optimizer

from . import settings
from ._collective.agree_plan import CollectivePlan
from ._collective.background import ON_BUSY, BackgroundQueue, OnBusy
from ._collective.export_local import LocalExport
from ._collective.export_save import CollectiveExport
from ._collective.handle import SaveHandle
from ._collective.load import CollectiveLoad, load_by_planner
from ._collective.save import CollectiveSave
from ._collective.save_native import CollectiveNativeSave
from ._dcp.save_planner import SavePlanner
from ._dcp.storage_reader import StorageReader
from ._dcp.storage_writer import check_format
from ._engine import _C
from ._engine.gc import gc_paused
from ._engine.rows import words
from ._hf.shard_size import shard_bytes
from ._ranks.exchange import Exchange
from ._ranks.groups import PerGroup
from ._ranks.store_clerk import GRACE_SECONDS
from ._state.application import check_is_mapping, saved_form
from ._state.key_selection import Rename, Selection
from ._state.tensor_table import NOT_READY, device_number
from ._storage.directory import local_path
from ._write import snapshot_budget
from ._write.optimizer_gate import Gate
from .errors import CheckpointTimeoutError, SaveInProgressError
from .reports import LoadReport
from .settings import Broadcast, checked_flag, checked_path

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
    queue = BackgroundQueue.of(process_group)
    with queue.lock:
        if on_busy != "wait" and not queue.all_free(process_group, timeout):
            busy = SaveInProgressError(f"saving to {os.fspath(path)}: the save before this one goes on")
            if on_busy == "raise":
                raise busy
            logger.warning("%s: this one is skipped", busy)
            return SaveHandle.of_skipped(busy)
        limit = settings.timeout(timeout)
        began = time.monotonic()
        queue.wait_until_done(limit)
        failed_before = queue.take_failure()
        if failed_before is not None and isinstance(failed_before.cause, CheckpointTimeoutError):
            # Its ranks waited in vain, and may do so again: the call has one timeout for both.
            limit = max(limit - (time.monotonic() - began), min(limit, GRACE_SECONDS))
        exchange = Exchange.of(process_group, limit)
        if planner is None:
            planner = _planners.of(process_group)
        doing = f"saving to {os.fspath(path)}"
        save: CollectiveSave
        if format == "safetensors":
            kind = LocalExport if planner.placement == "local" else CollectiveExport
            save = kind(exchange, planner, where, doing, overwrite, max_shard_size, metadata)
        else:
            save = CollectiveNativeSave(exchange, planner, where, doing, overwrite)
        try:
            with gc_paused():
                packed = save.begin(state, failed_before, gated=guard is not None)
                if packed and async_checkpoint:
                    save.stage(guard)
                elif packed:
                    save.finish()
        finally:
            save.release_state()
        if packed and async_checkpoint:
            return queue.finish_in_background(save)
        if async_checkpoint:
            logger.warning("the save to %s was made before training went on: DCP planned it", os.fspath(path))
        assert save.stats is not None
        return SaveHandle.of_finished(save.stats)


@overload
def load(
    path: str | os.PathLike[str],
    state: None = None,
    *,
    broadcast_checkpoint: Broadcast = "auto",
    strict: bool = True,
    keys: str | Iterable[str] | None = None,
    verify: bool = True,
    weights_only: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> dict[str, Any]: ...


@overload
def load(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    *,
    broadcast_checkpoint: Broadcast = "auto",
    strict: bool = True,
    keys: str | Iterable[str] | None = None,
    rename: Rename | None = None,
    verify: bool = True,
    allow_cast: bool = False,
    weights_only: bool = True,
    planner: DcpLoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> LoadReport: ...


def load(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any] | None = None,
    *,
    broadcast_checkpoint: Broadcast = "auto",
    strict: bool = True,
    keys: str | Iterable[str] | None = None,
    rename: Rename | None = None,
    verify: bool = True,
    allow_cast: bool = False,
    weights_only: bool = True,
    planner: DcpLoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> LoadReport | dict[str, Any]:
    """Loads the checkpoint in the directory `path`, whatever ranks saved it; all ranks of the group call it together.

    Tensors of `state` are filled in place, other values replaced. Modules, optimizers and all else that is `Stateful`
    get their state when all ranks have read theirs. Without `state` the result is all that the checkpoint holds: CPU
    tensors and objects, nested as they were saved.

    Args:
        path: a path or `file://` URL.
        state: nested dicts and lists of tensors, DTensors, `nn.Module`, `Optimizer`, `Stateful`, `PerRank` and other
            objects. In place of a tensor on the meta device a new one is put: on the CPU, a DTensor on its mesh's
            device; a module's or optimizer's stays the same object.
        broadcast_checkpoint: True has each byte that several ranks need read by one of them, which sends it to the
            others; False lets each rank read all of its own. "auto" decides by a rule, the same on
            all ranks: ranks on several nodes, or with targets on devices, read for each other if alone they would read
            1.3 times as much together.
        strict: False leaves what is missing from the checkpoint, or is of another shape, as it is, and reports it.
            Otherwise all of it is raised in one error, with keys that belong to a module or to an optimizer's state,
            but that it does not have (unless keys are renamed). Other keys that no rank asks for are never an error:
            the report tells them.
        keys: what to load, by the checkpoint's dotted keys: names, prefixes of names up to a dot, or patterns as of
            `fnmatch`. The rest of `state` stays as it is.
        rename: the checkpoint's key for a key of `state`: a function, or a mapping of keys or of prefixes up to a dot,
            of which the longest counts (`{"model": "old.net"}`).
        verify: False skips checksums of data (never the checks of sizes, paths and pickles).
        allow_cast: converts tensors to the dtype of `state`, which is otherwise `IncompatibleStateError`.
        weights_only: False builds whatever objects of the checkpoint ask for, which may run any code: for checkpoints
            that you trust as you trust code.
        planner: a planner of your own. The load goes in the steps of `dcp.load` then, with the planner's ideas of what
            is missing; it goes with none of the options above but `verify` and `weights_only`.
        process_group: None: all ranks, or this process alone where torch.distributed is not initialised.
        timeout: seconds to wait for other ranks at each step; None: `VESCALE_CKPT_TIMEOUT`.

    Raises on all ranks if any fails, in bounded time: `MissingKeysError` (with `missing`, `unexpected`, `mismatched`),
    `IncompatibleStateError`, `CorruptCheckpointError`, `UntrustedCheckpointError`, `LoadFailedError` with the rank for
    any other error, `CheckpointTimeoutError` with the ranks that did not come. Nothing was handed to modules,
    optimizers and other stateful objects then, unless it is one of them that raised; what is in tensors is not defined.
    """
    checked_path("path", path)
    for name, value in (
        ("strict", strict), ("verify", verify), ("allow_cast", allow_cast), ("weights_only", weights_only)
    ):  # fmt: skip
        checked_flag(name, value)
    if state is not None:
        check_is_mapping(state, "load")
    settings.broadcast(broadcast_checkpoint)
    if state is None and (rename is not None or allow_cast or planner is not None):
        raise ValueError("rename, allow_cast and planner are for loading into a state")
    if planner is not None:
        if not isinstance(planner, DcpLoadPlanner):
            raise TypeError(f"planner: a planner of loads is wanted, not {type(planner).__name__}")
        if keys is not None or rename is not None or allow_cast or not strict:
            raise ValueError("a planner of your own decides itself what is loaded: no keys, rename, allow_cast, strict")
    selection = Selection(keys)
    exchange = Exchange.of(process_group, timeout, purpose="load")
    reader = StorageReader(path, verify=verify, weights_only=weights_only)
    reader.timeout = exchange.timeout
    if planner is not None:
        assert state is not None
        return load_by_planner(exchange, reader, planner, state)
    loading = CollectiveLoad(exchange, reader, selection, strict, broadcast_checkpoint)
    return loading.all() if state is None else loading.into(state, rename, allow_cast)


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
    queue = BackgroundQueue.of(process_group)
    with queue.lock:
        limit = settings.timeout(timeout)
        queue.wait_until_done(limit)
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
                _C.prepare_snapshots(min(needed, snapshot_budget.snapshot_bytes()), settings.number("threads"))
        finally:
            planner.forget_state()
