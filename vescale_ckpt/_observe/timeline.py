"""`Timeline` is one save or load on one rank: measured, logged, watched and traced from the call to its end.

`Call` is any other collective call: only its long waits are logged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .. import settings
from .._engine.torch_private import profiled
from ..reports import LoadStats, SaveStats
from . import lines, listeners, slow_phases, write_trace
from .listeners import Finished
from .phase_times import Kind, OpenPhase, PhaseTimes
from .write_trace import Span


class Call(PhaseTimes):
    """A collective call of this rank. One thread at a time goes on with it, within `here`."""

    @contextmanager
    def here(self) -> Iterator[None]:
        """A context in which this thread goes on with the call."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def phase(
        self, name: str, detail: str = "", who: Callable[[], str] | None = None, meets: bool = False
    ) -> Iterator[None]:
        """A phase. Calls that need no other rank have none, and so cost nothing here."""
        self.open(OpenPhase(name, detail, who, time.perf_counter_ns(), threading.current_thread().name))
        slow_phases.add(self)
        try:
            yield
        finally:
            slow_phases.remove(self)
            self.close(time.perf_counter_ns(), meets)


class Timeline(Call):
    """One save or load of this rank."""

    def __init__(self, kind: Kind, path: str, doing: str, rank: int = 0, ranks: int = 1) -> None:
        lines.set_up_logging()
        super().__init__(doing, rank, ranks)
        self.kind = kind
        self.path = path
        self.ended = False
        self._trace_directory = str(settings.lenient("trace"))
        self._spans: list[Span] = []  # for the trace, if one is wanted

    @contextmanager
    def here(self) -> Iterator[None]:
        """A context in which this thread goes on with the save or load. An error ends the timeline."""
        slow_phases.add(self)
        try:
            with super().here():
                yield
        except BaseException as error:
            self.end(error=error)
            raise
        finally:
            slow_phases.remove(self)

    @contextmanager
    def phase(
        self, name: str, detail: str = "", who: Callable[[], str] | None = None, meets: bool = False
    ) -> Iterator[None]:
        """A phase, which profiles of torch show, too."""
        self.open(OpenPhase(name, detail, who, time.perf_counter_ns(), threading.current_thread().name))
        try:
            with profiled(f"vescale_ckpt {self.kind}: {name}"):
                yield
        finally:
            now = time.perf_counter_ns()
            ended = self.close(now, meets)
            if self._trace_directory:
                self._spans.append(Span(ended.name, ended.detail, ended.thread, ended.began, now))

    def begin(self, note: str = "") -> None:
        """Logs that the save or load begins."""
        lines.log_begin(self, note)

    def returned(self) -> None:
        """The call returns to training now."""
        self.blocked_seconds = self.seconds

    def end(self, stats: SaveStats | LoadStats | None = None, error: BaseException | None = None) -> None:
        """The save or load is over: logs it, tells the listeners, and writes its part of the trace. The first call
        counts."""
        if self.ended:
            return
        self.ended = True
        self.progress = None  # it may hold the state
        lines.log_end(self, stats, error)
        if self._trace_directory:
            write_trace.append(self._trace_directory, self, self.kind, self._spans)
        listeners.tell(Finished(self.kind, self.path, self.rank, self.ranks, self.seconds, stats, error))


_current: ContextVar[Call | None] = ContextVar("vescale_ckpt_call", default=None)


def current() -> Timeline | None:
    """The save or load that this thread goes on with."""
    call = _current.get()
    return call if isinstance(call, Timeline) else None


def doing(step: str) -> str:
    """The step, behind the name of the call that this thread goes on with."""
    call = _current.get()
    return step if call is None else f"{call.doing}: {step}"


@contextmanager
def phase(
    name: str,
    detail: str = "",
    who: Callable[[], str] | None = None,
    meets: bool = False,
    place: tuple[int, int] | None = None,
) -> Iterator[None]:
    """A phase of the call that this thread goes on with. Without one it does nothing.

    Args:
        detail: what is done in it.
        who: names the ranks that it waits for. Called on another thread if it takes long.
        meets: all ranks take part, so that the one that waits least has come last.
        place: this rank and the number of ranks: if no call goes on, the phase is watched like a call by itself.
    """
    call = _current.get() or (None if place is None else Call(detail, *place))
    if call is None:
        yield
        return
    with call.phase(name, detail, who, meets):
        yield
