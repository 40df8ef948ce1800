"""Lays out safetensors files for conversions: one file, or a folder of shards as Hugging Face names them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .._engine import _C
from .._engine.dtypes import DTYPE_CODES
from .._engine.errors import named_errors
from .._engine.rows import int_table
from .._hf.header import STORABLE, with_ties
from .._hf.names import INDEX_NAME, file_names
from .._storage.directory import directory_at
from .pipeline import Piece
from .plan import Output
from .streamed_file import Body


class SafetensorsLayout:
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
        self.bodies = []
        at = self._layout.data_begin
        for number in self._layout.order():
            self.bodies.append(Body(outputs[number], at))
            at += outputs[number].bytes
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


def shards(outputs: Sequence[Output], most_bytes: int) -> list[tuple[str, list[Output]]]:
    """Names of files with their tensors: at most `most_bytes` in each, except where a single tensor is larger."""
    files: list[list[Output]] = [[]]
    held = 0
    for output in outputs:
        if files[-1] and held + output.bytes > most_bytes:
            files.append([])
            held = 0
        files[-1].append(output)
        held += output.bytes
    return list(zip(file_names(len(files)), files, strict=True))


def write_index(directory: str, files: Sequence[tuple[str, Sequence[Output]]]) -> None:
    """Writes `model.safetensors.index.json`, which maps tensors to the files of a folder."""
    total = sum(output.bytes for _, outputs in files for output in outputs)
    file_of = {output.name: name for name, outputs in files for output in outputs}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2, sort_keys=True) + "\n"
    with named_errors(str, directory, len(text)):
        directory_at(directory).write(INDEX_NAME, text.encode())
