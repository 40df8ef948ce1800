"""A signal that asks for one last save."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class SignalFlag:
    """Notes that a signal has come, instead of ending the process. A handler of Python that was there is called, too.

    To be made and released in the main thread, as all handlers. Raises ValueError elsewhere.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.raised = False
        self._number = signal.Signals(number)
        self._handler = self._note  # one object, to be recognised by
        self._before: Any = signal.signal(self._number, self._handler)

    def release(self) -> None:
        """Puts the handler back that was there, unless somebody has set another since. May be called again."""
        if signal.getsignal(self._number) is self._handler:
            signal.signal(self._number, signal.SIG_DFL if self._before is None else self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.raised = True
        # That of Python for SIGINT ends the program, which is what this is here to put off.
        if callable(self._before) and self._before is not signal.default_int_handler:
            self._before(number, frame)
