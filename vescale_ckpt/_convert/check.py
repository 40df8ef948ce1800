"""Verifies a checkpoint of any format, for the commands `verify` and `copy`."""

from __future__ import annotations

import os
from contextlib import closing

import torch

from .._engine.errors import named_system_errors
from .._native import metadata_file
from .._read import contents
from .._read.check_records import Progress, add_error, as_damage
from .._read.verify import verify_with_progress
from .._storage.directory import checkpoint_path, directory_at, is_folder
from .._storage.file_kinds import kind_of_file
from ..errors import CheckpointError, CorruptCheckpointError
from ..reports import VerifyReport
from .formats import open_source
from .plan import cut
from .source import Read

_PIECE_BYTES = 64 << 20  # read at once
_NUMPY = "npy"  # the format without checksums


def verify_any(path: str | os.PathLike[str], quick: bool, progress: Progress | None = None) -> VerifyReport:
    """What `verify` reports, also of files of torch.save and numpy. Of these `quick` reads the tables of contents only.

    Raises `CheckpointError` if a file is of no known format or a directory holds no checkpoint, and FileNotFoundError.
    """
    where = checkpoint_path(path)
    if is_folder(where):
        of_tensors = bool(metadata_file.metadata_ranks(where)) or contents.is_safetensors(where)
        raw = not of_tensors and any(name.endswith(".npy") for name in directory_at(where).names())
        if not (of_tensors or raw):
            raise CheckpointError(verify_with_progress(where, quick, None).reason, path=where)
    else:
        with named_system_errors(where):
            raw = kind_of_file(where) != "other"
    return _verify_raw(where, quick, progress) if raw else verify_with_progress(where, quick, progress)


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
