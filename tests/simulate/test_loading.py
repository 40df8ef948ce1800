"""Simulated loads: each rank reads what real ranks read, and what crosses to nodes adds up."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import steps
from harness.ranks import run_ranks
from harness.states import real_state

import vescale_ckpt
from vescale_ckpt.cli import main
from vescale_ckpt.settings import Broadcast
from vescale_ckpt.simulate.loading import simulate_load
from vescale_ckpt.simulate.models import Entry
from vescale_ckpt.simulate.parallelism import Parallelism

TENSORS = [
    Entry("model.embed_tokens.weight", (4096, 512), torch.float32),
    *(Entry(f"model.layers.{i}.self_attn.q_proj.weight", (1024, 1024), torch.float32) for i in range(3)),
    Entry("model.norm.weight", (1024,), torch.float32),
]
STORED = sum(4 * torch.Size(entry.shape).numel() for entry in TENSORS)


def _real(directory: Path, saved: Parallelism, loads: Parallelism, node_size: int, broadcast: Broadcast) -> int:
    os.environ["VESCALE_CKPT_NODE"] = str(dist.get_rank() // node_size)
    vescale_ckpt.save(directory, real_state(TENSORS, saved), timeout=60)
    wanted = real_state(TENSORS, loads)
    for value in wanted.values():
        value.zero_()
    stats = vescale_ckpt.load(directory, wanted, broadcast_checkpoint=broadcast, timeout=60).stats
    for name, value in real_state(TENSORS, loads).items():
        assert torch.equal(*(v.to_local() if hasattr(v, "to_local") else v for v in (wanted[name], value)))
    return stats.read_bytes


@pytest.mark.parametrize(
    ("ranks", "saved_fsdp", "fsdp", "node_size", "broadcast"),
    [(4, 4, 4, 2, "auto"), (4, 4, 2, 2, "auto"), (4, 2, 1, 1, True), (3, 3, 1, 1, False), (2, 1, 2, 2, True)],
)
def test_real_ranks_read_what_the_simulation_says(
    checkpoint: Path, ranks: int, saved_fsdp: int, fsdp: int, node_size: int, broadcast: Broadcast
) -> None:
    saved, loads = Parallelism(ranks, saved_fsdp, 1, 1), Parallelism(ranks, fsdp, 1, 1)
    real = run_ranks(ranks, _real, checkpoint, saved, loads, node_size, broadcast)
    simulated = simulate_load(TENSORS, loads, saved, broadcast, node_size)
    assert sum(real) == pytest.approx(simulated.read, rel=0.02)
    for measured, said in zip(real, simulated.read_by_rank, strict=True):
        assert measured == pytest.approx(said, rel=0.05)


def test_replicas_on_nodes_get_one_copy_over_each_link() -> None:
    """And the tables of equal ranks travel once."""
    found = simulate_load(TENSORS, Parallelism(32, 2, 1, 1), broadcast=True, node_size=4, storage=1e9, link=1e6)
    assert found.nodes == 8 and found.broadcast and found.planning_parts == 1
    assert STORED <= found.read <= 1.3 * STORED
    assert 0.9 * STORED * 7 / 8 <= found.node_received_most <= 1.01 * STORED, "of what other nodes read"
    assert found.node_sent_most >= found.node_received_most / 2
    assert found.gathered_bytes == found.table_bytes / 16
    assert found.seconds == pytest.approx(max(found.node_received_most, found.node_sent_most) / 1e6)


def test_a_load_is_simulated_part_by_part() -> None:
    whole = simulate_load(TENSORS, Parallelism(8, 4, 1, 1), Parallelism(3, 3, 1, 1), True, 2)
    steps.limit("bytes gathered to plan one part of a load", 1000).start()
    parts = simulate_load(TENSORS, Parallelism(8, 4, 1, 1), Parallelism(3, 3, 1, 1), True, 2)
    assert parts.planning_parts > 3
    assert parts.read == pytest.approx(whole.read, rel=0.05)


def test_parts_are_even_together() -> None:
    """Each part alone is too small to be cut evenly over its ranks."""
    tensors = [Entry(f"model.layers.{i}.up.weight", (1536, 1024), torch.float32) for i in range(16)]
    steps.limit("bytes gathered to plan one part of a load", 1000).start()
    found = simulate_load(tensors, Parallelism(8), Parallelism(1), True, 2)
    assert found.planning_parts > 3
    mean = found.read / found.ranks
    assert max(found.read_by_rank) <= mean + (4 << 20), found.read_by_rank


def _printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", "llama-1b", "--ranks", "16", "--fsdp", "4", "--load", *options]) == 0
    return capsys.readouterr().out


def test_the_command_plans_loads(capsys: pytest.CaptureFixture[str]) -> None:
    text = _printed(capsys, "--storage", "10", "--link", "1")
    assert "read for each other  yes" in text and "storage and links" in text
    found = json.loads(_printed(capsys, "--broadcast", "never", "--saved-ranks", "8", "--json"))
    assert not found["broadcast"] and found["saved_ranks"] == 8 and len(found["read_by_rank"]) == 16
    assert found["read"] == sum(found["read_by_rank"]) and found["seconds"] is None


@pytest.mark.parametrize("options", [["--link", "0", "--load"], ["--link", "3"], ["--load", "--saved-ranks", "0"]])
def test_the_command_refuses_what_makes_no_sense(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-1b", *options]) == 2
    assert options[0 if options[0] == "--link" else 1] in capsys.readouterr().err
