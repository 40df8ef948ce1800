"""Loads in which ranks read for each other: each byte once, the right values everywhere, and failures told to all."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.logs import logged
from harness.ranks import on_ranks, run_ranks
from harness.states import MiB, assert_same, numbers, sharded
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._engine import _C
from vescale_ckpt._ranks.node import Process
from vescale_ckpt._routes import node_buffer, pipeline, routed_read, routes
from vescale_ckpt._routes.node_buffer import NodeBuffer

FOREVER = 60.0


def _load(directory: Path, state: dict[str, Any], **options: Any) -> tuple[int, int]:
    """Bytes that this rank read, and that it was to get."""
    report = vescale_ckpt.load(directory, state, broadcast_checkpoint=True, timeout=FOREVER, **options)
    return report.stats.read_bytes, report.stats.bytes


def _live_on_nodes(nodes: list[int]) -> None:
    """Ranks of different nodes send messages, those of one look at each other's memory."""
    os.environ["VESCALE_CKPT_NODE"] = str(nodes[dist.get_rank()])


def _assert_filled(value: torch.Tensor, full: torch.Tensor) -> None:
    if isinstance(value, DTensor):
        full = distribute_tensor(full, value.device_mesh, value.placements, src_data_rank=None).to_local()
        value = value.to_local()
    assert_same(value, full)


# --- Each byte once


def _replicated(directory: Path) -> tuple[int, int, int]:
    full = {"large": numbers(3000, 2000), **{f"n{i}": numbers(50 + i, 40, dtype=torch.int16) for i in range(60)}}
    vescale_ckpt.save(directory, dict(full))
    state = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    read, got = _load(directory, state)
    assert_same(state, full)
    return read, got, sum(tensor.nbytes for tensor in full.values())


def _resharded(directory: Path, saved: Placement, wanted: Placement, shape: tuple[int, ...]) -> tuple[int, int, int]:
    full = numbers(*shape)
    vescale_ckpt.save(directory, {"w": sharded(full, saved)})
    state = {"w": sharded(torch.zeros_like(full), wanted)}
    read, got = _load(directory, state)
    _assert_filled(state["w"], full)
    return read, got, full.nbytes


def _stacked(directory: Path) -> tuple[int, int, int]:
    return _resharded(directory, Replicate(), Shard(1), (8, 512, 1024))


def _rows_to_columns(directory: Path) -> tuple[int, int, int]:
    return _resharded(directory, Shard(0), Shard(1), (4096, 2048))


@pytest.mark.parametrize(("case", "replicas"), [(_replicated, 4), (_rows_to_columns, 1), (_stacked, 1)])
def test_each_byte_is_read_once(checkpoint: Path, case: Callable[[Path], tuple[int, int, int]], replicas: int) -> None:
    results = run_ranks(4, case, checkpoint)
    read, got = (sum(result[column] for result in results) for column in (0, 1))
    stored = results[0][2]
    assert got == replicas * stored
    assert read <= 1.02 * stored
    assert max(result[0] for result in results) <= 0.3 * stored, "all take part"


# --- Memory


@pytest.mark.parametrize("nodes", [[1, 1], [1, 2]])
@on_ranks(2)
def test_memory_is_bounded(checkpoint: Path, nodes: list[int]) -> None:
    _live_on_nodes(nodes)
    full = {"a": numbers(4096, 1024), "b": numbers(1024, 4096, dtype=torch.int16)}
    vescale_ckpt.save(checkpoint, dict(full))
    os.environ["VESCALE_CKPT_MEMORY_BYTES"] = str(12 * MiB)
    state = {"a": torch.zeros_like(full["a"]), "b": sharded(torch.zeros_like(full["b"]), Shard(1))}
    taken: list[int] = []

    def memory(sizes: list[int]) -> NodeBuffer:
        taken.extend(sizes)
        return NodeBuffer(sizes)

    with mock.patch.object(routed_read, "NodeBuffer", memory):
        read, _ = _load(checkpoint, state)
    assert_same(state["a"], full["a"])
    _assert_filled(state["b"], full["b"])
    assert 2 * MiB < sum(taken) <= 6 * MiB and read > 8 * MiB


# --- More nodes than read together


