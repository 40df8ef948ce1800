"""A job whose machines each have a folder of their own: asynchronous saves, copies on other machines, a lost machine.

The machines are namespaces on this one, with a link each. In every round: "local" saves without copies; "copies" saves
with one copy of each file and waits until it is there, then loses the last machine's folder and restores; the third way
saves while the copies of the step before are sent. The ceiling sends the lost bytes over the same link by gloo, all at
once, and then all ranks read as many bytes as they hold from their folders.

"stall" is what training waits in `save`, on the rank that waits longest. The peak of "copied" comes on top of the state
and the snapshot, which are there before. Its last column says how many bytes went over a link, in parts of a machine,
on the link that carried most each way.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import command
from benchmarks.command import Alternate
from benchmarks.harness.by_turns import CEILING, Sample, Steps
from benchmarks.harness.room import BenchmarkError, check_room
from benchmarks.ranks import Timed, timed, together
from vescale_ckpt import CheckpointManager, Tier

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

LOCAL, COPIES, SENDING = "local", "copies", "copies, sending"
_TENSORS = 4
_NEVER = 10**9  # steps until one becomes durable
_PATIENCE = 300.0  # seconds until a rank answers


# --- On the ranks


class Worker:
    """One rank: two managers, without copies and with one of each file, and the state that they save."""

    def __init__(self, rank: int, own: str, durable: str, mib: int) -> None:
        self._rank, self._own = rank, own
        torch.manual_seed(rank)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._parts = [torch.randn(mib * 2**18 // _TENSORS).view(-1, 1024) for _ in range(_TENSORS)]
        self._state = {
            f"w{number}": DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            for number, part in enumerate(self._parts)
        }
        self._saved = [part.clone() for part in self._parts]
        options: dict[str, Any] = {"max_to_keep": 1, "timeout": _PATIENCE}
        self._managers = {
            copies: CheckpointManager(
                f"{durable}/{copies}",
                tier=Tier(f"{own}/{copies}", copies=copies, durable_interval_steps=_NEVER),
                **options,
            )
            for copies in (0, 1)
        }
        self._raw = Path(own, f"raw{rank}")
        self._bytes = torch.cat([part.flatten() for part in self._parts]).view(torch.uint8)
        self._raw.write_bytes(memoryview(self._bytes.numpy()))

    def save(self, copies: int, step: int) -> tuple[float, float]:
        """Returns the seconds that the call took, and until the save was durable in the folders of all nodes."""
        manager, state = self._managers[copies], dict(self._state)
        dist.barrier()
        start = time.perf_counter()
        handle = manager.save(step, state)
        stall = time.perf_counter() - start
        assert handle is not None
        handle.result(_PATIENCE)
        return stall, time.perf_counter() - start

    def save_and_copy(self, step: int) -> tuple[float, Timed]:
        """Returns the seconds that the call took, and what all took until the copies were there."""
        stall: list[float] = []

        def all_of_it() -> None:
            stall.append(self.save(1, step)[0])
            self._wait_for_copies()
            assert self._copies.complete == step

        taken = timed(dist.barrier, all_of_it)
        return stall[0], taken

    def save_while_sending(self, step: int) -> tuple[float, float]:
        """The same as `save`, of the second of two steps."""
        self.save(1, step)
        deadline = time.monotonic() + _PATIENCE
        while self._copies.last != step:
            assert time.monotonic() < deadline, "copies do not begin"
            time.sleep(0.001)
        times = self.save(1, step + 1)
        self._wait_for_copies()
        return times

    def restore(self, step: int) -> Timed:
        for part in self._parts:
            part.zero_()
        taken = timed(dist.barrier, lambda: self._managers[1].restore(self._state))
        assert all(map(torch.equal, self._parts, self._saved)), "other values were restored"
        self._wait_for_copies()
        return taken

    def raw(self, source: int, target: int, lost: int) -> Timed:
        """Sends so many bytes from a rank to another one, and reads this rank's part."""
        sent = torch.ones(lost, dtype=torch.uint8) if self._rank in (source, target) else None

        def move() -> None:
            if self._rank == source:
                dist.send(sent, target)  # type: ignore[arg-type]
            elif self._rank == target:
                dist.recv(sent, source)
            dist.barrier()
            with self._raw.open("rb", buffering=0) as file:
                assert file.readinto(memoryview(self._bytes.numpy())) == len(self._bytes)

        return timed(dist.barrier, move)

    @property
    def _copies(self) -> Any:
        return self._managers[1]._folders.copies  # type: ignore[attr-defined]

    def _wait_for_copies(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self._copies.is_idle():
            assert time.monotonic() < deadline, "copies do not end"
            time.sleep(0.002)


def obey(rank: int, pipe: Connection, *arguments: Any) -> None:
    """Does what it is told, until there is nobody to tell it."""
    worker = Worker(rank, *arguments)
    pipe.send(None)
    while True:
        name, *rest = pipe.recv()
        pipe.send(getattr(worker, name)(*rest))


# --- In the process that measures


class Job:
    """Machines of two ranks each, and what is asked of them by turns."""

    def __init__(self, machines: Any, ranks: Any, mib: int) -> None:
        self._machines, self._ranks = machines, ranks
        self._part = machines.ranks * mib * 2**20
        self._steps = count(2, 2)

    def turns(self) -> dict[str, Callable[[], Steps]]:
        return {CEILING: self._raw, LOCAL: self._local, COPIES: self._copy, SENDING: self._while_sending}

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        self._ranks.say((name, *arguments))
        found: list[Any] = self._ranks.hear(_PATIENCE)
        return found

    def _local(self) -> Steps:
        return _longest(self._call("save", 0, next(self._steps)))

    def _while_sending(self) -> Steps:
        return _longest(self._call("save_while_sending", next(self._steps)))

    def _copy(self) -> Steps:
        step, before = next(self._steps), self._machines.traffic()
        saved = self._call("save_and_copy", step)
        moved = zip(before, self._machines.traffic(), strict=True)
        each_way = [(new.received - old.received, new.sent - old.sent) for old, new in moved]
        most = [max(one) / self._part for one in zip(*each_way, strict=True)]
        path = "{:.3f} received, {:.3f} sent".format(*most)
        shutil.rmtree(self._machines.folder(self._machines.count - 1) / "1")
        restored = together(self._call("restore", step))
        return {
            "stall": max(stall for stall, _ in saved),
            "copied": dataclasses.replace(together([taken for _, taken in saved]), path=path),
            "restore": restored,
        }

    def _raw(self) -> Steps:
        lost = (self._machines.count - 1) * self._machines.ranks  # the rank that leads the last machine
        return {"restore": together(self._call("raw", 0, lost, self._part))}


def _longest(times: Sequence[tuple[float, float]]) -> Steps:
    return {"stall": max(stall for stall, _ in times), "durable": max(durable for _, durable in times)}


def main(arguments: list[str] | None = None) -> int:
    """Runs what `arguments` ask for and returns the exit status."""
    parser = command.parser("benchmarks nodes", __doc__)
    add = parser.add_argument
    add("--nodes", type=command.positive, default=4, metavar="N", help="of two ranks each (default %(default)s)")
    add("--mib", type=command.positive, default=64, metavar="N", help="that a rank holds (default %(default)s)")
    add("--links", type=command.listed(str), default=["1000", "unlimited"], metavar="MBIT/S,…",
        help='bandwidths of a link, in turn; "unlimited": as fast as it goes (default 1000,unlimited)')  # fmt: skip
    options = parser.parse_args(arguments)

    def measured(directory: Path, alternate: Alternate) -> Iterator[Sample]:
        from harness.machines import Machines, why_not

        if reason := why_not():
            raise BenchmarkError(reason)
        check_room(directory, 16 * options.nodes * options.mib * 2**20, 12 * options.nodes * options.mib * 2**20)
        for link in options.links:
            megabits = None if link == "unlimited" else int(link)
            with Machines(options.nodes, ranks=2, megabits=megabits, below=directory) as machines:
                arguments = (str(machines.own), str(directory / "durable"), options.mib)
                with machines.start(obey, *arguments) as ranks:
                    ranks.hear(_PATIENCE)
                    case = f"{options.nodes} machines of 2 ranks, {options.mib} MiB a rank, links {link} Mbit/s"
                    yield from alternate(case, Job(machines, ranks, options.mib).turns())
            shutil.rmtree(directory / "durable", ignore_errors=True)

    return command.run(options, measured, baseline=LOCAL)
