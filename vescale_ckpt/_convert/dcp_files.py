"""Writes DCP checkpoints with all ranks, for conversions."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from .._checkpoint.view import View
from .._engine import _C
from .._engine.dtype_codes import dtype_code
from .._engine.engine_errors import named_errors
from .._engine.rows import LOCATION_ROW, NO_LIMIT, OBJECT, PLAN_ROW, SHARD, TENSOR, words
from .._ranks.message import pack, unpack
from .._state import objects
from .._state.chunk_rows import ShardChunk, packed_row
from .._state.flatten import flatten_with_structure
from .._state.per_rank import is_name_part
from .._state.structure import Path, Structure
from .._write.host_batches import write_table
from .._write.layout import SaveOptions
from .._write.native_layout import NativeLayout
from .batches import Batch, Buffers, Piece, pieces_of, transfer
from .plan import Output


def pieces_of_rank(outputs: Sequence[Output], most_bytes: int, rank: int, ranks: int) -> list[Piece]:
    """The consecutive pieces of all outputs that this rank writes. Ranks get about equally many bytes."""
    total = sum(output.bytes for output in outputs)
    mine = []
    at = 0
    for output in outputs:
        for piece in pieces_of(output, most_bytes):
            middle = at + piece.bytes // 2
            if min(ranks - 1, middle * ranks // total if total else 0) == rank:
                mine.append(piece)
            at += piece.bytes
    return mine


def begin(directory: str, rank: int, overwrite: bool) -> NativeLayout:
    """Begins the data file of one rank. It is durable after `write`, and belongs to the checkpoint after `commit`."""
    files = NativeLayout(SaveOptions(directory, rank, overwrite=overwrite))
    files.begin(is_coordinator=rank == 0)
    return files


def write(
    files: NativeLayout,
    pieces: Sequence[Piece],
    values: Mapping[str, Any],
    paths: Mapping[str, Path],
    view: View,
    buffers: Buffers,
) -> bytes:
    """Writes the pieces and then the objects. Returns the message that `commit` needs from each rank."""
    values, paths = _as_saved_today(values, paths)
    contents = [objects.dump(value, key) for key, value in values.items()]
    names = [*(piece.output.name for piece in pieces), *values]
    if not names:
        return pack(_C.pack_inventory([], [], 0), b"", b"")
    files.open(array("q", [piece.bytes for piece in pieces]))
    transfer(pieces, view, _Written(files), buffers)
    if contents:
        files.write_records(contents, list(values), range(len(pieces), len(names)), of_tensors=False)
    files.finish()
    rows = [_row(piece) for piece in pieces]
    rows += [packed_row(OBJECT, 0, False, len(content), ShardChunk((), (), ()), ()) for content in contents]
    own = dict.fromkeys(names)
    inventory = _C.pack_inventory(names, rows, 0)
    known = _C.pack_paths(list(own), [paths.get(name, (name,)) for name in own])
    locations, names_of_files = files.located()
    return pack(inventory, known, locations, *map(str.encode, names_of_files))


def commit(files: NativeLayout, messages: Sequence[bytes], path: str, structure: str | None) -> None:
    """Commits the files of all ranks, on the coordinator. `messages`: the messages of `write`, by rank. `path`: the
    final path of the directory."""
    of_ranks = list(map(unpack, messages))
    inventories, paths, locations = zip(*(parts[:3] for parts in of_ranks), strict=True)
    with named_errors(str, path):
        plan = _C.GlobalPlan(inventories, "lowest_rank", least_piece_bytes=NO_LIMIT)
        ordered = [_in_order_of(plan.local_plan(rank), own) for rank, own in enumerate(locations)]
        names = [[name.decode() for name in parts[3:]] for parts in of_ranks]
        save_id = files.options.save_id
        content, index = _C.checkpoint_files(plan.catalog(), ordered, names, paths, path, save_id, structure)
    files.commit(content, index)


def _as_saved_today(values: Mapping[str, Any], paths: Mapping[str, Path]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Splits containers that torch before 2.4 saved as one object, unless paths alone would lose their form."""
    split, known = dict[str, Any](), dict(paths)
    for name, value in values.items():
        inside, inner_paths, structure = flatten_with_structure({name: value})
        if structure != Structure() or is_name_part(name.rpartition(".")[2]):  # `PerRank` is saved as one object
            inside, inner_paths = {name: value}, {name: (name,)}
        split.update(inside)
        known.update((key, (*paths.get(name, (name,)), *path[1:])) for key, path in inner_paths.items())
    return split, known


class _Written:
    """Writes batches to a data file."""

    def __init__(self, files: NativeLayout) -> None:
        self._files = files
        self._rows = 0

    def prepare(self, batch: Batch) -> None: ...

    def write(self, batch: Batch) -> None:
        pieces = batch.pieces
        names = [placed.piece.output.name for placed in pieces]
        if pieces:
            table = write_table([placed.target for placed in pieces])
            rows = range(self._rows, self._rows + len(pieces))
            self._files.write_table(table, names.__getitem__, rows)
            self._rows = rows.stop


def _row(piece: Piece) -> bytes:
    output = piece.output
    kind = TENSOR if piece.sizes == output.shape else SHARD
    code = dtype_code(output.dtype, output.name)
    return packed_row(
        kind, code, False, output.dtype.itemsize, ShardChunk(piece.offsets, piece.sizes, ()), output.shape
    )


def _in_order_of(local_plan: bytes, locations: bytes) -> bytes:
    """Reorders record locations from the inventory's order to that of the local plan, which splits no item."""
    row_bytes = LOCATION_ROW * struct.calcsize("q")
    return b"".join(locations[item * row_bytes : (item + 1) * row_bytes] for item in words(local_plan)[::PLAN_ROW])
