"""`load`: the short way, with exchanges between ranks of our own in place of DCP's."""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping
from typing import Any, overload

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner as DcpLoadPlanner

from . import settings
from .application import Application, check_is_mapping
from .arguments import checked_flag, checked_path
from .collective_load import CollectiveLoad
from .errors import LoadFailedError
from .exchange import Exchange
from .flatten import flatten, place
from .item_load import load_items
from .reader import StorageReader
from .selection import Rename, Selection
from .settings import Broadcast
from .stats import LoadReport


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
        assert state is not None
        return _load_by_planner(path, state, planner, verify, weights_only, process_group, timeout)
    selection = Selection(keys)
    exchange = Exchange.of(process_group, timeout, purpose="load")
    reader = StorageReader(path, verify=verify, weights_only=weights_only)
    reader.timeout = exchange.timeout
    loading = CollectiveLoad(exchange, reader, selection, strict, broadcast_checkpoint)
    return loading.all() if state is None else loading.into(state, rename, allow_cast)


def _load_by_planner(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any],
    planner: DcpLoadPlanner,
    verify: bool,
    weights_only: bool,
    process_group: dist.ProcessGroup | None,
    timeout: float | None,
) -> LoadReport:
    exchange = Exchange.of(process_group, timeout, purpose="load")
    reader = StorageReader(path, verify=verify, weights_only=weights_only)
    reader.timeout = exchange.timeout
    application = Application(state)

    def hand_over() -> None:
        values, paths = flatten(application.form)
        for key, value in values.items():
            if not application.owns(paths[key]):
                place(state, paths[key], value)
        application.restore(set(values))

    try:
        exchange.together(application.prepare, f"loading {reader.given_path}: prepare", LoadFailedError)
        load_items(exchange, reader, planner, application.form)
        exchange.together(hand_over, f"loading {reader.given_path}: hand over", LoadFailedError)
    except BaseException:
        application.abandon()
        raise
    assert reader.last_stats is not None
    return LoadReport([], [], [], reader.last_stats)
