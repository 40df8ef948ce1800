"""The planning core from Python: random meshes and placements, and what its errors say."""

from __future__ import annotations

import itertools
import math
import struct
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._engine import _C

OBJECT, TENSOR, SHARD = 0, 1, 2
DTYPES = {name: (code, item_bytes) for code, (name, _, item_bytes) in enumerate(_C.dtypes())}


@dataclass(frozen=True)
class Row:
    name: str
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    kind: int = SHARD
    dtype: str = "float32"
    object_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.object_bytes if self.kind == OBJECT else math.prod(self.size) * DTYPES[self.dtype][1]


def tensor(name: str, *shape: int, dtype: str = "float32") -> Row:
    return Row(name, shape, (0,) * len(shape), shape, TENSOR, dtype)


def thing(name: str, size: int = 0) -> Row:
    return Row(name, kind=OBJECT, object_bytes=size)


def pack(rows: list[Row], node: int = 0) -> bytes:
    """The layout in csrc/state/inventory.h, written a second time."""
    numbers, numbers_of, ends, names = {}, [], [], b""
    for row in rows:
        code = 0 if row.kind == OBJECT else DTYPES[row.dtype][0]
        words = row.kind | code << 8 | len(row.shape) << 32, row.bytes, *row.shape, *row.offset, *row.size
        numbers_of.append(numbers.setdefault(words, len(numbers)))
        names += row.name.encode()
        ends.append(len(names))
    table = [word for words in numbers for word in words]
    lengths = len(rows), len(numbers), len(table), len(names), node
    packed = struct.pack("<6q", int.from_bytes(b"VKCVITM2", "little"), *lengths)
    packed += struct.pack(f"<{len(table)}q", *table)
    for block in (struct.pack(f"<{len(ends)}I", *numbers_of), struct.pack(f"<{len(ends)}I", *ends), names):
        packed += block + bytes(-len(block) % 8)
    return packed


@dataclass
class Job:
    """What every rank of a job holds."""

    ranks: list[list[Row]]
    nodes: list[int] = field(default_factory=list)

    def plan(self, placement: str = "balanced", **options: object) -> _C.GlobalPlan:
        nodes = self.nodes or [0] * len(self.ranks)
        inventories = [pack(rows, node) for rows, node in zip(self.ranks, nodes, strict=True)]
        return _C.GlobalPlan(inventories, placement, **options)  # type: ignore[arg-type]


def part(plan: _C.GlobalPlan, rank: int) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("<4q", plan.local_plan(rank)))


def written(job: Job, plan: _C.GlobalPlan, rank: int) -> list[Row]:
    """What the rank writes, row by row."""
    result = []
    for item, dim, start, length in part(plan, rank):
        row = job.ranks[rank][item]
        if dim >= 0:
            assert length > 0
            assert start >= 0
            assert start + length <= row.size[dim]
            offset, size = list(row.offset), list(row.size)
            offset[dim] += start
            size[dim] = length
            row = Row(row.name, row.shape, tuple(offset), tuple(size), row.kind, row.dtype)
        result.append(row)
    return result


def elements(row: Row) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(o, o + s) for o, s in zip(row.offset, row.size, strict=True))))


def check_catalog(job: Job, plan: _C.GlobalPlan, node: int = 0) -> None:
    """The catalog has every element once, and says of each chunk who writes it as which row."""
    held = {(row.name, row.kind == OBJECT) for rows in job.ranks for row in rows}
    shapes = {row.name: row.shape for rows in job.ranks for row in rows}
    seen: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    offsets = []
    writes = [written(job, plan, rank) for rank in range(plan.ranks)]
    for name, kind, shape, offset, size, writer, row in plan.catalog(node).rows():
        assert shape == shapes[name]
        row_written = writes[writer][row]
        assert (row_written.name, row_written.offset, row_written.size) == (name, offset, size)
        assert (kind == OBJECT) == (row_written.kind == OBJECT)
        seen[name] += elements(row_written)
        offsets.append((name, offset))
    assert len(set(offsets)) == len(offsets)
    assert set(seen) == {name for name, _ in held}
    for name, found in seen.items():
        assert sorted(found) == list(itertools.product(*map(range, shapes[name])))
    for name, group in itertools.groupby(offsets, key=lambda entry: entry[0]):
        group_offsets = [offset for _, offset in group]
        assert group_offsets == sorted(group_offsets), name


