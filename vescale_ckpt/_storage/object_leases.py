"""Leases in place of locks: a save leases a folder while it may reference its files; a remover backs off while a lease
exists.

A save writes a small object, its lease, and then looks for notices of removers. A remover writes a notice, and then
looks for leases. A store shows an object to all readers as soon as it is written. So of a save and a remover at least
one sees the other: the save waits until the notice is gone, and the remover leaves the files. Leases and notices of
processes that died expire after a day.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator

from ..errors import CheckpointError
from .storage import Storage

logger = logging.getLogger(__name__)

_LEASE, _REMOVER = ".user.", ".remover."  # they stand between the marker file's name and a random ending
_REMOVAL_SECONDS = 10.0  # waits so long for removers, which need some requests
_POLL_SECONDS = 0.2


class ObjectLease:
    """The lease of a save, until it is released."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name

    def release(self) -> None:
        """May be called again."""
        with contextlib.suppress(OSError):  # a lease that stays expires after a day
            self._storage.remove(self._name)


def lease(storage: Storage, marker: str, grace_seconds: float, *, make: bool) -> ObjectLease | None:
    """Leases the files of the folder, and waits for those who are removing some. Without the marker file, makes it, or
    returns None. Raises `CheckpointError` if that takes too long, and OSError."""
    name = marker + _LEASE + secrets.token_hex(8)
    storage.write(name, b"")
    made = ObjectLease(storage, name)
    deadline = time.monotonic() + _REMOVAL_SECONDS
    try:
        while True:
            with storage.look(lists=True, fresh=True):  # what was known before the lease does not count
                is_free, is_marked = not _is_any(storage, marker + _REMOVER, grace_seconds), storage.has(marker)
            if is_free:
                break
            if time.monotonic() > deadline:
                raise CheckpointError(f"{storage.path} is being cleaned up by another process", path=storage.path)
            time.sleep(_POLL_SECONDS)
        if not is_marked and make:
            storage.write(marker, b"")
    except BaseException:
        made.release()
        raise
    if is_marked or make:
        return made
    made.release()
    return None


@contextlib.contextmanager
def removing(storage: Storage, marker: str, grace_seconds: float) -> Iterator[bool]:
    """A context that gives whether nobody has leased files of the folder. New leases wait until it ends. Raises
    OSError."""
    name = marker + _REMOVER + secrets.token_hex(8)
    storage.write(name, b"")
    try:
        with storage.look(lists=True, fresh=True):  # what was known before the notice does not count
            yield not _is_any(storage, marker + _LEASE, grace_seconds)
    finally:
        with contextlib.suppress(OSError):
            storage.remove(name)


def _is_any(storage: Storage, beginning: str, grace_seconds: float) -> bool:
    """Whether there is an object whose name begins so. Removes such objects of processes that died."""
    found = False
    for name in storage.names():
        if not name.startswith(beginning):
            continue
        try:
            written = storage.stat(name).modified_ns
        except FileNotFoundError:  # it was released meanwhile
            continue
        if storage.age(written, grace_seconds) < grace_seconds:
            found = True
            continue
        with contextlib.suppress(OSError, CheckpointError):
            storage.remove(name)
            logger.info("removed %s/%s, of a process that died", storage.path, name)
    return found
