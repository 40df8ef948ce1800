"""Makes an index of the metadata of checkpoints that have none, as stock DCP's, so that all loads are planned alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from .._engine import _C, torch_private
from .._engine.dtype_codes import dtype_code
from .._engine.rows import ITEM_BYTES, MOST_BYTES, OBJECT, SHARD, TENSOR, int_table
from .._state.chunk_rows import ShardChunk, packed_row
from .._storage.paths import check_relative
from ..errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from .checkpoint import incomplete_tensor

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata

    from .._engine.torch_private import StorageInfo

_MOST_DIMS = 64  # torch's own limit, and the engine's


@dataclass(frozen=True)
class LoadIndex:
    """An index, and an error for each record or key that it cannot hold, which a load raises if it needs that."""

    index: _C.Index
    #: by key and offset of the chunk; without an offset for a key that is not in the index
    refused: Mapping[tuple[str, tuple[int, ...]], CheckpointError] = field(default_factory=dict)


def index_of(metadata: Metadata, path: str) -> LoadIndex:
    """Makes the index of a checkpoint that has none of its metadata, which `metadata_pickle` has checked."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    names, rows, places, files = list[str](), list[bytes](), int_table(), dict[str, int]()
    refused: dict[tuple[str, tuple[int, ...]], CheckpointError] = {}

    def add(kind: int, key: str, code: int, shape: Sequence[int], offset: Sequence[int], size: Sequence[int]) -> None:
        names.append(key)
        rows.append(packed_row(kind, code, False, ITEM_BYTES[code], ShardChunk(tuple(offset), tuple(size), ()), shape))

    def place(key: str, offset: torch.Size | None) -> None:
        info = metadata.storage_data.get(MetadataIndex(key, offset))
        try:
            info = located(info, key, path)
            file = files.setdefault(info.relative_path, len(files))
            places.extend((file, info.offset, info.length, crc_of(info)))
        except CheckpointError as error:
            refused[key, tuple(offset or ())] = error
            length = getattr(info, "length", 0)
            places.extend((0, 0, length if type(length) is int and 0 < length < MOST_BYTES else 0, -1))

    for key, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            add(OBJECT, key, 0, (), (), ())
            place(key, None)
            continue
        shape, chunks = stored.size, [chunk for chunk in stored.chunks if prod(chunk.sizes)]
        try:
            code = dtype_code(stored.properties.dtype, key)
            reach = prod(size or 1 for size in shape) * ITEM_BYTES[code]
            if len(shape) > _MOST_DIMS or reach >= MOST_BYTES or not (shape or chunks):
                raise incomplete_tensor(key)
        except CheckpointError as error:
            refused[key, ()] = error
            continue
        for chunk in chunks:
            add(TENSOR if chunk.sizes == shape else SHARD, key, code, shape, chunk.offsets, chunk.sizes)
            place(key, chunk.offsets)
        if not chunks:
            add(SHARD, key, code, shape, [0] * len(shape), [0] * len(shape))
            places.extend((0, 0, 0, -1))
    index = _C.Index.from_rows(_C.pack_inventory(names, rows), places.tobytes(), [*files] or [""])
    return LoadIndex(index, refused)


def located(info: object, key: str, where: str) -> StorageInfo:
    """Returns the record location of a chunk or an object from metadata, `where` they are. Raises
    `CorruptCheckpointError` if there is none, and `UntrustedCheckpointError` unless its types and ranges are sound, its
    file lies in the checkpoint's directory, and no stream transform was applied."""
    if info is None:
        reason = f"{key}: the metadata in {where} does not say where it is stored"
        raise CorruptCheckpointError(reason, key=key, file=where)
    if type(info) is not torch_private.StorageInfo or type(getattr(info, "relative_path", None)) is not str:
        raise UntrustedCheckpointError(f"{key}: metadata does not name a file for it", key=key)
    for name in ("offset", "length"):
        number = getattr(info, name, None)
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise UntrustedCheckpointError(f"{key}: metadata gives {number!r} as its {name}", key=key)
    check_relative(info.relative_path, key)
    if info.transform_descriptors:
        raise refused_transform(key)
    return info


def refused_transform(key: str) -> UntrustedCheckpointError:
    """The error for a record of a stream transform of stock DCP, which code that the checkpoint names undoes."""
    return UntrustedCheckpointError(
        f"{key}: it was stored through a stream transform (compression), which only stock DCP undoes: load it with "
        "torch's FileSystemReader and save it again",
        key=key,
    )


def crc_of(info: StorageInfo) -> int:
    """The CRC-32 that saves of this package add to a record location; -1 if it has none."""
    crc = getattr(info, "crc", -1)
    return crc if type(crc) is int and 0 <= crc < 1 << 32 else -1
