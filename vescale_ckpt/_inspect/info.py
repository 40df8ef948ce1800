"""Reads what a checkpoint of any format holds, from its metadata or headers alone, for `inspect`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .. import settings
from .._checkpoint.native import metadata_file
from .._checkpoint.native.file_names import checked_location, metadata_name
from .._checkpoint.safetensors.headers import SafetensorsContents
from .._convert.formats import open_source
from .._engine.errors import named_system_errors
from .._read import contents
from .._read.check_records import locations_by_key
from .._read.contents import Contents, of_safetensors
from .._read.no_checkpoint import explained
from .._state.key_selection import Selection
from .._storage.file_kinds import kind_of_file
from .._storage.open_storage import checkpoint_path, is_file, is_folder, stat_of, storage_at
from .._storage.paths import check_relative, data_path
from ..errors import CheckpointError, MissingKeysError
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
    if is_file(where) and _is_raw(where):
        info = _of_raw_files(where)
    elif contents.is_safetensors(where):
        info = _of_metadata(
            where, "safetensors", [of_safetensors(where, SafetensorsContents.read(where, verify=False))]
        )
    elif is_folder(where) and (ranks := metadata_file.metadata_ranks(where)):
        with explained(where):
            parts = [contents.read(where, rank, True, by_index=False) for rank in ranks]
            info = _of_metadata(where, "dcp", parts, _writer(where, ranks[0], parts[0]))
    else:
        info = _of_raw_files(where)
    if missing := selection.without_match([*info.tensors, *info.objects, *info.aliases]):
        raise MissingKeysError(missing)
    for found in (info.tensors, info.objects, info.aliases):
        for key in [key for key in found if key not in selection]:
            del found[key]
    return info


def _of_metadata(path: str, format: str, parts: list[Contents], writer: str = "") -> CheckpointInfo:
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    aliases: dict[str, str] = {}
    files: dict[str, int] = {}
    for part in parts:
        for chunk in _stored(part, part.metadata, tensors, objects):
            files.setdefault(chunk, _length(data_path(part.root, chunk)))
        aliases.update(_without_aliases(part, tensors))
    save_id = parts[0].save_id
    return CheckpointInfo(path, format, writer, save_id, tensors, objects, aliases, files)


def _stored(
    part: Contents, metadata: Metadata, tensors: dict[str, StoredTensor], objects: dict[str, StoredObject]
) -> Iterable[str]:
    """Adds what one metadata file names, and yields the names of its data files."""
    locations = locations_by_key(metadata, part.path, _raise)
    for key, stored in metadata.state_dict_metadata.items():
        of_key = locations.get(key, {})

        def location(offsets: tuple[int, ...], key: str = key, of_key: dict = of_key) -> tuple[str, int, int]:  # type: ignore[type-arg]
            found = checked_location(of_key.get(offsets, of_key.get(())), key)
            return check_relative(found.relative_path, key), found.offset, found.length

        if not isinstance(stored, TensorStorageMetadata):
            objects[key] = StoredObject(*location(()))
            yield objects[key].file
            continue
        count = math.prod(stored.size) * stored.properties.dtype.itemsize
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensor = tensors.setdefault(key, StoredTensor(tuple(stored.size), dtype, count, []))
        known = {chunk.offsets for chunk in tensor.chunks}  # replicas that ranks have saved for themselves
        for chunk in stored.chunks:
            offsets = tuple(chunk.offsets)
            if offsets not in known:
                tensor.chunks.append(StoredChunk(offsets, tuple(chunk.sizes), *location(offsets)))
                yield tensor.chunks[-1].file


def _raise(error: CheckpointError) -> None:
    raise error


def _without_aliases(part: Contents, tensors: dict[str, StoredTensor]) -> dict[str, str]:
    """Moves the aliases from `tensors` to a mapping of their own, to the names of the stored tensors."""
    places = {
        (chunk.file, chunk.offset, chunk.bytes): key
        for key, tensor in tensors.items()
        if key not in part.aliases
        for chunk in tensor.chunks
    }
    aliases = {}
    for alias in sorted(part.aliases & tensors.keys()):
        chunk = tensors.pop(alias).chunks[0]
        aliases[alias] = places.get((chunk.file, chunk.offset, chunk.bytes), "")
    return aliases


def _writer(path: str, rank: int | None, part: Contents) -> str:
    """The software that wrote the metadata, as far as the end of the file and its version tell."""
    length = metadata_file.TRAILER_BYTES
    with named_system_errors(path):
        _, end = storage_at(path).read_range(metadata_name(rank), -length, length)
    if metadata_file.has_checksum(end):
        return "vescale_ckpt"
    version = getattr(part.metadata, "version", None)
    return f"torch.distributed.checkpoint {version}" if isinstance(version, str) else "torch.distributed.checkpoint"


def _is_raw(path: str) -> bool:
    with named_system_errors(path):
        return kind_of_file(path) != "other"


def _of_raw_files(path: str) -> CheckpointInfo:
    source = open_source(path)
    try:
        tensors: dict[str, StoredTensor] = {}
        files: dict[str, int] = {}
        for key, info in source.tensors.items():
            dtype = str(info.dtype).removeprefix("torch.")
            file, offset, length = source.location(key)
            name = os.path.basename(file)
            files.setdefault(name, _length(file))
            tensors[key] = StoredTensor(
                info.shape, dtype, info.bytes, [StoredChunk((0,) * len(info.shape), info.shape, name, offset, length)]
            )
        objects = {key: StoredObject(os.path.basename(path), -1, -1) for key in source.object_names}
        return CheckpointInfo(path, source.format, "", "", tensors, objects, {}, files)
    finally:
        source.close()


def _length(path: str) -> int:
    try:
        return stat_of(path).size
    except OSError:
        return -1
