"""`CheckpointManager` saves, retains and restores the checkpoints of a training, one directory `step-N` for each."""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

import torch.distributed as dist
from torch.optim import Optimizer

from .. import settings
from .._collective.handle import SaveHandle
from .._ranks.exchange import calling
from .._ranks.groups import check_alone_on_purpose
from .._state.key_selection import Rename
from .._storage.open_storage import checkpoint_path, storage_at
from .._write.optimizer_gate import Gate
from ..settings import checked_count, checked_flag, checked_seconds
from . import step_metrics
from .background_work import CommitCalls, OnCommit
from .folders import Folders, SharedFolder
from .node_folders import NodeFolders, find_nodes
from .retention import BestMode, Retention
from .save_loop import SaveLoop
from .schedule import Ranks, SaveClock, Schedule, SignalFlag
from .tier import DurablePlace, StepPlace, Tier

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")
_Arguments = ParamSpec("_Arguments")

OnError = Literal["raise", "warn"]


def _collective(
    method: Callable[Concatenate[CheckpointManager, _Arguments], _Found],
) -> Callable[Concatenate[CheckpointManager, _Arguments], _Found]:
    """A method that all ranks call together. Where it waits for long, a line names it and the late ranks."""

    @wraps(method)
    def call(self: CheckpointManager, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Found:
        with calling(f"CheckpointManager.{method.__name__}", self.process_group):
            return method(self, *args, **kwargs)

    return call


class CheckpointManager:
    """Saves a training run's checkpoints under one directory, removes old ones, and restores the newest sound one.

    All ranks create the manager together and with equal arguments. docs/howto/manager.md lists which methods all ranks
    call together, and which any rank may call alone. All ranks see the same directory. The coordinator's clock and its
    view of the files count for all ranks. Several managers may work in one directory, and other processes may load from
    it: a checkpoint that is being saved to or read (through this package) is not removed. One thread at a time may use
    a manager; clean-up after an asynchronous save runs in a thread of its own.

    Args:
        directory: a path or URL. The first save creates it.
        max_to_keep, best, best_mode: short for `retention=Retention(newest=max_to_keep, best=best,
            best_mode=best_mode)`.
        save_interval_steps: short for `schedule=Schedule(steps=save_interval_steps)`.
        async_checkpoint: whether `save` returns before the checkpoint is durable. If a save is running when the process
            ends, the process waits for it and its clean-up, at most `VESCALE_CKPT_EXIT_TIMEOUT` seconds.
        retention: which checkpoints stay. Others are removed after a newer one is durable. None: all stay. The one
            saved last is never removed, and a sound one is not removed to keep a damaged one.
        schedule: when `save` saves. None: always.
        tier: a folder on fast disks in front of `directory`. None: saves go to `directory`.
        on_error: what to do about a save that fails. "raise", or "warn": it is logged as an error, counted in
            `failed_saves`, and told to the listeners of `vescale_ckpt.metrics`; `save` returns None, and `wait` and
            `close` return as if it had not been. The next save that is due is made. A handle's `result` raises the
            error. Mistakes of the caller are raised all the same: wrong arguments, and steps or metrics that differ.
        on_commit: `on_commit(step, path)` is called for each checkpoint that this manager has made durable: it pushes
            a model to a repository, or notes the checkpoint in a registry. It is called on the coordinator alone, in a
            thread beside the training, one call at a time; so it calls neither the manager nor other ranks. `path`
            stays during the call, if it is no URL. A step that retention has removed before its turn is passed over
            with a warning. An error is logged, and `close` raises it on the coordinator, unless `on_error` is "warn".
            `close` and the end of the process wait for calls as long as for uploads.
        fingerprint: whether each save keeps the `vescale_ckpt.fingerprint` of its state, as `vescale_ckpt.save` does.
            The coordinator logs it, one line a save. A warning names a save whose trained tensors all equal those of
            the save before it, bit for bit, although the step has gone on: then a stale copy is saved.
        prove: whether `restore` compares the state with the checkpoint's fingerprint when it has loaded it. It logs one
            line, or raises `StateDiffersError` on all ranks. Implies `fingerprint`.
        timeout: seconds to wait for other ranks at each step; None: `VESCALE_CKPT_TIMEOUT`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        save_interval_steps: int | None = None,
        best: str | None = None,
        best_mode: BestMode | None = None,
        async_checkpoint: bool = True,
        retention: Retention | None = None,
        schedule: Schedule | None = None,
        tier: Tier | None = None,
        on_error: OnError = "raise",
        on_commit: OnCommit | None = None,
        fingerprint: bool = False,
        prove: bool = False,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
    ) -> None:
        _check_policy("retention", retention, Retention, max_to_keep=max_to_keep, best=best, best_mode=best_mode)
        _check_policy("schedule", schedule, Schedule, save_interval_steps=save_interval_steps)
        _check_policy("tier", tier, Tier)
        max_to_keep = checked_count("max_to_keep", max_to_keep)
        save_interval_steps = checked_count("save_interval_steps", save_interval_steps)
        self.retention = retention or Retention(max_to_keep, best=best, best_mode=best_mode)
        self.schedule = schedule or Schedule(save_interval_steps)
        self.tier = tier
        self.directory, self.durable = _places(directory, tier)
        self.async_checkpoint = async_checkpoint
        self.process_group = process_group
        timeout = checked_seconds("timeout", timeout, zero=False)
        if on_error not in get_args(OnError):
            raise ValueError(f"on_error: expected one of {', '.join(get_args(OnError))}, got {on_error!r}")
        if on_commit is not None and not callable(on_commit):
            raise TypeError(f"on_commit: expected a function of a step and a path, got {type(on_commit).__name__}")
        self.on_error = on_error
        self.prove = checked_flag("prove", prove)
        self.fingerprint = checked_flag("fingerprint", fingerprint) or prove
        self._closed = False
        signal = self.schedule.signal
        flag = None if signal is None else SignalFlag(signal, self.schedule.deadline_seconds)
        self._ranks = Ranks(self.directory, process_group, timeout, flag)
        try:
            self._open(on_commit)
        except BaseException:
            if flag is not None:
                flag.release()  # nobody else would: the process would survive the signal
            raise

    def _open(self, on_commit: OnCommit | None) -> None:
        """Finds out what all ranks see in the folders, and begins to follow the schedule."""
        ranks, tier = self._ranks, self.tier
        durable = nodes = None
        with calling("CheckpointManager", self.process_group):
            if self.durable is not None:
                durable = DurablePlace(self.durable, self.directory, settings.timeout(ranks.timeout))
                nodes = find_nodes(ranks.exchange(), durable)
            if nodes is not None and on_commit is not None:
                raise ValueError("on_commit: with a Tier(local=) of each node, no path holds the whole checkpoint")
            self._folders: Folders
            if durable is None or tier is None or nodes is None:
                self._folders = SharedFolder(ranks, self.retention, durable, tier)
            else:
                self._folders = NodeFolders(ranks, self.retention, durable, tier, nodes)
            self._folders.proves = self.prove
        self._commit_calls = CommitCalls(on_commit) if on_commit is not None and ranks.is_coordinator() else None
        self._saves = SaveLoop(
            ranks, SaveClock(self.schedule, ranks), self._folders, self._commit_calls, best=self.retention.best,
            async_checkpoint=self.async_checkpoint, tolerates=self.on_error == "warn",
            fingerprints=self.fingerprint,
        )  # fmt: skip

    @property
    def failed_saves(self) -> int:
        """How many saves have failed, with on_error="warn"."""
        return self._saves.failed_saves

    @property
    def preempted(self) -> bool:
        """Whether a signal came and the last save is durable: training should stop."""
        return self._ranks.flag is not None and self._ranks.flag.preempted

    # --- Saving

    @_collective
    def should_save(self, step: int) -> bool:
        """Whether `save` of this step, without `force`, will save: metrics are then worth their reduction over ranks.

        All ranks call it together, and get the same. It is decided once: `save` of the same step does what was said.
        Raises what `save` raises before it begins.
        """
        return self._saves.is_due(self._checked(step))

    @_collective
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        gate: Optimizer | Iterable[Optimizer] | Gate | None = None,
        force: bool = False,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> SaveHandle | None:
        """Saves `state` as the checkpoint of a step if a save is due, or with `force`; returns None otherwise.

        All ranks call it together.

        An existing checkpoint of the step is replaced. Waits for the save before this one. If that save failed, and
        some rank has not raised its error yet, all ranks raise it and nothing is saved; the next call saves. `gate`
        (for an asynchronous save), `extra_files` and errors are those of `vescale_ckpt.save`.

        A step lower than one saved before begins a new branch: `restore` and `latest` then take this step for the
        newest, and a warning names the later steps, which are abandoned.

        `metrics`: numbers that are stored with the checkpoint, equal on all ranks. A tensor of one element is read only
        if a save is due. Raises ValueError if the metric that `best` names is missing, and CheckpointError on all ranks
        if ranks give different metrics. In both cases a save that a signal asked for is made without metrics.
        """
        return self._saves.save(self._checked(step), state, metrics, force=force, gate=gate, extra_files=extra_files)

    def _checked(self, step: int) -> int:
        if self._closed:
            raise ValueError("the manager is closed")
        check_alone_on_purpose()
        return _checked_step(step)

    def wait(self) -> None:
        """Waits until this manager's last save and its clean-up are done. Raises the error of that save, once, unless
        `on_error` is "warn". Any rank may call it alone."""
        self._saves.wait()

    def cancel(self) -> bool:
        """Ends the manager's running save on all ranks, as `SaveHandle.cancel` does; one rank's call is enough. Returns
        whether it is cancelled: False if none is running, or if its commit has begun.

        Then `wait` and `close` raise `SaveCancelledError` on ranks that have not called this. With a tier, checkpoints
        that are whole there are copied to `directory` as before: this concerns the save alone.
        """
        return self._saves.running is not None and self._saves.running.cancel()

    def close(self) -> None:
        """Ends the manager; all ranks call it. Waits for a running save, and at most `VESCALE_CKPT_EXIT_TIMEOUT`
        seconds each for uploads with copies and calls of `on_commit`, and restores the signal's handler. Raises on the
        coordinator if a checkpoint could not be uploaded, or `on_commit` failed. May be called again."""
        self._closed = True
        try:
            self.wait()
            limit = settings.number("exit_timeout")
            until = time.monotonic() + limit
            self._folders.close(limit)
            if self._folders.uploads is not None:
                self._folders.uploads.finish(max(0.0, until - time.monotonic()))
            if self._commit_calls is not None:
                self._commit_calls.end_within(settings.number("exit_timeout"))
                if self.on_error == "raise":
                    where = f"whose checkpoints are whole in {self.directory}"
                    self._commit_calls.raise_failures(
                        lambda steps: f"on_commit failed for steps {steps}, {where}", self.directory
                    )
        finally:
            if self._ranks.flag is not None:
                self._ranks.flag.release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as raised:
            if error is None:
                raise
            logger.error("the last save failed, too: %s", raised)  # the program's own error is raised

    # --- Finding and loading

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, ascending, as this process sees the directory now. Asks no other
        rank. Raises `CheckpointError` if the directory cannot be read. If the durable place cannot be read and the
        tier's folder has steps, warns and returns these."""
        return self._folders.steps()

    def tiers(self) -> dict[int, StepPlace]:
        """Returns {step: place} of a manager with a tier, in ascending order. The place is "durable" if the durable
        place has the step (the local folder may have it, too), "uploading", or "local". If the durable place cannot be
        read now, all steps of the local folder are "local". Asks no other rank. Only the coordinator knows what is
        being uploaded."""
        return self._folders.tiers()

    @_collective
    def losses_survived(self) -> dict[int, int]:
        """Returns {step: how many nodes may be lost} for the steps that the folders of the nodes hold whole, in
        ascending order: one less than the nodes that have the file with the fewest copies. Steps that are durable
        (`tiers`) survive the loss of all. Empty if all ranks see one folder. All ranks call it together; reads no
        data."""
        return self._folders.losses_survived()

    @property
    def saving(self) -> int | None:
        """The step whose save is running on this rank; None if none is. `steps` does not have it yet."""
        running = self._saves.running
        return None if running is None or running.ends_within(0) else running.step

    @_collective
    def best_step(self) -> int | None:
        """Returns the complete step with the best value of the metric `best`, the later one of equals; None if no step
        has that metric. All ranks call it together; it reads metrics alone. Raises ValueError without `best`."""
        name = self.retention.best
        if name is None:
            raise ValueError("best_step: the manager has no best=, the name of a metric")
        return self._folders.best_step(name)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that were saved with a step; an empty dict if there were none. Asks no other rank."""
        return step_metrics.read(self._folders.path_of(step))

    @_collective
    def latest(self, *, full: bool = False) -> int | None:
        """Returns the step that was saved last of those whose checkpoint is complete and sound by `verify(quick=True)`;
        None if there is none. All ranks call it together.

        Raises `CheckpointError` if an object store cannot be read, even if it refuses only one checkpoint.

        Abandoned steps (training went back to an earlier step and saved again) are considered after all others. `full`
        verifies all data, on the coordinator, while other ranks wait. The result is equal on all ranks.
        """
        return self._folders.latest(full)

    @_collective
    def restore(
        self,
        state: dict[str, Any],
        step: int | None = None,
        *,
        strict: bool = True,
        keys: str | Iterable[str] | None = None,
        rename: Rename | None = None,
        prepare: bool = True,
        weights_only: bool = True,
        extra_files: dict[str, bytes] | None = None,
    ) -> int:
        """Loads the checkpoint of `step`, or without it the newest sound one, into `state`; returns its step. All ranks
        call it together.

        The next saves continue from that step. Later steps on disk are abandoned by the next save, with a warning.

        Without `step`: if any rank finds the newest checkpoint damaged, all ranks try the one before it, with a
        warning. If an object store cannot be read, `restore` raises, as `latest` does, because its checkpoints may be
        sound. With a tier, it warns and takes the newest local step instead. It waits for a running save; `wait` or
        the next save raises the error of that save. If `restore` raises, `state` may hold parts of several checkpoints.

        `prepare` plans the next save of `state` and allocates the memory of its snapshot (`vescale_ckpt.prepare`). Give
        False if nothing will be saved. The other arguments are those of `vescale_ckpt.load`.

        With `CheckpointManager(prove=True)`, the entries of `state` are then compared with the checkpoint's
        fingerprint. If they differ, `StateDiffersError` is raised; with `strict=False`, a warning is logged. Nothing is
        compared, and a warning says so, if the checkpoint has no fingerprint, or with `keys` or `rename`.

        Raises on all ranks, as `vescale_ckpt.load` does. `CheckpointError`: there is no checkpoint. If none is sound,
        the error of the one tried last. If the state does not fit the checkpoint: `IncompatibleStateError`,
        `MissingKeysError`, `UntrustedCheckpointError`, `LoadFailedError`.
        """
        if self._saves.running is not None:
            self._saves.running.wait_until_ended()
        options = {
            "strict": strict, "keys": keys, "rename": rename, "weights_only": weights_only, "extra_files": extra_files
        }  # fmt: skip
        step = self._folders.load(state, None if step is None else _checked_step(step), options)
        if prepare:
            try:
                self._folders.prepare_save(state, self.async_checkpoint)
            except Exception as error:  # the restore has succeeded
                logger.warning("the next save has to plan: %s", error)
        return step


def _check_policy(name: str, given: object, kind: type, **short: object) -> None:
    """Raises if it is no such policy, or if `short` arguments for the same are given, too."""
    if given is not None and not isinstance(given, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}, or None, got {type(given).__name__}")
    if given is not None and (beside := [argument for argument, value in short.items() if value is not None]):
        raise ValueError(
            f"{' and '.join(beside)}: expected as part of {name}={kind.__name__}(...), which is given, too"
        )


def _places(directory: str | os.PathLike[str], tier: Tier | None) -> tuple[str, str | None]:
    """Where saves go, and the durable place where they are copied afterwards."""
    path = checkpoint_path(directory)
    if tier is None:
        return path, None
    local = checkpoint_path(tier.local)
    if storage_at(local).can_be_away or local == path:
        raise ValueError("local: expected a local path, and as directory another folder or a URL")
    return local, path


def _checked_step(step: int) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step: expected a whole number, got {step!r:.100}")
    step = operator.index(step)
    if step < 0:
        raise ValueError(f"step: expected a number from 0 on, got {step}")
    return step
