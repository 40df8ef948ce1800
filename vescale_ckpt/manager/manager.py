"""`CheckpointManager` saves, retains and restores the checkpoints of a training, one directory `step-N` for each."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import operator
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from signal import Signals
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

import torch.distributed as dist
from torch.optim import Optimizer

from .. import api, settings
from .._checkpoint.native.metadata_file import has_metadata
from .._checkpoint.native.step_order import Branch, SavedOrder, all_steps, complete_steps, path_of
from .._checkpoint.newest import newest_sound
from .._collective.background import BackgroundQueue
from .._collective.handle import SaveHandle
from .._engine.engine_errors import named_system_errors
from .._observe.listeners import Finished, tell
from .._ranks.exchange import Exchange, calling, digest
from .._ranks.groups import check_alone_on_purpose, place_in
from .._ranks.rendezvous import GRACE
from .._state.key_selection import Rename
from .._storage.open_storage import checkpoint_path, is_inconclusive, storage_at
from .._write.optimizer_gate import Gate
from ..errors import CheckpointError, CheckpointTimeoutError, CorruptCheckpointError, SaveCancelledError, some
from ..settings import checked_count, checked_seconds
from . import step_metrics
from .branch_tracker import BranchTracker
from .clean_up import clean_up
from .commit_calls import CommitCalls, OnCommit
from .node_table import branch_of
from .node_tier import NodeTier
from .node_work import NodeWork, find_nodes
from .remote_tier import RemoteTier, cannot_be_stored
from .retention import BestMode, Candidate, Retention
from .running_save import RunningSave
from .schedule import NO_SIGNAL, Decision, Schedule, SignalFlag
from .uploads import Tier, Uploads

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")
_Arguments = ParamSpec("_Arguments")

_LOOK_SECONDS = 0.5  # so often the ranks agree on whether the deadline of a signal is over
_SECONDS_TO_CANCEL = 5.0  # a save that is cancelled ends within so many seconds, or `save` returns before it has

OnError = Literal["raise", "warn"]

#: Errors for which `restore` tries an older checkpoint without calling this one damaged: they may be temporary.
_UNREADABLE_NOW = {errno.EIO, errno.ENOENT, errno.ESTALE, errno.ENODATA, errno.EBADMSG}


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
        directory: a path or `file://` URL. The first save creates it.
        max_to_keep: how many checkpoints stay: those saved last, or with `best` the best ones. None: all. Others are
            removed after a newer one is durable. The one saved last is never removed, and a sound one is not removed
            to keep a damaged one.
        keep_period: checkpoints whose step is a multiple of it stay for good.
        save_interval_steps, save_interval_seconds: `save` saves when the step is a multiple of the former, or this many
            seconds after the last save began. With neither it always saves.
        best: name of the metric that ranks checkpoints. Every save then needs this metric.
        best_mode: "max" or "min"; required with `best`.
        async_checkpoint: whether `save` returns before the checkpoint is durable. If a save is running when the process
            ends, the process waits for it and its clean-up, at most `VESCALE_CKPT_EXIT_TIMEOUT` seconds.
        save_on_signal: a signal (SIGTERM, say) that asks for one last save. The first `save` after any rank got the
            signal saves, and returns when the checkpoint is durable; `preempted` is True then. The manager must then be
            created in the main thread.
        deadline_seconds: with `save_on_signal`, how long after the signal the process will be killed. `save` then
            returns by about that time, on all ranks: a running save goes on until it is durable, then the last save is
            made, and what is not durable at the deadline is cancelled. The last save is left out if the running one has
            become durable and less time is left than earlier saves took. `preempted` is True if either is durable. If
            neither is, the checkpoint before is whole, and a process that lives on saves as before the signal.
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
        timeout: seconds to wait for other ranks at each step; None: `VESCALE_CKPT_TIMEOUT`.
        local: a folder on fast disks or in memory, in front of a slower `directory` (a shared folder, or an object
            store). Saves go there, and are copied to `directory` in the background. Retention holds for both. `restore`
            and `latest` prefer the local copy of a step if it is whole. `tiers` says where each step is. The folder may
            be one that all ranks share; then the coordinator copies. Or, which is experimental, each node has one of
            its own under the same path: then a node saves what its ranks hold, and the folders of all nodes together
            have the step. `restore` brings what a node lacks from nodes that have it. Managers find out when they are
            made: all ranks make theirs together. They raise `CheckpointError` if a folder has steps of another run.
        local_max_bytes: with a folder of each node, about how many bytes the checkpoints there may have. Those saved
            first are removed, whatever retention says, so that the next one has room; the one saved last stays. None:
            no limit.
        upload_bytes_per_second: with `local`, the limit for copies to `directory`, of each node that copies; 0: no
            limit.
        copies: with a folder of each node, how many other nodes get each file of a step, while training goes on.
            At most all others, with a warning. Replicas that nodes have saved count. While a step is sent, those that
            are saved get no copies, but the last one when the manager is closed.
        copy_bytes_per_second: with `copies`, most that each node sends; 0: no limit.
        durable_interval_steps: with `local`, only steps that are multiples of it are copied to `directory`, and with a
            folder of each node the last one when the manager is closed. None: all steps. While nodes copy a step, those
            that are saved stay on the nodes.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        save_interval_steps: int | None = None,
        save_interval_seconds: float | None = None,
        best: str | None = None,
        best_mode: BestMode | None = None,
        async_checkpoint: bool = True,
        process_group: dist.ProcessGroup | None = None,
        save_on_signal: Signals | None = None,
        deadline_seconds: float | None = None,
        on_error: OnError = "raise",
        on_commit: OnCommit | None = None,
        timeout: float | None = None,
        local: str | os.PathLike[str] | None = None,
        local_max_bytes: int | None = None,
        upload_bytes_per_second: int = 0,
        durable_interval_steps: int | None = None,
        copies: int = 0,
        copy_bytes_per_second: int = 0,
    ) -> None:
        self.directory = checkpoint_path(directory)  #: saves go there
        self.remote: str | None = None  #: checkpoints are copied there afterwards
        if local is not None:
            self.directory, self.remote = checkpoint_path(local), self.directory
            if storage_at(self.directory).can_be_away or self.directory == self.remote:
                raise ValueError("local: expected a local path, and as directory another folder or a URL")
        elif any((upload_bytes_per_second, durable_interval_steps, copies, copy_bytes_per_second, local_max_bytes)):
            raise ValueError(
                "upload_bytes_per_second, durable_interval_steps, copies, copy_bytes_per_second and local_max_bytes "
                "are for a manager with local="
            )
        checked_count("local_max_bytes", local_max_bytes)
        checked_count("durable_interval_steps", durable_interval_steps)
        self._roots = [self.directory] if self.remote is None else [self.directory, self.remote]  # local first
        self.retention = Retention(max_to_keep, keep_period, best, best_mode)
        self.schedule = Schedule(save_interval_steps, save_interval_seconds)
        # the decision of `should_save` for a step, until `save` or a failed call of any rank
        self._decided: tuple[int, Decision, int] | None = None
        self.async_checkpoint = async_checkpoint
        self.process_group = process_group
        Exchange.begin_connecting(process_group)
        self.timeout = checked_seconds("timeout", timeout, zero=False)
        if on_error not in get_args(OnError):
            raise ValueError(f"on_error: expected one of {', '.join(get_args(OnError))}, got {on_error!r}")
        self.on_error = on_error
        self.failed_saves = 0  #: how many saves have failed, with on_error="warn"
        self.preempted = False  #: whether a signal came and the last save is durable: training should stop
        if deadline_seconds is not None and save_on_signal is None:
            raise ValueError("deadline_seconds is for a manager with save_on_signal=")
        checked_seconds("deadline_seconds", deadline_seconds, zero=False)
        self._signal = None if save_on_signal is None else SignalFlag(save_on_signal, deadline_seconds)
        self._durations: deque[float] = deque(maxlen=3)  # seconds until the last saves were durable
        self._running: RunningSave | None = None  # the save that began last, until `wait` has returned its outcome
        self._damaged: frozenset[str] = frozenset()  # paths of checkpoints that `restore` found damaged
        self._spared: frozenset[str] = frozenset()  # paths that `restore` could not load, but that may be sound
        limit = settings.timeout(self.timeout)
        self._tier = None if self.remote is None else RemoteTier(self.remote, self.directory, limit)
        # None: all ranks see one folder
        with calling("CheckpointManager", process_group):
            self._nodes = None if self._tier is None else find_nodes(self._exchange(), self._tier)
        if self._nodes is not None and on_commit is not None:
            raise ValueError("on_commit: with a local= folder of each node, no path holds the whole checkpoint")
        if on_commit is not None and not callable(on_commit):
            raise TypeError(f"on_commit: expected a function of a step and a path, got {type(on_commit).__name__}")
        self._commit_calls = CommitCalls(on_commit) if on_commit is not None and self._is_coordinator() else None
        self._uploads: Uploads | None = None
        self._node_work: NodeWork | None = None
        if self._nodes is not None:
            assert self._tier is not None
            nodes = self._nodes
            self._node_work = NodeWork(
                nodes, self._exchange(), self._tier, self.retention,
                process_group=process_group, timeout=timeout, local_max_bytes=local_max_bytes,
                upload_bytes_per_second=upload_bytes_per_second, durable_interval_steps=durable_interval_steps,
                copies=copies, copy_bytes_per_second=copy_bytes_per_second,
            )  # fmt: skip
            self._uploads = self._node_work.uploads
            self._branches = BranchTracker(self.directory, lambda _: SavedOrder.of(nodes.table.branches))
        else:
            if copies:
                logger.warning("copies=%d: all ranks see one folder %s, which gets no copies", copies, self.directory)
            if (tier := self._tier) is not None:
                self._from_coordinator(tier.begin_run, "looking for the run")
            # The durable place is read once: all later saves are in the directory.
            elsewhere = {} if tier is None else tier.found.branches
            self._branches = BranchTracker(self.directory, lambda known: SavedOrder(self.directory, known, elsewhere))
        if self._is_coordinator():  # only it uses them
            self._branches.look()
        if self.remote is not None and self._nodes is None and self._is_coordinator():
            self._uploads = Uploads(
                self.directory, self.remote, self.retention, upload_bytes_per_second, durable_interval_steps
            )
            self._uploads.begin()  # continues the uploads of an earlier process
        self._closed = False

    # --- Saving

    @_collective
    def should_save(self, step: int) -> bool:
        """Whether `save` of this step, without `force`, will save: metrics are then worth their reduction over ranks.

        All ranks call it together, and get the same. It is decided once: `save` of the same step does what was said.
        Raises what `save` raises before it begins.
        """
        step = self._checked(step)
        with self._tolerating(step, CheckpointTimeoutError):
            decision = self.schedule.decide(step, False, self._open_signal, self._exchange, "asking whether to save")
            self._decided = step, decision, self._generation()
            return decision.due
        return False

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
        step = self._checked(step)
        flag = self._open_signal
        options = {"gate": gate, "extra_files": extra_files}
        with self._tolerating(step, CheckpointTimeoutError):  # all other errors here are the caller's mistakes
            decided, self._decided = self._decided, None
            is_decided = decided is not None and decided[0] == step and (decided[1].due or not force)
            if decided is not None and is_decided and decided[2] == self._generation():
                decision = decided[1]
            else:
                decision = self.schedule.decide(step, force, flag, self._exchange, "saving if it is due")
            if not decision.due:
                step_metrics.check(metrics or {})
                return None
            numbers = self._agreed(step, metrics, is_last=decision.by_signal)
            with self._tolerating(step, CheckpointError):
                if flag is not None and flag.has_deadline:
                    return self._save_in_time(flag, step, state, numbers, **options)
                self._wait_for_previous_save(is_last=decision.by_signal)
                in_background = self.async_checkpoint and not decision.by_signal
                handle = self._save(step, state, numbers, in_background, **options)
                if decision.by_signal:
                    self.wait()
                    self.preempted = True
                return handle
        return None

    def _checked(self, step: int) -> int:
        if self._closed:
            raise ValueError("the manager is closed")
        check_alone_on_purpose()
        return _checked_step(step)

    def _generation(self) -> int:
        """The generation of the exchange by which ranks agree whether to save; 0 if each decides alone."""
        return 0 if self.schedule.decides_alone(self._open_signal) else self._exchange().generation

    @property
    def _open_signal(self) -> SignalFlag | None:
        """The signal that still asks for a last save."""
        return None if self.preempted else self._signal

    def _save_in_time(
        self, flag: SignalFlag, step: int, state: Mapping[str, Any], numbers: dict[str, float] | None, **options: Any
    ) -> SaveHandle | None:
        """Saves after the running save. If a signal has come by then, this is the last save."""
        before = None if self._running is None or self._running.ends_within(0) else self._running
        durable, has_time, left = self._end_in_time(flag, before)
        self.preempted = durable
        if not has_time:
            logger.warning("step %d is not saved: too little time is left after the signal", step)
            return None
        self._wait_for_previous_save(is_last=left < NO_SIGNAL)
        if left == NO_SIGNAL:
            return self._save(step, state, numbers, self.async_checkpoint, **options)
        queue = BackgroundQueue.of(self.process_group)
        queue.hurried = True
        try:
            handle = self._save(step, state, numbers, True, **options)
        finally:
            queue.hurried = False
        self.preempted |= self._end_in_time(flag, self._running)[0]
        if handle.done() and handle.stats is None:
            self.wait()
        return handle

    def _end_in_time(self, flag: SignalFlag, running: RunningSave | None) -> tuple[bool, bool, int]:
        """Waits for a save, and cancels it at the deadline of a signal. Returns, equal on all ranks, whether it became
        durable after a signal, whether another may begin, and the milliseconds that are left."""
        began, limit, doing = time.monotonic(), settings.timeout(self.timeout), "waiting for the save before this one"
        while True:
            exchange = self._exchange()
            others = not exchange.is_coordinator  # `agree` takes the minimum of each
            mine = running is None or running.ends_within(_LOOK_SECONDS)
            in_time = time.monotonic() - began < limit or others
            ended, goes_on, left = exchange.agree((mine, in_time, flag.milliseconds_left()), doing)
            if left == NO_SIGNAL and ended:
                return False, True, left
            if left == NO_SIGNAL and not goes_on:
                raise CheckpointTimeoutError(doing, [], f"{doing}: not done after {limit:.0f} s")
            if ended or left <= 0:
                break
            flag.agree(left)
        if running is not None and not ended:
            logger.warning("the save of step %d is cancelled: it is not durable at the deadline", running.step)
            with suppress(CheckpointTimeoutError):  # the store is away; another rank may reach it
                running.cancel()
            running.ends_within(_SECONDS_TO_CANCEL)
        flag.agree(left)
        durable = running is not None and running.is_durable()
        has_time = left > 0 and (not durable or left >= 1000 * max(self._durations, default=0))
        agreed = exchange.agree((durable or others, has_time or others), doing)
        return bool(agreed[0]), bool(agreed[1]), left

    def _save(
        self, step: int, state: Mapping[str, Any], numbers: dict[str, float] | None, in_background: bool, **options: Any
    ) -> SaveHandle:
        began = time.monotonic()
        running = self._running = RunningSave(self.directory, step, self._writes_notes(), self._running)
        if self._node_work is not None:
            self._node_work.begin(running)
        self._prepare(running, numbers)
        handle = self._begin_save(running, state, async_checkpoint=in_background, **options)
        self.schedule.began(began)
        return handle

    @contextmanager
    def _tolerating(self, step: int, kind: type[CheckpointError]) -> Iterator[None]:
        """A context whose errors of a kind are logged and counted with on_error="warn". All ranks have them."""
        began = time.monotonic()
        try:
            yield
        except kind as error:
            if self.on_error == "raise":
                raise
            self.failed_saves += 1
            self.schedule.began(began)
            logger.error("the save of step %d failed, and the next one that is due is tried: %s", step, error)
            if self._running is None or self._running.step != step or not self._running.has_begun:
                path, seconds = path_of(self.directory, step), time.monotonic() - began
                tell(Finished("save", path, *place_in(self.process_group), seconds, None, error))

    def _agreed(self, step: int, metrics: Mapping[str, Any] | None, *, is_last: bool) -> dict[str, float] | None:
        """Returns the metrics that all ranks give for a save. Raises on all ranks if the metrics of one rank are
        wrong."""
        numbers, error = None, None
        try:  # not before a save is due: a device may have to finish its work first
            numbers = None if metrics is None else step_metrics.as_numbers(metrics)
        except Exception as wrong:
            error = wrong
        if error is None and self.retention.best is not None and self.retention.best not in (numbers or {}):
            given = ", ".join(map(repr, numbers or {})) or "none"
            error = ValueError(
                f"step {step}: metrics={{{self.retention.best!r}: ...}} is missing, which best= asks for: {given} given"
            )
        exchange = self._exchange()
        text = json.dumps(numbers, sort_keys=True).encode()
        number = digest(text)
        ours = (step, ~step, number, ~number, exchange.size if error is None else exchange.rank)
        votes = [] if self._node_work is None else self._node_work.votes()
        answers = exchange.agree((*ours, *votes), "beginning to save")
        least, not_most, low, not_high, missing_on, *votes = answers
        if self._node_work is not None:
            self._node_work.decide(votes)
        if least != ~not_most:
            raise CheckpointError(f"ranks are at steps {least} to {~not_most}: all save the same step")
        if error is None and missing_on < exchange.size:
            error = CheckpointError(f"step {step}: nothing is saved, because of the metrics on rank {missing_on}")
        elif error is None and low != ~not_high:
            error = CheckpointError(self._differing(step, text, exchange))
        if error is None:
            return numbers
        if not is_last:
            raise error
        if exchange.is_coordinator:
            logger.error("this last save is made without metrics: %s", error)
        return None

    @staticmethod
    def _differing(step: int, text: bytes, exchange: Exchange) -> str:
        """A text that says how the ranks' metrics differ, equal on all ranks."""
        phase = "comparing metrics"
        of_all = exchange.gather(text, phase) or []

        def difference() -> str:
            other = next((rank for rank, theirs in enumerate(of_all) if theirs != of_all[0]), 0)
            return (
                f"the metrics of step {step} differ over ranks: rank 0 gives {of_all[0].decode()[:500]}, rank {other} "
                f"gives {of_all[other].decode()[:500]}. Give all ranks the same: the mean over ranks, say"
            )

        return exchange.from_coordinator(difference, phase)

    def _prepare(self, running: RunningSave, numbers: dict[str, float] | None) -> None:
        """Prepares the step's directory on the coordinator. Raises on all ranks if the branch cannot be recorded."""
        abandoned: list[int] = []
        phase = f"preparing {running.path}"

        def prepare() -> None:
            if not running.is_coordinator:
                return
            with storage_at(running.root).look(lists=True, fresh=True):
                branch, abandoned[:] = self._branches.branch_of(running.step)
                if self._tier is not None:
                    self._tier.write_run(shares_local=True)
                running.prepare(numbers, branch)

        def prepare_on_node(work: NodeWork, branch: Branch, removal: Any) -> None:
            work.prepare(running, removal)
            running.prepare(numbers, branch)

        try:
            if (work := self._node_work) is None:
                self._exchange().together(prepare, phase)
            else:
                metric = (numbers or {}).get(self.retention.best or "")
                planned, abandoned, removal = self._from_coordinator(
                    lambda: work.plan(running, metric, self._branches), phase
                )
                self._exchange().together(lambda: prepare_on_node(work, branch_of(planned), removal), phase)
        except BaseException:
            running.end(None)
            raise
        if abandoned:
            logger.warning(
                "step %d is saved after going back: steps %s in %s are abandoned. latest() and restore() go on from "
                "what is saved last",
                running.step,
                some([*map(str, abandoned)]),
                running.root,
            )

    def _wait_for_previous_save(self, *, is_last: bool) -> None:
        """Waits for the last save of the process group, whoever has begun it. The next save raises its error."""
        queue, limit = BackgroundQueue.of(self.process_group), self._patience()
        with queue.lock:
            if self.on_error == "warn":  # either all ranks go on, or none
                exchange = Exchange.of(self.process_group, limit + 2 * GRACE, purpose="manager")
                exchange.together(lambda: queue.wait_until_done(limit), "waiting for the save before this one")
            else:
                queue.wait_until_done(limit)
            # An earlier failure must not stop the last save before the process ends.
            if (is_last or self.on_error == "warn") and (failure := queue.take_failure()) is not None:
                logger.error("%s", failure)

    def _begin_save(
        self,
        running: RunningSave,
        state: Mapping[str, Any],
        *,
        async_checkpoint: bool,
        gate: Optimizer | Iterable[Optimizer] | Gate | None,
        extra_files: Mapping[str, bytes] | None,
    ) -> SaveHandle:
        """Begins the save and makes sure that `running.end` is called."""
        running.has_begun = True
        nodes, node_work = self._nodes, self._node_work
        save = api.save if nodes is None else nodes.save
        try:
            handle = running.handle = save(
                running.path,
                state,
                async_checkpoint=async_checkpoint,
                process_group=self.process_group,
                gate=gate if async_checkpoint else None,
                timeout=self._patience(),
                extra_files=extra_files,
            )
        except BaseException:
            running.end(None)
            raise

        if self.on_error == "warn":
            handle.notice.raised = True  # the log tells of a failure, and nobody else

        def committed() -> None:
            self._damaged -= {running.path}
            self._spared -= {running.path}
            if node_work is not None:
                node_work.committed(running)
            elif running.is_coordinator:
                self._clean_up(running)
                if self._commit_calls is not None:
                    self._commit_calls.begin(running.step, running.path)
            if self._uploads is not None and self._nodes is None:
                self._uploads.begin()

        def ended(handle: SaveHandle) -> None:
            error = handle.wait()
            if error is None:
                self._durations.append(time.monotonic() - running.began)
            self.failed_saves += self.on_error == "warn" and not isinstance(error, SaveCancelledError | None)
            running.end(committed if error is None else None)

        handle.add_done_callback(ended)
        return handle

    def _clean_up(self, saved: RunningSave) -> None:
        is_doubt = self._damaged or self._spared
        paths = {step: path_of(saved.root, step) for step in (complete_steps(saved.root) if is_doubt else ())}
        doubted = {step for step, path in paths.items() if path in self._damaged}
        spared = {step for step, path in paths.items() if path in self._spared}
        sound = {paths[step] for step in clean_up(saved.root, self.retention, saved.step, doubted, spared)}
        self._damaged -= sound
        self._spared |= sound

    def wait(self) -> None:
        """Waits until this manager's last save and its clean-up are done. Raises the error of that save, once, unless
        `on_error` is "warn". Any rank may call it alone."""
        if (running := self._running) is None:
            return
        running.wait_until_ended()
        self._running = None
        if self.on_error == "raise":
            running.raise_error()

    def cancel(self) -> bool:
        """Ends the manager's running save on all ranks, as `SaveHandle.cancel` does; one rank's call is enough. Returns
        whether it is cancelled: False if none is running, or if its commit has begun.

        Then `wait` and `close` raise `SaveCancelledError` on ranks that have not called this. With `local`, checkpoints
        that are whole there are copied to `directory` as before: this concerns the save alone.
        """
        return self._running is not None and self._running.cancel()

    def close(self) -> None:
        """Ends the manager; all ranks call it. Waits for a running save, and at most `VESCALE_CKPT_EXIT_TIMEOUT`
        seconds each for uploads with copies and calls of `on_commit`, and restores the signal's handler. Raises on the
        coordinator if a checkpoint could not be uploaded, or `on_commit` failed. May be called again."""
        self._closed = True
        try:
            self.wait()
            limit = settings.number("exit_timeout")
            until = time.monotonic() + limit
            if self._node_work is not None:
                self._node_work.end(limit)
            if self._uploads is not None:
                self._finish_uploads(self._uploads, max(0.0, until - time.monotonic()))
            if self._commit_calls is not None:
                self._finish_calls(self._commit_calls)
        finally:
            if self._signal is not None:
                self._signal.release()

    def _finish_uploads(self, uploads: Uploads, seconds: float) -> None:
        try:
            uploads.end_within(seconds)
        finally:
            uploads.stop()
        failures, uploads.failures = uploads.failures, {}
        if failures:
            steps, (failure, *_) = some([*map(str, failures)]), failures.values()
            raise CheckpointError(
                f"steps {steps} could not be uploaded to {self.remote}, and are in {self.directory} alone: {failure}",
                path=self.remote,
            ) from failure

    def _finish_calls(self, calls: CommitCalls) -> None:
        calls.end_within(settings.number("exit_timeout"))
        failures, calls.failures = calls.failures, {}
        if failures and self.on_error == "raise":
            steps, (failure, *_) = some([*map(str, failures)]), failures.values()
            raise CheckpointError(
                f"on_commit failed for steps {steps}, whose checkpoints are whole in {self.directory}: {failure}",
                path=self.directory,
            ) from failure

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
        rank. Raises `CheckpointError` if the directory cannot be read. If a store cannot be read and `local` has steps,
        warns and returns the local steps."""
        return sorted({*_complete_steps(self.directory), *self._remote_steps()})

    def _remote_steps(self) -> list[int]:
        tier = self._tier
        return [] if tier is None else tier.ask(lambda: _complete_steps(tier.url), [])

    def tiers(self) -> dict[int, Tier]:
        """Returns {step: place} of a manager with `local`, in ascending order. The place is "remote" if the object
        store has the step (the local directory may have it, too), "uploading", or "local". If the store cannot be read
        now, all steps of the local directory are "local". Asks no other rank. Only the coordinator knows what is being
        uploaded."""
        remote = set(self._remote_steps())
        uploading = None if self._uploads is None else self._uploads.uploading()
        return {
            step: "uploading" if step == uploading else "remote" if step in remote else "local"
            for step in sorted({*_complete_steps(self.directory), *remote})
        }

    @_collective
    def losses_survived(self) -> dict[int, int]:
        """Returns {step: how many nodes may be lost} for the steps that the folders of the nodes hold whole, in
        ascending order: one less than the nodes that have the file with the fewest copies. Steps that are durable
        (`tiers`) survive the loss of all. Empty if all ranks see one folder. All ranks call it together; reads no
        data."""
        if self._nodes is None:
            return {}
        return self._nodes.losses_survived(self._exchange(), "counting the copies of each step")

    @property
    def saving(self) -> int | None:
        """The step whose save is running on this rank; None if none is. `steps` does not have it yet."""
        running = self._running
        return None if running is None or running.ends_within(0) else running.step

    @_collective
    def best_step(self) -> int | None:
        """Returns the complete step with the best value of the metric `best`, the later one of equals; None if no step
        has that metric. All ranks call it together; it reads metrics alone. Raises ValueError without `best`."""
        name = self.retention.best
        if name is None:
            raise ValueError("best_step: the manager has no best=, the name of a metric")

        def best_first() -> list[int]:
            rows = {} if self._nodes is None else self._nodes.table.rows
            metrics = {step: row.metric for step, row in rows.items() if row.survives >= 0}
            others = {*(self.steps() if self._nodes is None else self._remote_steps())} - rows.keys()
            metrics |= {step: self.metrics(step).get(name) for step in others}
            return self.retention.best_first(itertools.starmap(Candidate, metrics.items()))

        phase = "looking for the best checkpoint"
        if self._nodes is not None:
            self._nodes.look(self._exchange(), phase, finds_whole=True)
        return next(iter(self._from_coordinator(best_first, phase)), None)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics that were saved with a step; an empty dict if there were none. Asks no other rank."""
        return step_metrics.read(self._path_of(step))

    def _path_of(self, step: int) -> str:
        """Returns the path of a step's checkpoint; the local one if there are two."""
        paths = [path_of(root, step) for root in self._roots]
        return next((path for path in paths if has_metadata(path, None)), paths[0])

    @_collective
    def latest(self, *, full: bool = False) -> int | None:
        """Returns the step that was saved last of those whose checkpoint is complete and sound by `verify(quick=True)`;
        None if there is none. All ranks call it together.

        Raises `CheckpointError` if an object store cannot be read, even if it refuses only one checkpoint.

        Abandoned steps (training went back to an earlier step and saved again) are considered after all others. `full`
        verifies all data, on the coordinator, while other ranks wait. The result is equal on all ranks.
        """
        if self._nodes is not None:
            nodes, exchange, phase = self._nodes, self._exchange(), "looking for the newest checkpoint"
            steps = nodes.steps(exchange, phase)
            return next((step.number for step in steps if not full or nodes.is_sound(step, exchange, phase)), None)
        found = self._newest_sound("looking for the newest checkpoint", quick=not full)
        return None if found is None else found[0]

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
        sound. With `local`, it warns and takes the newest local step instead. It waits for a running save; `wait` or
        the next save raises the error of that save. If `restore` raises, `state` may hold parts of several checkpoints.

        `strict`, `keys` and `rename` are those of `vescale_ckpt.load`.

        `prepare` plans the next save of `state` and allocates the memory of its snapshot (`vescale_ckpt.prepare`). Give
        False if nothing will be saved. `weights_only` is that of `vescale_ckpt.load`; False is for checkpoints that you
        trust as you trust code. `extra_files` is a dict to fill, as with `vescale_ckpt.load`.

        Raises on all ranks, as `vescale_ckpt.load` does. `CheckpointError`: there is no checkpoint. If none is sound,
        the error of the one tried last. If the state does not fit the checkpoint: `IncompatibleStateError`,
        `MissingKeysError`, `UntrustedCheckpointError`, `LoadFailedError`.
        """
        if self._running is not None:
            self._running.wait_until_ended()
        options = {
            "strict": strict, "keys": keys, "rename": rename, "weights_only": weights_only, "extra_files": extra_files
        }  # fmt: skip
        if self._nodes is not None:
            step = self._load_from_nodes(self._nodes, state, None if step is None else _checked_step(step), options)
        elif step is None:
            step = self._load_newest(state, options)
        else:
            step = _checked_step(step)
            path = self._from_coordinator(partial(self._path_of, step), "looking for a checkpoint")
            self._load(path, state, **options)
        self._note_restored(step)
        if prepare:
            self._prepare_to_save(state)
        return step

    def _load_newest(self, state: dict[str, Any], options: Mapping[str, Any]) -> int:
        failure: CheckpointError | None = None
        tried: set[str] = set()
        roots = self._roots
        phase = "looking for the newest checkpoint to restore"
        while (newest := self._newest_sound(phase, quick=True, but=tried, roots=roots)) is not None:
            found, path = newest
            try:
                self._load(path, state, **options)
            except CheckpointError as error:  # all ranks get the same class and errno
                number = getattr(error, "errno", None)
                if isinstance(error, CorruptCheckpointError):
                    self._damaged |= {path}
                elif storage_at(path).can_be_away and is_inconclusive(number, path):
                    if self.remote is None:  # it may be sound: nothing older is taken in its place
                        raise
                    roots = [self.directory]
                elif number not in _UNREADABLE_NOW:
                    raise
                else:
                    self._spared |= {path}
                failure = error
            else:
                self._spared -= {path}
                return found
            level = logging.WARNING if self._is_coordinator() else logging.DEBUG
            logger.log(level, "the checkpoint of step %d is passed over, for an older one: %s", found, failure)
            tried.add(path)
        if failure is not None:
            raise failure
        raise CheckpointError(f"{self.directory} holds no checkpoint that is complete and sound", path=self.directory)

    def _load_from_nodes(
        self, nodes: NodeTier, state: dict[str, Any], only: int | None, options: Mapping[str, Any]
    ) -> int:
        """Loads the newest step that is whole, or `only` that one. What is damaged is taken from another copy, and then
        from the durable place."""
        exchange, phase = self._exchange(), f"looking for a checkpoint in {self.directory}"
        failure: CheckpointError | None = None
        held_back: int | None = None  # a step that is whole, but a node cannot store what it lacks
        for step in nodes.steps(exchange, phase, only):
            if held_back not in (None, step.number):
                break  # nothing older is taken in its place
            try:
                if step.files is None:
                    self._load(step.path, state, **options)
                else:
                    nodes.load(step, state, exchange, process_group=self.process_group, timeout=self.timeout, **options)
            except CheckpointError as error:  # all ranks get the same class and errno
                if cannot_be_stored(error):
                    held_back = step.number
                elif (
                    not isinstance(error, CorruptCheckpointError)
                    and getattr(error, "errno", None) not in _UNREADABLE_NOW
                ):
                    raise
                failure = error
                level = logging.WARNING if exchange.is_coordinator else logging.DEBUG
                logger.log(level, "the checkpoint of step %d in %s is passed over: %s", step.number, step.path, error)
                continue
            assert self._node_work is not None
            self._node_work.restored(step)
            return step.number
        if failure is not None:
            raise failure
        which = "no checkpoint" if only is None else f"no checkpoint of step {only}"
        raise CheckpointError(
            f"{self.directory} of all nodes and {self.remote} hold {which} that is whole", path=self.directory
        )

    def _note_restored(self, step: int) -> None:
        def go_on() -> None:
            if abandoned := self._branches.note_restored(step):
                logger.warning(
                    "step %d was saved last in %s; later steps %s were abandoned, when training went back",
                    step,
                    self.directory,
                    some([*map(str, abandoned)]),
                )

        self._from_coordinator(go_on, "looking for later checkpoints")

    def _prepare_to_save(self, state: Mapping[str, Any]) -> None:
        """Plans the next save. An error is only logged: the restore has succeeded."""
        try:
            (api.prepare if self._nodes is None else self._nodes.prepare)(
                state,
                async_checkpoint=self.async_checkpoint,
                process_group=self.process_group,
                timeout=self.timeout,
            )
        except Exception as error:
            logger.warning("the next save has to plan: %s", error)

    def _load(self, path: str, state: dict[str, Any], **options: Any) -> None:
        api.load(path, state, process_group=self.process_group, timeout=self.timeout, **options)

    def _newest_sound(
        self, phase: str, *, quick: bool, but: AbstractSet[str] = frozenset(), roots: Sequence[str] | None = None
    ) -> tuple[int, str] | None:
        """The step, and the path of its checkpoint. `roots`: where it may be; None: all of the manager's."""

        def warn(step: int, reason: str) -> None:
            logger.warning("the checkpoint of step %d is passed over: %s", step, reason)

        def find() -> tuple[int, str] | None:
            where, tier = roots or self._roots, self._tier
            if tier is None or len(where) == 1:
                with storage_at(where[0]).look(lists=quick, fresh=True):
                    return newest_sound(where, quick=quick, on_damage=warn, but=self._damaged | but)
            if not tier.ask(lambda: all_steps(tier.url) is not None, False):
                where = [self.directory]
            with tier.patience() if quick else nullcontext():
                return newest_sound(where, quick=quick, on_damage=warn, but=self._damaged | but)

        found = self._from_coordinator(find, phase)
        return None if found is None else (found[0], found[1])  # it came as a list

    # --- Between ranks

    def _writes_notes(self) -> bool:
        """Whether this rank writes what stands beside the checkpoints in its folder, and cleans up there."""
        if self._nodes is None:
            return self._is_coordinator()
        return self._nodes.leads(place_in(self.process_group)[0])

    def _is_coordinator(self) -> bool:
        return place_in(self.process_group)[0] == 0

    def _exchange(self) -> Exchange:
        return Exchange.of(self.process_group, self._patience(), purpose="manager")

    def _patience(self) -> float:
        """Seconds to wait for other ranks: not much longer than until the deadline of a signal."""
        limit = settings.timeout(self.timeout)
        left = NO_SIGNAL if self._signal is None or self.preempted else self._signal.milliseconds_left()
        return min(limit, max(0, left) / 1000 + 3 * _SECONDS_TO_CANCEL)

    def _from_coordinator(self, find: Callable[[], _Found], phase: str) -> _Found:
        """Calls `find` on the coordinator. Returns its result, which JSON can hold, on every rank, or raises its error
        there."""

        def named() -> _Found:
            try:
                return find()
            except Exception as error:
                is_named = isinstance(error, (CheckpointError, OSError))
                text = str(error) if is_named else f"{type(error).__name__}: {error}"
                text, number = f"{phase} in {self.directory}: {text}", getattr(error, "errno", None)
                raise CheckpointError(text, path=self.directory, errno=number) from error

        return self._exchange().from_coordinator(named, phase)


def _complete_steps(root: str) -> list[int]:
    with named_system_errors(root):
        return complete_steps(root)


def _checked_step(step: int) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step: expected a whole number, got {step!r:.100}")
    step = operator.index(step)
    if step < 0:
        raise ValueError(f"step: expected a number from 0 on, got {step}")
    return step
