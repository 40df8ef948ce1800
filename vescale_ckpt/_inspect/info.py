"""Tells what a checkpoint of any format holds, from its metadata or headers alone, for `inspect`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

from .. import settings
from .._checkpoint.checkpoint import Checkpoint
from .._checkpoint.open_checkpoint import open_parts
from .._state.key_selection import Selection
from .._storage.open_storage import checkpoint_path, stat_of
from ..errors import CheckpointError
from ..reports import CheckpointInfo, StoredChunk, StoredObject, StoredTensor
from ..settings import checked_path

_MOST_VALUES = 200  # so many objects are read for their values
_MOST_BYTES = 8 << 10  # longer records are no short values
_MOST_ELEMENTS = 16
_SCALARS = (bool, int, float, str, type(None))


def inspect(path: str | os.PathLike[str], keys: str | Iterable[str] | None = None) -> CheckpointInfo:
    """What a checkpoint holds: one of DCP, of safetensors, or a file of torch.save.

    It reads metadata or headers, no tensor, and of a DCP checkpoint the first 200 objects, for the values of numbers,
    texts and short lists. It runs no code of the checkpoint. A file of torch.save is one pickle, which is loaded with
    `weights_only=True`, without its tensors. Where each rank has saved for itself, the parts of all ranks are put
    together.

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
            where, first.format, first.writer, first.save_id, {}, {}, dict(first.aliases), {}, first.is_node_part,
            first.saved_by,
        )  # fmt: skip
        _add(first, info, selection)
    for part in others:
        with closing(part):
            _add(part, info, selection)
    if others and info.saved_by is not None:  # each rank has saved for itself
        info = replace(info, saved_by=replace(info.saved_by, ranks=1 + len(others)))
    selection.check([*info.tensors, *info.objects, *info.aliases])
    for found in (info.tensors, info.objects, info.aliases):
        for key in [key for key in found if key not in selection]:
            del found[key]
    return info


def _add(part: Checkpoint, info: CheckpointInfo, selection: Selection) -> None:
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
    asked = [key for key in part.objects if key in selection][: max(0, _MOST_VALUES - len(info.objects))]
    values = _values(part, [key for key in asked if 0 < part.objects[key].bytes <= _MOST_BYTES])
    for key, chunk in part.objects.items():
        value = values.get(key)
        plain = value if _is_plain(value) else None
        info.objects[key] = StoredObject(chunk.file, chunk.offset, chunk.bytes, plain)
    for name in part.file_names():
        info.files.setdefault(name, _length(os.path.join(part.root, name)))


def _values(part: Checkpoint, keys: list[str]) -> dict[str, Any]:
    """The values of objects, without those that are damaged or take code to load."""
    try:
        return part.load_objects(keys)
    except CheckpointError:  # of one of them
        each = [_values(part, [key]) for key in keys] if len(keys) > 1 else []
        return {key: value for found in each for key, value in found.items()}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return len(value) <= _MOST_ELEMENTS and all(type(item) in _SCALARS for item in value)
    if type(value) is dict:
        return _is_plain(list(value.values())) and all(type(key) is str for key in value)
    return type(value) in _SCALARS


def _length(path: str) -> int:
    try:
        return stat_of(path).size
    except OSError:
        return -1