def cuts(length: int, parts: int) -> list[tuple[int, int]]:
    """As torch.chunk: even parts rounded up, the last ones short or empty."""
    step = -(-length // parts)
    return [(min(i * step, length), max(0, min(step, length - i * step))) for i in range(parts)]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Tensors on a mesh of up to three dimensions, each sharded or replicated along each, and objects on some ranks.
    Tensors are alike, as those of layers, and ranks have them in one order or each in its own."""
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    coordinates = list(itertools.product(*map(range, mesh)))
    ranks: list[list[Row]] = [[] for _ in coordinates]
    layers, shuffled = draw(st.integers(1, 3)), draw(st.booleans())
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        dtype = draw(st.sampled_from(["float32", "int8", "float64"]))
        choices = st.sampled_from([None, *range(len(shape))])
        places = draw(st.lists(choices, min_size=len(mesh), max_size=len(mesh)))
        for rank, coordinate in enumerate(coordinates):
            offset, size = [0] * len(shape), list(shape)
            for mesh_dim, dim in enumerate(places):
                if dim is not None:
                    start, size[dim] = cuts(size[dim], mesh[mesh_dim])[coordinate[mesh_dim]]
                    offset[dim] += start
            kind = TENSOR if all(dim is None for dim in places) else SHARD
            for layer in range(layers):
                ranks[rank].append(Row(f"{layer}.t{number}", shape, tuple(offset), tuple(size), kind, dtype))
    for number in range(draw(st.integers(0, 4))):
        holders = draw(st.sets(st.sampled_from(range(len(ranks))), min_size=1))
        known = draw(st.sampled_from([0, 1, 500]))
        for rank in holders:
            ranks[rank].append(thing(f"o{number}", known))
    for rows in ranks if shuffled else []:
        draw(st.randoms(use_true_random=False)).shuffle(rows)
    ranks_a_node = draw(st.integers(1, 4))
    return Job(ranks, [rank // ranks_a_node for rank in range(len(ranks))])


@settings(max_examples=100, deadline=None)
@given(jobs(), st.sampled_from(["balanced", "lowest_rank"]), st.sampled_from([1, 16, 1 << 20]))
def test_every_element_has_one_writer_that_holds_it(job: Job, placement: str, least: int) -> None:
    plan = job.plan(placement, least_piece_bytes=least)
    check_catalog(job, plan)
    assert plan.items == plan.catalog().chunks == sum(len(part(plan, rank)) for rank in range(plan.ranks))
    assert plan.bytes_by_rank() == [sum(row.bytes for row in written(job, plan, r)) for r in range(plan.ranks)]
    for rank in range(plan.ranks):
        order = [(job.ranks[rank][item].kind == OBJECT, item, start) for item, _, start, _ in part(plan, rank)]
        assert order == sorted(order)


@settings(max_examples=75, deadline=None)
@given(jobs(), st.sampled_from([1, 1 << 20]))
def test_local_plans_give_each_node_a_copy_of_what_it_holds(job: Job, least: int) -> None:
    plan = job.plan("local", least_piece_bytes=least)
    for node in range(len(set(job.nodes))):
        check_catalog(job, plan, node)
        here = [rank for rank, at in enumerate(job.nodes) if at == node]
        held = defaultdict(set)
        for rank in here:
            for row in job.ranks[rank]:
                held[row.name].update(elements(row))
        copies: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for rank in here:
            for row in written(job, plan, rank):
                copies[row.name] += elements(row)
        for name, wanted in held.items():
            assert sorted(copies[name]) == sorted(wanted)
