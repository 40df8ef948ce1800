"""`SafetensorsCheckpoint` opens one safetensors file or a folder of them, of any tool, for loads and tools."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch

from ..._engine import _C
from ..._engine.dtype_codes import CODE_DTYPES
from ..._engine.rows import ITEM_BYTES, LOCATION_ROW, MOST_BYTES, SHARD, TENSOR, int_table, words
from ..._state.chunk_rows import ShardChunk, packed_row
from ..._storage.open_storage import is_file, stat_of, storage_at
from ...errors import CheckpointError, UntrustedCheckpointError
from ..checkpoint import Chunk, Read, TensorInfo
from ..loadable import LoadableCheckpoint, fill_parts
from ..quantized_tensors import Quantized, stacked_with_scales
from ..record_reader import ReadOptions, RecordReader
from ..stacking import Composite, Stack
from ..view import View
from .headers import HeaderTables
from .model_names import INDEX_SUFFIX, SUFFIXES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


class SafetensorsCheckpoint(LoadableCheckpoint):
    """The tensors of a file or folder. A tensor is whole in one file or stored as chunks in several. Files without
    checksums, as the safetensors library writes them, cannot be verified.

    A tensor that several names share is listed once, under its stored name.
    """

    format = "safetensors"
    _stored: SafetensorsCheckpoint | None = None  # without rules, if there are some

    def __init__(self, path: str, headers: HeaderTables) -> None:
        index = headers.index()
        self.save_id = index.save_id
        super().__init__(path, headers.root, lambda: _metadata(headers), index)
        self.aliases = headers.aliases
        self.headers = headers
        self.quantization_config = headers.quantization

    @classmethod
    def open(cls, path: str) -> SafetensorsCheckpoint:
        """Opens the checkpoint for listing and reading."""
        opened = cls(path, HeaderTables.read(path, verify=True))
        for name in opened.headers.files:
            opened._seen.look(os.path.join(opened.root, name))
        return opened

    def stacked(self, stack: Stack) -> SafetensorsCheckpoint:
        other = SafetensorsCheckpoint(self.path, _stacked(self.headers, stack, View(self).known))
        other.save_id, other._stored = self.save_id, self
        return other

    def places(self) -> tuple[object, None]:
        return None, None

    def stored_key(self, file: str, offset: int) -> str | None:
        for name, *_, chunk in () if self._stored is None else _chunks(self._stored.headers):
            if chunk.offset <= offset < chunk.offset + chunk.bytes and os.path.join(self.root, chunk.file) == file:
                return name
        return None

    def file_names(self) -> list[str]:
        return self.headers.files

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        chunks: dict[str, list[Chunk]] = {}
        for name, code, shape, chunk in _chunks(self.headers):
            if name not in self.aliases:
                of_name = chunks.setdefault(name, [])
                of_name.append(chunk)
                found.setdefault(name, TensorInfo(shape, CODE_DTYPES[code], of_name))
        return found

    @cached_property
    def _reader(self) -> RecordReader:
        return RecordReader(self, ReadOptions(), self._seen)

    def read(self, reads: Sequence[Read]) -> None:
        fill_parts(self._reader, self.parts(reads))


def _chunks(headers: HeaderTables) -> Iterator[tuple[str, int, tuple[int, ...], Chunk]]:
    """Yields the chunks of all tensors, also under aliases: name, dtype code, shape of the whole tensor, chunk."""
    locations = words(headers.locations)
    for row, (name, _, code, _, _, shape, offset, size) in enumerate(_C.inventory_items(headers.inventory)):
        file, at, length, crc = locations[row * LOCATION_ROW : (row + 1) * LOCATION_ROW]
        yield name, code, shape, Chunk(offset, size, headers.files[file], at, length, crc)


def _metadata(headers: HeaderTables) -> Metadata:
    """Returns the contents as DCP's metadata, for DCP's planners."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from ..._engine.torch_private import StorageInfo

    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    for name, code, shape, chunk in _chunks(headers):
        stored = tensors.get(name)
        if stored is None:
            properties = TensorProperties(dtype=CODE_DTYPES[code])
            stored = tensors[name] = TensorStorageMetadata(properties, torch.Size(shape), [])
        offset = torch.Size(chunk.offsets)
        stored.chunks.append(ChunkStorageMetadata(offset, torch.Size(chunk.sizes)))
        info = StorageInfo(chunk.file, chunk.offset, chunk.bytes)
        info.crc = chunk.crc  # type: ignore[attr-defined]
        storage[MetadataIndex(name, offset)] = info
    return Metadata({**tensors}, storage_data=storage)


