"""Changes the contents of safetensors headers by rules that stack, concatenate and split tensors, for loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ..._engine import _C
from ..._engine.dtype_codes import CODE_DTYPES
from ..._engine.rows import ITEM_BYTES, LOCATION_ROW, MOST_BYTES, SHARD, TENSOR, int_table, words
from ..._state.chunk_rows import ShardChunk, packed_row
from ...errors import CheckpointError, UntrustedCheckpointError
from ..quantized_tensors import Quantized, stacked_with_scales
from ..stacking import Composite, Stack
from .headers import HeaderTables


class _Row(NamedTuple):
    """A chunk of a tensor, and its record location."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: int
    at: int
    length: int
    crc: int  #: of the file's header


def stack_rows(headers: HeaderTables, stack: Stack, known: Mapping[str, Quantized]) -> HeaderTables:
    """Returns the contents with the tensors that the rules make of the stored ones, in the same places of the files.

    `known`: the quantised tensors whose scheme is known. Raises as `restacked` does, and `CheckpointError` for a rule
    that takes one name of a shared (tied) tensor and leaves another.
    """
    places = words(headers.locations)
    codes: dict[str, int] = {}
    rows: dict[str, list[_Row]] = {}
    tensors: list[Composite] = []
    for number, (name, _, code, _, _, shape, offset, size) in enumerate(_C.inventory_items(headers.inventory)):
        if name not in rows:
            codes[name] = code
            tensors.append(Composite(name, shape, CODE_DTYPES[code], (name,)))
        place = places[number * LOCATION_ROW : (number + 1) * LOCATION_ROW]
        rows.setdefault(name, []).append(_Row(offset, size, *place))
    names: list[str] = []
    packed: list[bytes] = []
    locations = int_table()
    made = stacked_with_scales(tensors, stack, rows, known, headers.aliases)
    seen: dict[tuple[int, int], tuple[str, int, tuple[int, ...]]] = {}
    for of in made:
        code = codes[of.keys[0]]
        if prod(max(length, 1) for length in of.shape) * ITEM_BYTES[code] >= MOST_BYTES:
            raise UntrustedCheckpointError(f"{of.name}: no tensor has shape {of.shape}", key=of.name)
        chunks = list(_rows_of(of, rows))
        for row in [row for row in chunks if row.length] or chunks[:1]:
            form = of.name, row.length, row.size
            if row.length and (first := seen.setdefault((row.file, row.at), form))[1:] != form[1:]:
                raise CheckpointError(
                    f"stack: {first[0]} and {of.name} are stored as one tensor (shared weights), and the rules make "
                    "different tensors of it: name both in a rule",
                    key=of.name,
                )
            kind = TENSOR if row.size == of.shape else SHARD
            chunk = ShardChunk(row.offset, row.size, ())
            names.append(of.name)
            packed.append(packed_row(kind, code, False, ITEM_BYTES[code], chunk, of.shape))
            locations.extend(row[2:])
    left = {of.name for of in made if of.is_stored}
    aliases = {alias: name for alias, name in headers.aliases.items() if {alias, name} <= left}
    inventory = _C.pack_inventory(names, packed, 0)
    return replace(headers, inventory=inventory, locations=locations.tobytes(), aliases=aliases)


def _rows_of(of: Composite, stored: Mapping[str, list[_Row]]) -> Iterator[_Row]:
    """Yields the chunks of a composite."""
    if of.index is not None:
        for row in stored[of.keys[0]]:
            inside = of.index - row.offset[0]
            if 0 <= inside < row.size[0]:
                length = row.length // row.size[0]
                yield row._replace(offset=row.offset[1:], size=row.size[1:], at=row.at + inside * length, length=length)
        return
    for key, layer, begin in of.parts():
        for row in stored[key]:
            if of.rows:
                row = row._replace(offset=(row.offset[0] + begin, *row.offset[1:]))
            if of.stacked:
                row = row._replace(offset=(layer, *row.offset), size=(1, *row.size))
            yield row
