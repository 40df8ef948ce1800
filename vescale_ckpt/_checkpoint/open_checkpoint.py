"""Recognizes the format of a checkpoint, and opens it for loads and tools."""

from __future__ import annotations

import errno

from .._ranks.message import pack, unpack
from .._storage.open_storage import is_folder, storage_at
from ..errors import CheckpointError
from .archive_entries import advice_for_file
from .checkpoint import Checkpoint
from .loadable import LoadableCheckpoint
from .native import metadata_file
from .native.explain_missing import explained
from .native.native_checkpoint import NativeCheckpoint
from .recognize import recognize
from .safetensors import safetensors_checkpoint
from .safetensors.headers import HeaderTables
from .safetensors.safetensors_checkpoint import SafetensorsCheckpoint
from .torch_checkpoint import TorchCheckpoint


def open_checkpoint(path: str) -> Checkpoint:
    """Opens a checkpoint of any format for listing and reading.

    Raises `CheckpointError` if there is none, and the errors of the format.
    """
    kind = recognize(path)
    if kind == "dcp":
        return NativeCheckpoint.open(path)
    if kind == "safetensors":
        return SafetensorsCheckpoint.open(path)
    if kind is None and not is_folder(path):
        raise CheckpointError(f"cannot read {path}: there is no such file or folder", path=path, errno=errno.ENOENT)
    if kind is None:
        with explained(path):
            text = f"{path} has no .metadata and no .safetensors files: {metadata_file.NO_CHECKPOINT}"
            raise CheckpointError(text, path=path, errno=errno.ENOENT)
    storage_at(path).check_mounted("a file of torch.save that is read", "Copy it to a disk first")
    return TorchCheckpoint(path)


def open_parts(path: str) -> list[Checkpoint]:
    """Does the same, but opens one checkpoint for each rank if ranks have saved for themselves."""
    if recognize(path) != "dcp":
        return [open_checkpoint(path)]
    return [NativeCheckpoint.open(path, rank) for rank in metadata_file.metadata_ranks(path)]


# --- For loads


def open_to_load(path: str, rank: int | None, verify: bool) -> LoadableCheckpoint:
    """Opens a checkpoint for a load; with `rank`, what that rank saved without collectives.

    `verify`: checks safetensors headers. Raises `CheckpointError` if there is no checkpoint, `CorruptCheckpointError`,
    `UntrustedCheckpointError`.
    """
    if rank is None and _is_safetensors(path):
        return SafetensorsCheckpoint(path, HeaderTables.read(path, verify))
    return NativeCheckpoint.by_index(path, rank)


def _is_safetensors(path: str) -> bool:
    kind = recognize(path)
    if kind == "archive":
        raise CheckpointError(advice_for_file(path), path=path)
    return kind == "safetensors"


def fingerprint(path: str) -> str:
    """Returns a text that differs between saves, from a small read; empty if there is no checkpoint. Raises OSError."""
    return (
        safetensors_checkpoint.fingerprint(path) if _is_safetensors(path) else metadata_file.metadata_fingerprint(path)
    )


def pack_for_ranks(path: str, verify: bool) -> bytes:
    """Reads the index, or all metadata if there is no index, and packs it for other ranks."""
    if _is_safetensors(path):
        return pack(b"", b"", HeaderTables.read(path, verify).pack())
    index = metadata_file.index_bytes(path)
    if index is not None:
        return pack(index, b"", b"")
    with explained(path):
        return pack(b"", metadata_file.metadata_bytes(path, None), b"")


def is_by_index(message: bytes) -> bool:
    """Whether a message of `pack_for_ranks` has an index, which names only files that nobody writes again."""
    return bool(unpack(message)[0])


def unpack_from_rank(path: str, message: bytes) -> LoadableCheckpoint:
    """Makes the checkpoint from a message of `pack_for_ranks`. Raises as `open_to_load` does."""
    index, metadata, headers = unpack(message)
    if headers:
        return SafetensorsCheckpoint(path, HeaderTables.unpack(path, headers))
    return NativeCheckpoint.unpack(path, index, metadata)
