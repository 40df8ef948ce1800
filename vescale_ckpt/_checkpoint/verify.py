"""Checks a checkpoint of any format without loading it, for users and clean-ups."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

from .. import settings
from .._engine.gc import gc_paused
from .._storage.open_storage import checkpoint_path
from ..errors import CheckpointError, CorruptCheckpointError
from ..reports import VerifyReport
from ..settings import checked_flag, checked_path
from .damage import add_error
from .native.check_native import check_native
from .recognize import recognize

if TYPE_CHECKING:
    from .check_records import Progress


def verify(path: str | os.PathLike[str], *, quick: bool = False) -> VerifyReport:
    """Verifies the checkpoint at `path`, in this process alone, whatever the number of ranks that saved it.

    With `quick`, it verifies the metadata, and checks that each data file that the metadata names is a regular file and
    long enough for its records: it reads one small file, and calls `stat` once per data file. Without `quick`, it also
    compares every byte of every tensor and object with its checksums. It verifies the index, the checksum tables and
    the data descriptors as well, and lists damage in them as harmless. `unchecked` lists what has no checksum. At most
    `VESCALE_CKPT_MEMORY_BYTES` of data are in memory at a time.

    The report lists all damage; none is raised. A directory without a checkpoint counts as damaged. `unreadable` lists
    what the storage refuses to return, or does not return in time: it may be sound or damaged. In an object store,
    damaged data is read again over another connection before it is listed.

    A checkpoint of stock DCP is verified as far as it has checksums; `unverified_bytes` counts the remaining bytes. The
    same applies to safetensors files, one or a directory of them (`quick` checks their headers, which determine the
    lengths of the files), and to files of torch.save that `convert` accepts (`quick` reads their tables of contents).

    Raises:
        ValueError: `path` is no path, and no URL of an object store.
        CheckpointError: a file of torch.save cannot be verified: it contains objects that torch does not load with
            `weights_only=True`.
    """
    return verify_checkpoint(path, quick)


@gc_paused()
def verify_checkpoint(
    path: str | os.PathLike[str], quick: bool, progress: Progress | None = None, *, must_exist: bool = False
) -> VerifyReport:
    """Does the same. Calls `progress` with the bytes of tensors checked so far, and of all. `must_exist`: raises
    `CheckpointError` if there is no checkpoint, or it cannot be read."""
    where = checkpoint_path(checked_path("path", path))
    report = VerifyReport(where, checked_flag("quick", quick))
    settings.check()
    try:
        kind = recognize(where)
    except CheckpointError as error:
        if must_exist:
            raise
        add_error(report, error, where)
        return report
    if kind == "safetensors":
        _check_safetensors(where, report, progress)
    elif kind == "dcp" or kind is None:
        check_native(where, report, progress)
        if kind is None and must_exist:
            raise CheckpointError(report.reason, path=where)
    else:
        _check_torch_file(where, report, progress)
        return report
    if report.quick:
        report.unchecked.append("the data: only its length was checked")
    elif report.unverified_bytes:
        report.unchecked.append(f"{report.unverified_bytes:,} bytes that were written without checksums")
    return report


def _check_safetensors(path: str, report: VerifyReport, progress: Progress | None) -> None:
    from .check_records import check_records
    from .safetensors.headers import HeaderTables
    from .safetensors.safetensors_checkpoint import SafetensorsCheckpoint

    def add(error: CheckpointError) -> None:
        add_error(report, error, path)

    try:
        checkpoint = SafetensorsCheckpoint(path, HeaderTables.read(path, verify=True, on_error=add))
    except CheckpointError as error:
        add(error)
        return
    for fault in checkpoint.faults():
        add(fault)
    report.keys, report.files = len(checkpoint.tensors), len(checkpoint.file_names())
    if not report.quick:  # a sound header includes a sound length of the file
        check_records(checkpoint, {}, report, progress)


def _check_torch_file(path: str, report: VerifyReport, progress: Progress | None) -> None:
    from .open_checkpoint import open_checkpoint
    from .torch_checkpoint import TorchCheckpoint

    try:
        checkpoint = open_checkpoint(path)
    except CorruptCheckpointError as error:
        add_error(report, error, path)
        return
    assert isinstance(checkpoint, TorchCheckpoint)
    with closing(checkpoint):
        report.keys, report.files = len(checkpoint.tensors) + len(checkpoint.objects), 1
        if report.quick:
            report.unchecked.append("the data: only the file's table of contents was read")
            return
        total = sum(info.bytes for info in checkpoint.tensors.values())
        for key, info in checkpoint.tensors.items():
            try:
                checkpoint.check(key)
            except CheckpointError as error:
                add_error(report, error, path)
            report.bytes += info.bytes
            if progress is not None:
                progress(report.bytes, total)
