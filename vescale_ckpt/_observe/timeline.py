"""`Timeline` is one save or load on one rank: measured, logged, watched and traced from the call to its end.

`Call` is any other collective call: only its long waits are logged.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .. import settings
from .._engine.torch_private import profiled
from ..reports import LoadStats, SaveStats
from . import lines, listeners
from .listeners import Finished
from .phase_times import Kind, Phase, PhaseTimes
from .slow_phases import watch

logger = logging.getLogger(__name__)


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
        self.open(Phase(name, detail, who, time.perf_counter_ns(), threading.current_thread().name))
        watch.add(self)
        try:
            yield
        finally:
            watch.remove(self)
            self.close(meets)


class Timeline(Call):
    """One save or load of this rank."""

    def __init__(self, kind: Kind, path: str, doing: str, rank: int = 0, ranks: int = 1) -> None:
        lines.set_up_logging()
        super().__init__(doing, rank, ranks)
        self.kind = kind
        self.path = path
        self.ended = False
        self._trace_directory = str(settings.lenient("trace"))
        self._phases: list[Phase] = []  # that have ended, for the trace, if one is wanted

    @contextmanager
    def here(self) -> Iterator[None]:
        """A context in which this thread goes on with the save or load. An error ends the timeline."""
        watch.add(self)
        try:
            with super().here():
                yield
        except BaseException as error:
            self.end(error=error)
            raise
        finally:
            watch.remove(self)

    @contextmanager
    def phase(
        self, name: str, detail: str = "", who: Callable[[], str] | None = None, meets: bool = False
    ) -> Iterator[None]:
        """A phase, which profiles of torch show, too."""
        with profiled(f"vescale_ckpt {self.kind}: {name}"), super().phase(name, detail, who, meets):
            yield

    def close(self, meets: bool) -> Phase:
        ended = super().close(meets)
        if self._trace_directory:
            self._phases.append(ended)
        return ended

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
            self._write_trace(self._trace_directory)
        listeners.tell(Finished(self.kind, self.path, self.rank, self.ranks, self.seconds, stats, error))

    def _write_trace(self, directory: str) -> None:
        """Appends the save or load and its phases to this process's file in Chrome's trace format: an array of events
        without its closing bracket, which viewers accept, so it can be read after the process was killed. A save does
        not fail for its trace."""
        rank = os.environ.get("RANK", "")
        number = int(rank) if rank.isdecimal() else self.rank
        host, process = socket.gethostname(), os.getpid()
        threads = list(dict.fromkeys(phase.thread for phase in self._phases))
        # The system's clock minus that of the phases: files of several machines have one time.
        offset = time.time_ns() - time.perf_counter_ns()

        def event(form: str, thread: int, **fields: Any) -> dict[str, Any]:
            return {"ph": form, "pid": number, "tid": thread, **fields}

        def span(thread: int, name: str, began: int, ended: int, args: dict[str, Any]) -> dict[str, Any]:
            times = {"ts": (began + offset) / 1000, "dur": (ended - began) / 1000}
            return event("X", thread, name=name, cat=self.kind, **times, args={"id": self.began, **args})

        events = [event("M", 0, name="process_name", args={"name": f"rank {number} ({host}, process {process})"})]
        events += [event("M", 0, name="process_sort_index", args={"sort_index": number})]
        events += [event("M", lane, name="thread_name", args={"name": name}) for lane, name in enumerate(threads, 1)]
        events += [span(0, self.doing, self.began, time.perf_counter_ns(), {"seconds": self.seconds_by_phase})]
        events += [
            span(1 + threads.index(phase.thread), phase.name, phase.began, phase.ended, {"detail": phase.detail})
            for phase in self._phases
        ]
        text = "".join(f"{json.dumps(item)},\n" for item in events)
        path = os.path.join(directory, f"trace-rank{number:05d}-{host}-{process}.json")
        try:
            os.makedirs(directory, exist_ok=True)
            with open(path, "ab", buffering=0) as file:
                file.write((("" if file.tell() else "[\n") + text).encode())
        except OSError as error:
            logger.warning("no trace is written to %s: %s", directory, error)


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
