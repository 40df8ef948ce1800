"""Collective saves and loads of checkpoints, over this package's own exchanges instead of DCP's collectives."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, overload

import torch.distributed as dist
from torch.optim import Optimizer

from . import settings
from ._checkpoint.record_reader import ReadOptions
from ._checkpoint.stacking import Stack, checked_rules
from ._collective.background import ON_BUSY, OnBusy
from ._collective.handle import SaveHandle
from ._collective.load import CollectiveLoad
from ._collective.start_save import prepare_save, start_save
from ._fingerprint.collect import fingerprint as take_fingerprint
from ._fingerprint.fingerprint import remove_fingerprint, with_fingerprint
from ._load.source import Source
from ._plan.planner import Planner
from ._ranks.groups import PerGroup
from ._state.application import check_is_mapping
from ._state.key_selection import Rename, Selection
from ._storage.open_storage import checkpoint_path
from ._write.layout import Layout, SaveOptions
from ._write.native_layout import NativeLayout
from ._write.optimizer_gate import Gate, as_gate
from ._write.safetensors_layout import Safetensors, SafetensorsLayout, SaveFormat, chosen_format
from .reports import LoadReport
from .settings import Broadcast, checked_flag, checked_path

# One planner per process group. A planner compares its cached plan with the state before it reuses the plan.
_planners = PerGroup(Planner)


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    async_checkpoint: bool = False,
    format: SaveFormat | Safetensors = "dcp",
    process_group: dist.ProcessGroup | None = None,
    overwrite: bool = True,
    gate: Optimizer | Iterable[Optimizer] | Gate | None = None,
    timeout: float | None = None,
    on_busy: OnBusy = "wait",
    extra_files: Mapping[str, bytes] | None = None,
    fingerprint: bool = False,
) -> SaveHandle:
    """Saves `state` as a checkpoint in the directory `path`. Collective: all ranks of the group call it.

    The files have the format that `dcp.save` writes. Ranks exchange less: while the form of the state stays the same,
    there is one small reduction before data is written, and one gather of record locations afterwards.

    With `async_checkpoint`, `save` returns when this rank has copied what it writes, and the save continues in the
    background; the state may change from then on. The handle's `result()` raises a later error. If nobody calls it, the
    next save of the group raises the error on all ranks.

    Args:
        path: a path, or the URL of an object store. A relative path is resolved when `save` is called.
        state: nested containers of tensors, DTensors, ShardedTensors, `PerRank` and other objects. For a top-level
            value with `state_dict` and `load_state_dict`, its state dict is saved.
        async_checkpoint: True: training continues while data is written.
        format: "dcp", or "safetensors" for a model's files as Hugging Face's tools read them; a `Safetensors` has
            options. All ranks write into the same files, on a disk. The state may then hold only tensors. Of several
            tensors in the same memory, the first is stored, and the header maps the other names to it. The keys of a
            value under the name "" (for example a module) get no prefix.
        process_group: the ranks that save. None: all ranks, or this process alone if torch.distributed is not
            initialized.
        overwrite: False raises if the directory holds a checkpoint.
        gate: optimizers whose parameters and state an asynchronous save copies after it has returned, while forward and
            backward run; their next `step` waits for the copy. All other state is copied before the save returns. An
            optimizer with `capturable=True` needs a `Gate` that allows it.
        timeout: seconds to wait for other ranks in each step; None: `VESCALE_CKPT_TIMEOUT`.
        on_busy: what to do if the group's last asynchronous save is still running on any rank: "wait" for it, "skip"
            this save (returns a finished handle with `.skipped`, and logs a warning), or "raise" `SaveInProgressError`.
        extra_files: {name: content} of small files that belong to the checkpoint (`{"config.json": b"..."}`). Those of
            rank 0 are used. They are committed with the checkpoint, and `load` returns them. After the commit, a copy
            of each is written into the directory, for other programs. Only for format "dcp".
        fingerprint: whether the `vescale_ckpt.fingerprint` of `state` is stored with the checkpoint, for `prove`. It is
            taken of the live tensors before the call returns. Only for format "dcp".

    Returns:
        A handle; without `async_checkpoint`, the save is complete.

    Raises:
        CheckpointError: on all ranks and within bounded time, if any rank fails; nothing is committed.
            `SaveFailedError` names the failed rank and the cause.
        CheckpointTimeoutError: names the ranks that did not arrive; its `committed` reports whether the new checkpoint
            may have been committed nevertheless.
        ValueError, TypeError: an argument is invalid.
    """
    checked_path("path", path)
    checked_flag("async_checkpoint", async_checkpoint)
    checked_flag("overwrite", overwrite)
    if on_busy not in ON_BUSY:
        raise ValueError(f"on_busy: expected one of {', '.join(ON_BUSY)}, got {on_busy!r}")
    if gate is not None and not async_checkpoint:
        raise ValueError("gate: only an asynchronous save copies while training goes on")
    check_is_mapping(state, "save")
    safetensors = chosen_format(format)
    checked_flag("fingerprint", fingerprint)
    if safetensors is not None and fingerprint:
        raise ValueError("fingerprint: a model in format='safetensors' has no place for it. Save with format='dcp'")
    if safetensors is not None and extra_files is not None:
        raise ValueError(
            "extra_files: a model in format='safetensors' has no place for files that are committed with it. Write "
            "them into its folder before the save, as save_pretrained does with config.json"
        )
    if fingerprint:
        taken = take_fingerprint(state, process_group=process_group, timeout=timeout)
        extra_files = with_fingerprint(extra_files, taken)
    directory = checkpoint_path(path)  # absolute: the working directory may change later

    def layout(options: SaveOptions) -> Layout:
        if safetensors is None:
            return NativeLayout(options, extra_files)
        return SafetensorsLayout(options, safetensors)

    return start_save(
        path, directory, state, layout, _planners.of(process_group),
        async_checkpoint=async_checkpoint, process_group=process_group, overwrite=overwrite, gate=as_gate(gate),
        timeout=timeout, on_busy=on_busy,
    )  # fmt: skip


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
    extra_files: dict[str, bytes] | None = None,
    stack: Stack | None = None,
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
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    extra_files: dict[str, bytes] | None = None,
    stack: Stack | None = None,
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
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    extra_files: dict[str, bytes] | None = None,
    stack: Stack | None = None,
) -> LoadReport | dict[str, Any]:
    """Loads the checkpoint in the directory `path`. Collective: all ranks of the group call it.

    The checkpoint may have been saved by any number of ranks. Tensors of `state` are filled in place, other values are
    replaced. Modules, optimizers and other `Stateful` objects get their state after all ranks have read theirs.
    Without `state`, the result is the whole checkpoint: CPU tensors and objects, nested as they were saved.

    Args:
        path: a path, or the URL of an object store.
        state: nested dicts and lists of tensors, DTensors, `nn.Module`, `Optimizer`, `Stateful`, `PerRank` and other
            objects. A tensor on the meta device is replaced by a new tensor: on the CPU, or for a DTensor on the device
            of its mesh. A parameter or buffer of a module or optimizer stays the same object.
        broadcast_checkpoint: True: each byte that several ranks need is read by one of them, which sends it to the
            others. False: each rank reads for itself. "auto" applies a rule, with the same outcome on all ranks: ranks
            on several nodes, or with targets on devices, broadcast if they would otherwise read at least 1.3 times as
            many bytes in total.
        strict: True raises one error that lists all keys that are missing from the checkpoint or have another shape
            there, and the checkpoint's keys below a module or an optimizer's state that the state lacks (unless keys
            are renamed). False leaves missing and mismatched values unchanged and reports them. Other keys that no rank
            requests are reported, and are not an error.
        keys: which of the checkpoint's dotted keys to load: names, prefixes up to a dot, or `fnmatch` patterns; `!`
            before one excludes, in any order. Other values of `state` stay unchanged.
        rename: maps a key of `state` to the checkpoint's key: a function, or a mapping of keys or of prefixes up to a
            dot, of which the longest match applies (`{"model": "old.net"}`).
        verify: False skips the checksums of data. Sizes, paths and pickles are always checked.
        allow_cast: True converts tensors to the dtype of `state`; False raises `IncompatibleStateError`. Values of
            quantised models need no `allow_cast` (docs/loading.md).
        weights_only: False unpickles any object of the checkpoint, which may run arbitrary code. Use it only for
            checkpoints that you trust as you trust code.
        process_group: the ranks that load. None: all ranks, or this process alone if torch.distributed is not
            initialized.
        timeout: seconds to wait for other ranks in each step; None: `VESCALE_CKPT_TIMEOUT`.
        extra_files: a dict that is cleared and filled with {name: content} of the files that were saved with
            `extra_files=`. The copies in the directory are not read.
        stack: builds tensors from those in safetensors files during the load. `{"layers.*.w": "layers.w"}` stacks them
            along a new first dimension, in the order of the numbers that `*` matches; `{"layers.w": "layers.*.w"}`
            splits them; `{("q", "k", "v"): "qkv"}` concatenates along the first dimension. A rank reads what it needs.
            `keys` and `rename` use the names that the rules produce. See docs/loading.md.

    Returns:
        The differences between state and checkpoint, and the statistics; without `state`, the loaded values.

    Raises:
        MissingKeysError: keys are missing or unexpected (with `missing`, `unexpected`, `mismatched`).
        IncompatibleStateError: shapes, dtypes or kinds differ.
        CorruptCheckpointError: data is damaged, with the key, the file and the offset.
        UntrustedCheckpointError: the checkpoint is unsafe to load.
        LoadFailedError: any other error on any rank, with that rank.
        CheckpointTimeoutError: ranks did not arrive, with their numbers.
        ValueError, TypeError: an argument is invalid.

    If any rank fails, all ranks raise within bounded time. Modules, optimizers and other stateful objects are then
    unchanged, unless one of them raised the error; the contents of tensors are undefined.
    """
    checked_path("path", path)
    for name, value in (
        ("strict", strict), ("verify", verify), ("allow_cast", allow_cast), ("weights_only", weights_only)
    ):  # fmt: skip
        checked_flag(name, value)
    if state is not None:
        check_is_mapping(state, "load")
    settings.broadcast(broadcast_checkpoint)
    if state is None and (rename is not None or allow_cast):
        raise ValueError("rename and allow_cast are for loading into a state")
    selection = Selection(keys)
    options = ReadOptions(verify=verify, weights_only=weights_only, allow_cast=allow_cast)
    source = Source(os.fspath(path), options, None if stack is None else checked_rules(stack))
    loading = CollectiveLoad(source, selection, strict, broadcast_checkpoint, process_group, timeout, extra_files)
    found = loading.all() if state is None else loading.into(state, rename)
    if extra_files is not None:
        remove_fingerprint(extra_files)  # `prove` reads it
    return found


def prepare(
    state: Mapping[str, Any],
    *,
    async_checkpoint: bool = True,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> None:
    """Plans saves of `state` and allocates the memory of their snapshots, so that the first save is faster. Collective:
    all ranks of the group call it, before training or after a load. Nothing is written.

    On CUDA devices, it also creates the streams and the memory (26 MiB on each) that copies need. An error of the
    previous save is not raised here, but by the next save.

    Args:
        state: as for `save`.
        async_checkpoint: False only plans.
        process_group: as for `save`.
        timeout: as for `save`.

    Raises the errors of `save`.
    """
    check_is_mapping(state, "prepare")
    checked_flag("async_checkpoint", async_checkpoint)
    prepare_save(state, _planners.of(process_group), async_checkpoint, process_group, timeout)