def _on_many_nodes(directory: Path, nodes: list[int], limit: int) -> tuple[int, int]:
    """Bytes that this rank read, and how often it planned."""
    _live_on_nodes(nodes)
    full = {"a": numbers(2048, 512), "b": numbers(512, 2048, dtype=torch.int16), "c": numbers(7)}
    vescale_ckpt.save(directory, dict(full))
    os.environ["VESCALE_CKPT_MEMORY_BYTES"] = str(2 * limit)
    state = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    with (
        mock.patch.object(routes, "_MOST_NODES", 2),
        mock.patch.object(_C, "plan_routes", wraps=_C.plan_routes) as planned,
    ):
        read, _ = _load(directory, state)
        assert_same(state, full)
        _load(directory, {name: torch.zeros_like(tensor) for name, tensor in full.items()})
    return read, planned.call_count


@pytest.mark.parametrize(
    ("nodes", "limit"), [([0, 1, 2, 3], 4 * MiB), ([0, 0, 1, 1, 2, 2], 64 * MiB), ([0, 0, 1, 1, 2, 3], 64 * MiB)]
)
def test_every_so_many_nodes_read_once(checkpoint: Path, nodes: list[int], limit: int) -> None:
    results = run_ranks(len(nodes), _on_many_nodes, checkpoint, nodes, limit)
    stored = 6 * MiB
    assert 2 * stored <= sum(read for read, _ in results) <= 2.6 * stored, "and a block of checksums at each cut"
    assert [plans for _, plans in results] == [1] + [0] * (len(nodes) - 1)


