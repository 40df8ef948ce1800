"""Jobs on several machines: what the machines of the tests are, and what crosses the links between them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from machines import Machines, why_not

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
