"""A copy of 1 GiB on another rank, beside torchft's HTTP transport, and saves of two ranks, beside DCP's own.

torchft moves tensors from memory to memory, and checks nothing; ours moves a file from folder to folder, checks it, and
gives it its name. The ceiling is one message of gloo. torchft (0.2.0) is left out where it is not installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

import vescale_ckpt
from benchmarks import command
from benchmarks.harness.by_turns import CEILING, STOCK, Sample, Steps
from benchmarks.ranks import Rank, Ranks, Timed, ranks_on, timed, together
from vescale_ckpt._checkpoint.native.native_checkpoint import NativeCheckpoint
from vescale_ckpt._collective.node_files import NodeFiles
from vescale_ckpt._ranks.exchange import Exchange

OURS, PATIENCE = "vescale", timedelta(minutes=5)


def _hold(rank: Rank, mib: int, folder: str) -> None:
    parts = rank.kept["parts"] = {f"w{number}": torch.randn(mib * 16, 1024) for number in range(16)}
    rank.kept["state"] = {name: DTensor.from_local(part, rank.mesh, [Shard(0)]) for name, part in parts.items()}
    vescale_ckpt.save(f"{folder}/node0", rank.kept["state"])


def _copy(rank: Rank, name: str, folder: str) -> Timed:
    if name == CEILING:
        whole = torch.cat([*rank.kept["parts"].values()])
        return timed(rank.barrier.wait, lambda: dist.recv(whole, 0) if rank.rank else dist.send(whole, 1))
    if name == OURS:
        (file,) = Path(folder, "node0").glob("__0_*")
        files = NodeFiles([0, 1], {file.name: {0: file.stat().st_size}})
        checkpoint = NativeCheckpoint.by_metadata(f"{folder}/node{rank.rank}", None)
        return timed(
            rank.barrier.wait,
            lambda: files.bring(Exchange.of(timeout=300), "copy", checkpoint, [file.name] * rank.rank),
        )
    from torchft.checkpointing.http_transport import HTTPTransport

    transport: Any = HTTPTransport(PATIENCE, num_chunks=0)
    address = [f"http://localhost:{transport.metadata().rpartition(':')[2]}"]
    dist.broadcast_object_list(address, 0)
    if rank.rank == 0:
        found = timed(rank.barrier.wait, lambda: transport.send_checkpoint([1], 1, rank.kept["parts"], PATIENCE))
    else:
        found = timed(rank.barrier.wait, lambda: transport.recv_checkpoint(0, address[0], 1, PATIENCE))
    dist.barrier()
    transport.shutdown()
    return found


def _save(rank: Rank, name: str, path: str) -> Timed:
    state = rank.kept["state"]
    return timed(
        rank.barrier.wait,
        lambda: vescale_ckpt.save(path, state) if name == OURS else dcp.save(state, checkpoint_id=path),
    )


def _turn(ranks: Ranks, name: str, directory: Path) -> Steps:
    steps: dict[str, Any] = {}
    if name in (OURS, STOCK):
        steps["save"] = together(ranks.call(_save, name, str(directory / "saved")))
        shutil.rmtree(directory / "saved")
    if name != STOCK:
        shutil.copytree(directory / "node0", directory / "node1", ignore=shutil.ignore_patterns("_*"))
        steps["copy"] = together(ranks.call(_copy, name, str(directory)))
        shutil.rmtree(directory / "node1")
    return steps


def main(arguments: list[str] | None = None) -> int:
    """Runs what `arguments` ask for and returns the exit status."""
    parser = command.parser("benchmarks peers", __doc__)
    parser.add_argument("--mib", type=command.positive, default=1024, metavar="N", help="of each rank")
    options = parser.parse_args(arguments)

    def measured(directory: Path, alternate: command.Alternate) -> Iterator[Sample]:
        with ranks_on(2, apart=True) as ranks:
            ranks.call(_hold, options.mib, str(directory))
            names = [CEILING, OURS, STOCK, *(["torchft"] if find_spec("torchft") else [])]
            turns = {name: partial(_turn, ranks, name, directory) for name in names}
            yield from alternate(f"2 ranks, {options.mib} MiB each", turns)

    return command.run(options, measured, baseline=OURS)
