"""Writes what this process did, and when, to a file of Chrome's trace format in the directory `VESCALE_CKPT_TRACE`.

The file is an array of events without its closing bracket, which viewers accept: each save and load appends to it, so
it can be read after a process was killed. `vescale-ckpt trace` merges the files of all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from typing import Any

from .. import settings
from .._engine import _C

logger = logging.getLogger(__name__)

_ENGINE_LANES = 100  # number of the first thread of the engine in the trace


class TraceFile:
    """The file of one process. Thread-safe."""

    def __init__(self, directory: str, rank: int) -> None:
        os.makedirs(directory, exist_ok=True)
        host = socket.gethostname()
        self.path = os.path.join(directory, f"trace-rank{rank:05d}-{host}-{os.getpid()}.json")
        self._rank = rank
        # Of the system's clock minus that of the spans: files of several machines have one time.
        self._offset = time.time_ns() - time.perf_counter_ns()
        self._lock = threading.Lock()
        self._lanes: dict[str, int] = {}
        self._named: set[int] = set()
        self._events: list[dict[str, Any]] = []
        self._begun = False
        self._failed = False
        self._event("M", 0, name="process_name", args={"name": f"rank {rank} ({host}, process {os.getpid()})"})
        self._event("M", 0, name="process_sort_index", args={"sort_index": rank})
        _C.enable_trace(True)

    def add(self, kind: str, name: str, detail: str, thread: str, begin: int, end: int) -> None:
        """A phase, in nanoseconds of the clock `time.perf_counter_ns`."""
        with self._lock:
            lane = self._lanes.setdefault(thread, len(self._lanes))
            self._span(lane, thread, kind, name, begin, end, {"detail": detail} if detail else {})

    def write(self) -> None:
        """Appends to the file what was added, and what the engine's threads did."""
        spans, dropped = _C.take_trace()
        with self._lock:
            for name, lane, begin, end, count in spans:
                self._span(_ENGINE_LANES + lane, f"engine {lane}", "engine", name, begin, end, {"bytes": count})
            if dropped:
                logger.warning(
                    "the trace lacks %d steps of the engine's threads: too many for one save or load", dropped
                )
            events, self._events = self._events, []
            try:
                with open(self.path, "a") as file:
                    file.write(("" if self._begun else "[\n") + "".join(f"{json.dumps(event)},\n" for event in events))
                self._begun = True
            except OSError as error:  # a save does not fail for its trace
                if not self._failed:
                    logger.warning("the trace is not complete: %s", error)
                self._failed = True

    def _span(
        self, lane: int, name_of_lane: str, kind: str, name: str, begin: int, end: int, args: dict[str, Any]
    ) -> None:
        if lane not in self._named:
            self._named.add(lane)
            self._event("M", lane, name="thread_name", args={"name": name_of_lane})
            self._event("M", lane, name="thread_sort_index", args={"sort_index": lane})
        self._event(
            "X", lane, name=name, cat=kind, ts=(begin + self._offset) / 1000, dur=(end - begin) / 1000, args=args
        )

    def _event(self, form: str, lane: int, **fields: Any) -> None:
        self._events.append({"ph": form, "pid": self._rank, "tid": lane, **fields})


_files: dict[tuple[str, int, int], TraceFile | None] = {}
_lock = threading.Lock()


def sink(rank: int) -> TraceFile | None:
    """The file of this process for the trace that is wanted now. None if none is wanted, or it cannot be made."""
    directory = str(settings.lenient("trace"))
    if not directory:
        return None
    rank = int(os.environ.get("RANK", rank)) if os.environ.get("RANK", "0").isdecimal() else rank
    key = directory, rank, os.getpid()
    with _lock:
        if key not in _files:
            try:
                _files[key] = TraceFile(directory, rank)
            except OSError as error:
                logger.warning("no trace is written to %s: %s", directory, error)
                _files[key] = None
        return _files[key]
