"""`SafetensorsCheckpoint` opens one safetensors file or a folder of them, of any tool, for loads and tools."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..._engine import _C
from ..._engine.dtype_codes import CODE_DTYPES
from ..._engine.options import threads_of
from ..._engine.rows import LOCATION_ROW, words
from ..._state.stacking import Stack
from ..._storage.open_storage import is_file, stat_of, storage_at
from ...errors import CheckpointError
from ..checkpoint import Chunk, Read, TensorInfo
from ..loadable import LoadableCheckpoint, fill_parts
from ..quantized_tensors import Quantized, fill, find, of_values
from ..record_reader import ReadOptions, RecordReader
from .headers import HeaderTables
from .model_names import INDEX_SUFFIX, SUFFIXES
from .stack_rows import stack_rows

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

    @classmethod
    def open(cls, path: str) -> SafetensorsCheckpoint:
        """Opens the checkpoint for listing and reading."""
        opened = cls(path, HeaderTables.read(path, verify=True))
        for name in opened.headers.files:
            opened._seen.look(os.path.join(opened.root, name))
        return opened

    def stacked(self, stack: Stack) -> SafetensorsCheckpoint:
        other = SafetensorsCheckpoint(self.path, stack_rows(self.headers, stack, self.quantized))
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

    @cached_property
    def _quantization(self) -> tuple[Mapping[str, Quantized], str]:
        config = self.headers.quantization
        return find(config, self.tensors) if config else ({}, "no config.json beside it has a quantization_config")

    @property
    def quantized(self) -> Mapping[str, Quantized]:
        return self._quantization[0]

    @property
    def not_dequantized(self) -> str:  # type: ignore[override]
        return self._quantization[1]

    def dequantized(self, dtype_of: Callable[[str], torch.dtype]) -> Mapping[str, TensorInfo]:
        return of_values(self.tensors, self.quantized, dtype_of)

    def read(self, reads: Sequence[Read]) -> None:
        stored, boxes = [], []
        for read in reads:
            of = self.quantized.get(read.key)
            if of is None or read.target.dtype == of.numbers_dtype:
                stored.append(read)
            else:
                boxes.append((of, read.offsets, read.target))
        fill_parts(self._reader, self.parts(stored))
        if boxes:
            fill(boxes, lambda of: fill_parts(self._reader, self.parts(of)), threads_of())


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
