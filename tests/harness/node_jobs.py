"""Jobs whose machines each have a folder of their own, one command after another, and what a restart finds of them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import vescale_ckpt
from harness import faults, steps
from harness.children import wait_for
from harness.logs import logged
from harness.machines import Machines, Ranks, make_read_only, mount_small, unmount
from harness.states import same, sharded
from harness.stores import silent_store
from vescale_ckpt import CheckpointManager, CheckpointTimeoutError, Tier
from vescale_ckpt.manager.node_copies import NodeCopies
from vescale_ckpt.manager.node_folders import NodeFolders

ROWS, COLUMNS = 512, 32
BOUND = 90.0  # seconds until a rank answers, whatever has happened: managers wait for each other for few of them
NEVER = 1000  # an interval of steps that no test reaches
_numbers = itertools.count()


@dataclass(frozen=True)
class Answer:
    """What a command returned on a rank, or the error that it raised."""

    value: Any
    error: str = ""
    committed: bool | None = True  #: False: the error says that nothing was committed
    trace: str = ""


def values(step: int, attempt: int = 0, at: torch.Tensor | None = None) -> dict[str, Any]:
    """What is saved. `at`: where each element is; None: all of them."""
    first = step + 1000 * attempt
    at = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) if at is None else at
    w = ((at + first) % 8191).float()
    return {"w": w, "b": torch.arange(5.0) + first, "step": step, "attempt": attempt}


# --- On the ranks


class Worker:
    """One rank. Its values tell the step, and how often the job has started before they were saved."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._managers: dict[str, CheckpointManager] = {}
        self._at: dict[str, torch.Tensor] = {}  # {kind: where each element is}, made once: groups cannot be made later
        self._kind = ""
        self._attempt = 0
        self._patches: list[Any] = []
        self._log = logged()  # until the process ends
        self._told = self._log.__enter__()

    def open(self, kind: str, own: str, durable: str, attempt: int, options: dict[str, Any], name: str = "") -> None:
        if kind not in self._at:
            world, full = dist.get_world_size(), torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS)
            placements: list[Placement] = [Shard(0)] if kind == "shards" else [Replicate(), Shard(0)]
            mesh = (world,) if kind == "shards" else (2, world // 2)
            self._at[kind] = full if kind == "replicas" else sharded(full, *placements, mesh=mesh)
        self._kind, self._attempt = kind, attempt
        tier = {option: options.pop(option) for option in options.keys() & Tier.__dataclass_fields__.keys()}
        self._managers[name] = CheckpointManager(durable, tier=Tier(own, **tier), **{"timeout": 5, **options})

    def _state(self, step: int, attempt: int) -> dict[str, Any]:
        return values(step, attempt, self._at[self._kind])

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """A function of the test with the manager, and with what makes the state of a step."""
        return function(self._managers[""], lambda step: self._state(step, self._attempt), *args)

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
        for worker in (manager._folders.uploads, self._copies(name)):
            assert worker is None or worker.wait(BOUND)

    def wait(self) -> None:
        """Until what a save supersedes is removed."""
        self._managers[""].wait()

    def settle_copies(self) -> None:
        """Waits for copies, and not for uploads."""
        self._managers[""].wait()
        copies = self._copies("")
        assert copies is None or copies.wait(BOUND)

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

    def halt(self, step: str, where: str, sign: str) -> None:
        """From now on, who comes to a step halts there for ever, and makes a file."""

        def halt(*_: Any, **__: Any) -> None:
            Path(sign).touch()
            threading.Event().wait()

        (steps.before if where == "before" else steps.behind)(step, halt).start()

    def told(self) -> list[str]:
        """What was logged since the last call."""
        texts = [*self._told]
        self._told.clear()
        return texts

    def losses_survived(self) -> dict[int, int]:
        return self._managers[""].losses_survived()

    def copied(self) -> int | None:
        """The last step that has its copies."""
        copies = self._copies("")
        return None if copies is None else copies.complete

    def _copies(self, name: str) -> NodeCopies | None:
        folders = self._managers[name]._folders
        return folders.copies if isinstance(folders, NodeFolders) else None

    def best_step(self) -> int | None:
        return self._managers[""].best_step()

    def metrics(self, step: int) -> dict[str, float]:
        return self._managers[""].metrics(step)

    def hold(self, step: str, where: str, sign: str, until: str) -> None:
        """Who comes to a step makes a file, and waits until another is there."""

        def hold(*_: Any, **__: Any) -> None:
            Path(sign).touch()
            wait_for(Path(until))

        self._act(step, where, hold)

    def fail(self, step: str) -> None:
        """A step fails, until `mend`."""
        self._patches.append(steps.failing(step, RuntimeError("none")))
        self._patches[-1].start()

    def lose_packets(self) -> None:
        """From now on nothing that is sent to an object store is answered. Until `mend`, the wait for it is short."""
        self._silent, environment = silent_store()
        os.environ.update(environment, VESCALE_CKPT_EXIT_TIMEOUT="3")

    def spoil_at(self, step: str, where: str, how: str, folder: str) -> None:
        """Spoils this machine's folder when somebody comes to a step, once."""
        once = iter([how])

        def spoil(*_: Any, **__: Any) -> None:
            for what in once:
                self.spoil(what, folder)

        self._act(step, where, spoil)

    def _act(self, step: str, where: str, action: Callable[..., None]) -> None:
        self._patches.append((steps.before if where == "before" else steps.behind)(step, action))
        self._patches[-1].start()

    def spoil(self, how: str, folder: str) -> None:
        """`how`: of "removed", "emptied", "read-only", "full", and "no space", which is a fault of the engine."""
        if how == "no space":
            faults.inject("write", errno.ENOSPC, times=10**6)
        elif how == "read-only":
            make_read_only(folder)
        elif how == "full":
            with open(Path(folder, "filler"), "wb", buffering=0) as filler, contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(4096))
        elif how == "emptied":
            for path in Path(folder).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            shutil.rmtree(folder)

    def mend(self, how: str, folder: str) -> None:
        """Undoes `spoil`, as far as it can be."""
        os.environ["VESCALE_CKPT_EXIT_TIMEOUT"] = "15"
        while self._patches:
            self._patches.pop().stop()
        if how == "no space":
            faults.clear()
        elif how == "read-only":
            unmount(folder)
        elif how == "full":
            os.remove(Path(folder, "filler"))

    def make_small(self, folder: str, size: int) -> None:
        """Gives this machine's folder a file system of its own, of so many bytes, with what it has."""
        away = shutil.copytree(folder, f"{folder}.away")
        mount_small(folder, size)
        shutil.copytree(away, folder, dirs_exist_ok=True)
        shutil.rmtree(away)

    def make_large(self, folder: str) -> None:
        unmount(folder)


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

    def save(self, *steps: int, settle: bool = True, **options: Any) -> None:
        """`settle`: with copies and uploads."""
        for step in steps:
            self.call("save", step, **options)
            if settle:
                self.call("settle")

    def ask(self, command: str, *args: Any, **options: Any) -> list[Answer]:
        self.ranks.say((command, args, options))
        return self.ranks.hear(BOUND)

    def say(self, command: str, *args: Any) -> None:
        self.ranks.say((command, args, {}))

    def hear_those_left(self, *lost: int) -> list[Answer]:
        """What the last command did on all machines but those that are lost, within the bound."""
        gone = [rank for machine in lost for rank in self.ranks.on(machine)]
        return [answer for answer in self.ranks.hear(BOUND, but=gone) if answer is not None]

    def call_on(self, machine: int, command: str, *args: Any) -> None:
        """On the ranks of one machine alone."""
        ranks = self.ranks.on(machine)
        self.ranks.say((command, args, {}), ranks)
        answers = self.ranks.hear(BOUND, but={*range(len(self.ranks.machine_of))} - {*ranks})
        for rank in ranks:
            assert not answers[rank].error, f"rank {rank}: {answers[rank].trace}"

    def halt(self, machine: int, step: str, where: str) -> None:
        """The machine's ranks halt at a step from now on."""
        self.call_on(machine, "halt", step, where, str(self._sign))

    def hold(self, machine: int, step: str, where: str) -> None:
        """The machine's ranks halt at a step until `go_on`."""
        self.call_on(machine, "hold", step, where, str(self._sign), str(self._sign.with_suffix(".over")))

    def go_on(self) -> None:
        self._sign.with_suffix(".over").touch()

    def end(self, machines: Iterable[int], silently: bool) -> None:
        """The machines lose power, or all their ranks get SIGKILL."""
        for machine in machines:
            (self.ranks.lose if silently else self.ranks.kill)(machine)

    def told(self, but: Iterable[int] = ()) -> str:
        """What all machines that are not lost have logged since the last call."""
        self.say("told")
        return "\n".join(text for answer in self.hear_those_left(*but) for text in answer.value)

    def wait_until_halted(self) -> None:
        """Also by `hold`."""
        wait_for(self._sign)

    @property
    def _sign(self) -> Path:
        return self.durable.parent / f"halted in {self.name}"


