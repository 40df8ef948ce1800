"""Tells what a checkpoint of any format holds, from its metadata or headers alone, for `inspect`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing

from .. import settings
from .._checkpoint.checkpoint import Checkpoint
from .._checkpoint.open_checkpoint import open_parts
from .._state.key_selection import Selection
from .._storage.open_storage import checkpoint_path, stat_of
from .._storage.paths import data_path
from ..reports import CheckpointInfo, StoredChunk, StoredObject, StoredTensor
from ..settings import checked_path


def inspect(path: str | os.PathLike[str], keys: str | Iterable[str] | None = None) -> CheckpointInfo:
    """What a checkpoint holds: one of DCP, of safetensors, a file of torch.save, an `.npz` or a folder of `.npy`.

    It reads metadata or headers, no tensor, and unpickles no object of a DCP checkpoint. A file of torch.save is one
    pickle, which is loaded with `weights_only=True`, without its tensors. Where each rank has saved for itself, the
    parts of all ranks are put together.

    Args:
        keys: only these: names, prefixes up to a dot, or `fnmatch` patterns; with `!` before it, all but these.

    Raises `CheckpointError` if there is no checkpoint, `CorruptCheckpointError`, `UntrustedCheckpointError`, and
    `MissingKeysError` for `keys` that match nothing.
    """
    settings.check()
    where = checkpoint_path(checked_path("path", path))
    selection = Selection(keys)
    first, *others = open_parts(where)
    with closing(first):
        info = CheckpointInfo(
            where, first.format, first.writer, first.save_id, {}, {}, dict(first.aliases), {}, first.is_node_part
        )
        _add(first, info)
    for part in others:
        with closing(part):
            _add(part, info)
    selection.check([*info.tensors, *info.objects, *info.aliases])
    for found in (info.tensors, info.objects, info.aliases):
        for key in [key for key in found if key not in selection]:
            del found[key]
    return info


def _add(part: Checkpoint, info: CheckpointInfo) -> None:
    part.check_malformed()
    for key, tensor in part.tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        stored = info.tensors.setdefault(key, StoredTensor(tensor.shape, dtype, tensor.bytes, []))
        known = {chunk.offsets for chunk in stored.chunks}  # replicas that ranks have saved for themselves
        stored.chunks.extend(
            StoredChunk(chunk.offsets, chunk.sizes, chunk.file, chunk.offset, chunk.bytes)
            for chunk in tensor.chunks
            if chunk.offsets not in known
        )
    for key, chunk in part.objects.items():
        info.objects[key] = StoredObject(chunk.file, chunk.offset, chunk.bytes)
    for name in part.file_names():
        info.files.setdefault(name, _length(data_path(part.root, name)))


def _length(path: str) -> int:
    try:
        return stat_of(path).size
    except OSError:
        return -1
