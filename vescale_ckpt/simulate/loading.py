"""Plans a load for simulated ranks: who reads how much, and what crosses the links of nodes."""

from __future__ import annotations

import math
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from .. import settings
from .._engine import _C
from .._routes.broadcast_load import pays, reads_own_only
from .._routes.routes import BUFFERS, Routes, parts_of, planned_bytes, range_bytes_of
from ..settings import Broadcast
from .models import Entry
from .parallelism import Parallelism, SimulatedState
from .simulation import gather, metadata_files, planned, with_peak_memory, written

_Rule = Callable[[float, float], bool]  # bytes read alone, bytes read once -> whether to share


@dataclass(frozen=True)
class LoadSimulation:
    """The figures of a simulated load of all tensors. Sizes are in bytes, of reads with checksums."""

    ranks: int
    saved_ranks: int
    broadcast: bool  #: whether ranks read for each other
    read_by_rank: list[int]
    read_alone: int  #: what all ranks read in sum if each reads what it needs
    nodes: int
    node_read_most: int  #: most that the ranks of one node read
    node_received_most: int  #: over one node's link
    node_sent_most: int
    table_bytes: int  #: tables of what all ranks need
    gathered_bytes: int  #: what of these the coordinator gets at the first load: equal tables once
    planning_parts: int  #: the coordinator plans one at a time
    planning_seconds: float  #: on the coordinator, and for one rank's own part
    rounds: int  #: that all ranks take together
    planning_memory: int | None  #: peak, of one part, with what was gathered. None if the kernel does not report it
    seconds: float | None  #: what storage and links need at least; None if no bandwidth is given

    @property
    def read(self) -> int:
        return sum(self.read_by_rank)


