"""A folder that appears under its name when everything in it is durable, or not at all, and takes the place of another.

Old and new folder change names in one step where the file system can (RENAME_EXCHANGE). Where it cannot the old one is
set aside first, so that for an instant nothing has the name: who is killed there leaves both, which `put_back` mends.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil

from .. import _C, engine, layout
from ..whole_file import leftovers, temporary_name

logger = logging.getLogger(__name__)

_ASIDE = ".old"  # between the folder's own name and what temporary names end in


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
        with engine.named_system_errors(self.directory):
            layout.make_name_durable(self.directory, holds_one=False)
            self._remove_leftovers()
            self.temporary = temporary_name(self.path)
            os.mkdir(self.temporary)
            self._lock = layout.lock(self.temporary)

    def commit(self) -> None:
        """All files in it are complete and durable: gives it its name. What had it before is removed after that."""
        with engine.named_system_errors(self.directory):
            _C.sync_directory(self.temporary)
            old = ""
            if not os.path.lexists(self.path):
                _C.rename_file(self.temporary, self.path)
            elif _C.exchange_names(self.temporary, self.path):
                old = self.temporary
            else:
                old = self._replace_in_two_steps()
            self.temporary = ""
            _C.sync_directory(self.directory)
        if os.path.islink(old):  # what it leads to is somewhere else, and stays
            with contextlib.suppress(OSError):
                os.unlink(old)
        elif old:
            shutil.rmtree(old, ignore_errors=True)

    def _replace_in_two_steps(self) -> str:
        """Returns what the old folder is called then."""
        aside = temporary_name(self.path + _ASIDE)
        # Not left over as long as this goes on.
        mark = None if os.path.islink(self.path) else layout.lock(self.path)
        try:
            _C.rename_file(self.path, aside)
            try:
                _C.sync_directory(self.directory)
                _C.rename_file(self.temporary, self.path)
            except _C.EngineError:
                _C.rename_file(aside, self.path)
                raise
        finally:
            if mark is not None:
                mark.release()
        return aside

    def end(self) -> None:
        """Removes it unless it was committed."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Failures are no matter: a leftover does no harm. Without locks nobody knows what is one."""
        found = list(leftovers(self.path))
        if os.path.lexists(self.path):  # else what was set aside is all that there is
            found += leftovers(self.path + _ASIDE)
        for path in found:
            with contextlib.suppress(OSError), layout.abandoned(path, math.inf) as free:
                if free and os.path.islink(path):
                    os.unlink(path)
                elif free:
                    shutil.rmtree(path, ignore_errors=True)


def put_back(path: str) -> None:
    """If somebody was killed between setting the folder `path` aside and giving its name to another: undoes that. Where
    the file system has no locks, nobody knows whether he was; then it goes back, too, and who lives raises."""
    path = path.rstrip("/") or path
    if os.path.lexists(path):
        return
    for aside in sorted(leftovers(path + _ASIDE)):
        with engine.named_system_errors(path), layout.abandoned(aside, 0.0) as free:
            if not free:
                continue
            _C.rename_file(aside, path)
            _C.sync_directory(os.path.dirname(path) or ".")
        logger.warning("%s was being replaced when the conversion died: what was there is back", path)
        return
