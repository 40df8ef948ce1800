"""Finds and reads the metadata of a checkpoint's directory, and its index. Imports torch only to read a pickle."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from ..._engine import _C
from ..._engine.engine_errors import of_system
from ..._storage.open_storage import is_folder, read_twice, storage_at
from ...errors import CheckpointError, UntrustedCheckpointError
from .file_names import METADATA_NAME, index_name, is_metadata_file, metadata_name, rank_of_metadata
from .metadata_check import TRAILER_BYTES, TRAILER_MAGIC, check, check_beginning, has_checksum

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from .metadata_unpickler import Places

_MOST_INDEX_BYTES = 1 << 30  # 14 times what 9,000 ranks of 405B with Adam need
NO_CHECKPOINT = "not a checkpoint, or one whose save did not finish"  #: ends the error for a missing metadata file


def has_metadata(directory: str, rank: int | None) -> bool:
    return storage_at(directory).has(metadata_name(rank))


def metadata_ranks(directory: str) -> list[int | None]:
    """Returns the ranks whose metadata the directory holds: [None] for one metadata file of all ranks, otherwise the
    ranks that saved without collectives. Raises OSError."""
    ranks = {rank_of_metadata(name) for name in storage_at(directory).names() if is_metadata_file(name)}
    return [None] if None in ranks else sorted(ranks)  # type: ignore[type-var]


def read_metadata(directory: str, rank: int | None = None) -> Metadata:
    """Reads and checks the metadata of the checkpoint in a directory.

    Raises `CheckpointError` if there is none, `CorruptCheckpointError`, `UntrustedCheckpointError`.
    """
    from .metadata_pickle import loads

    return loads(metadata_bytes(directory, rank), os.path.join(directory, metadata_name(rank)))


def read_metadata_of(directory: str, rank: int | None, save_id: str) -> Metadata:
    """Reads the metadata that one save committed. Raises `CheckpointError` if a later save has replaced it."""
    metadata = read_metadata(directory, rank)
    _check_save(directory, metadata, save_id)
    return metadata


def read_places_of(directory: str, rank: int | None, save_id: str) -> Places:
    """Does the same, but leaves out what describes tensors and records."""
    from .metadata_unpickler import load_places

    places = load_places(metadata_bytes(directory, rank), os.path.join(directory, metadata_name(rank)))
    _check_save(directory, places, save_id)
    return places


def _check_save(directory: str, metadata: Metadata | Places, save_id: str) -> None:
    if metadata.storage_meta is None or metadata.storage_meta.save_id != save_id:
        raise CheckpointError(f"the checkpoint in {directory} was replaced by a later save", path=directory)


def metadata_bytes(directory: str, rank: int | None) -> bytes:
    """Returns the bytes of the metadata file. Checks only their beginning; in an object store all of them. Raises as
    `read_metadata` does."""
    storage, name = storage_at(directory), metadata_name(rank)
    path = os.path.join(directory, name)

    def read() -> bytes:
        data = storage.read(name, lambda beginning, length: check_beginning(beginning, length, path))
        if storage.rereads:
            if has_checksum(data):
                check(data, path)
            else:
                from .metadata_pickle import loads

                loads(data, path)
        return data

    try:
        if not storage.by_requests and not storage.stat(name).is_file:  # an object is a file
            raise UntrustedCheckpointError(f"{path} is not a regular file", path=path)
        return read_twice(path, read)
    except FileNotFoundError:
        what = f"has no {name}" if is_folder(directory) else "is no directory"
        raise CheckpointError(f"{directory} {what}: {NO_CHECKPOINT}", path=directory, errno=errno.ENOENT) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}", path=path, errno=error.errno) from error


def metadata_fingerprint(directory: str) -> str:
    """Returns a text that differs between the metadata of different saves: its length and its end, which holds a
    checksum. Empty if there is no metadata. Raises OSError if it cannot be read."""
    try:
        found, end = storage_at(directory).read_range(METADATA_NAME, -TRAILER_BYTES, TRAILER_BYTES)
    except FileNotFoundError:
        return ""
    # Files of stock DCP have no checksum, so their time counts: a copy on another disk has another fingerprint.
    known = "" if end.startswith(TRAILER_MAGIC) else f":{found.modified_ns}"
    return _fingerprint(found.size, end) + known


def fingerprint_of(data: bytes) -> str:
    """Returns the fingerprint of metadata of this package, from its bytes."""
    return _fingerprint(len(data), data[-TRAILER_BYTES:])


def _fingerprint(length: int, end: bytes) -> str:
    return f"{length}:{end.hex()}"


def read_index(directory: str, rank: int | None = None, metadata: bytes | None = None) -> _C.Index | None:
    """Returns the index of the checkpoint in a directory, or None if it has none that is sound and belongs to its
    metadata. Raises `CheckpointError` if an object store cannot be read: a read of the metadata would fail, too, after
    another long wait. `metadata`: the bytes of the metadata file, if they have been read."""
    found = _matching(directory, rank, metadata)
    return None if found is None else found[1]


def index_bytes(directory: str) -> bytes | None:
    """Returns the bytes of the index and checks all of them. None where `read_index` returns None."""
    found = _matching(directory, None, None)
    return None if found is None else found[0]


def _matching(directory: str, rank: int | None, metadata: bytes | None) -> tuple[bytes, _C.Index] | None:
    storage = storage_at(directory)
    try:
        data, index = open_index(directory, rank)
        if metadata is not None:
            length, end = len(metadata), metadata[-TRAILER_BYTES:]
        else:
            found, end = storage.read_range(metadata_name(rank), -TRAILER_BYTES, TRAILER_BYTES)
            length = found.size
        return (data, index) if index.matches(end, length) else None
    except (OSError, _C.EngineError) as error:
        if storage.is_away(error):
            raise of_system(error, directory) from error
        return None


def open_index(directory: str, rank: int | None) -> tuple[bytes, _C.Index]:
    """Reads the index, and checks all of it, whatever metadata it belongs to."""
    storage, name = storage_at(directory), index_name(rank)
    path = os.path.join(directory, name)
    if not storage.by_requests and storage.stat(name).size > _MOST_INDEX_BYTES:  # sparse, perhaps
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    data = storage.read(name)
    return data, _C.Index.from_bytes(data, path)