def fingerprint(path: str) -> str:
    """Returns a text that differs between checkpoints: names and the index's length. Reads no file. Raises OSError."""
    if is_file(path):
        return f"{os.path.basename(path)}:{stat_of(path).size}"
    names = sorted(name for name in storage_at(path).names() if name.endswith(SUFFIXES))
    sizes = [storage_at(path).stat(name).size for name in names if name.endswith(INDEX_SUFFIX)]
    return json.dumps([names, sizes])


def was_exported_since(path: str, save_id: str) -> bool:
    """Whether an export has replaced the checkpoint with the id `save_id`, or it cannot be read any more."""
    try:
        return SafetensorsCheckpoint(path, HeaderTables.read(path, verify=False)).save_id != save_id
    except CheckpointError:
        return True


# --- Stacked, concatenated and split: rows of stored tensors under other names, so that a load plans on them


def _stacked(headers: HeaderTables, stack: Stack, known: Mapping[str, Quantized]) -> HeaderTables:
    """Returns the contents with the tensors that the rules make of the stored ones, in the same places of the files.

    `known`: the quantised tensors whose scheme is known. Raises as `restacked` does, and `CheckpointError` for a rule
    that takes one name of a shared (tied) tensor and leaves another.
    """
    codes: dict[str, int] = {}
    stored: dict[str, list[Chunk]] = {}
    tensors: list[Composite] = []
    for name, code, shape, chunk in _chunks(headers):
        if name not in stored:
            codes[name] = code
            tensors.append(Composite(name, shape, CODE_DTYPES[code], (name,)))
        stored.setdefault(name, []).append(chunk)
    file_numbers = {name: number for number, name in enumerate(headers.files)}
    names: list[str] = []
    packed: list[bytes] = []
    locations = int_table()
    made = stacked_with_scales(tensors, stack, stored, known, headers.aliases)
    seen: dict[tuple[str, int], tuple[str, int, tuple[int, ...]]] = {}
    for of in made:
        code = codes[of.keys[0]]
        if prod(max(length, 1) for length in of.shape) * ITEM_BYTES[code] >= MOST_BYTES:
            raise UntrustedCheckpointError(f"{of.name}: no tensor has shape {of.shape}", key=of.name)
        chunks = list(_chunks_of(of, stored))
        for chunk in [chunk for chunk in chunks if chunk.bytes] or chunks[:1]:
            form = of.name, chunk.bytes, chunk.sizes
            if chunk.bytes and (first := seen.setdefault((chunk.file, chunk.offset), form))[1:] != form[1:]:
                raise CheckpointError(
                    f"stack: {first[0]} and {of.name} are stored as one tensor (shared weights), and the rules make "
                    "different tensors of it: name both in a rule",
                    key=of.name,
                )
            kind = TENSOR if chunk.sizes == of.shape else SHARD
            box = ShardChunk(chunk.offsets, chunk.sizes, ())
            names.append(of.name)
            packed.append(packed_row(kind, code, False, ITEM_BYTES[code], box, of.shape))
            locations.extend((file_numbers[chunk.file], chunk.offset, chunk.bytes, chunk.crc))
    left = {of.name for of in made if of.is_stored}
    aliases = {alias: name for alias, name in headers.aliases.items() if {alias, name} <= left}
    inventory = _C.pack_inventory(names, packed, 0)
    return replace(headers, inventory=inventory, locations=locations.tobytes(), aliases=aliases)


def _chunks_of(of: Composite, stored: Mapping[str, list[Chunk]]) -> Iterator[Chunk]:
    """Yields the chunks of a composite: the stored ones at other offsets, or one index of them."""
    if of.index is not None:
        for chunk in stored[of.keys[0]]:
            inside = of.index - chunk.offsets[0]
            if 0 <= inside < chunk.sizes[0]:
                length = chunk.bytes // chunk.sizes[0]
                at = chunk.offset + inside * length
                yield Chunk(chunk.offsets[1:], chunk.sizes[1:], chunk.file, at, length, chunk.crc)
        return
    for key, layer, begin in of.parts():
        for chunk in stored[key]:
            offsets, sizes = chunk.offsets, chunk.sizes
            if of.rows:
                offsets = (offsets[0] + begin, *offsets[1:])
            if of.stacked:
                offsets, sizes = (layer, *offsets), (1, *sizes)
            yield Chunk(offsets, sizes, chunk.file, chunk.offset, chunk.bytes, chunk.crc)
