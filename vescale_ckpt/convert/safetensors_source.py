"""Reads safetensors files for conversions: one file or a folder of them, whatever tool wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from .._engine import _C
from .._engine.dtypes import CODE_DTYPES
from .._engine.errors import named_errors
from .._engine.options import direct_io_setting, engine_options
from .._engine.rows import int_table
from .._hf.contents import SafetensorsContents, StoredBox
from .._read.match import not_all_there
from .._read.seen_files import SeenFiles
from .._state.structure import Path
from .source import Read, TensorInfo, parts_of


class SafetensorsSource:
    """The tensors of a file or folder; the same files count as in loads. A tensor is whole in one file or stored as
    boxes in several. Files without checksums, as the safetensors library writes them, cannot be verified.

    A tensor that several names share is listed once, under its stored name.
    """

    def __init__(self, path: str) -> None:
        contents = SafetensorsContents.read(path, verify=True)
        self._where = path
        self._paths = [os.path.join(contents.root, name) for name in contents.files]
        self._seen = SeenFiles()
        for file in self._paths:
            self._seen.look(file)
        self._reads = _C.SafetensorsReads(True, engine_options(None, direct_io_setting("auto")))
        self._boxes: dict[str, list[StoredBox]] = {}
        for box in contents.boxes():
            if box.name not in contents.aliases:
                self._boxes.setdefault(box.name, []).append(box)
        self.tensors = {
            name: TensorInfo(boxes[0].shape, CODE_DTYPES[boxes[0].code]) for name, boxes in self._boxes.items()
        }
        self.object_names: list[str] = []
        self.paths: dict[str, Path] = {}

    def close(self) -> None: ...

    def objects(self, names: Iterable[str]) -> dict[str, Any]:
        return {}

    def read(self, reads: Sequence[Read]) -> None:
        table, keys = int_table(), []
        for read in reads:
            boxes = self._boxes[read.key]
            found = 0
            for number, inside, target in parts_of([(box.offset, box.size) for box in boxes], read):
                found += target.numel()
                box = boxes[number]
                table.extend((box.file, box.at, box.bytes, box.crc, box.code, len(box.size), *box.size))
                table.extend((*inside, *target.shape, target.data_ptr(), *target.stride()))
                keys.append(read.key)
            if found != read.target.numel():
                raise not_all_there(read.key)
        with named_errors(keys.__getitem__, self._where):
            self._reads.read_tensors(self._paths, table)
        self._seen.check(self._paths)
