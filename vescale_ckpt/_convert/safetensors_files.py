"""Lays out safetensors files as Hugging Face names them, for conversions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from .._checkpoint.safetensors.header_texts import with_ties
from .._checkpoint.safetensors.model_names import INDEX_NAME, file_names
from .._checkpoint.view import View
from .._engine import _C
from .._engine.dtype_codes import DTYPE_CODES, SAFETENSORS_DTYPES
from .._engine.engine_errors import named_errors
from .._engine.options import direct_io_setting, engine_options
from .._engine.rows import int_table
from .._storage.open_storage import storage_at
from .batches import PAGE, Batch, Buffers, Piece, memory_of, pieces_of, transfer
from .output_files import Create, Files, OutputFile, Write
from .plan import Output


class _Layout:
    """The file that `vescale_ckpt.safetensors.save_file` writes. Raises ValueError for tensors that the format cannot
    hold."""

    def __init__(self, outputs: Sequence[Output], ties: Mapping[str, str]) -> None:
        names = [output.name for output in outputs]
        ties = {other: name for other, name in ties.items() if name in names}
        texts = [pair for pair in ties.items() if pair[0] != "format"]  # for the library's load_model
        table = int_table()
        for output in outputs:
            if output.dtype not in SAFETENSORS_DTYPES.values():
                raise ValueError(f"{output.name}: safetensors files have no {output.dtype}: give it another dtype")
            shape, ndim = output.shape, len(output.shape)
            table.extend((0, DTYPE_CODES[output.dtype], 1, ndim, *shape, *[0] * ndim))
        try:
            self._layout = _C.SafetensorsLayout(names, table, with_ties([("format", "pt"), *texts], ties))
        except _C.EngineError as error:
            raise ValueError(f"{'' if error.item is None else names[error.item] + ': '}{error}") from None
        self.length = self._layout.file_bytes
        self._ordered = [outputs[number] for number in self._layout.order()]
        self._blocks: list[int] = []
        self._of: Output | None = None  # the output that the last block belongs to

    def add_checksum(self, piece: Piece, address: int) -> None:
        """Takes the checksum of a piece, whose bytes in memory are those to be written. Pieces come in order."""
        at = piece.file_offset
        while left := piece.file_offset + piece.bytes - at:
            count = min(left, _C.CHECKSUM_BLOCK - at % _C.CHECKSUM_BLOCK)
            crc = _C.crc32_of_memory(address + at - piece.file_offset, count)
            if piece.output is self._of and at % _C.CHECKSUM_BLOCK:  # the last piece ended within the block
                self._blocks[-1] = _C.crc32_combine(self._blocks[-1], crc, count)
            else:
                self._blocks.append(crc)
            self._of = piece.output
            at += count

    def pieces(self, most_bytes: int) -> Iterator[Piece]:
        """All tensors, which follow each other without gaps."""
        at = self._layout.data_begin
        for output in self._ordered:
            yield from pieces_of(output, most_bytes, at)
            at += output.bytes

    def head(self) -> bytes:
        """The first bytes of the file, after `add_checksum` of all pieces."""
        return self._layout.head(self._blocks)


def _written(outputs: Sequence[Output], ties: Mapping[str, str]) -> Write:
    """The content of one file, in bounded memory."""

    def write(directory: str, create: Create, view: View, buffers: Buffers) -> None:
        layout = _Layout(outputs, ties)
        with named_errors(str, directory, layout.length):
            storage_at(directory).check_space(layout.length)
            options = engine_options(None, direct_io_setting("auto"))
            writer = create(lambda name: _C.FileWriter(name, layout.length, options, False))
            if not outputs:
                writer.write_bytes(int_table(), layout.length)  # the file ends where the last call ends: with its head
            transfer(layout.pieces(buffers.most_bytes), view, _Pages(layout, writer), buffers)
            writer.finish_bytes(layout.head(), sync=True)

    return write


class _Pages:
    """Takes the checksums of batches, and writes them in whole pages: the rest of a batch with the next one. The head
    is written over the end of its last page, which the first batch writes, too."""

    def __init__(self, layout: _Layout, writer: _C.FileWriter) -> None:
        self._layout = layout
        self._writer = writer
        self._rest = b""  # bytes after the last whole page

    def prepare(self, batch: Batch) -> None:
        for placed in batch.pieces:
            self._layout.add_checksum(placed.piece, placed.target.data_ptr())

    def write(self, batch: Batch) -> None:
        image = memory_of(batch.buffer)
        image[: len(self._rest)] = self._rest
        last = batch.pieces[-1] if batch.pieces else None
        end = 0 if last is None else last.at + last.target.nbytes
        whole = end if batch.last else end // PAGE * PAGE
        self._rest = bytes(image[whole:end])
        if whole:
            self._writer.write_bytes(int_table([batch.buffer.data_ptr(), whole]), batch.file_offset)


def safetensors_files(outputs: Sequence[Output], ties: Mapping[str, str], in_folder: bool, most_bytes: int) -> Files:
    """One file, or a folder of shards and their index. Tied weights are stored once, under the name in `ties`."""
    outputs = [output for output in outputs if output.name not in ties]
    if not in_folder:
        return Files.one(outputs, _written(outputs, ties))
    shards = _shards(outputs, most_bytes)
    for shard in shards:
        _Layout(shard, ties)  # raises before writing
    names = file_names(len(shards))
    files = [
        OutputFile(name, sum(output.bytes for output in shard), _written(shard, ties))
        for name, shard in zip(names, shards, strict=True)
    ]
    if len(files) == 1:
        return Files(files)
    file_of = {output.name: name for name, shard in zip(names, shards, strict=True) for output in shard}
    total = sum(file.bytes for file in files)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2, sort_keys=True) + "\n"

    def write_index(directory: str) -> None:
        with named_errors(str, directory, len(text)):
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
