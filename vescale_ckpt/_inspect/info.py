"""Tells what a checkpoint of any format holds, from its metadata or headers alone, for `inspect`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from .. import settings
from .._checkpoint.checkpoint import Checkpoint
from .._checkpoint.open_checkpoint import open_parts
from .._engine import _C
from .._fingerprint.fingerprint import KEY as FINGERPRINT_KEY
from .._fingerprint.fingerprint import Fingerprint
from .._state import objects
from .._state.key_selection import Selection
from .._storage.open_storage import checkpoint_path, stat_of, storage_at
from ..errors import CorruptCheckpointError
from ..reports import CheckpointInfo, StoredChunk, StoredObject, StoredTensor
from ..settings import checked_path

_MOST_VALUES = 200  # a listing reads the values of so many objects
_MOST_REQUESTED = 20  # of so many in an object store, where each is a request
_MOST_BYTES = 8 << 10  # longer records are no short values
_MOST_ELEMENTS = 16
_SCALARS = (bool, int, float, str, type(None))


def inspect(path: str | os.PathLike[str], keys: str | Iterable[str] | None = None) -> CheckpointInfo:
    """Returns the contents of a checkpoint: a DCP directory, safetensors files, or a file of torch.save.

    Reads metadata or headers, but no tensors. From a DCP checkpoint it also reads the first 200 objects (20 in an
    object store), to show numbers, strings and short lists. It runs no code of the checkpoint. A file of torch.save is
    one pickle, which is loaded with `weights_only=True`, without its tensors. If ranks saved without collectives, the
    parts of all ranks are merged.

    Args:
        path: the checkpoint's directory or file.
        keys: names, prefixes up to a dot, or `fnmatch` patterns to select; entries that start with `!` exclude. None:
            all keys.

    Raises:
        CheckpointError: there is no checkpoint.
        CorruptCheckpointError, UntrustedCheckpointError: the metadata is damaged or unsafe.
        MissingKeysError: `keys` matches nothing.
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
    with suppress(Exception):  # `verify` reports damage, and stores that do not answer
        if (kept := read_fingerprint(first)) is not None:
            info = replace(info, fingerprint=str(kept))
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
    most = _MOST_REQUESTED if storage_at(part.root).by_requests else _MOST_VALUES
    for key, chunk in part.objects.items():
        has_value = part.format == "dcp" and key in selection and len(info.objects) < most
        value = _plain_value(part, key) if has_value else None
        info.objects[key] = StoredObject(chunk.file, chunk.offset, chunk.bytes, value)
    for name in part.file_names():
        info.files.setdefault(name, _length(os.path.join(part.root, name)))


def _length(path: str) -> int:
    try:
        return stat_of(path).size
    except OSError:
        return -1


def read_fingerprint(checkpoint: Checkpoint) -> Fingerprint | None:
    """Returns the fingerprint that a checkpoint has; None if it has none. Reads one record.

    Raises `CorruptCheckpointError` if it is damaged, and OSError if it cannot be read. (The file beside the data is a
    copy, which other software may have left behind.)
    """
    if checkpoint.format != "dcp" or FINGERPRINT_KEY not in checkpoint.objects:
        return None
    content = _value(checkpoint, FINGERPRINT_KEY)
    if type(content) is not bytes:
        chunk = checkpoint.objects[FINGERPRINT_KEY]
        file = os.path.join(checkpoint.root, chunk.file)
        raise CorruptCheckpointError(
            f"{FINGERPRINT_KEY}: the fingerprint is damaged", key=FINGERPRINT_KEY, file=file, offset=chunk.offset
        )
    return Fingerprint.from_bytes(content, checkpoint.path)


def _plain_value(checkpoint: Checkpoint, key: str) -> Any:
    """Returns the value of an object of a native checkpoint: a number, a text, a short list of them. None if it is no
    such value, damaged, or cannot be read."""
    if not 0 < checkpoint.objects[key].bytes <= _MOST_BYTES:
        return None
    with suppress(Exception):  # of a store, too
        if _is_plain(value := _value(checkpoint, key)):
            return value
    return None


def _value(checkpoint: Checkpoint, key: str) -> Any:
    """Returns the value of an object of a native checkpoint, if it is plain or bytes, and None if it is neither, or
    damaged. Runs no code. Raises what reading raises."""
    chunk = checkpoint.objects[key]
    _, record = storage_at(checkpoint.root).read_range(chunk.file, chunk.offset, chunk.bytes)
    return objects.load_plain(record)[1] if chunk.crc < 0 or _C.crc32(record) == chunk.crc else None


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return len(value) <= _MOST_ELEMENTS and all(type(item) in _SCALARS for item in value)
    if type(value) is dict:
        return _is_plain(list(value.values())) and all(type(key) is str for key in value)
    return type(value) in _SCALARS
