"""`save`: the short way, with exchanges between ranks of our own in place of DCP's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .collective_save import CollectiveSave
from .exchange import Exchange
from .pause import garbage_collector_paused
from .save_planner import SavePlanner
from .stats import SaveStats

# One for each process group, and one for saves without any. What they keep is compared exactly before it is used.
_default_planners: WeakKeyDictionary[dist.ProcessGroup, SavePlanner] = WeakKeyDictionary()
_planner_alone = SavePlanner()


def _default_planner(process_group: dist.ProcessGroup | None) -> SavePlanner:
    if not (dist.is_available() and dist.is_initialized()):
        return _planner_alone
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    return _default_planners.setdefault(group, SavePlanner())


class SaveHandle:
    """A save that is going on, or done."""

    def __init__(self, result: Future[SaveStats], staged: Future[None]) -> None:
        self.staged = staged  #: done when the state may change again
        self._result = result

    def done(self) -> bool:
        return self._result.done()

    def result(self, timeout: float | None = None) -> SaveStats:
        """This rank's statistics once the checkpoint is durable. Raises what went wrong, on any rank."""
        return self._result.result(timeout)

    def progress(self) -> tuple[int, int]:
        """Bytes of tensors that this rank has written, and has to write."""
        total = self.result().bytes if self.done() and self._result.exception() is None else 0
        return total, total


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    overwrite: bool = True,
    timeout: float | None = None,
) -> SaveHandle:
    """Saves `state` as a checkpoint in the directory `path`; all ranks of the group call it together.

    What `dcp.save` writes, in the same files, with less talk between ranks: while the state keeps its form, one small
    reduction before data is written, and one gather of where it was written after it.

    Args:
        path: a path or `file://` URL.
        state: nested containers of tensors, DTensors, ShardedTensors, `PerRank` and other objects; of a top-level value
            with `state_dict` and `load_state_dict` it is its state that is saved.
        planner: who writes what; a planner of a class of its own is used through `dcp.save`. None: one that is kept for
            the process group.
        process_group: None: all ranks, or this process alone where torch.distributed is not initialised.
        overwrite: False raises if the directory holds a checkpoint.
        timeout: seconds to wait for other ranks at each step; None: `VESCALE_CKPT_TIMEOUT`.

    Returns a finished handle. Raises `CheckpointError` on all ranks if any fails, in bounded time; nothing is committed
    then. `SaveFailedError` names the rank and its cause, `CheckpointTimeoutError` the ranks that did not come.
    """
    exchange = Exchange.of(process_group, timeout)
    if planner is None:
        planner = _default_planner(process_group)
    with garbage_collector_paused():
        stats = CollectiveSave(exchange, planner, path, overwrite, process_group).run(state)
    staged: Future[None] = Future()
    staged.set_result(None)
    result: Future[SaveStats] = Future()
    result.set_result(stats)
    return SaveHandle(result, staged)
