"""`DeltaBase` is the older checkpoint whose records a delta save may name. Only the coordinator opens it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterable

from .._checkpoint.native import delta_table
from .._checkpoint.native.delta_table import DeltaTable, Row
from .._checkpoint.native.file_names import LEASE_MARKER, METADATA_NAME
from .._checkpoint.native.metadata_file import has_metadata
from .._engine import _C
from .._storage.open_storage import storage_at
from .._storage.orphans import SAVE_GRACE
from .._storage.paths import InSibling, data_path, folder_above, in_sibling
from .._storage.storage import Lease, Storage
from ..errors import CheckpointError

logger = logging.getLogger(__name__)

MOST_FOLDERS = 8  #: older directories whose files a checkpoint may name
#: Of an older file so much must be in use. Of a file with less, the records are written again: it takes its space as
#: long as one record of it is named.
LEAST_SHARE = 0.25
#: Smaller records are always written: a file should not be kept for them.
LEAST_RECORD_BYTES = 4096


class DeltaBase:
    """The records of `base` that a save to `target` may name, and leases that keep their files until `release`.

    Raises `CheckpointError` if the two are not in one directory. Any other reason for which the base cannot be used is
    logged: `table` is empty then, and the save writes everything.
    """

    def __init__(self, base: str, target: str) -> None:
        self.table = DeltaTable(os.urandom(delta_table.SEED_BYTES), [], b"")
        self._target = target
        self._above, self._own = folder_above(target)
        self._leases: list[Lease] = []
        above, folder = folder_above(base)
        if above != self._above:
            raise CheckpointError(
                f"base={base} and {target} must be folders of the same directory: a checkpoint names the files of its "
                "base by a path relative to itself",
                path=base,
            )
        if folder == self._own and not has_metadata(target, None):
            return  # the first save of a chain
        try:
            self._open(folder)
        except (CheckpointError, _C.EngineError, OSError) as error:
            self.release()
            logger.warning("%s: all tensors are written, because the base cannot be used: %s", target, error)

    def release(self) -> None:
        """Ends the protection of the files. May be called again."""
        for lease in self._leases:
            lease.release()
        self._leases = []

    def check(self, names: Iterable[str]) -> None:
        """Call it before the commit. Raises `CheckpointError` if a file of another directory, of `names`, that the new
        checkpoint names is not there any more."""
        for name in names:
            if (file := in_sibling(name)) is not None and not _is_whole(data_path(self._target, name), 0):
                raise CheckpointError(
                    f"{data_path(self._target, name)}, which the base names, was removed during the save: nothing is "
                    "committed",
                    path=os.path.join(self._above, file.folder),
                )

    def _open(self, folder: str) -> None:
        storage = storage_at(os.path.join(self._above, folder))
        if not storage.has(METADATA_NAME):
            raise CheckpointError(f"{storage.path} holds no checkpoint", path=storage.path)
        if (lock := storage.share(METADATA_NAME)) is not None:
            self._leases.append(lock)
        with contextlib.ExitStack() as looks:  # each begins with the lease
            looks.enter_context(storage.look(lists=True, fresh=True))
            self._protect(storage, make=True)  # before the table is read: a remover that sees no lease relies on it
            table = delta_table.read(storage.path)
            places = [in_sibling(name) or InSibling(folder, name) for name in table.files]
            lost = set()
            for name in {place.folder for place in places} - {folder}:
                older = storage_at(os.path.join(self._above, name))
                looks.enter_context(older.look(lists=True, fresh=True))
                if not self._protect(older, make=False):
                    lost.add(name)
            rows = [row for row in table.rows() if row.file < len(places) and places[row.file].folder not in lost]
            rows = self._affordable(rows, places)
        self.table = DeltaTable.of(table.seed, [self._name(place) for place in places], rows)

    def _protect(self, storage: Storage, *, make: bool) -> bool:
        """Keeps the files of a directory from being removed. `make`: gives it the mark. Returns False if it has none:
        then its files are not kept for anybody."""
        lease = storage.lease(LEASE_MARKER, SAVE_GRACE, make=make)
        if lease is not None:
            self._leases.append(lease)
        return lease is not None

    def _affordable(self, rows: list[Row], places: list[InSibling]) -> list[Row]:
        """The rows whose files are there and in use to a fair share, in at most `MOST_FOLDERS` directories."""
        used, ends = Counter[int](), Counter[int]()
        for row in rows:
            used[row.file] += row.length
            ends[row.file] = max(ends[row.file], row.offset + row.length)
        fit = set()
        for file, end in ends.items():
            path = os.path.join(self._above, *places[file])
            if not _is_whole(path, end):
                logger.warning("%s: %s is missing or too short, so its tensors are written again", self._target, path)
            elif used[file] >= LEAST_SHARE * storage_at(path).stat().size:
                fit.add(file)
        of_folder = Counter[str]()
        for file in fit:
            of_folder[places[file].folder] += used[file]
        kept = {folder for folder, _ in of_folder.most_common(MOST_FOLDERS)}
        return [row for row in rows if row.file in fit and places[row.file].folder in kept]

    def _name(self, place: InSibling) -> str:
        """The name of a file in the metadata of the new checkpoint."""
        return place.file if place.folder == self._own else place.name


def _is_whole(path: str, end: int) -> bool:
    with contextlib.suppress(OSError):
        found = storage_at(path).stat()
        return found.is_file and found.size >= end
    return False
