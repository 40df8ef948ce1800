"""Lays out safetensors files as Hugging Face names them, for conversions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from .._checkpoint.safetensors.header_texts import STORABLE, with_ties
from .._checkpoint.safetensors.model_names import INDEX_NAME, file_names
from .._engine import _C
from .._engine.dtypes import DTYPE_CODES
from .._engine.errors import named_errors
from .._engine.rows import int_table
from .._storage.open_storage import storage_at
from .pipeline import Piece
from .plan import Output
from .streamed_file import Files, Layout, OutputFile, laid_out


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
