"""`Schedule` says when a manager saves: by step, by the coordinator's clock, or after a signal.

`SaveClock` follows it for one manager, so that all its ranks (`Ranks`) decide the same. They wait for each other no
longer than the deadline of a signal (`SignalFlag`) allows.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from .. import settings
from .._ranks.exchange import Exchange
from .._ranks.groups import place_in
from ..errors import CheckpointError
from ..settings import checked_count, checked_seconds

NO_DEADLINE, NO_SIGNAL = 1 << 40, 1 << 41  #: in place of milliseconds that are left, as large numbers
SECONDS_TO_CANCEL = 5.0  #: a save that is cancelled ends within so many seconds, or `save` returns before it has

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Schedule:
    """When a `CheckpointManager` saves. With neither `steps` nor `seconds`, each `save` saves.

    A subclass may define `is_due`, to have a rule of its own.

    Args:
        steps: a step that is a multiple of it is saved.
        seconds: a step is saved this many seconds after the last save began. The coordinator's clock counts.
        signal: a signal (SIGTERM, say) that asks for one last save. The first `save` after any rank got the signal
            saves, and returns when the checkpoint is durable; `preempted` of the manager is True then. The manager must
            then be created in the main thread.
        deadline_seconds: how long after the signal the process will be killed. `save` then returns by about that time,
            on all ranks: a running save goes on until it is durable, then the last save is made, and what is not
            durable at the deadline is cancelled. The last save is left out if the running one has become durable and
            less time is left than earlier saves took. `preempted` is True if either is durable. If neither is, the
            checkpoint before is whole, and a process that lives on saves as before the signal.
    """

    steps: int | None = None
    seconds: float | None = None
    signal: signal.Signals | None = None
    deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", checked_count("steps", self.steps))  # an int: NumPy's may overflow
        checked_seconds("seconds", self.seconds, zero=True)
        checked_seconds("deadline_seconds", self.deadline_seconds, zero=False)
        if self.signal is None and self.deadline_seconds is not None:
            raise ValueError("deadline_seconds is for a schedule with signal=")
        try:
            _ = self.signal is None or signal.Signals(self.signal)
        except ValueError:
            raise ValueError(f"signal: expected a signal, as signal.SIGTERM, got {self.signal!r}") from None

    def is_due(self, step: int) -> bool:
        """Whether a step is saved, whatever the time is. Ranks do not ask each other: all get the same answer."""
        return self.seconds is None if self.steps is None else step % self.steps == 0


@dataclass(frozen=True)
class Decision:
    """The common decision of all ranks."""

    due: bool
    by_signal: bool = False


class SaveClock:
    """Follows a schedule for one manager: knows when the last save began, and what was decided for the next step."""

    def __init__(self, schedule: Schedule, ranks: Ranks) -> None:
        self._schedule = schedule
        self._ranks = ranks
        self._last_save = time.monotonic()
        self._decided: tuple[int, Decision, int] | None = None  # by `ask`, until `decide` or a failed call of any rank

    def save_began(self, at: float) -> None:
        self._last_save = at

    def ask(self, step: int) -> bool:
        """Whether a step will be saved. The answer is kept for `decide`."""
        decision = self._decide(step, False, "asking whether to save")
        self._decided = step, decision, self._generation()
        return decision.due

    def decide(self, step: int, force: bool) -> Decision:
        """Whether a step is saved, as `ask` has answered if it was called."""
        decided, self._decided = self._decided, None
        is_decided = decided is not None and decided[0] == step and (decided[1].due or not force)
        if decided is not None and is_decided and decided[2] == self._generation():
            return decided[1]
        return self._decide(step, force, "saving if it is due")

    def _decides_alone(self) -> bool:
        """Whether neither a clock nor a signal counts, so that no other rank is asked."""
        return self._schedule.seconds is None and self._ranks.open_flag is None

    def _generation(self) -> int:
        """The generation of the exchange by which ranks agree whether to save; 0 if each decides alone."""
        return 0 if self._decides_alone() else self._ranks.exchange().generation

    def _decide(self, step: int, force: bool, phase: str) -> Decision:
        """Asks other ranks only where a clock or a signal counts. Notes their signals and deadlines."""
        due = bool(force or self._schedule.is_due(step))
        if self._decides_alone():
            return Decision(due)
        flag, seconds, exchange = self._ranks.open_flag, self._schedule.seconds, self._ranks.exchange()
        by_clock = seconds is not None and time.monotonic() - self._last_save >= seconds
        # `agree` takes the minimum of each: the coordinator's clock counts, and any rank's signal.
        left = NO_SIGNAL if flag is None else flag.milliseconds_left()
        ours = (step, ~step, due, by_clock or not exchange.is_coordinator, left)
        least, not_most, *answers = exchange.agree(ours, phase)
        check_same_step(least, not_most)
        due, by_clock, left = bool(answers[0]), bool(answers[1]), answers[2]
        if flag is not None:
            flag.agree(left)
        by_signal = 0 < left < NO_SIGNAL
        return Decision(due or by_clock or by_signal, by_signal)


def check_same_step(least: int, not_most: int) -> None:
    """Raises `CheckpointError` unless all ranks are at one step, given the minima of `step` and `~step`."""
    if least != ~not_most:
        raise CheckpointError(f"ranks are at steps {least} to {~not_most}: all save the same step")


class Ranks:
    """The ranks of one manager. `flag` is that of the signal that asks for a last save."""

    def __init__(
        self, directory: str, process_group: dist.ProcessGroup | None, timeout: float | None, flag: SignalFlag | None
    ) -> None:
        self.directory = directory  # for texts
        self.process_group = process_group
        self.timeout = timeout
        self.flag = flag

    @property
    def open_flag(self) -> SignalFlag | None:
        """That of a signal which still asks for a last save."""
        return None if self.flag is None or self.flag.preempted else self.flag

    def is_coordinator(self) -> bool:
        return place_in(self.process_group)[0] == 0

    def exchange(self) -> Exchange:
        return Exchange.of(self.process_group, self.patience(), purpose="manager")

    def patience(self) -> float:
        """Seconds to wait for other ranks: not much longer than until the deadline of a signal."""
        left = NO_SIGNAL if (flag := self.open_flag) is None else flag.milliseconds_left()
        return min(settings.timeout(self.timeout), max(0, left) / 1000 + 3 * SECONDS_TO_CANCEL)

    def from_coordinator(self, find: Callable[[], _Found], phase: str) -> _Found:
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

        return self.exchange().from_coordinator(named, phase)


class SignalFlag:
    """Records a signal instead of ending the process. Calls a Python handler that was set before, too.

    `deadline_seconds`: so long after the signal the process will be killed; None: that is not known. Must be created
    and released in the main thread, as Python requires of all handlers. Raises ValueError elsewhere.
    """

    def __init__(self, number: signal.Signals, deadline_seconds: float | None) -> None:
        self.preempted = False  #: whether the signal came and a save after it is durable
        self.has_deadline = deadline_seconds is not None
        self._seconds = math.inf if deadline_seconds is None else deadline_seconds
        self._until: float | None = None  # of `time.monotonic`; None: there was no signal
        self._number = number
        self._handler = self._set_raised  # one bound method, which `release` compares
        self._before: Any = signal.signal(self._number, self._handler)

    def milliseconds_left(self) -> int:
        """Until the deadline; or `NO_DEADLINE`, or `NO_SIGNAL`."""
        left = math.inf if self._until is None else self._until - time.monotonic()
        return int(1000 * left) if left < math.inf else NO_SIGNAL if self._until is None else NO_DEADLINE

    def agree(self, left: int) -> None:
        """Takes over what is left by the signals of all ranks. A deadline that is over is forgotten: the process lives,
        and goes on to save as before."""
        if left < NO_SIGNAL:
            self._until = None if left <= 0 else time.monotonic() + left / 1000 if left < NO_DEADLINE else math.inf

    def release(self) -> None:
        """Restores the handler that was set before, unless another has been set since. May be called again."""
        if signal.getsignal(self._number) is self._handler:
            signal.signal(self._number, signal.SIG_DFL if self._before is None else self._before)

    def _set_raised(self, number: int, frame: FrameType | None) -> None:
        if self._until is None:
            self._until = time.monotonic() + self._seconds
        # Python's own handler for SIGINT would end the program before the last save.
        if callable(self._before) and self._before is not signal.default_int_handler:
            self._before(number, frame)
