"""`verify`: checks a checkpoint of any format."""

from __future__ import annotations

import os
from contextlib import closing

import torch

from .._checkpoint.native import metadata_file
from .._engine.errors import named_system_errors
from .._read import contents
from .._read.check_records import Progress, add_error, as_damage
from .._read.verify import verify_checkpoint
from .._storage.file_kinds import kind_of_file
from .._storage.open_storage import checkpoint_path, is_folder, storage_at
from ..errors import CheckpointError, CorruptCheckpointError
from ..reports import VerifyReport
from ..settings import checked_flag, checked_path
from .formats import open_source
from .plan import cut
from .source import Read

_PIECE_BYTES = 64 << 20  # read at once
_NUMPY = "npy"  # the format without checksums


def verify(path: str | os.PathLike[str], *, quick: bool = False) -> VerifyReport:
    """Checks the checkpoint in the directory `path`, in this process alone, however many ranks have saved it.

    With `quick` it checks that the metadata is sound, and that each data file that the metadata names is a regular file
    and long enough for its records. It reads one small file, and calls `stat` once for each data file. Without `quick`
    it also checks every byte of every tensor and object against its checksums; and the index, the tables of checksums
    and the data descriptors, whose damage is listed as harmless. `unchecked` lists what has no checksum. At most
    `VESCALE_CKPT_ARENA_BYTES` of data are in memory at a time.

    All damage is listed, none is raised; a directory without a checkpoint counts as damaged. What the storage refuses
    to give, or does not give in time, is listed as `unreadable`: it is neither sound nor damaged. In an object store,
    damage is read again by another connection before it is listed.

    A checkpoint of stock DCP is verified as far as it has checksums: `unverified_bytes` counts the rest. So are
    safetensors files, one or a directory of them; of these `quick` checks headers, which give the lengths of the files.
    So are files of torch.save and numpy, which `convert` takes; of these `quick` reads the tables of contents. Those of
    .npy have no checksums.

    Raises ValueError for a URL that is no `file://`, and `CheckpointError` for a file of torch.save that cannot be
    verified: of torch before 1.6, or with objects that torch does not load with `weights_only=True`.
    """
    where = checkpoint_path(checked_path("path", path))
    checked_flag("quick", quick)
    try:
        raw = _is_raw(where)
    except (OSError, CheckpointError):  # which the other one lists
        raw = False
    return _verify_raw(where, quick, None) if raw else verify_checkpoint(where, quick=quick)


def verify_any(path: str | os.PathLike[str], quick: bool, progress: Progress | None = None) -> VerifyReport:
    """The same, but it raises `CheckpointError` if a directory holds no checkpoint, or a file cannot be read.
    `progress` is called with the bytes of tensors checked so far, and of all."""
    where = checkpoint_path(path)
    with named_system_errors(where):
        raw = _is_raw(where)
    if raw:
        return _verify_raw(where, quick, progress)
    if is_folder(where) and not (metadata_file.metadata_ranks(where) or contents.is_safetensors(where)):
        raise CheckpointError(verify_checkpoint(where, quick=quick).reason, path=where)
    return verify_checkpoint(where, quick=quick, progress=progress)


def _is_raw(path: str) -> bool:
    """Whether `path` is of torch.save or numpy. Raises OSError and `CheckpointError` if it cannot be looked at."""
    if not is_folder(path):
        return kind_of_file(path) != "other"
    if metadata_file.metadata_ranks(path) or contents.is_safetensors(path):
        return False
    return any(name.endswith(".npy") for name in storage_at(path).names())


def _verify_raw(path: str, quick: bool, progress: Progress | None) -> VerifyReport:
    report = VerifyReport(path, quick)
    try:
        source = open_source(path)
    except CorruptCheckpointError as error:
        report.damaged.append(as_damage(error, path))
        return report
    with closing(source):
        report.keys = len(source.tensors) + len(source.object_names)
        report.files = len({source.location(key)[0] for key in source.tensors}) or 1
        if quick:
            report.unchecked.append("the data: only what the files say that they hold")
            return report
        total = sum(info.bytes for info in source.tensors.values())
        for key, info in source.tensors.items():
            try:
                for offsets, sizes in cut(info.shape, max(1, _PIECE_BYTES // info.dtype.itemsize)):
                    source.read([Read(key, offsets, torch.empty(sizes, dtype=info.dtype, device="cpu"))])
            except CheckpointError as error:
                add_error(report, error, path)
            report.bytes += info.bytes
            if progress is not None:
                progress(report.bytes, total)
        if source.format == _NUMPY:
            report.unverified_bytes = report.bytes
            report.unchecked.append(f"{report.bytes:,} bytes: files of .npy have no checksums")
    return report
