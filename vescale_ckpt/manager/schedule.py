"""Decides for the manager when to save: by step, by the coordinator's clock, on request, or after a signal."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from .._ranks.exchange import Exchange
from ..errors import CheckpointError
from ..settings import checked_count, checked_seconds

NO_DEADLINE, NO_SIGNAL = 1 << 40, 1 << 41  #: in place of milliseconds that are left, as large numbers


@dataclass(frozen=True)
class Decision:
    """The common decision of all ranks."""

    due: bool
    by_signal: bool = False


class Schedule:
    """Saves when the step is a multiple of `steps`, or `seconds` after the last save began; with neither, always."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self.steps = checked_count("save_interval_steps", steps)
        self.seconds = checked_seconds("save_interval_seconds", seconds, zero=True)
        self._last_save = time.monotonic()

    def began(self, at: float) -> None:
        self._last_save = at

    def decides_alone(self, flag: SignalFlag | None) -> bool:
        """Whether neither a clock nor a signal counts, so that no other rank is asked."""
        return self.seconds is None and flag is None

    def decide(
        self, step: int, force: bool, flag: SignalFlag | None, exchange: Callable[[], Exchange], phase: str
    ) -> Decision:
        """Whether a save is due. Asks other ranks only where a clock or a signal counts. `flag`: of the signal that is
        watched; other ranks' signals and deadlines are noted there. `phase`: of the exchange."""
        by_step = self.steps is not None and step % self.steps == 0
        due = force or by_step or (self.steps is None and self.seconds is None)
        if self.decides_alone(flag):
            return Decision(due)
        asked = exchange()
        by_clock = self.seconds is not None and time.monotonic() - self._last_save >= self.seconds
        # `agree` takes the minimum of each: the coordinator's clock counts, and any rank's signal.
        left = NO_SIGNAL if flag is None else flag.milliseconds_left()
        ours = (step, ~step, due, by_clock or not asked.is_coordinator, left)
        least, not_most, *answers = asked.agree(ours, phase)
        if least != ~not_most:
            raise CheckpointError(f"ranks are at steps {least} to {~not_most}: all save the same step")
        due, by_clock, left = bool(answers[0]), bool(answers[1]), answers[2]
        if flag is not None:
            flag.agree(left)
        by_signal = 0 < left < NO_SIGNAL
        return Decision(due or by_clock or by_signal, by_signal)


class SignalFlag:
    """Records a signal instead of ending the process. Calls a Python handler that was set before, too.

    `deadline_seconds`: so long after the signal the process will be killed; None: that is not known. Must be created
    and released in the main thread, as Python requires of all handlers. Raises ValueError elsewhere.
    """

    def __init__(self, number: signal.Signals, deadline_seconds: float | None) -> None:
        self.has_deadline = deadline_seconds is not None
        self._seconds = math.inf if deadline_seconds is None else deadline_seconds
        self._until: float | None = None  # of `time.monotonic`; None: there was no signal
        try:
            self._number = signal.Signals(number)
        except ValueError:
            raise ValueError(f"save_on_signal: expected a signal, as signal.SIGTERM, got {number!r}") from None
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
