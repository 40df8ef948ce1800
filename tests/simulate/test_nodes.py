"""Simulated jobs with a folder of each node: real nodes have what the simulation says, and losses are counted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.machines import Machines, why_not
from harness.states import real_state

from vescale_ckpt import CheckpointManager
from vescale_ckpt.cli import main
from vescale_ckpt.simulate.models import Entry
from vescale_ckpt.simulate.nodes import simulate_nodes
from vescale_ckpt.simulate.parallelism import Parallelism

TENSORS = [
    Entry("model.embed_tokens.weight", (4096, 512), torch.float32),
    *(Entry(f"model.layers.{i}.self_attn.q_proj.weight", (1024, 512), torch.float32) for i in range(3)),
    Entry("model.router.weight", (2048, 512), torch.float32),  # whole on all ranks of tensor parallelism
]
JOBS = [
    Parallelism(6, 6),
    Parallelism(6, 2),  # each node has a replica
    Parallelism(6, 3),  # replicas lie on nodes in different ways
    Parallelism(6, 1, 3),  # and ranks with equal shards write different files
    Parallelism(6),
]
GIB, MANY = 2**30, [Entry(f"layers.{i}.up.weight", (4096, 256), torch.float32) for i in range(256)]  # 1 GiB


def _save(rank: int, own: Path, durable: Path) -> list[dict[int, int]]:
    """Saves once for each job. Returns what the managers say of losses."""
    survived = []
    for number, job in enumerate(JOBS):
        name = f"job {number}"
        options: dict[str, Any] = {"local": own / name, "copies": 1, "durable_interval_steps": 10}
        with CheckpointManager(durable / name, **options) as manager:
            manager.save(1, real_state(TENSORS, job))
        with CheckpointManager(durable / name, **options) as manager:
            survived.append(manager.losses_survived())
    return survived


def _bytes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("__*.distcp")}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_real_nodes_have_what_the_simulation_says(tmp_path: Path) -> None:
    with Machines(3, ranks=2) as machines:
        survived = machines.run(_save, machines.own, tmp_path)[0]
        for number, (job, says) in enumerate(zip(JOBS, survived, strict=True)):
            of_nodes = [_bytes(machines.folder(node) / f"job {number}" / "step-1") for node in range(3)]
            found = simulate_nodes(TENSORS, job, 1, node_size=2)
            assert says == {1: found.losses_survived}, job
            assert max(sum(files.values()) for files in of_nodes) == pytest.approx(found.held_most, rel=0.05), job
            assert _pairs(of_nodes) == pytest.approx(found.pairs_survived), job


def _pairs(of_nodes: list[Mapping[str, int]]) -> float:
    """The share of pairs of nodes without which each file is still there."""
    names = {name for files in of_nodes for name in files}
    pairs = list(itertools.combinations(range(len(of_nodes)), 2))
    kept = [
        names == {name for node, files in enumerate(of_nodes) if node not in pair for name in files} for pair in pairs
    ]
    return sum(kept) / len(pairs)


def test_without_copies_no_node_may_be_lost_and_with_them_any_rack() -> None:
    parallelism, racks = Parallelism(256, 256), {"node_size": 8, "domain_nodes": 4}
    alone = simulate_nodes(MANY, parallelism, 0, **racks)
    assert (alone.nodes, alone.written_most, alone.sent_most) == (32, GIB / 32, 0)
    assert (alone.losses_survived, alone.domain_survived, alone.pairs_survived) == (0, False, 0)
    one = simulate_nodes(MANY, parallelism, 1, **racks)
    assert one.sent_most == one.received_most == GIB / 32
    assert (one.losses_survived, one.domain_survived) == (1, True)
    assert one.held_most == 2 * GIB / 32
    assert one.pairs_survived == 1 - 32 / (32 * 31 / 2), "each node and the next one of the ring"
    two = simulate_nodes(MANY, parallelism, 2, **racks)
    assert (two.losses_survived, two.pairs_survived, two.sent_most) == (2, 1, 2 * GIB / 32)
    assert not simulate_nodes(MANY, parallelism, 1, node_size=8, domain_nodes=32).domain_survived, "there is one rack"


def test_replicas_count_as_copies() -> None:
    found = simulate_nodes(MANY, Parallelism(64, 8), 2, node_size=8)
    assert (found.written_most, found.sent_most, found.losses_survived) == (GIB, 0, 7)
    two = simulate_nodes(MANY, Parallelism(16, 8), 1, node_size=4)  # replicas of nodes 0 and 1 on nodes 2 and 3
    assert (two.written_most, two.sent_most, two.losses_survived) == (GIB / 2, 0, 1)
    assert two.pairs_survived == pytest.approx(1 - 2 / 6)


def test_seconds_follow_from_bandwidths() -> None:
    job = MANY, Parallelism(256, 256)
    found = simulate_nodes(*job, 1, node_size=8, storage=1e9, link=1e8, disk=1e9)
    assert found.restore_seconds == pytest.approx(GIB / 32 / 1e8 + GIB / 32 / 1e9)
    assert found.durable_restore_seconds == pytest.approx(GIB / 1e9)
    slow = simulate_nodes(*job, 0, node_size=8, storage=1e12, link=1e8, disk=1e9)
    assert slow.restore_seconds is None, "what the lost node had is in the durable place alone"
    assert slow.durable_restore_seconds == pytest.approx(GIB / 32 / 1e8)
    none = simulate_nodes(*job, 1, node_size=8)
    assert none.restore_seconds is None and none.durable_restore_seconds is None


def test_the_command_plans_folders_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["plan", "llama-1b", "--ranks", "32", "--copies", "1", "--domain-nodes", "2", "--link", "1", "--disk", "2"]
    assert main(job) == 0
    text = capsys.readouterr().out
    assert "any 1 nodes, any one rack, 33.3333% of the pairs" in text
    assert "restore from the nodes" in text and "restore without them" in text
    assert main([*job, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["nodes"], found["losses_survived"], found["domain_survived"]) == (4, 1, True)
    assert found["restore_seconds"] == pytest.approx(found["written_most"] * (1 / 1e9 + 1 / 2e9))


@pytest.mark.parametrize(
    "options",
    [
        ["--copies", "-1"],
        ["--copies", "1", "--load"],
        ["--disk", "3"],
        ["--domain-nodes", "3"],
        ["--copies", "1", "--domain-nodes", "0"],
        ["--copies", "1", "--disk", "0"],
    ],
)
def test_the_command_refuses_what_makes_no_sense(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-1b", "--ranks", "8", *options]) == 2
    assert options[-2 if options[-1] == "0" else 0] in capsys.readouterr().err
