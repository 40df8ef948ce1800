"""Plans on the coordinator which rank reads what for which others, and caches the plan for loads of the same form."""

from __future__ import annotations

import json
import secrets
import struct
import threading
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

from .. import settings
from .._engine import _C
from .._engine.rows import OBJECT_ROW, words
from .._plan.read_plan import Reads
from .._ranks.exchange import Exchange
from .._ranks.message import pack, unpack
from .._ranks.node import memory_domain
from ..errors import LoadFailedError

BUFFERS = 3  #: a rank reads one round, sends one, and copies one to its targets at a time
_MOST_KEPT = 4
_UNKNOWN = 0
_HEAD = 5  # 64-bit words before the tables of packed routes
_MOST_WHOLE_BYTES = 64 << 20  # each rank reads larger records itself if they can only be verified as a whole
_MOST_GATHERED_BYTES = 128 << 20  # tables planned at a time; a plan takes a few times as much memory
_RANGE_BYTES = 16 << 20  # of files: such ranges are distributed over the parts of a plan
_MOST_NODES = 16  # bytes that more nodes need are read once per group of at most this many nodes
_SIZE = struct.Struct("<q")
_MOST_OBJECT_BYTES = 64 << 20  # above this sum, each rank reads objects itself; else the coordinator reads for all


@dataclass(frozen=True)
class Round:
    """What a rank does in one round: the tables of `RouteRound` in csrc/share/routes.h."""

    memory_bytes: int
    staged: memoryview
    packs: memoryview
    sends: memoryview
    receives: memoryview
    placements: memoryview

    def messages(self, table: memoryview) -> list[tuple[int, int, int]]:
        """Returns peer, offset and bytes of each message in `sends` or `receives`."""
        return [(table[at], table[at + 1], table[at + 2]) for at in range(0, len(table), 3)]

    def same_node_peers(self, table: memoryview) -> list[int]:
        """Returns the peers in `sends` or `receives` with mapped buffers: messages with them have no bytes."""
        return [peer for peer, _, size in self.messages(table) if size == 0]


class Routes:
    """What one rank reads, sends and receives. `number`: identifies the plan, on all of its ranks."""

    def __init__(self, number: int, parts: Sequence[bytes], objects: bytes = b"") -> None:
        self.number = number
        self.objects: list[int] = words(objects).tolist()  #: rows of `Needs.objects` that all ranks need, in one order
        self._parts = [words(packed) for packed in parts]  # planned one after another
        self.shared_bytes, self.once_bytes, self.alone_bytes = (
            sum(table[column] for table in self._parts) for column in (1, 2, 3)
        )
        #: rows of `LoadPlan.reads` that only this rank needs
        self.own = b"".join(bytes(table[_HEAD : _HEAD + table[_HEAD - 1]]) for table in self._parts)

    @cached_property
    def rounds(self) -> list[Round]:
        """The rounds; equally many on all ranks."""
        return [round_ for table in self._parts for round_ in _rounds_of(table)]

    @cached_property
    def peers(self) -> frozenset[int]:
        """The ranks that this one sends to or receives from in any round."""
        tables = [table for round_ in self.rounds for table in (round_.sends, round_.receives)]
        return frozenset(peer for table in tables for peer in table[::3])

    @property
    def neighbours(self) -> frozenset[int]:
        """Those of them that map this one's buffers."""
        tables = [(round_, table) for round_ in self.rounds for table in (round_.sends, round_.receives)]
        return frozenset(peer for round_, table in tables for peer in round_.same_node_peers(table))

    @property
    def buffer_bytes(self) -> list[int]:
        """The bytes of each of this rank's `BUFFERS`."""
        rounds = self.rounds
        return [max((one.memory_bytes for one in rounds[first::BUFFERS]), default=0) for first in range(BUFFERS)]


@dataclass(frozen=True)
class Needs:
    """What a rank needs, and with which ranks it may share reads, packed for the coordinator."""

    rows: bytes  #: `LoadPlan.reads`
    objects: bytes  #: `LoadPlan.objects`
    files: bytes  #: `LoadPlan.files`
    group: bytes  #: only ranks with the same group share reads
    domain: bytes  #: ranks with the same domain map each other's buffers
    budget: int  #: bytes for the rounds' buffers on this rank

    def tables(self, rows: bytes, objects: bytes) -> tuple[bytes, ...]:
        """Returns what the coordinator needs to know of these rows and objects, except the domain."""
        return rows, objects, self.files, self.group

    @classmethod
    def of(cls, reads: Reads | None, save: str) -> Needs:
        """Returns what a rank needs for its reads (None: nothing). `save`: the id of the save that it reads.

        Raises ValueError for a setting or a name that cannot be used.
        """
        domain, budget = memory_domain().encode(), settings.broadcast_bytes()
        if reads is None:
            return cls(b"", b"", json.dumps([]).encode(), b"", domain, budget)
        files = json.dumps(reads.files).encode()
        return cls(reads.rows, reads.object_rows, files, save.encode(), domain, budget)


