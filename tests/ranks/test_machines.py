"""Jobs on several machines: what crosses the links between them, and what ranks do when a machine is lost, frozen or
parted from the others: none waits longer than the timeout and some grace, and who is named is who cannot be reached."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.machines import Machines, why_not
from harness.steps import SECONDS_OF_GRACE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
MiB = 1 << 20


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


# --- A machine that is lost, frozen, or parted from the others

TIMEOUT = 2.0  # seconds
LOAD_OF_THE_MACHINE = 20.0  # seconds that tests allow on top: to tell what ends from what hangs
MOST_SECONDS = TIMEOUT + SECONDS_OF_GRACE + LOAD_OF_THE_MACHINE
Trouble = Literal["frozen", "lost", "deaf", "down", "power"]


def _state(fill: int) -> dict[str, Any]:
    return {"w": torch.full((1 << 18,), float(fill)), "step": fill}


def _operation(name: str, directory: str, timeout: float = TIMEOUT) -> Callable[[int], Any]:
    """What is done again and again; its argument is what is saved."""
    if name == "manager":
        manager = CheckpointManager(f"{directory}/managed", timeout=timeout, max_to_keep=2)
        return lambda number: manager.save(number, _state(number))
    if name == "load":
        return lambda _: vescale_ckpt.load(directory, _state(0), timeout=TIMEOUT, broadcast_checkpoint=True)
    if name == "async":
        return lambda number: vescale_ckpt.save(
            directory, _state(number), async_checkpoint=True, timeout=TIMEOUT
        ).result()
    return lambda number: vescale_ckpt.save(directory, _state(number), timeout=timeout)


def _until_it_fails(rank: int, pipe: Connection, name: str, directory: str) -> None:
    """Tells the first error and after how many seconds it came; then whether the operation succeeds again."""
    operation = _operation(name, directory)
    _operation("save", directory, 60)(1)
    _operation(name, directory, 60)(2)
    pipe.send("ready")
    for number in itertools.count(3):
        time.sleep(0.2 if name == "manager" else 0.0)  # in which a network parts where no rank waits for another
        began = time.monotonic()
        try:
            operation(number)
        except CheckpointError as error:
            pipe.send(
                (time.monotonic() - began, getattr(error, "late_ranks", None), f"{type(error).__name__}: {error}")
            )
            break
    pipe.recv()
    for number in range(1001, 1005):  # ranks may have failed another number of times: they find each other again
        succeeded = True
        try:
            operation(number)
        except CheckpointError:
            succeeded = False
    pipe.send(succeeded)
    pipe.recv()


def _once_more(rank: int, directory: str) -> int:
    """As after a restart of the job: loads what there is, then saves and loads again."""
    state = _state(0)
    vescale_ckpt.load(directory, state, timeout=60)
    assert torch.equal(state["w"], _state(state["step"])["w"])
    _operation("save", directory, 60)(5000)
    new = _state(0)
    vescale_ckpt.load(directory, new, timeout=60)
    assert new["step"] == 5000
    return int(state["step"])


def _assert_whole(directory: Path) -> None:
    loaded = vescale_ckpt.load(directory)
    assert torch.equal(loaded["w"], _state(loaded["step"])["w"]) and loaded["step"] >= 1


def _check(told: list[tuple[float, list[int] | None, str]], broken: list[int], store_is_gone: bool) -> None:
    for seconds, late, text in told:
        assert seconds < MOST_SECONDS, text
        if store_is_gone:
            assert "store" in text or set(late or []) & set(broken), text
        else:
            assert late and set(late) <= set(broken), text


def _trouble(directory: Path, name: str, trouble: Trouble, machine: int, machines: Machines) -> None:
    shown = directory / "c"
    with machines.start(_until_it_fails, name, str(shown)) as ranks:
        ranks.hear()
        time.sleep(0.3)
        broken = ranks.on(machine)
        if trouble == "frozen":
            ranks.freeze(machine)
        elif trouble == "power":
            ranks.lose(machine)
        else:
            machines.part(trouble, machine)
        parted = trouble not in ("frozen", "power")
        told = ranks.hear(2 * MOST_SECONDS, but=() if parted else broken)
        _check([report for rank, report in enumerate(told) if rank not in broken], broken, machine == 0)
        for seconds, late, text in (told[rank] for rank in broken if parted):
            assert seconds < MOST_SECONDS and not set(late or []) & set(broken), text
        _assert_whole(shown)
        if trouble == "power":
            machines.heal("lost", machine)
        else:
            if trouble == "frozen":
                ranks.thaw(machine)
                ranks.hear(2 * MOST_SECONDS, but=[rank for rank, _ in enumerate(told) if rank not in broken])
            else:
                machines.heal(trouble, machine)
            ranks.say("go on")
            assert ranks.hear(8 * MOST_SECONDS) == [True] * len(told)
            ranks.say("end")
    assert len(set(machines.run(_once_more, str(shown)))) == 1


@pytest.mark.parametrize(
    ("name", "trouble"),
    [("save", "frozen"), ("load", "deaf"), ("async", "down"), pytest.param("manager", "lost", marks=pytest.mark.slow)],
)
def test_the_others_name_a_machine_in_trouble(name: str, trouble: Trouble, tmp_path: Path) -> None:
    with Machines(2, ranks=1 if trouble == "frozen" else 2) as machines:
        _trouble(tmp_path, name, trouble, 1, machines)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [1, 0])
@pytest.mark.parametrize("trouble", ["frozen", "power", "lost", "deaf", "down"])
@pytest.mark.parametrize("name", ["save", "async", "load"])
def test_the_others_name_a_machine_in_any_trouble(name: str, trouble: Trouble, machine: int, tmp_path: Path) -> None:
    with Machines(2) as machines:
        _trouble(tmp_path, name, trouble, machine, machines)


def test_a_job_goes_on_after_one_of_three_machines_lost_power(tmp_path: Path) -> None:
    with Machines(3, ranks=1) as machines:
        _trouble(tmp_path, "save", "power", 2, machines)


# --- Clocks


def _with_clocks_apart(rank: int, directory: str, days: list[int]) -> tuple[list[int], list[str]]:
    """A manager's saves beside those of another job, in a folder without locks. Each rank's clock is off by days."""
    clock = time.time
    own = mock.patch("time.time", lambda: clock() + 24 * 3600 * days[rank])
    others = [Path(directory, "step-99", "__0_89abcdef.distcp"), Path(directory, "step-2", "__7_01234567.distcp")]
    with own, mock.patch("fcntl.flock", side_effect=OSError(95, "no locks here")):
        manager = CheckpointManager(directory, max_to_keep=2, timeout=60)
        if rank == 0:
            for path in others:  # another job is at work, now
                path.parent.mkdir(parents=True)
                path.write_bytes(b"of another job")
        dist.barrier()
        for step in (1, 2, 3):
            manager.save(step, _state(step))
        manager.wait()
        state = _state(0)
        assert manager.restore(state) == 3 and state["step"] == 3
        return manager.steps(), [path.name for path in others if path.exists()]


@pytest.mark.parametrize("days", [[100, 0], pytest.param([-100, 3], marks=pytest.mark.slow)])
def test_clocks_that_differ_do_no_harm(days: list[int], tmp_path: Path) -> None:
    with Machines(2, ranks=1) as machines:
        for steps, left in machines.run(_with_clocks_apart, str(tmp_path / "c"), days):
            assert steps == [2, 3]
            assert left == ["__0_89abcdef.distcp", "__7_01234567.distcp"], "nobody took them for old"
