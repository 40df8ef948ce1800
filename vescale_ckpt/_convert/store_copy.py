"""Copies a checkpoint to an object store, for `vescale-ckpt copy` and for the uploads of a manager."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from .._checkpoint.check_records import Progress
from .._checkpoint.native.commit_metadata import remove_leftovers
from .._checkpoint.native.file_names import DELTA_NAME, INDEX_NAME, METADATA_NAME
from .._checkpoint.native.named_files import named_files
from .._engine import _C
from .._engine.errors import named_system_errors
from .._storage.open_storage import stat_of, storage_at
from .._storage.paths import data_path
from .._storage.storage import Storage
from ..errors import CheckpointError, CorruptCheckpointError
from .copied_files import (
    SelfContained,
    completes,
    exists,
    files_of_checkpoint,
    metadata_files,
    name_in_copy,
    names_to_copy,
)
from .transfer import CopyReport, Transfer


class StoreCopy:
    """A copy to an object store: data files under their own names, and last the file that makes them a checkpoint. What
    a copy that died has sent of the same checkpoint is not sent again.

    Args:
        bytes_per_second: most that it sends; 0: no limit.
        read_back: whether data files are read again and compared, before the copy counts.
    """

    def __init__(
        self,
        source: str,
        path: str,
        overwrite: bool,
        report: CopyReport,
        progress: Progress | None,
        *,
        bytes_per_second: int = 0,
        read_back: bool = True,
    ) -> None:
        self._source = source
        self._path = path
        self._overwrite = overwrite
        self._report = report
        self._progress = progress
        self._bytes_per_second = bytes_per_second
        self._read_back = read_back
        self._cancelled = False

    def cancel(self) -> None:
        """Ends `run` soon, from any thread. What was sent stays for the next copy."""
        self._cancelled = True

    def run(self) -> None:
        report, source, storage = self._report, storage_at(self._source), storage_at(self._path)
        if not self._overwrite:
            storage.check_exclusive_commits()
        metadata = metadata_files(self._source)  # before they are read
        of_checkpoint = files_of_checkpoint(self._source)
        names, report.left_out = names_to_copy(self._source, of_checkpoint)
        made = SelfContained.of(self._source, of_checkpoint)  # in place of files of the source
        if made is not None:
            names = [name for name in names if name not in (INDEX_NAME, DELTA_NAME)]
        last = [name for name in names if completes(name)]
        superseded, sent = self._sent_before(storage, last, set(map(name_in_copy, of_checkpoint)))
        sizes = {name: stat_of(data_path(self._source, name)).size for name in names}
        total = (1 + self._read_back) * sum(sizes.values())
        transfer = Transfer(total, self._progress, self._bytes_per_second, self._check)
        for name in (name for name in names if name not in last):
            self._check()
            url, size = os.path.join(self._path, name_in_copy(name)), sizes[name]
            if name_in_copy(name) in sent and stat_of(url).size == size and not self._read_back:
                report.resumed_files, report.resumed_bytes = report.resumed_files + 1, report.resumed_bytes + size
                transfer.moved(size)
                continue
            _, crc = transfer.copy(data_path(self._source, name), self._path, partial(_made_at, url))
            report.files, report.bytes = report.files + 1, report.bytes + size
            if self._read_back and transfer.crc_of(url, size) != crc:
                raise CorruptCheckpointError(f"{url} cannot be read back as it was written", key=None, file=url)
        contents_of_last = [(name, source.read(name)) for name in last]
        if made is not None:
            others = [entry for entry in contents_of_last if entry[0] != METADATA_NAME]
            contents_of_last = [*others, (DELTA_NAME, made.delta), (METADATA_NAME, made.metadata)]
        if metadata_files(self._source) != metadata:
            raise CheckpointError(f"{self._source} was saved to while it was copied", path=self._source)
        for name, content in contents_of_last:
            storage.commit(name, content, self._overwrite)
            report.files, report.bytes = report.files + 1, report.bytes + len(content)
        if superseded:
            remove_leftovers(self._path, superseded)

    def _sent_before(self, storage: Storage, last: list[str], of_checkpoint: set[str]) -> tuple[set[str], set[str]]:
        """The data files of the checkpoint that is there, which this one replaces; and what a copy of this one has
        sent. Raises `CheckpointError` if the copy must not be made."""
        try:
            there = set(storage.names())
        except FileNotFoundError:
            return set(), set()
        if not any(map(completes, there)) and last:
            return set(), there
        if not self._overwrite:
            raise exists(self._path)
        if both := sorted(there & of_checkpoint):  # while they are written, the old checkpoint would be a mixture
            raise CheckpointError(
                f"{self._path} holds {both[0]} already, which the copy would write, and is not replaced: remove it "
                "first",
                path=self._path,
            )
        return named_files(self._path, None), set()

    def _check(self) -> None:
        if self._cancelled:
            raise CheckpointError(f"copying {self._source} to {self._path} was stopped", path=self._path)


def _made_at(url: str, make: Callable[[str], _C.FileWriter]) -> _C.FileWriter:
    return make(url)


def upload(source: str, url: str, bytes_per_second: int) -> tuple[Callable[[], CopyReport], Callable[[], None]]:
    """Two functions: one copies a checkpoint of a local folder to an object store, within a rate; one ends that soon,
    from another thread. A checkpoint that is there already is replaced."""
    report = CopyReport(url)
    copying = StoreCopy(source, url, True, report, None, bytes_per_second=bytes_per_second, read_back=False)

    def run() -> CopyReport:
        with named_system_errors(url):
            copying.run()
        return report

    return run, copying.cancel
