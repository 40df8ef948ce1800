"""Starts and prepares collective saves, each after the previous one has ended, for `vescale_ckpt.save` and managers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from .. import settings
from .._engine import _C
from .._engine.engine_errors import named_errors
from .._engine.gc import gc_paused
from .._engine.options import threads_of
from .._engine.rows import words
from .._observe.timeline import Timeline, phase
from .._plan.planner import Planner
from .._ranks.exchange import Exchange, calling
from .._ranks.groups import place_in
from .._ranks.steps import Steps
from .._ranks.store_thread import STORE_SECONDS
from .._state.application import saved_form
from .._state.tensor_table import device_number
from .._write import snapshot_budget
from .._write.layout import Layout, SaveOptions
from .._write.optimizer_gate import Gate
from ..errors import CheckpointTimeoutError, SaveInProgressError
from .agree_plan import CollectivePlan
from .background import BackgroundQueue, OnBusy
from .handle import SaveHandle, settled
from .save import Save

logger = logging.getLogger(__name__)


def start_save(
    given: str | os.PathLike[str],
    directory: str,
    state: Mapping[str, Any],
    layout: Callable[[SaveOptions], Layout],
    planner: Planner,
    *,
    async_checkpoint: bool,
    process_group: dist.ProcessGroup | None,
    overwrite: bool = True,
    gate: Gate | None = None,
    timeout: float | None = None,
    on_busy: OnBusy = "wait",
) -> SaveHandle:
    """Saves `state`; collective, as `vescale_ckpt.save`. Returns when training may continue.

    Args:
        given: the path as shown in messages, equal on all ranks; `directory` is the absolute path.
        layout: creates the layout on this rank. Its errors count as errors of the save's first step.
    """
    queue = BackgroundQueue.of(process_group)
    timeline = Timeline("save", directory, f"saving to {os.fspath(given)}", *place_in(process_group))
    with queue.lock, timeline.here():
        if on_busy != "wait" and not queue.all_free(process_group, timeout):
            busy = SaveInProgressError(f"{timeline.doing}: the save before this one goes on")
            if on_busy == "raise":
                raise busy
            logger.warning("%s: this one is skipped", busy)
            skipped = SaveHandle(settled(error=busy), settled())
            skipped.skipped = True
            return skipped
        limit = settings.timeout(timeout)
        began = time.monotonic()
        with phase("previous save"):
            queue.wait_until_done(limit)
        failed_before = queue.take_failure()
        if failed_before is not None and isinstance(failed_before.cause, CheckpointTimeoutError):
            # Ranks of the previous save timed out, and may time out again: both waits share one timeout.
            limit = max(limit - (time.monotonic() - began), min(limit, STORE_SECONDS))
        exchange = Exchange.of(process_group, limit)
        timeline.begin(", asynchronously" if async_checkpoint else "")

        def make() -> Layout:
            return layout(SaveOptions(directory, exchange.rank, overwrite=overwrite))

        save = Save(exchange, planner, directory, make, timeline)
        try:
            with gc_paused():
                save.begin(state, failed_before, gated=gate is not None)
                if async_checkpoint:
                    save.stage(gate)
                else:
                    save.finish()
        finally:
            save.release_state()
        if async_checkpoint:
            timeline.returned()
            return queue.finish_in_background(save)
        assert save.stats is not None
        return SaveHandle(settled(save.stats), settled())


def prepare_save(
    state: Mapping[str, Any],
    planner: Planner,
    async_checkpoint: bool,
    process_group: dist.ProcessGroup | None,
    timeout: float | None,
) -> None:
    """Plans saves of `state` and allocates what asynchronous ones need; collective, as `vescale_ckpt.prepare`."""
    queue = BackgroundQueue.of(process_group)
    with queue.lock, calling("preparing to save", process_group):
        limit = settings.timeout(timeout)
        queue.wait_until_done(limit)
        steps = Steps(Exchange.of(process_group, limit), "preparing to save")
        plan = CollectivePlan(steps, planner)
        steps.take(settings.check)
        steps.take(lambda: plan.describe(saved_form(state)))
        local, _ = plan.make()
        if async_checkpoint:
            needed = sum(words(local.body_bytes()))
            devices = [number for number in map(device_number, set(local.state.ready)) if number >= 0]
            with named_errors(str, ""):
                _C.prepare_devices(devices)
                _C.prepare_snapshots(min(needed, snapshot_budget.snapshot_bytes()), threads_of())
