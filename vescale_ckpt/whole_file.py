"""One large file that appears under its name when all of it is durable, or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from . import _C, engine, layout

Writer = TypeVar("Writer")

_TEMPORARY = re.compile(r"\.tmp\.\d+\.\d+")
_GRACE_SECONDS = 600.0  # after which a file that nobody has locked is left over, even where there are no locks to ask
_serial = itertools.count()


class WholeFile:
    """The file `path` while it is written beside itself, as `{path}.tmp.{pid}.{n}`. As a context: removed unless
    `commit` was reached.

    What saves that died have left of this file is removed when the next one begins.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.directory = os.path.dirname(path) or "."
        self.temporary = ""
        self._lock: layout.FileLock | None = None

    def create(self, make: Callable[[str], Writer]) -> Writer:
        """What `make` returns, given the name of a file that it creates. Marks that file as being written."""
        for found in leftovers(self.path):
            with contextlib.suppress(OSError), layout.abandoned(found, _GRACE_SECONDS) as free:
                if free:
                    os.unlink(found)
        for attempts_left in (2, 1, 0):
            self.temporary = temporary_name(self.path)
            made = make(self.temporary)
            try:
                self._lock = layout.lock(self.temporary)
                break
            except layout.TakenForLeftoverError:  # by another save's clean-up, between its making and its marking
                if not attempts_left:
                    raise
        return made

    def commit(self) -> None:
        """The file is complete and synced: gives it its name, durably."""
        with engine.named_errors(str, self.directory):
            _C.move_into_place(self.temporary, self.directory, self.path)
        self.temporary = ""

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.release()
        if self.temporary:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)


def temporary_name(path: str) -> str:
    """Of a file or folder while it is written beside the place that it will have."""
    return f"{path}.tmp.{os.getpid()}.{next(_serial)}"


def leftovers(path: str) -> Iterator[str]:
    """What has such a name, of this process or another. Ends where the directory cannot be read."""
    directory, name = os.path.dirname(path) or ".", os.path.basename(path)
    with contextlib.suppress(OSError):
        for found in os.listdir(directory):
            if found.startswith(name) and _TEMPORARY.fullmatch(found, len(name)):
                yield os.path.join(directory, found)
