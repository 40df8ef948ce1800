"""A folder that appears under its name when everything in it is durable, or not at all."""

from __future__ import annotations

import contextlib
import math
import os
import shutil

from .. import _C, engine, layout
from ..errors import CheckpointError
from ..whole_file import leftovers, temporary_name


class WholeFolder:
    """The folder `path` while it is filled beside itself, as `{path}.tmp.{pid}.{n}`.

    One rank makes it and ends it; `temporary` is where all put their files. What conversions that died have left of it
    is removed when the next one begins.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or path
        self.directory = os.path.dirname(self.path) or "."
        self.temporary = ""
        self._lock: layout.FileLock | None = None

    def make(self) -> None:
        layout.make_directory(self.directory)
        self._remove_leftovers()
        self.temporary = temporary_name(self.path)
        try:
            os.mkdir(self.temporary)
        except OSError as error:
            raise CheckpointError(
                f"cannot make {self.temporary}: {error}", path=self.path, errno=error.errno
            ) from error
        self._lock = layout.lock(self.temporary)

    def commit(self) -> None:
        """All files in it are complete and durable: gives it its name. What had it before is removed after that."""
        aside = ""
        try:
            with engine.named_errors(str, self.directory):
                _C.sync_directory(self.temporary)
                if os.path.lexists(self.path):
                    aside = temporary_name(self.path)
                    os.rename(self.path, aside)
                try:
                    os.rename(self.temporary, self.path)
                except OSError:
                    if aside:
                        os.rename(aside, self.path)
                    raise
                self.temporary = ""
                _C.sync_directory(self.directory)
        except OSError as error:
            raise CheckpointError(f"cannot give {self.path} its name: {error}", path=self.path) from error
        if os.path.islink(aside):  # what it leads to is somewhere else, and stays
            os.unlink(aside)
        elif aside:
            shutil.rmtree(aside, ignore_errors=True)

    def end(self) -> None:
        """Removes it unless it was committed."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Failures are no matter: a leftover does no harm. Without locks nobody knows what is one."""
        for found in leftovers(self.path):
            with contextlib.suppress(OSError), layout.abandoned(found, math.inf) as free:
                if free:
                    shutil.rmtree(found, ignore_errors=True)
