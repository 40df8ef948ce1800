"""Fills a pending folder over several processes, for copies: the next one goes on where one was killed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from .._engine import _C
from . import locks, orphans
from .open_storage import storage_at
from .orphans import Orphan
from .pending import PendingFolder, temporary_name, temporary_ones

JOURNAL_NAME = ".copy.journal"  #: in the folder until the commit: a line of JSON for each complete file
_MOST_JOURNAL_BYTES = 1 << 30


class ResumableFolder(PendingFolder):
    """A pending folder with a journal of its complete files. If its process dies, the next one that makes a resumable
    folder for the same path takes it over. Where the file system has no locks, none is taken over."""

    def make(self) -> None:
        """Takes over the folder of a process that died, or makes one."""
        super().make()
        others = (path for path in temporary_ones(self.path) if path != self.temporary and is_unfinished(path))
        orphans.remove(Orphan([path], path, orphans.NEVER, are_folders=True) for path in others)

    def _orphans(self) -> Iterator[str]:
        return (path for path in super()._orphans() if not is_unfinished(path))

    def _make(self) -> tuple[str, None]:
        temporary = temporary_name(self.path)
        for found in filter(is_unfinished, temporary_ones(self.path)):
            with contextlib.suppress(OSError, _C.EngineError), locks.abandoned(found, orphans.NEVER) as free:
                if free:
                    _C.rename_file(found, temporary)
                    return temporary, None
        os.mkdir(temporary)
        storage_at(temporary).leave_mark(JOURNAL_NAME)
        return temporary, None

    def journal(self) -> list[Any]:
        """What was noted, without a last line that a kill has cut."""
        _, content = storage_at(self.temporary).read_range(JOURNAL_NAME, 0, _MOST_JOURNAL_BYTES)
        entries = []
        for line in content.split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):
                entries.append(json.loads(line))
        return entries

    def note(self, entry: Any) -> None:
        """Adds a line. What it tells of must be durable."""
        with open(os.path.join(self.temporary, JOURNAL_NAME), "ab") as file:
            file.write(b"\n" + json.dumps(entry).encode() + b"\n")  # begins a line also behind one that was cut

    def commit(self) -> None:
        storage_at(self.temporary).remove(JOURNAL_NAME)
        super().commit()

    def leave(self) -> None:
        """Leaves the folder to the next process."""
        self.committed()
        self.discard()


def is_unfinished(path: str) -> bool:
    """Whether a folder is what a copy has left, or is being filled by one."""
    return storage_at(path).has(JOURNAL_NAME)
