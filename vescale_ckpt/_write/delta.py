"""`Delta` finds the tensors of one rank whose bytes an older checkpoint has, for saves with `base=`."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from .._checkpoint.native.delta_table import ID_BYTES, DeltaTable, Row, rows_of_rank
from .._engine import _C
from .._engine.dtype_codes import CODE_DTYPES
from .._engine.rows import LOCATION_ROW, int_table, words
from .._observe.timeline import phase
from .._plan.save_plan import PackedItems
from .._state.watch import changed_meanwhile
from .delta_base import LEAST_RECORD_BYTES
from .frozen import Content, FrozenTensors, table_rows

Write = Callable[[Any, Callable[[int], str], Any], list[int]]


class Delta:
    """The records that the rows of one rank's part are stored in: new ones, and those of older checkpoints.

    A row is stored in an older record if dtype, shape and id are equal, and the CRC-32, which the record's own framing
    repeats. docs/guarantees.md tells why that is enough.
    """

    def __init__(self, table: DeltaTable, frozen: FrozenTensors | None = None) -> None:
        self._frozen = frozen
        self.seed = table.seed
        self._key = hashlib.shake_128(b"vescale_ckpt delta" + table.seed).digest(_C.HASH_KEY_BYTES)
        self._table = table
        self._ids: dict[int, bytes] = {}  # {row of the rank's part: id}
        self._older: dict[int, Row] = {}  # {row of the rank's part: the record that has it already}
        self.reused_bytes = 0
        self.reused_tensors = 0

    def unread(self, items: PackedItems) -> dict[int, list[int]]:
        """The rows of the rank's part that need not be read, because they are of frozen tensors and older checkpoints
        have them: offset, length and CRC-32 of their records."""
        if self._frozen is None:
            return {}
        sizes = words(items.body_bytes())
        placed = {}
        for row, content in self._frozen.contents(items, self.seed).items():
            older = self._table.find(content.id)
            if older is not None and older.crc == content.crc:
                self._ids[row] = content.id
                placed[row] = self._reuse(row, older, sizes[row])
        return placed

    def _reuse(self, row: int, older: Row, size: int) -> list[int]:
        self._older[row] = older
        self.reused_bytes += size
        self.reused_tensors += 1
        return [older.offset, older.length, older.crc]

    def write(
        self, table: Any, key_of: Callable[[int], str], rows: Sequence[int], options: _C.Options, write: Write
    ) -> list[int]:
        """Writes the tensors of the engine's table that no older checkpoint has. Returns offset, length and CRC-32 of
        each record, in whatever file. `write` writes tensors to this rank's file: it gets a table, a function that
        gives keys, and the size of each tensor."""
        entries = table_rows(bytes(memoryview(table).cast("B")))
        sizes = words(_C.body_bytes(table))
        new, new_table, new_sizes, crcs = [], int_table(), array("q"), []
        placed: list[int] = [0] * (3 * len(entries))
        with phase("compare"):
            hashes = _C.hash_tensors(table, self._key, options)
        for index, (blocks, crc) in enumerate(hashes):
            row, entry = rows[index], entries[index]
            id = self._ids[row] = _id_of(entry, blocks)
            if self._frozen is not None:
                self._frozen.was_read(row, self.seed, Content(id, crc))
            older = self._table.find(id)
            if older is not None and older.crc == crc:
                placed[3 * index : 3 * index + 3] = self._reuse(row, older, sizes[index])
            else:
                new.append(index)
                new_table.extend(entry)
                new_sizes.append(sizes[index])
                crcs.append(crc)
        if new:
            written = write(new_table, lambda at: key_of(new[at]), new_sizes)
            for at, index in enumerate(new):
                if written[3 * at + 2] != crcs[at]:  # else a later save could take the record for what was hashed
                    raise changed_meanwhile(key_of(index))
                placed[3 * index : 3 * index + 3] = written[3 * at : 3 * at + 3]
        return placed

    def write_archives(
        self,
        archives: list[bytes],
        keys: list[str],
        rows: Sequence[int],
        write: Callable[[list[bytes], list[str]], list[int]],
    ) -> list[int]:
        """The same for the records of wrapper subclasses, which are archives of `torch.save`."""
        placed: list[int] = [0] * (3 * len(archives))
        new = []
        for index, (archive, row) in enumerate(zip(archives, rows, strict=True)):
            id = self._ids[row] = hashlib.sha256(self._key + archive).digest()[:ID_BYTES]
            older = self._table.find(id)
            if older is not None and (older.crc, older.length) == (_C.crc32(archive), len(archive)):
                placed[3 * index : 3 * index + 3] = self._reuse(row, older, len(archive))
            else:
                new.append(index)
        written = write([archives[index] for index in new], [keys[index] for index in new])
        for at, index in enumerate(new):
            placed[3 * index : 3 * index + 3] = written[3 * at : 3 * at + 3]
        return placed

    def locate(self, located: array[int], own_files: Sequence[str]) -> tuple[bytes, list[str]]:
        """The table of places with the files of older records, and the names of the files. `located`: the table for
        the rank's own files; it is changed."""
        names = list(own_files)
        numbers: dict[int, int] = {}
        for row, older in self._older.items():
            if older.file not in numbers:
                numbers[older.file] = len(names)
                names.append(self._table.files[older.file])
            located[row * LOCATION_ROW] = numbers[older.file]
        return located.tobytes(), names

    def ids(self) -> bytes:
        """The ids of all tensors of the rank's part, in its order."""
        return b"".join(self._ids[row] for row in range(len(self._ids)))


def table_of_new_checkpoint(
    seed: bytes, locations: Sequence[bytes], ids: Sequence[bytes], names: Sequence[Sequence[str]]
) -> DeltaTable:
    """The records of a checkpoint, for later saves. Of each rank: record locations, ids of its tensors, its files."""
    files: dict[str, int] = {}
    rows: dict[Row, None] = {}
    for located, of_rank, own in zip(locations, ids, names, strict=True):
        numbers = [files.setdefault(name, len(files)) for name in own]
        rows.update(dict.fromkeys(rows_of_rank(words(located), of_rank, numbers, LEAST_RECORD_BYTES)))
    return DeltaTable.of(seed, list(files), rows)


def _id_of(entry: memoryview, blocks: bytes) -> bytes:
    sizes = entry[3 : 3 + entry[2]]
    head = f"{CODE_DTYPES[entry[0] & ~_C.UNCHANGING]}{list(sizes)}".encode()
    return hashlib.sha256(len(head).to_bytes(8, "little") + head + blocks).digest()[:ID_BYTES]
