"""Builds the engine's options from arguments and settings, and words its I/O statistics for reports."""

from __future__ import annotations

import os
from typing import Any

from .. import settings
from ..settings import DirectIO
from . import _C

_ACCESS = {"auto": "direct", "on": "direct", True: "direct only", "off": "buffered", False: "buffered"}

SLOT_BYTES = 8 << 20  #: one piece of I/O, and one slot of memory
#: Of the engine by default. Fewer than 4 leave a disk idle; 16 reach what the memory of a machine does.
_LEAST_THREADS, _MOST_THREADS = 4, 16
_NICENESS = 10  # how much the threads of asynchronous saves give way to training

#: Bytes that are read and not wanted where a request for what is behind them would cost more: what a connection moves
#: in the 20 ms or so that an object store takes to answer.
_REQUEST_GAP = 2 << 20


def direct_io_setting(argument: DirectIO) -> DirectIO:
    """The caller's `direct_io`; for "auto" that of the environment. Raises ValueError for other values."""
    if argument != "auto" and not isinstance(argument, bool):
        raise ValueError(f"direct_io: expected 'auto', True or False, got {argument!r}")
    if argument == "auto":
        return {"auto": "auto", "on": True, "off": False}[str(settings.lenient("direct_io"))]  # type: ignore[return-value]
    return argument


def threads_of(argument: int | None = None) -> int:
    """The caller's `thread_count`, the setting, or this rank's share of the cores that this process may run on."""
    if argument is None:
        cores, ranks = len(os.sched_getaffinity(0)), settings.ranks_of_this_node(1)
        is_shared = cores * ranks > (os.cpu_count() or cores)  # else each rank is bound to cores of its own
        share = cores // ranks if is_shared else cores
        return settings.number("threads") or min(max(share, _LEAST_THREADS), _MOST_THREADS)
    return argument


def batch_bytes() -> int:
    """Most memory of one batch of tensors that are copied, of which two are under way."""
    return settings.number("memory_bytes") // 2


def engine_options(
    threads: int | None,
    direct_io: DirectIO,
    in_background: bool = False,
    *,
    requests: bool = False,
    bytes_per_second: int = 0,
) -> _C.Options:
    """The engine's options for one save or load. `in_background`: training goes on meanwhile. `requests`: it reads from
    an object store, where each worker waits for a request of its own. `bytes_per_second`: most that a writer writes."""
    return _C.Options(
        threads=settings.number("object_store_requests") if requests and threads is None else threads_of(threads),
        read_gap=_REQUEST_GAP if requests else 0,
        slot_bytes=SLOT_BYTES,
        arena_bytes=settings.number("memory_bytes"),
        access=_ACCESS[direct_io],
        niceness=_NICENESS if in_background else 0,
        bytes_per_second=bytes_per_second,
    )


def used_paths(stats: dict[str, Any]) -> str:
    """The ways that the bytes took, in words: `direct 98 % (in place 97 %)`."""
    ways = {way: int(stats[f"{way}_bytes"]) for way in ("direct", "buffered")}
    total = sum(ways.values())
    if total == 0:
        return "nothing moved"
    text = ", ".join(f"{way} {100 * moved / total:.0f} %" for way, moved in ways.items() if moved)
    return f"{text} (in place {100 * int(stats['in_place_bytes']) / total:.0f} %)"