@contextlib.contextmanager
def started(directory: Path, count: int, ranks: int = 1, **options: Any) -> Iterator[NodeJob]:
    """A job on machines of its own."""
    with Machines(count, ranks=ranks, **options) as machines, machines.start(obey) as processes:
        yield NodeJob(machines, processes, "job", directory / "job")


def start_again(
    job: NodeJob,
    checker: NodeJob,
    empty: Iterable[int] = (),
    places: Mapping[int, int] | None = None,
    durable: bool = True,
) -> NodeJob:
    """The job of `checker` with what `job` has left, by another name; machines of `empty` were replaced.

    Args:
        places: {machine of the checker: the machine of the job that it was}. None: all as they were.
        durable: whether the durable place is still there.
    """
    name = f"again{next(_numbers)}"
    again = NodeJob(checker.machines, checker.ranks, name, checker.durable.with_name(name))
    if durable and job.durable.exists():
        shutil.copytree(job.durable, again.durable)
    for machine, was in (places or {machine: machine for machine in range(job.machines.count)}).items():
        if was not in empty and job.folder(was).exists():
            shutil.copytree(job.folder(was), again.folder(machine))
    return again


def restart(
    job: NodeJob,
    checker: NodeJob,
    kind: str,
    steps: Iterable[int],
    empty: Iterable[int] = (),
    places: Mapping[int, int] | None = None,
    durable: bool = True,
    **options: Any,
) -> str:
    """The job starts again as by `start_again`, and finds one of these steps, of the first attempt. Returns what was
    logged until it was restored."""
    again = start_again(job, checker, empty, places, durable)
    step, attempt, told = check_restart(again, kind, **options)
    assert attempt == 1 and step in steps, f"found step {step} with {empty} empty, expected one of {steps}:\n{told}"
    return told


