"""Tells what a failed read says: that bytes are damaged or absent, or nothing. Reads damage in object stores twice."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import TypeVar

from .._engine import _C
from ..errors import CorruptCheckpointError, UntrustedCheckpointError
from . import urls

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

# By these a file system says that there is no such file, or nothing that could be a file of a checkpoint.
_OF_A_FILE_SYSTEM = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL)


def says_nothing(number: int | None, path: str) -> bool:
    """Whether a read of `path` that failed with this errno leaves open what is there. Of an object store only "there is
    no such object" is an answer: access denied, too many requests, no such bucket and no network are none."""
    if not number:  # the error is not of the system: bytes came, and are wrong
        return False
    return number != errno.ENOENT if urls.is_url(path) else number not in _OF_A_FILE_SYSTEM


def read_twice(path: str, read: Callable[[], Found]) -> Found:
    """What `read` returns. If that raises an error of damage, and `path` is in an object store, it is called again,
    with new connections: a bit may have changed on the way, or the object was replaced by a sound version of it."""
    try:
        return read()
    except (CorruptCheckpointError, UntrustedCheckpointError, _C.EngineError) as error:
        if not urls.is_url(path) or (isinstance(error, _C.EngineError) and error.kind not in ("corrupt", "invalid")):
            raise
        logger.warning("%s seems to be damaged, and is read again: %s", path, error)
    look_again(path)
    return read()


def look_again(path: str) -> None:
    """Makes the next reads below a path of an object store look at its objects anew, by new connections."""
    if urls.is_url(path):
        from .object_store import forget  # an extra, imported by those who need it

        forget(path)