_kept: OrderedDict[bytes, Routes] = OrderedDict()  # {hash of the plan's input: routes}
_kept_lock = threading.Lock()


def routes_of_all(exchange: Exchange, needs: Needs, verify: bool, phase: str, through_devices: bool = False) -> Routes:
    """Returns this rank's routes; collective. One reduction suffices if all ranks have cached the routes of one plan.

    `through_devices`: ranks do not map each other's buffers. Raises on all ranks, as `together` does, if the
    coordinator cannot plan.
    """
    tables = pack(*needs.tables(needs.rows, needs.objects), needs.domain)
    limits = f"{exchange.rank} {exchange.size} {verify} {needs.budget} {through_devices}".encode()
    form = blake2b(pack(tables, limits), digest_size=16).digest()
    with _kept_lock:
        routes = _kept.get(form)
    number = _UNKNOWN if routes is None else routes.number
    least, not_most = exchange.agree((number, ~number), phase)
    if routes is None or not least == ~not_most != _UNKNOWN:
        routes = _plan(exchange, needs, verify, phase, through_devices)
    with _kept_lock:
        _kept[form] = routes
        _kept.move_to_end(form)
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
    return routes


def _plan(exchange: Exchange, needs: Needs, verify: bool, phase: str, through_devices: bool) -> Routes:
    """Plans one part of the records after another, so that the coordinator's memory is bounded; collective. Equal
    tables are gathered once, different ones at most `_MOST_GATHERED_BYTES` at a time."""
    # Every rank takes part in each step, even if its tables cannot be split.
    (table_bytes,) = exchange.agree([], phase, [len(needs.rows)])
    count = parts_of(table_bytes)
    if count > 1:
        count = parts_of(_planned_bytes_of_all(exchange, needs, phase))
    parts = exchange.together(
        lambda: _C.split_reads(needs.rows, json.loads(needs.files), count, _RANGE_BYTES), phase, LoadFailedError
    )
    number, common, planned = b"", b"", []
    coordinator = _Coordinator(verify, needs.budget, through_devices)
    for part, rows in enumerate(parts):
        tables = needs.tables(rows, needs.objects if part == 0 else b"")
        gathered = exchange.gather_distinct([*tables, needs.domain], phase)
        answers = exchange.together(partial(coordinator.plan, gathered), phase, LoadFailedError)
        packed, number_of_part, objects, numbers = exchange.scatter_contents(answers, phase)
        number, common = (number_of_part, objects) if part == 0 else (number, common)
        planned.append(renumbered(packed, *unpack(numbers)) if numbers else packed)
    return Routes(int.from_bytes(number, "little"), planned, common)


def _planned_bytes_of_all(exchange: Exchange, needs: Needs, phase: str) -> int:
    tables = pack(*needs.tables(needs.rows, b""))
    table, node = (blake2b(data, digest_size=16).digest() for data in (tables, needs.domain))
    gathered = exchange.gather(table + node + _SIZE.pack(len(needs.rows)), phase)
    told = ((row[:16], row[16:32], *_SIZE.unpack_from(row, 32)) for row in gathered or ())
    return exchange.from_coordinator(lambda: planned_bytes(told), phase, LoadFailedError)


