"""Reads safetensors files, whatever tool wrote them, and lays them out as Hugging Face names them, for conversions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from .._checkpoint.safetensors.header_texts import STORABLE, with_ties
from .._checkpoint.safetensors.headers import SafetensorsContents, StoredBox
from .._checkpoint.safetensors.model_names import INDEX_NAME, file_names
from .._engine import _C
from .._engine.dtypes import CODE_DTYPES, DTYPE_CODES
from .._engine.errors import named_errors
from .._engine.options import direct_io_setting, engine_options
from .._engine.rows import int_table
from .._read.seen_files import SeenFiles
from .._storage.open_storage import storage_at
from .pipeline import Piece
from .plan import Output
from .source import Read, Source, TensorInfo, parts_of
from .streamed_file import Files, Layout, OutputFile, laid_out


class SafetensorsSource(Source):
    """The tensors of a file or folder; the same files count as in loads. A tensor is whole in one file or stored as
    boxes in several. Files without checksums, as the safetensors library writes them, cannot be verified.

    A tensor that several names share is listed once, under its stored name.
    """

    format = "safetensors"

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

    def read(self, reads: Sequence[Read]) -> None:
        table, keys = int_table(), []
        for read in reads:
            boxes = self._boxes[read.key]
            for number, inside, target in parts_of([(box.offset, box.size) for box in boxes], read):
                box = boxes[number]
                table.extend((box.file, box.at, box.bytes, box.crc, box.code, len(box.size), *box.size))
                table.extend((*inside, *target.shape, target.data_ptr(), *target.stride()))
                keys.append(read.key)
        with named_errors(keys.__getitem__, self._where):
            self._reads.read_tensors(self._paths, table)
        self._seen.check(self._paths)


# --- Writing


class SafetensorsLayout(Layout):
    """The file that `vescale_ckpt.safetensors.save_file` writes. Raises ValueError for tensors that the format cannot
    hold."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        names = [output.name for output in outputs]
        table = int_table()
        for output in outputs:
            if output.dtype not in STORABLE:
                raise ValueError(f"{output.name}: safetensors files have no {output.dtype}: give it another dtype")
            shape, ndim = output.shape, len(output.shape)
            table.extend((0, DTYPE_CODES[output.dtype], 1, ndim, *shape, *[0] * ndim))
        try:
            self._layout = _C.SafetensorsLayout(names, table, with_ties([("format", "pt")], {}))
        except _C.EngineError as error:
            raise ValueError(f"{'' if error.item is None else names[error.item] + ': '}{error}") from None
        self.length = self._layout.file_bytes
        ordered = [outputs[number] for number in self._layout.order()]
        ends = accumulate((output.bytes for output in ordered), initial=self._layout.data_begin)
        self.bodies = list(zip(ordered, ends, strict=False))
        self._blocks: list[int] = []
        self._of: Output | None = None  # the output that the last block belongs to

    def add_checksum(self, piece: Piece, address: int) -> None:
        row = (address, piece.bytes, piece.file_offset)
        found = memoryview(_C.crc32_of_cells(int_table(row))).cast("q").tolist()
        crcs, lengths = found[::2], found[1::2]
        if crcs and piece.output is self._of and piece.file_offset % _C.CHECKSUM_BLOCK:
            self._blocks[-1] = _C.crc32_combine(self._blocks[-1], crcs.pop(0), lengths[0])
        self._blocks += crcs
        self._of = piece.output if piece.bytes else None

    def format_bytes(self, number: int) -> bytes:
        return bytes(self._layout.data_begin)  # zeros: `head` is written over them at the end

    def head(self) -> bytes:
        return self._layout.head(self._blocks)


def safetensors_files(outputs: Sequence[Output], in_folder: bool, most_bytes: int) -> Files:
    """One file, or a folder of shards and their index."""
    if not in_folder:
        return Files.one(outputs, laid_out(partial(SafetensorsLayout, outputs)))
    shards = _shards(outputs, most_bytes)
    for shard in shards:
        SafetensorsLayout(shard)  # raises before writing
    names = file_names(len(shards))
    files = [
        OutputFile(name, sum(output.bytes for output in shard), laid_out(partial(SafetensorsLayout, shard)))
        for name, shard in zip(names, shards, strict=True)
    ]
    if len(files) == 1:
        return Files(files)
    file_of = {output.name: name for name, shard in zip(names, shards, strict=True) for output in shard}
    total = sum(file.bytes for file in files)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2, sort_keys=True) + "\n"

    def write_index(directory: str) -> None:
        with named_errors(str, directory, len(text)):
            # In an object store it is the commit: shards without an index are no model.
            storage_at(directory).commit(INDEX_NAME, text.encode(), overwrite=False)

    return Files(files, write_index)


def _shards(outputs: Sequence[Output], most_bytes: int) -> list[list[Output]]:
    """The tensors of each file: at most `most_bytes`, except where a single tensor is larger."""
    shards: list[list[Output]] = [[]]
    held = 0
    for output in outputs:
        if shards[-1] and held + output.bytes > most_bytes:
            shards.append([])
            held = 0
        shards[-1].append(output)
        held += output.bytes
    return shards
