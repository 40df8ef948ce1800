"""Safetensors files: one, or a folder of shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import _C, engine
from ..errors import CheckpointError, CorruptCheckpointError, UntrustedCheckpointError
from ..flatten import Path
from .source import Read, TensorInfo

INDEX_SUFFIX = ".safetensors.index.json"
_LONGEST_INDEX = 1 << 28  # bytes


class SafetensorsSource:
    """All files stay open. Files without checksums, as the library writes them, cannot be verified."""

    def __init__(self, path: str) -> None:
        self._options = engine.options(None, engine.direct_io_setting("auto"))
        self._path = path
        paths, places = _shards(path) if os.path.isdir(path) else ([path], None)
        with engine.named_errors(str, path):
            self._files = [_C.SafetensorsFile.open(file, self._options, True) for file in paths]
        self._places: dict[str, tuple[int, int]] = {}  # by name: file, number in it
        self.tensors: dict[str, TensorInfo] = {}
        self.object_names: list[str] = []
        self.paths: dict[str, Path] = {}
        for number, file in enumerate(self._files):
            self._add(number, paths[number], file, places)
        missing = [name for name in places or () if name not in self._places]
        if missing:
            raise CorruptCheckpointError(
                f"{missing[0]}: the index of {path} names {places[missing[0]]}, which has no such tensor",  # type: ignore[index]
                key=missing[0],
                file=path,
            )

    def _add(self, number: int, path: str, file: _C.SafetensorsFile, places: dict[str, str] | None) -> None:
        for row, (name, _, torch_name, _) in enumerate(file.tensors()):
            if places is not None and places.get(name) != os.path.basename(path):
                continue  # another file's counts
            if name in self._places:
                raise CheckpointError(f"{name}: two files of {self._path} have it, and no index says which counts")
            dtype = getattr(torch, torch_name, None) if torch_name else None
            if not isinstance(dtype, torch.dtype):
                raise CheckpointError(f"{name}: this torch has no dtype for it", key=name, path=path)
            with engine.named_errors(lambda _, name=name: name, path):  # type: ignore[misc]
                self.tensors[name] = TensorInfo(file.torch_shape(row), dtype)
            self._places[name] = number, row

    def close(self) -> None:
        self._files = []

    def objects(self, names: Iterable[str]) -> dict[str, Any]:
        return {}

    def read(self, reads: Sequence[Read]) -> None:
        wanted = [read for read in reads if read.target.numel()]
        table = engine.int_table()
        for read in wanted:
            target = read.target
            table.extend((*self._places[read.key], target.data_ptr(), target.ndim))
            table.extend((*read.offsets, *target.shape, *target.stride()))
        with engine.named_errors(lambda row: wanted[row].key, self._path):
            _C.read_safetensors(self._files, table, True, self._options)


def _shards(directory: str) -> tuple[list[str], dict[str, str] | None]:
    """The files of a folder, and by tensor the name of its file where an index says it."""
    names = sorted(os.listdir(directory))
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indices) > 1:
        raise CheckpointError(f"{directory} holds several checkpoints: {', '.join(indices)}", path=directory)
    if not indices:
        return [os.path.join(directory, name) for name in names if name.endswith(".safetensors")], None
    path = os.path.join(directory, indices[0])
    if os.path.getsize(path) > _LONGEST_INDEX:
        raise UntrustedCheckpointError(f"{path} is too long for an index", path=path)
    try:
        with open(path, encoding="utf-8") as file:
            places = json.load(file)["weight_map"]
        files = sorted({str(name) for name in places.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{path} is no index of safetensors files: {error!r}", key=None, file=path
        ) from None
    for name in files:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise UntrustedCheckpointError(f"{path} names {name!r}, which is no file of its folder", path=path)
    return [os.path.join(directory, name) for name in files], places
