"""Jobs whose machines each have a folder of their own, one command after another, and what a restart finds of them."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import vescale_ckpt
from harness import steps
from harness.logs import logged
from harness.machines import Machines, Ranks
from harness.states import sharded
from vescale_ckpt import CheckpointManager, CheckpointTimeoutError

ROWS, COLUMNS = 512, 32
BOUND = 90.0  # seconds until a rank answers, whatever has happened: managers wait for each other for few of them


@dataclass(frozen=True)
class Answer:
    """What a command returned on a rank, or the error that it raised."""

    value: Any
    error: str = ""
    committed: bool | None = True  #: False: the error says that nothing was committed
    trace: str = ""


# --- On the ranks


class Worker:
    """One rank. Its values tell the step, and how often the job has started before they were saved."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._managers: dict[str, CheckpointManager] = {}
        self._at: dict[str, torch.Tensor] = {}  # {kind: where each element is}, made once: groups cannot be made later
        self._kind = ""
        self._attempt = 0

    def open(self, kind: str, own: str, durable: str, attempt: int, options: dict[str, Any], name: str = "") -> None:
        if kind not in self._at:
            world, full = dist.get_world_size(), torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
            placements: list[Placement] = [Shard(0)] if kind == "shards" else [Replicate(), Shard(0)]
            mesh = (world,) if kind == "shards" else (2, world // 2)
            self._at[kind] = full if kind == "replicas" else sharded(full, *placements, mesh=mesh)
        self._kind, self._attempt = kind, attempt
        self._managers[name] = CheckpointManager(durable, local=own, **{"timeout": 5, **options})

    def _state(self, step: int, attempt: int) -> dict[str, Any]:
        first = step + 1000 * attempt
        w = ((self._at[self._kind] + first) % 8191).float()
        return {"w": w, "b": torch.arange(5.0) + first, "step": step, "attempt": attempt}

    def save(self, step: int, name: str = "", **options: Any) -> bool:
        """Waits until the save is durable on the machines. Returns whether one was made."""
        manager = self._managers[name]
        failed = manager.failed_saves
        handle = manager.save(step, self._state(step, self._attempt), **options)
        if handle is not None and manager.on_error == "raise":
            handle.result(BOUND)
        elif handle is not None:
            handle.wait(BOUND)
        return handle is not None and manager.failed_saves == failed and handle.stats is not None

    def settle(self, name: str = "") -> None:
        """Waits for copies and uploads."""
        manager = self._managers[name]
        manager.wait()
        for worker in (manager._node_uploads, manager._copies):
            assert worker is None or worker.wait(BOUND)

    def close(self, name: str = "") -> list[str]:
        """Returns what was warned of."""
        with logged(logging.WARNING) as texts:
            self._managers.pop(name).close()
        return texts

    def latest(self) -> tuple[int | None, dict[int, str]]:
        manager = self._managers[""]
        return manager.latest(), dict(manager.tiers())

    def restore(self, step: int | None = None) -> tuple[int, int, list[str]]:
        """Compares all values bit for bit. Returns the step, the attempt, and what was warned of."""
        state = self._state(0, 0)
        with logged(logging.WARNING) as texts:
            found = self._managers[""].restore(state, step)
        assert state["step"] == found
        wanted = self._state(found, state["attempt"])
        assert torch.equal(state["b"], wanted["b"])
        assert torch.equal(_local(state["w"]), _local(wanted["w"]))
        return found, state["attempt"], texts

    def limit(self, what: str, value: float) -> None:
        steps.limit(what, value).start()

    def halt(self, step: str, where: str, sign: str) -> None:
        """From now on, who comes to a step halts there for ever, and makes a file."""

        def halt(*_: Any, **__: Any) -> None:
            Path(sign).touch()
            threading.Event().wait()

        (steps.before if where == "before" else steps.behind)(step, halt).start()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def obey(rank: int, pipe: Connection) -> None:
    """Runs the commands of a test."""
    steps.limit("seconds until a network file system shows a file to all machines", 0.1).start()
    os.environ["VESCALE_CKPT_EXIT_TIMEOUT"] = "15"
    worker = Worker(rank)
    while (call := pipe.recv()) != "end":
        name, args, options = call
        try:
            answer = Answer(getattr(worker, name)(*args, **options))
        except Exception as error:
            committed = error.committed if isinstance(error, CheckpointTimeoutError) else False
            answer = Answer(None, f"{type(error).__name__}: {error}", committed, traceback.format_exc())
        pipe.send(answer)


# --- In the test


class NodeJob:
    """A job on machines, by name: its folder on each machine, and a durable one."""

    def __init__(self, machines: Machines, ranks: Ranks, name: str, durable: Path) -> None:
        self.machines = machines
        self.ranks = ranks
        self.name = name
        self.own = machines.own / name
        self.durable = durable

    def folder(self, machine: int) -> Path:
        """That of the machine, as the test sees it."""
        return self.machines.folder(machine) / self.name

    def open(self, kind: str, attempt: int = 1, name: str = "", folder: str = "", **options: Any) -> None:
        """`name`: of the manager; `folder`: a folder below those of the job."""
        own, durable = self.own / folder, self.durable / folder
        self.call("open", kind, str(own), str(durable), attempt, options, name)

    def call(self, command: str, *args: Any, **options: Any) -> list[Any]:
        """What it returns on each rank."""
        answers = self.ask(command, *args, **options)
        for rank, answer in enumerate(answers):
            assert not answer.error, f"rank {rank}: {answer.trace}"
        return [answer.value for answer in answers]

    def ask(self, command: str, *args: Any, **options: Any) -> list[Answer]:
        self.ranks.say((command, args, options))
        return self.ranks.hear(BOUND)

    def say(self, command: str, *args: Any) -> None:
        self.ranks.say((command, args, {}))

    def hear_those_left(self, machine: int) -> list[Answer]:
        """What the last command did on all machines but one that is lost, within the bound."""
        return [answer for answer in self.ranks.hear(BOUND, but=self.ranks.on(machine)) if answer is not None]

    def halt(self, machine: int, step: str, where: str) -> None:
        """The machine's ranks halt at a step from now on."""
        self.ranks.say(("halt", (step, where, str(self._sign)), {}), self.ranks.on(machine))
        self.ranks.hear(BOUND, but=set(range(len(self.ranks.machine_of))) - set(self.ranks.on(machine)))

    def wait_until_halted(self) -> None:
        deadline = time.monotonic() + BOUND
        while not self._sign.exists():
            assert time.monotonic() < deadline, "no rank has come to the step"
            time.sleep(0.01)

    @property
    def _sign(self) -> Path:
        return self.durable.parent / f"halted in {self.name}"


def start_again(job: NodeJob, checker: NodeJob, name: str, empty: Iterable[int] = ()) -> NodeJob:
    """The job of `checker` with what `job` has left, by another name; machines of `empty` were replaced."""
    again = NodeJob(checker.machines, checker.ranks, name, checker.durable.with_name(name))
    if job.durable.exists():
        shutil.copytree(job.durable, again.durable)
    for machine in range(job.machines.count):
        if machine not in empty and job.folder(machine).exists():
            shutil.copytree(job.folder(machine), again.folder(machine))
    return again


def check_restart(again: NodeJob, kind: str, attempt: int = 2, **options: Any) -> tuple[int, int]:
    """A job restores, and all that it claims is there; it saves on, and that is durable. Returns step and attempt."""
    options = {"max_to_keep": 4, "timeout": 20, **options}
    again.open(kind, attempt, **options)
    latest = again.call("latest")
    found = again.call("restore")
    step, of_attempt, _ = found[0]
    assert {(each[0], each[1]) for each in found} == {(step, of_attempt)}, found
    assert {each[0] for each in latest} == {step}, latest
    for claimed, place in latest[0][1].items():
        if place == "remote":
            assert vescale_ckpt.verify(again.durable / f"step-{claimed}").ok
    again.call("save", step + 1)
    again.call("close")
    check_durable(again.durable, step + 1, attempt)
    again.open(kind, attempt, **options)
    assert {each[:2] for each in again.call("restore")} == {(step + 1, attempt)}
    again.call("close")
    return step, of_attempt


def check_durable(durable: Path, step: int, attempt: int) -> None:
    """Stock DCP reads the durable step, and it has the values of that attempt."""
    path = durable / f"step-{step}"
    assert vescale_ckpt.verify(path).ok, vescale_ckpt.verify(path).reason
    wanted: dict[str, Any] = {"w": torch.zeros(ROWS, COLUMNS), "b": torch.zeros(5), "step": 0, "attempt": 0}
    dcp.load(wanted, checkpoint_id=str(path), no_dist=True)
    first = step + 1000 * attempt
    full = ((torch.arange(ROWS * COLUMNS) + first) % 8191).float().view(ROWS, COLUMNS)
    assert torch.equal(wanted["w"], full) and torch.equal(wanted["b"], torch.arange(5.0) + first)
    assert (wanted["step"], wanted["attempt"]) == (step, attempt)
