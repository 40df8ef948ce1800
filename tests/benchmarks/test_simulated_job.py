"""Jobs that exist only as shapes: their ranks hold, write and read what real ones do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.inventories import inventory_of, items
from harness.ranks import on_ranks, run_ranks
from harness.states import real_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import vescale_ckpt
from benchmarks.planning.models import Entry
from benchmarks.planning.simulated_job import (
    Parallelism,
    SimulatedState,
    bytes_by_rank,
    gather,
    metadata_files,
    planned,
    shared_reads,
    written,
)
from vescale_ckpt._engine import _C

TENSORS = [
    Entry("model.embed_tokens.weight", (4096, 512), torch.float32),
    *(Entry(f"model.layers.{i}.self_attn.q_proj.weight", (1024, 1024), torch.float32) for i in range(3)),
    Entry("model.norm.weight", (1024,), torch.float32),
]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(24, 38, bias=False)
        self.o_proj = torch.nn.Linear(38, 24, bias=False)
        self.norm = torch.nn.Linear(24, 1, bias=False)


@pytest.mark.parametrize(
    ("parallelism", "mesh_shape", "names"),
    [
        (Parallelism(4, fsdp=4), (4,), ("fsdp",)),
        (Parallelism(4, fsdp=2), (2, 2), ("replica", "fsdp")),
        (Parallelism(4, fsdp=2, tensor=2), (2, 2), ("fsdp", "tensor")),
    ],
    ids=["FSDP", "HSDP", "FSDP x TP"],
)
@on_ranks(4)
def test_ranks_hold_what_torch_gives_them(
    parallelism: Parallelism, mesh_shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    """On one of four ranks, laid out by torch's own means: the layer's tensors, and the items that the rank has."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = Layer().requires_grad_(False)
    if "tensor" in names:
        parallelize_module(model, mesh["tensor"], {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()})
    fully_shard(model, mesh=mesh[tuple(name for name in names if name != "tensor")])
    state = model.state_dict()
    entries = [Entry(name, tuple(tensor.shape), torch.float32) for name, tensor in state.items()]
    held = SimulatedState(entries, parallelism).inventory(dist.get_rank())
    assert items(held) == items(inventory_of(state))


@pytest.mark.parametrize("rank", range(8))
def test_experts_lie_on_the_innermost_ranks(rank: int) -> None:
    entry = Entry("layers.0.experts.w1", (4, 6, 5), torch.float32)
    parallelism = Parallelism(8, fsdp=8, expert=2)
    placed = parallelism.mesh_and_placements(entry)
    assert placed == ((1, 4, 2), (Replicate(), Shard(1), Shard(0)))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        tensor = distribute_tensor(torch.zeros(entry.shape), init_device_mesh("cpu", placed[0]), placed[1])
        real = inventory_of({entry.name: tensor})
    finally:
        dist.destroy_process_group()
    simulated = SimulatedState([entry], parallelism).inventory(rank)
    assert items(simulated) == items(real)


def _save_and_load(directory: Path, saved: Parallelism, loads: Parallelism, node_size: int) -> tuple[int, int]:
    os.environ["VESCALE_CKPT_NODE"] = str(dist.get_rank() // node_size)
    written_bytes = vescale_ckpt.save(directory, real_state(TENSORS, saved), timeout=60).result(60).bytes
    wanted = real_state(TENSORS, loads)
    for value in wanted.values():
        value.zero_()
    stats = vescale_ckpt.load(directory, wanted, broadcast_checkpoint=True, timeout=60).stats
    for name, value in real_state(TENSORS, loads).items():
        assert torch.equal(*(v.to_local() if hasattr(v, "to_local") else v for v in (wanted[name], value)))
    return written_bytes, stats.read_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "saved_fsdp", "fsdp", "node_size"), [(4, 4, 4, 2), (4, 4, 2, 2), (4, 2, 1, 1), (2, 1, 2, 2)]
)
def test_real_ranks_write_and_read_what_is_planned(
    checkpoint: Path, ranks: int, saved_fsdp: int, fsdp: int, node_size: int
) -> None:
    saved, loads = Parallelism(ranks, saved_fsdp), Parallelism(ranks, fsdp)
    real = run_ranks(ranks, _save_and_load, checkpoint, saved, loads, node_size)
    state = SimulatedState(TENSORS, saved)
    inventories = gather(state, node_size).inventories
    plan, parts = planned(inventories)
    assert [stored for stored, _ in real] == bytes_by_rank(inventories, parts)
    index = _C.Index.from_bytes(metadata_files(plan, written(state, parts))[1])
    planned_reads = shared_reads(index, SimulatedState(TENSORS, loads), node_size)
    for (_, measured), expected in zip(real, planned_reads, strict=True):
        assert measured == pytest.approx(expected, rel=0.05, abs=1 << 20)
