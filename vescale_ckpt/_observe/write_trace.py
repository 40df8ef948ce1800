"""Writes the phases of saves and loads to files of Chrome's trace format in the directory `VESCALE_CKPT_TRACE`.

The file of a process is an array of events without its closing bracket, which viewers accept: each save and load
appends to it, so it can be read after a process was killed.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from .phase_times import PhaseTimes

logger = logging.getLogger(__name__)


class Span(NamedTuple):
    """A phase. Nanoseconds of `time.perf_counter_ns`."""

    name: str
    detail: str
    thread: str
    begin: int
    end: int


def append(directory: str, times: PhaseTimes, kind: str, spans: Sequence[Span]) -> None:
    """Appends a save or load that is over, and its phases. A save does not fail for its trace."""
    rank = os.environ.get("RANK", "")
    number = int(rank) if rank.isdecimal() else times.rank
    host, process = socket.gethostname(), os.getpid()
    threads = list(dict.fromkeys(span.thread for span in spans))
    # The system's clock minus that of the spans: files of several machines have one time.
    offset = time.time_ns() - time.perf_counter_ns()

    def event(form: str, thread: int, **fields: Any) -> dict[str, Any]:
        return {"ph": form, "pid": number, "tid": thread, **fields}

    def span(thread: int, name: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
        args = {"id": times.began, **args}
        return event("X", thread, name=name, cat=kind, ts=(begin + offset) / 1000, dur=(end - begin) / 1000, args=args)

    events = [event("M", 0, name="process_name", args={"name": f"rank {number} ({host}, process {process})"})]
    events += [event("M", 0, name="process_sort_index", args={"sort_index": number})]
    events += [event("M", lane, name="thread_name", args={"name": name}) for lane, name in enumerate(threads, 1)]
    events += [span(0, times.doing, times.began, time.perf_counter_ns(), {"seconds": times.seconds_by_phase})]
    events += [
        span(1 + threads.index(thread), name, begin, end, {"detail": detail})
        for name, detail, thread, begin, end in spans
    ]
    text = "".join(f"{json.dumps(item)},\n" for item in events)
    path = os.path.join(directory, f"trace-rank{number:05d}-{host}-{process}.json")
    try:
        os.makedirs(directory, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            file.write((("" if file.tell() else "[\n") + text).encode())
    except OSError as error:
        logger.warning("no trace is written to %s: %s", directory, error)
