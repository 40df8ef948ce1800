"""`IndexCheckpoint` lists a checkpoint by its index or headers, for what reads no tensor: it needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..._engine import _C
from ..._storage.open_storage import storage_at
from ..._storage.paths import check_relative
from ...errors import CheckpointError
from ..checkpoint import Checkpoint, Chunk, TensorInfo
from ..safetensors.headers import HeaderTables
from . import metadata_check, metadata_file
from .file_names import INDEX_NAME, NODE_MARKER, metadata_name
from .save_facts import unstamped


class _Dtype(NamedTuple):
    """Stands for a dtype of torch in a listing."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


_DTYPES: dict[str, Any] = {name: _Dtype(name, size) for name, _, size in _C.dtypes()}


def _rows(index: _C.Index) -> Iterator[tuple[str, str, tuple[int, ...], list[Chunk]]]:
    """Name, dtype or "" for an object, shape and chunks of each key. Raises if the index claims more chunks than its
    metadata has room for."""
    index.check_counts()
    files = index.files
    for number in range(len(index)):
        name, dtype, shape, places = index.row(number)
        chunks = [
            Chunk(offsets, sizes, check_relative(files[file], name), offset, length, crc)
            for offsets, sizes, file, offset, length, crc in places
        ]
        yield name, dtype, shape, chunks


def says_the_same(index: _C.Index, checkpoint: Checkpoint) -> bool:
    """Whether a sound index holds what the checkpoint's metadata holds."""
    try:
        if len(index) != len(checkpoint.tensors) + len(checkpoint.objects):
            return False
        for name, dtype, shape, chunks in _rows(index):  # no two are of one name
            tensor = checkpoint.tensors.get(name)
            expected = checkpoint.objects.get(name) if tensor is None else tensor.chunks
            if tensor is not None and (f"torch.{dtype}", shape) != (str(tensor.dtype), tuple(tensor.shape)):
                return False
            if ([expected] if isinstance(expected, Chunk) else expected) != chunks:
                return False
    except (_C.EngineError, CheckpointError):  # it names what is not there
        return False
    return True


class IndexCheckpoint(Checkpoint):
    """A native checkpoint that all ranks have saved together, or one of safetensors. It cannot be read."""

    def __init__(self, path: str, index: _C.Index) -> None:
        """Raises `_C.EngineError` for a damaged index, and KeyError for dtypes that the engine does not know."""
        self.format, self.path, self.root = "dcp", path, path
        self.writer = "vescale_ckpt"
        self.save_id, self.saved_by = unstamped(index.save_id)
        self._files: list[str] = []  # also those without tensors; filled for safetensors
        tensors: dict[str, TensorInfo] = {}
        objects: dict[str, Chunk] = {}
        for name, dtype, shape, chunks in _rows(index):
            if dtype:
                tensors[name] = TensorInfo(shape, _DTYPES[dtype], chunks)
            else:
                (objects[name],) = chunks
        self.tensors, self.objects = tensors, objects

    @classmethod
    def open(cls, path: str) -> IndexCheckpoint | None:
        """Opens the checkpoint; None without a sound index, which only saves of this package have. Raises as
        `metadata_file.metadata_bytes` and `metadata_check.check`."""
        if not storage_at(path).has(INDEX_NAME):
            return None
        data = metadata_file.metadata_bytes(path, None)
        index = metadata_file.read_index(path, None, data)
        if index is None:
            return None
        metadata_check.check(data, os.path.join(path, metadata_name(None)))
        try:
            return cls(path, index)
        except (_C.EngineError, KeyError):  # the metadata has the same content
            return None

    @classmethod
    def of_headers(cls, path: str) -> IndexCheckpoint:
        """Opens a file or a folder of safetensors. Raises as `HeaderTables.read`."""
        headers = HeaderTables.read(path, verify=True)
        opened = cls(path, headers.index())
        opened.format, opened.root, opened.writer = "safetensors", headers.root, ""
        opened._files, opened.aliases = headers.files, headers.aliases
        opened.tensors = {name: tensor for name, tensor in opened.tensors.items() if name not in headers.aliases}
        return opened

    @property
    def is_node_part(self) -> bool:
        return self.format == "dcp" and storage_at(self.path).has(NODE_MARKER)

    def file_names(self) -> list[str]:
        chunks = [chunk for tensor in self.tensors.values() for chunk in tensor.chunks]
        return self._files or list(dict.fromkeys(chunk.file for chunk in [*chunks, *self.objects.values()]))