def test_replicas_on_many_nodes_are_planned_for_some() -> None:
    assert routes.planned_bytes(("table", rank // 2, 100) for rank in range(34)) == 3200
    assert routes.planned_bytes(("table", rank // 2, 100) for rank in range(32)) == 3200
    assert routes.planned_bytes((f"table {rank}", rank, 100) for rank in range(32)) == 3200


# --- Planning once, standing down


@on_ranks(2)
def test_a_second_load_of_the_same_form_plans_nothing(checkpoint: Path) -> None:
    full = numbers(100, 10)
    vescale_ckpt.save(checkpoint, {"w": full})
    for is_whole, plans in ((True, 1), (True, 0), (False, 1), (True, 0)):
        state = {"w": torch.zeros_like(full) if is_whole else sharded(torch.zeros_like(full), Shard(0))}
        with mock.patch.object(_C, "plan_routes", wraps=_C.plan_routes) as planned:
            _load(checkpoint, state)
        assert planned.call_count == (0 if dist.get_rank() else plans)
        _assert_filled(state["w"], full)


@pytest.mark.parametrize(("ranks_a_node", "shares"), [(4, False), (2, True), (1, True)])
@on_ranks(4)
def test_auto_shares_over_nodes_and_not_within_one(checkpoint: Path, ranks_a_node: int, shares: bool) -> None:
    full = {"w": numbers(1024, 1024), "text": "an object"}
    vescale_ckpt.save(checkpoint, dict(full))
    os.environ["VESCALE_CKPT_NODE"] = str(dist.get_rank() // ranks_a_node)
    state = {"w": torch.zeros(1024, 1024), "text": ""}
    stats = vescale_ckpt.load(checkpoint, state, timeout=FOREVER).stats
    assert_same(state, full)
    assert (stats.shared_bytes, stats.bytes) == (4 * MiB if shares else 0, 4 * MiB)


@on_ranks(2)
def test_auto_reads_shards_alone_on_any_nodes(checkpoint: Path) -> None:
    """Rows that each rank needs to itself, but for blocks at their edges: nothing to gain by going through others."""
    os.environ["VESCALE_CKPT_NODE"] = str(dist.get_rank())
    full = numbers(2048, 1023)
    vescale_ckpt.save(checkpoint, {"w": full})
    state = {"w": sharded(torch.zeros_like(full), Shard(0))}
    routes._kept.clear()
    asked = mock.patch.object(_C, "plan_routes", wraps=_C.plan_routes)
    never = mock.patch.object(pipeline.Pipeline, "run", side_effect=AssertionError("nothing is to be tried"))
    with never, asked as planned:
        assert vescale_ckpt.load(checkpoint, state, timeout=FOREVER).stats.shared_bytes == 0
    _assert_filled(state["w"], full)
    assert not any(rows for call in planned.call_args_list for rows in call.args[0]), "nobody tells what it wants"


@on_ranks(2)
def test_rounds_of_different_plans_do_not_mix(checkpoint: Path) -> None:
    """As if two loads of the group, in two threads, had met each other's collectives."""
    vescale_ckpt.save(checkpoint, {"w": numbers(100, 10)})
    _load(checkpoint, {"w": torch.zeros(100, 10)})
    plan = routes.routes_of_all

    def other_plan(*args: Any) -> routes.Routes:
        of_all = plan(*args)
        of_all.number += dist.get_rank()
        return of_all

    with (
        mock.patch("vescale_ckpt._routes.broadcast_load.routes_of_all", other_plan),
        pytest.raises(CheckpointError, match=r"(?s)ranks are in different places.*plan"),
    ):
        _load(checkpoint, {"w": torch.zeros(100, 10)})


@on_ranks(2)
def test_ranks_that_may_not_see_memory_of_others_read_for_themselves(checkpoint: Path) -> None:
    full = numbers(512, 1024)
    vescale_ckpt.save(checkpoint, {"w": full})
    state = {"w": torch.zeros_like(full)}
    blind = mock.patch.object(node_buffer, "_open", side_effect=PermissionError(13, "not yours"))
    with blind if dist.get_rank() == 1 else contextlib.nullcontext(), logged(logging.WARNING) as texts:
        stats = vescale_ckpt.load(checkpoint, state, broadcast_checkpoint=True, timeout=FOREVER).stats
    assert_same(state["w"], full)
    assert stats.shared_bytes == 0 and len(texts) == dist.get_rank()
    assert all("memory of rank 0" in text and "not yours" in text for text in texts)


def test_memory_of_another_size_is_not_looked_at(tmp_path: Path) -> None:
    """What a number of a process of another machine happens to mean on this one."""
    memory = NodeBuffer([5000, 0, 70])
    hello = bytearray(node_buffer._HELLO.pack(os.getpid(), memory._file, 3, memory._token))
    sizes = struct.pack("<3q", *memory._sizes)
    opened = node_buffer._open(hello + sizes)
    memory[0][7] = 3
    assert opened.memories[0][7] == 3
    (tmp_path / "short").write_bytes(b"another file")
    with (tmp_path / "short").open("rb+") as file:
        hello = bytearray(node_buffer._HELLO.pack(os.getpid(), file.fileno(), 3, memory._token))
        with pytest.raises(ValueError, match="of another size"):
            node_buffer._open(hello + sizes)


def test_nobody_waits_for_a_neighbour_that_has_left_or_died() -> None:
    memory, half_a_minute = NodeBuffer([4096]), timedelta(seconds=30)
    hello = bytearray(node_buffer._HELLO.pack(os.getpid(), memory._file, 1, memory._token))
    opened = node_buffer._open(hello + struct.pack("<q", 4096))
    waits = node_buffer._Counted(opened.filled, opened.process, 2)
    memory._own.filled.set(1)
    with pytest.raises(RuntimeError, match="is late"):
        waits.wait(timedelta(seconds=0.01))
    memory._own.filled.set(3)
    waits.wait(half_a_minute)  # it has come further
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    opened.process = Process(child.pid)
    placed = node_buffer._Counted(opened.placed, opened.process, 1)
    assert opened.process.lives()
    child.kill()
    with pytest.raises(RuntimeError, match="has died"):
        placed.wait(half_a_minute)
    child.communicate()  # until here a zombie
    assert not opened.process.lives()
    memory.leave()
    with pytest.raises(RuntimeError, match="has left"):
        waits.wait(half_a_minute)


def test_one_rank_shares_nothing(checkpoint: Path) -> None:
    vescale_ckpt.save(checkpoint, {"w": numbers(10)})
    with mock.patch.object(routes.Routes, "__init__", side_effect=AssertionError):
        for way in (True, False, "auto"):
            state = {"w": torch.zeros(10)}
            vescale_ckpt.load(checkpoint, state, broadcast_checkpoint=way)  # type: ignore[arg-type]
            assert_same(state["w"], numbers(10))
    with pytest.raises(ValueError, match=r"broadcast_checkpoint: expected .* got 'yes'"):
        vescale_ckpt.load(checkpoint, broadcast_checkpoint="yes")  # type: ignore[call-overload]