def planned_bytes(tables: Iterable[tuple[Hashable, Hashable, int]]) -> int:
    """Returns the bytes of the tables to plan; of replicas on many nodes, only about `_MOST_NODES` count. `tables`: per
    rank, an id of its table, an id of its node, and the bytes of its table."""
    sizes: dict[Hashable, int] = {}
    ranks, nodes = Counter[Hashable](), defaultdict[Hashable, set[Hashable]](set)
    for table, node, size in tables:
        sizes[table] = size
        ranks[table] += 1
        nodes[table].add(node)
    return sum(size * ranks[name] * _MOST_NODES // max(_MOST_NODES, len(nodes[name])) for name, size in sizes.items())


def parts_of(table_bytes: int) -> int:
    """Returns the number of parts to plan one at a time, for tables of this size."""
    return max(1, -(-table_bytes // _MOST_GATHERED_BYTES))


class _Coordinator:
    """Plans the parts of a load, one after another. Each part evens out the imbalance of the previous ones."""

    def __init__(self, verify: bool, budget: int, through_devices: bool) -> None:
        self._verify = verify
        self._budget = budget
        self._through_devices = through_devices
        self._bytes_read: list[int] = []  # per rank, in the parts planned so far

    def plan(self, gathered: list[list[bytes]] | None) -> list[tuple[bytes, ...]] | None:
        """Returns each rank's answer for one part: its packed routes, the number of the plan, the objects that all
        ranks need, and the input of `renumbered` if the routes are those of another rank. `gathered`: the tables of all
        ranks; None except on the coordinator."""
        if gathered is None:
            return None
        rows, objects, names, groups, domains = ([of_rank[column] for of_rank in gathered] for column in range(5))
        files = {of_rank: json.loads(of_rank) for of_rank in set(names)}
        routes, self._bytes_read, alike = _C.plan_routes(
            rows,
            [files[of_rank] for of_rank in names],
            _numbered(groups),
            _numbered(domains),
            self._verify,
            whole_bytes=min(_MOST_WHOLE_BYTES, self._budget // 2),
            budget_bytes=self._budget // BUFFERS,
            bytes_before=self._bytes_read,
            most_nodes=_MOST_NODES,
            sees_neighbours=not self._through_devices,
        )
        number = (secrets.randbits(62) | 1).to_bytes(8, "little")  # never _UNKNOWN
        common = _common_objects(list(zip(objects, names, groups, strict=True)))
        numbers = [b""] * len(rows)
        for ranks, planned in alike:
            of_all = pack(array("q", planned).tobytes(), array("q", ranks).tobytes())
            for rank, of in zip(ranks, planned, strict=True):
                routes[rank], numbers[rank] = routes[of], of_all
        return [(packed, number, *rest) for packed, *rest in zip(routes, common, numbers, strict=True)]


def _rounds_of(table: memoryview) -> list[Round]:
    at, rounds = _HEAD + table[_HEAD - 1], []
    for _ in range(table[0]):
        memory_bytes, *lengths = table[at : at + 6]
        at += 6
        tables = []
        for length in lengths:
            tables.append(table[at : at + length])
            at += length
        rounds.append(Round(memory_bytes, *tables))
    return rounds


def renumbered(packed: bytes, planned: bytes, ranks: bytes) -> bytes:
    """Returns packed routes that were planned for other ranks, with `ranks` substituted for them."""
    numbers = dict(zip(words(planned), words(ranks), strict=True))
    routes = bytearray(packed)
    for round_ in _rounds_of(memoryview(routes).cast("q")):
        for messages in (round_.sends, round_.receives):
            for at in range(0, len(messages), 3):
                messages[at] = numbers[messages[at]]
        places, at = round_.placements, 0
        while at < len(places):
            places[at] = numbers.get(places[at], places[at])  # -1, its own memory, has no number
            at += 5 + 4 * places[at + 4]
    return bytes(routes)


def _common_objects(needs: list[tuple[bytes, bytes, bytes]]) -> list[bytes]:
    """Returns, per rank, the rows of the objects that every rank needs, in the same order on all ranks.

    `needs`: per rank, its table of objects, its file names, and its group. Equal ones are parsed once.
    """
    locations = {need: _object_locations(*need) for need in set(needs)}
    first, *others = locations.values()
    common = sorted(set(first).intersection(*others))
    if sum(length for _, _, _, length, _ in common) > _MOST_OBJECT_BYTES:
        common = []
    rows = {need: array("q", [row_at[at] for at in common]).tobytes() for need, row_at in locations.items()}
    return [rows[need] for need in needs]


def _object_locations(table: bytes, names: bytes, group: bytes) -> dict[tuple[Any, ...], int]:
    """Returns the row of each object of a table, by the location of its record."""
    numbers, files = words(table), json.loads(names)
    rows = [numbers[at + 1 : at + OBJECT_ROW].tolist() for at in range(0, len(numbers), OBJECT_ROW)]
    return {(group, files[file], *where): row for row, (file, *where) in enumerate(rows)}


def _numbered(values: list[bytes]) -> list[int]:
    """Returns a number per value, the same for equal values."""
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
