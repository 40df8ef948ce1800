"""`SaveLoop` makes the saves of a manager, one after another, and tolerates their failures if configured to."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch.optim import Optimizer

from .. import settings
from .._checkpoint.native.step_order import path_of
from .._collective.background import BackgroundQueue
from .._collective.handle import SaveHandle
from .._fingerprint.collect import fingerprint as take_fingerprint
from .._fingerprint.fingerprint import Fingerprint, stale_copy, with_fingerprint
from .._observe.listeners import Finished, tell
from .._ranks.exchange import Exchange, digest
from .._ranks.groups import place_in
from .._ranks.rendezvous import GRACE
from .._write.optimizer_gate import Gate
from ..errors import CheckpointError, CheckpointTimeoutError, SaveCancelledError
from . import step_metrics
from .background_work import CommitCalls
from .folders import Folders
from .running_save import RunningSave
from .schedule import NO_SIGNAL, SECONDS_TO_CANCEL, Ranks, SaveClock, SignalFlag, check_same_step

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5  # so often the ranks agree on whether the deadline of a signal is over


class SaveLoop:
    """The saves of one manager. All ranks call its methods together unless stated otherwise.

    Args:
        best: a metric that each save needs.
        tolerates: whether a save that fails is only logged and counted, and the next one is made.
        fingerprints: whether each save keeps the fingerprint of its state, which is logged and compared with the last.
    """

    def __init__(
        self,
        ranks: Ranks,
        clock: SaveClock,
        folders: Folders,
        commit_calls: CommitCalls | None,
        *,
        best: str | None,
        async_checkpoint: bool,
        tolerates: bool,
        fingerprints: bool,
    ) -> None:
        self.failed_saves = 0
        self.running: RunningSave | None = None  #: the save that began last, until `wait` has returned its outcome
        self._ranks = ranks
        self._clock = clock
        self._folders = folders
        self._commit_calls = commit_calls
        self._best = best
        self._async_checkpoint = async_checkpoint
        self._tolerates = tolerates
        self._fingerprints = fingerprints
        self._last_taken: tuple[int, Fingerprint] | None = None  # step and fingerprint of the last save
        self._durations: deque[float] = deque(maxlen=3)  # seconds until the last saves were durable

    def is_due(self, step: int) -> bool:
        with self._tolerating(step, CheckpointTimeoutError):
            return self._clock.ask(step)
        return False

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any] | None, *, force: bool, **options: Any
    ) -> SaveHandle | None:
        """Saves if a save is due. `options` are those of `vescale_ckpt.save`."""
        with self._tolerating(step, CheckpointTimeoutError):  # all other errors here are the caller's mistakes
            decision = self._clock.decide(step, force)
            if not decision.due:
                return None
            numbers, votes = _agree(
                step, metrics, self._best, self._ranks.exchange(), self._folders.votes(step), decision.by_signal
            )
            begin = partial(self._begin, step, state, numbers, votes, **options)
            with self._tolerating(step, CheckpointError):
                if (flag := self._ranks.open_flag) is not None and flag.has_deadline:
                    return self._save_in_time(flag, step, begin)
                self._wait_for_previous_save(is_last=decision.by_signal)
                handle = begin(in_background=self._async_checkpoint and not decision.by_signal)
                if flag is not None and decision.by_signal:
                    self.wait()
                    flag.preempted = True
                return handle
        return None

    def wait(self) -> None:
        """Waits until the last save and its clean-up are done, without any other rank. Raises its error, once."""
        if (running := self.running) is None:
            return
        running.wait_until_ended()
        self.running = None
        if not self._tolerates:
            running.raise_error()

    @contextmanager
    def _tolerating(self, step: int, kind: type[CheckpointError]) -> Iterator[None]:
        """A context whose errors of a kind are logged and counted, if the loop tolerates them. All ranks have them."""
        began = time.monotonic()
        try:
            yield
        except kind as error:
            if not self._tolerates:
                raise
            self.failed_saves += 1
            self._clock.save_began(began)
            logger.error("the save of step %d failed, and the next one that is due is tried: %s", step, error)
            if self.running is None or self.running.step != step or not self.running.has_begun:
                path, seconds = path_of(self._folders.root, step), time.monotonic() - began
                tell(Finished("save", path, *place_in(self._ranks.process_group), seconds, None, error))

    def _wait_for_previous_save(self, *, is_last: bool) -> None:
        """Waits for the last save of the process group, whoever has begun it. The next save raises its error."""
        queue, limit = BackgroundQueue.of(self._ranks.process_group), self._ranks.patience()
        with queue.lock:
            if self._tolerates:  # either all ranks go on, or none
                exchange = Exchange.of(self._ranks.process_group, limit + 2 * GRACE, purpose="manager")
                exchange.together(lambda: queue.wait_until_done(limit), "waiting for the save before this one")
            else:
                queue.wait_until_done(limit)
            # An earlier failure must not stop the last save before the process ends.
            if (is_last or self._tolerates) and (failure := queue.take_failure()) is not None:
                logger.error("%s", failure)

    # --- One save

    def _begin(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: dict[str, float] | None,
        votes: list[int],
        *,
        in_background: bool,
        gate: Optimizer | Iterable[Optimizer] | Gate | None,
        extra_files: Mapping[str, bytes] | None,
    ) -> SaveHandle:
        """Begins a save and makes sure that `running.end` is called."""
        began, folders = time.monotonic(), self._folders
        group, taken = self._ranks.process_group, None
        if self._fingerprints:  # of the live state, before training goes on
            taken = take_fingerprint(state, process_group=group, timeout=self._ranks.patience())
            extra_files = with_fingerprint(extra_files, taken)
        running = self.running = RunningSave(folders.root, step, folders.writes_notes, self.running)
        try:
            folders.reserve(running, votes)
            folders.prepare(running, metrics)
            running.has_begun = True
            handle = running.handle = folders.begin_save(
                running,
                state,
                async_checkpoint=in_background,
                process_group=group,
                gate=gate if in_background else None,
                timeout=self._ranks.patience(),
                extra_files=extra_files,
            )
        except BaseException:
            running.end(None)
            raise
        if self._tolerates:
            handle.notice.raised = True  # the log tells of a failure, and nobody else
        handle.add_done_callback(partial(self._ended, running))
        self._clock.save_began(began)
        if taken is not None:
            self._tell(step, taken)
        return handle

    def _tell(self, step: int, taken: Fingerprint) -> None:
        """Logs the fingerprint of a save, on the coordinator, and warns if training has not changed the tensors."""
        before, self._last_taken = self._last_taken, (step, taken)
        if self._ranks.is_coordinator():
            logger.info("step %d: fingerprint %s", step, taken)
            if before is not None and (warning := stale_copy(before, step, taken)):
                logger.warning("%s", warning)

    def _ended(self, running: RunningSave, handle: SaveHandle) -> None:
        error = handle.wait()
        if error is None:
            self._durations.append(time.monotonic() - running.began)
        self.failed_saves += self._tolerates and not isinstance(error, SaveCancelledError | None)
        running.end(partial(self._committed, running) if error is None else None)

    def _committed(self, running: RunningSave) -> None:
        try:
            self._folders.committed(running)
        finally:  # the checkpoint is durable, whatever hinders the clean-up
            if self._commit_calls is not None:
                self._commit_calls.begin(running.step, running.path)

    # --- Before the deadline of a signal

    def _save_in_time(self, flag: SignalFlag, step: int, begin: Callable[..., SaveHandle]) -> SaveHandle | None:
        """Saves after the running save. If a signal has come by then, this is the last save."""
        before = None if self.running is None or self.running.ends_within(0) else self.running
        flag.preempted, has_time, left = self._end_in_time(flag, before)
        if not has_time:
            logger.warning("step %d is not saved: too little time is left after the signal", step)
            return None
        self._wait_for_previous_save(is_last=left < NO_SIGNAL)
        if left == NO_SIGNAL:
            return begin(in_background=self._async_checkpoint)
        queue = BackgroundQueue.of(self._ranks.process_group)
        queue.hurried = True
        try:
            handle = begin(in_background=True)
        finally:
            queue.hurried = False
        flag.preempted |= self._end_in_time(flag, self.running)[0]
        if handle.done() and handle.stats is None:
            self.wait()
        return handle

    def _end_in_time(self, flag: SignalFlag, running: RunningSave | None) -> tuple[bool, bool, int]:
        """Waits for a save, and cancels it at the deadline of a signal. Returns, equal on all ranks, whether it became
        durable after a signal, whether another may begin, and the milliseconds that are left."""
        began, limit = time.monotonic(), settings.timeout(self._ranks.timeout)
        doing = "waiting for the save before this one"
        while True:
            exchange = self._ranks.exchange()
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
            running.ends_within(SECONDS_TO_CANCEL)
        flag.agree(left)
        durable = running is not None and running.is_durable()
        has_time = left > 0 and (not durable or left >= 1000 * max(self._durations, default=0))
        agreed = exchange.agree((durable or others, has_time or others), doing)
        return bool(agreed[0]), bool(agreed[1]), left


def _agree(
    step: int, metrics: Mapping[str, Any] | None, best: str | None, exchange: Exchange, votes: list[int], is_last: bool
) -> tuple[dict[str, float] | None, list[int]]:
    """Returns the metrics that all ranks give for a save, and the minima of `votes` over all ranks. Raises on all ranks
    if the metrics of one rank are wrong, or lack `best`; for the last save (`is_last`), that is only logged."""
    numbers, error = None, None
    try:  # not before a save is due: a device may have to finish its work first
        numbers = None if metrics is None else step_metrics.as_numbers(metrics)
    except Exception as wrong:
        error = wrong
    if error is None and best is not None and best not in (numbers or {}):
        given = ", ".join(map(repr, numbers or {})) or "none"
        error = ValueError(f"step {step}: metrics={{{best!r}: ...}} is missing, which best= asks for: {given} given")
    text = json.dumps(numbers, sort_keys=True).encode()
    number = digest(text)
    ours = (step, ~step, number, ~number, exchange.size if error is None else exchange.rank)
    least, not_most, low, not_high, missing_on, *votes = exchange.agree((*ours, *votes), "beginning to save")
    check_same_step(least, not_most)
    if error is None and missing_on < exchange.size:
        error = CheckpointError(f"step {step}: nothing is saved, because of the metrics on rank {missing_on}")
    elif error is None and low != ~not_high:
        error = CheckpointError(
            f"the metrics of step {step} differ over ranks: this rank gives {text.decode()[:500]}. Give all ranks the "
            "same: the mean over ranks, say"
        )
    if error is None:
        return numbers, votes
    if not is_last:
        raise error
    if exchange.is_coordinator:
        logger.error("this last save is made without metrics: %s", error)
    return None, votes
