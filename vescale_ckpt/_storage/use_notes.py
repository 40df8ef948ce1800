"""Keeps those who use the files of a folder in an object store, which has no locks, apart from those who remove them.

A user writes a small object, a note, and then looks for notes of removers. A remover writes a note, and then looks for
notes of users. Stores show what was written to all who look later. So of two at least one sees the other: a user waits
until the remover has gone, and a remover lets the files be. Notes older than a day are of processes that died.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from .clock import seconds_since

if TYPE_CHECKING:
    from .directory import Directory

logger = logging.getLogger(__name__)

_USER, _REMOVER = ".user.", ".remover."  # between the mark's name and a random ending
_REMOVAL_SECONDS = 10.0  # to wait for removers, which need some requests
_POLL_SECONDS = 0.2


class UseNote:
    """The note of a user, until it is released."""

    def __init__(self, directory: Directory, name: str) -> None:
        self._directory = directory
        self._name = name

    def release(self) -> None:
        """May be called again."""
        with contextlib.suppress(OSError):  # it counts for a day at most
            self._directory.remove(self._name)


def use(directory: Directory, mark: str, grace_seconds: float) -> UseNote | None:
    """Notes that files of the directory are in use, and waits for those who are removing some. None if that takes too
    long. Raises OSError."""
    name = mark + _USER + secrets.token_hex(8)
    directory.write(name, b"")
    note = UseNote(directory, name)
    deadline = time.monotonic() + _REMOVAL_SECONDS
    try:
        while _has_notes(directory, mark + _REMOVER, grace_seconds):
            if time.monotonic() > deadline:
                note.release()
                return None
            time.sleep(_POLL_SECONDS)
    except BaseException:
        note.release()
        raise
    return note


@contextlib.contextmanager
def removing(directory: Directory, mark: str, grace_seconds: float) -> Iterator[bool]:
    """A context that gives whether nobody uses files of the directory; nobody begins to while it lasts. Raises
    OSError."""
    name = mark + _REMOVER + secrets.token_hex(8)
    directory.write(name, b"")
    try:
        yield not _has_notes(directory, mark + _USER, grace_seconds)
    finally:
        with contextlib.suppress(OSError):
            directory.remove(name)


def _has_notes(directory: Directory, beginning: str, grace_seconds: float) -> bool:
    """Whether there are notes of that kind. Removes those of processes that died."""
    found = False
    for name in directory.names():
        if not name.startswith(beginning):
            continue
        try:
            written = directory.stat(name).modified_ns / 1e9
        except FileNotFoundError:  # it was released meanwhile
            continue
        if seconds_since(written, directory.path, grace_seconds) < grace_seconds:
            found = True
            continue
        with contextlib.suppress(OSError, CheckpointError):
            directory.remove(name)
            logger.info("removed %s/%s, of a process that died", directory.path, name)
    return found
