"""Jobs on several machines: what the machines of the tests are, and what crosses the links between them."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from machines import Machines, why_not
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import vescale_ckpt

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
MiB = 1 << 20


def _what_a_rank_sees(rank: int, own: str, shared: str) -> tuple[str, list[str], int]:
    Path(own, f"of {rank}").touch()
    Path(shared, f"of {rank}").touch()
    dist.barrier()
    if rank == 0:
        dist.send(torch.zeros(MiB), 3)
    elif rank == 3:
        dist.recv(torch.zeros(MiB), 0)
    return os.environ["VESCALE_CKPT_NODE"], sorted(os.listdir(own)), len(os.listdir(shared))


def test_machines_have_folders_and_links_of_their_own(tmp_path: Path) -> None:
    with Machines(2, megabits=200) as machines:
        before = machines.traffic()
        began = time.monotonic()
        found = machines.run(_what_a_rank_sees, str(machines.own), str(tmp_path))
        seconds = time.monotonic() - began
        sent = [after.sent - link.sent for after, link in zip(machines.traffic(), before, strict=True)]
        assert sorted(os.listdir(machines.folder(1))) == ["of 2", "of 3"]
    assert found == [("0", ["of 0", "of 1"], 4)] * 2 + [("1", ["of 2", "of 3"], 4)] * 2
    assert 4 * MiB < sent[0] < 4.4 * MiB and sent[1] < 0.4 * MiB
    assert seconds > 4 * MiB * 8 / 200e6


# --- Broadcast


def _load_in_ways(rank: int, pipe: Connection, directory: str) -> None:
    """Tells for each state what this rank read and got, when it is told to load it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(2048 * 2048, dtype=torch.float32).view(2048, 2048)
    vescale_ckpt.save(directory, {"w": full, "v": full.flip(0)}, timeout=60)

    def sharded(tensor: torch.Tensor, placement: Placement) -> DTensor:
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

    for placement in (Replicate(), Shard(1)):
        state = {name: sharded(torch.zeros_like(full), placement) for name in "wv"}
        pipe.send(None)
        pipe.recv()
        stats = vescale_ckpt.load(directory, state, broadcast_checkpoint=True, timeout=60).stats
        assert torch.equal(state["w"].to_local(), sharded(full, placement).to_local())
        assert torch.equal(state["v"].to_local(), sharded(full.flip(0), placement).to_local())
        pipe.send((stats.read_bytes, stats.bytes))
        pipe.recv()


def test_each_byte_crosses_to_a_machine_once(tmp_path: Path) -> None:
    stored = 2 * 2048 * 2048 * 4
    with Machines(2) as machines, machines.start(_load_in_ways, str(tmp_path / "c")) as ranks:
        for wanted_on_a_machine in (stored, stored // 2):  # replicas on all; columns of each rank
            ranks.hear()
            before = machines.traffic()
            ranks.say("load")
            told = ranks.hear()
            traffic = machines.traffic()
            ranks.say("go on")
            assert sum(read for read, _ in told) < 1.02 * stored
            for machine, (link, was) in enumerate(zip(traffic, before, strict=True)):
                read_there = sum(told[rank][0] for rank in ranks.on(machine))
                received, sent = link.received - was.received, link.sent - was.sent
                assert received <= 1.1 * min(wanted_on_a_machine, stored - read_there)
                assert sent <= 1.1 * min(wanted_on_a_machine, read_there)
