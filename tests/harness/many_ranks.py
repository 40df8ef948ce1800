"""Hundreds of ranks on one machine: forks that share a store, as a launcher hosts it, and no group of torch's own.

torch's gloo groups connect every rank with every other, which takes hundreds of ranks on two cores minutes.
vescale_ckpt makes its own connections, so the default group is one of torch's "fake" ones: it has a store, and sends
nothing. `torch.distributed` itself must not be used for messages in functions that run here.
"""

from __future__ import annotations

import ctypes
import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from harness.ranks import Pool

_STORE_TIMEOUT = timedelta(seconds=300)


@contextmanager
def many_ranks(size: int) -> Iterator[Pool]:
    """So many ranks, which end with the context. No two of them at a time, on all workers of pytest together."""
    with Path(tempfile.gettempdir(), "vescale_ckpt_many_ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with the process
        with _no_name_server():
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        pool = Pool(size, partial(_join, store.port))
        try:
            yield pool
        finally:
            pool.kill()


def _join(port: int, rank: int, size: int, directory: str) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  # makes the backend known

    with _no_name_server():
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_STORE_TIMEOUT)
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)


@contextmanager
def _no_name_server() -> Iterator[None]:
    """In it this thread knows no name server (`nscount` of glibc's `resolv.h`): its first look-up fails at once.

    torch looks up names of both ends of each connection to a store, only to log them, until the first failure in a
    process. The store's host does so while all clients wait. A name server that drops some questions of hundreds makes
    that minutes.
    """
    library = ctypes.CDLL(None)
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    library.__res_init()
    count = library.__res_state()
    before, count[4] = count[4], 0
    try:
        yield
    finally:
        count[4] = before