def simulate_load(
    entries: Sequence[Entry],
    parallelism: Parallelism,
    saved: Parallelism | None = None,
    broadcast: Broadcast = "auto",
    node_size: int = 8,
    storage: float | None = None,
    link: float | None = None,
    budget: int | None = None,
) -> LoadSimulation:
    """Plans a load of all tensors of `entries` by ranks of which `node_size` share a node, into host memory.

    Args:
        saved: how the ranks that saved held them; None: as the ranks that load.
        storage: bytes a second that the storage gives to all ranks together.
        link: bytes a second of each node's link, each way.
        budget: `VESCALE_CKPT_BROADCAST_BYTES` of a rank.
    """
    tensors = [entry for entry in entries if entry.dtype is not None]
    needs = _Needs(tensors, parallelism, _index(tensors, saved or parallelism))
    ranks, nodes = parallelism.ranks, -(-parallelism.ranks // node_size)
    load = _Traffic([0] * ranks, [0] * nodes, [0] * nodes, node_size)
    once, alone = needs.stored_bytes, sum(needs.alone)

    def is_worth_it(alone_bytes: float, once_bytes: float) -> bool:
        return broadcast is True or (broadcast == "auto" and pays(nodes == 1, False, alone_bytes, once_bytes))

    shares = ranks > 1 and is_worth_it(math.inf, 1)
    own_only = reads_own_only(max(needs.alone) * ranks, once, is_worth_it)
    parts, peak = 0, None
    if shares and not own_only:
        parts, peak, shares = load.share(needs, budget or settings.number("broadcast_bytes"), is_worth_it)
        seconds, rounds = load.seconds, load.rounds
    else:
        seconds, rounds = 0.0, 0
        shares = False
    if not shares:
        load = _Traffic(list(needs.alone), [0] * nodes, [0] * nodes, node_size)
    by_node = [sum(load.read[first : first + node_size]) for first in range(0, ranks, node_size)]
    times = [sum(load.read) / storage] if storage else []
    times += [max(*load.received, *load.sent, 0) / link] if link else []
    return LoadSimulation(
        ranks=ranks,
        saved_ranks=(saved or parallelism).ranks,
        broadcast=shares,
        read_by_rank=load.read,
        read_alone=alone,
        nodes=nodes,
        node_read_most=max(by_node),
        node_received_most=max(load.received),
        node_sent_most=max(load.sent),
        table_bytes=needs.table_bytes,
        gathered_bytes=needs.distinct_bytes if parts else 0,
        planning_parts=parts,
        planning_seconds=seconds,
        rounds=rounds,
        planning_memory=peak,
        seconds=max(times) if times else None,
    )


def _index(entries: Sequence[Entry], saved: Parallelism) -> _C.Index:
    """The index of a checkpoint that these ranks would have saved."""
    state = SimulatedState(entries, saved)
    plan, local_plans = planned(gather(state).inventories, "balanced")
    _, index = metadata_files(plan, written(state, local_plans))
    return _C.Index.from_bytes(index)


class _Needs:
    """What each rank reads without others. Equal tables are kept once, compressed: layers repeat."""

    def __init__(self, entries: Sequence[Entry], parallelism: Parallelism, index: _C.Index) -> None:
        state = SimulatedState(entries, parallelism)
        self.alone: list[int] = []  #: bytes that a rank reads
        self.table_bytes = 0
        self.distinct_bytes = 0
        self.last = 0  #: where the last record starts
        self._tables: dict[bytes, tuple[bytes, list[str], int]] = {}
        self._sizes: dict[bytes, int] = {}
        self._of_rank: list[bytes] = []
        for rank in range(parallelism.ranks):
            plan = index.plan_load(state.inventory(rank))
            name = blake2b(plan.reads + repr(plan.files).encode(), digest_size=16).digest()
            if name not in self._tables:
                wanted = _C.bytes_read_alone(plan.reads, plan.files, True)
                self._tables[name] = zlib.compress(plan.reads, 1), plan.files, wanted
                self._sizes[name] = len(plan.reads)
                self.distinct_bytes += len(plan.reads)
                self.last = max(self.last, _C.last_record(plan.reads))
            self._of_rank.append(name)
            self.alone.append(self._tables[name][2])
            self.table_bytes += len(plan.reads)
        self.stored_bytes = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries if entry.dtype)

    def count_parts(self, node_size: int) -> int:
        """How many parts the coordinator plans."""
        tables = ((name, rank // node_size, self._sizes[name]) for rank, name in enumerate(self._of_rank))
        count = parts_of(self.table_bytes)
        return count if count == 1 else parts_of(planned_bytes(tables))

    def parts(self, count: int, range_bytes: int) -> Iterator[tuple[list[bytes], list[list[str]]]]:
        """For each part the tables of all ranks, and the names of files."""
        files = [self._tables[name][1] for name in self._of_rank]
        for part in range(count):
            tables = {
                name: _C.split_reads(zlib.decompress(packed), names, count, range_bytes)[part]
                for name, (packed, names, _) in self._tables.items()
            }
            yield [tables[name] for name in self._of_rank], files


@dataclass
class _Traffic:
    """Bytes that ranks read, and that the links of nodes carry."""

    read: list[int]
    received: list[int]
    sent: list[int]
    node_size: int
    seconds: float = 0.0  #: that planning took
    rounds: int = 0

    def share(self, needs: _Needs, budget: int, is_worth_it: _Rule) -> tuple[int, int | None, bool]:
        """Plans as the coordinator does. Returns the number of parts, the peak memory of one, and whether ranks read
        for each other at all."""
        count = needs.count_parts(self.node_size)
        most, alone, once = None, 0, 0
        bytes_read: list[int] = []
        nodes = [rank // self.node_size for rank in range(len(self.read))]
        options = {"whole_bytes": budget // 2, "budget_bytes": budget // BUFFERS}
        for tables, files in needs.parts(count, range_bytes_of(needs.last, count)):

            def plan(
                tables: list[bytes] = tables, files: list[list[str]] = files, bytes_read: list[int] = bytes_read
            ) -> tuple[list[bytes], list[int], bytes]:
                groups = [0] * len(tables)
                return _C.plan_routes(tables, files, groups, nodes, True, **options, bytes_before=bytes_read)

            start = time.perf_counter()
            (answers, bytes_read, relays), peak = with_peak_memory(plan)
            _C.relay_routes(relays, 0, tables[0])
            self.seconds += time.perf_counter() - start
            if peak is not None:
                most = max(most or 0, peak + sum({id(table): len(table) for table in tables}.values()))
            for rank, packed in enumerate(answers):
                routes = Routes(1, [packed, _C.relay_routes(relays, rank, tables[rank])])
                self._add(rank, routes, files[rank])
            self.rounds += len(routes.rounds)
            alone, once = alone + routes.alone_bytes, once + routes.once_bytes
        return count, most, is_worth_it(alone, once)

    def _add(self, rank: int, routes: Routes, files: list[str]) -> None:
        node = rank // self.node_size
        if routes.own:
            self.read[rank] += _C.bytes_read_alone(routes.own, files, True)
        staged = b"".join(_reads_of(round_.staged) for round_ in routes.rounds if len(round_.staged))
        if staged:
            self.read[rank] += _C.bytes_read_alone(staged, [""], True)
        for round_ in routes.rounds:
            self.received[node] += sum(size for _, _, size in round_.messages(round_.receives))
            self.sent[node] += sum(size for _, _, size in round_.messages(round_.sends))


def _reads_of(staged: memoryview) -> bytes:
    """Rows of `LoadPlan.reads` for the pieces that a rank reads in a round, as if all were in one file."""
    reads, at = array("q"), 0
    while at < len(staged):
        dims = staged[at + 7]
        reads.extend((staged[at + 1], 0, *staged[at + 3 : at + 8 + 3 * dims]))
        reads.extend([0] * dims)
        at += 8 + 3 * dims
    return reads.tobytes()