def check_restart(again: NodeJob, kind: str, attempt: int = 2, **options: Any) -> tuple[int, int, str]:
    """A job restores, and all that it claims is there; it saves on, and that is durable. Returns step and attempt, and
    what was logged until then."""
    options = {"max_to_keep": 4, "timeout": 20, **options}
    again.told()
    again.open(kind, attempt, **options)
    latest = again.call("latest")
    found = again.call("restore")
    told = again.told()
    step, of_attempt, _ = found[0]
    assert f"loading {again.own}/step-{step}: " in told or f"loading {again.durable}/step-{step}: " in told, told
    assert {(each[0], each[1]) for each in found} == {(step, of_attempt)}, found
    passed_over = set(map(int, re.findall(r"step (\d+)[^\n]* is passed over", told)))
    (newest,) = {each[0] for each in latest}
    assert newest == step or newest in passed_over, told  # `latest` reads no data
    for claimed, place in latest[0][1].items():
        if place == "durable" and claimed not in passed_over:
            assert vescale_ckpt.verify(again.durable / f"step-{claimed}").ok
    again.call("save", step + 1)
    again.call("close")
    check_durable(again.durable, step + 1, attempt)
    again.open(kind, attempt, **options)
    assert {each[:2] for each in again.call("restore")} == {(step + 1, attempt)}
    again.call("close")
    return step, of_attempt, told


def check_durable(durable: Path, step: int, attempt: int) -> None:
    """Stock DCP reads the durable step, and it has the values of that attempt."""
    path = durable / f"step-{step}"
    assert vescale_ckpt.verify(path).ok, vescale_ckpt.verify(path).reason
    wanted = values(0)
    dcp.load(wanted, checkpoint_id=str(path), no_dist=True)
    assert same(wanted, values(step, attempt))
