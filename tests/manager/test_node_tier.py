"""A manager whose machines each have a folder of their own, in front of a durable place that all see."""

from __future__ import annotations

import logging
import os
import shutil
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.machines import Machines, Ranks, why_not
from harness.snapshots import held
from harness.states import numbers, sharded
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager
from vescale_ckpt._storage.open_storage import storage_at
from vescale_ckpt.manager.clean_up import prune
from vescale_ckpt.manager.retention import Retention

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
ROWS = 4096


def _placed(kind: str, full: torch.Tensor) -> torch.Tensor:
    """Shards of all ranks; or shards within a machine, replicas between machines; or replicas."""
    world = torch.distributed.get_world_size()
    if kind == "replicas":
        return full.clone()
    placements: list[Placement] = [Shard(0)] if kind == "shards" else [Replicate(), Shard(0)]
    return sharded(full, *placements, mesh=(world,) if kind == "shards" else (2, world // 2))


def _state(kind: str, step: int) -> dict[str, Any]:
    return {"w": _placed(kind, numbers(ROWS, 64, first=step)), "b": numbers(5, first=step), "step": step}


def _save(rank: int, kind: str, own: str, durable: str, steps: list[int], options: dict[str, Any]) -> dict[int, str]:
    with CheckpointManager(durable, local=own, **options) as manager:
        for step in steps:
            manager.save(step, _state(kind, step))
        manager.wait()
    return dict(manager.tiers())


def _restore(rank: int, kind: str, own: str, durable: str, step: int | None = None) -> tuple[int, list[str]]:
    """Restores, and compares all values. Returns the step and what was warned of."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "has no id of a run" not in record.getMessage())  # where the durable place is lost
    logging.getLogger("vescale_ckpt").addHandler(handler)
    with CheckpointManager(durable, local=own) as manager:
        state = _state(kind, 0)
        found = manager.restore(state, step)
        wanted = _state(kind, found)
        assert state["step"] == found and torch.equal(state["b"], wanted["b"])
        for tensors in (state, wanted):
            if isinstance(tensors["w"], DTensor):
                tensors["w"] = tensors["w"].to_local()
        assert torch.equal(state["w"], wanted["w"])
    return found, warned


def _cancel(rank: int, own: str, durable: str) -> tuple[bool | None, str, list[int]]:
    """Cancels the second of three saves on the last rank."""
    with CheckpointManager(durable, local=own) as manager:
        manager.save(1, _state("shards", 1))
        manager.wait()
        with held() as event:
            handle = manager.save(2, _state("shards", 2), metrics={"loss": 2})
            assert handle is not None
            said = manager.cancel() if rank == 3 else None
            torch.distributed.barrier()
            event.set()
            kind = type(handle.exception(60)).__name__
        torch.distributed.barrier()
        manager.save(3, _state("shards", 3))
    return said, kind, manager.steps()


def _goes_back(rank: int, own: str, durable: str) -> list[int]:
    """To a step that retention would have removed, if it had not been in use."""
    options = {"max_to_keep": 2, "durable_interval_steps": 100, "async_checkpoint": False}
    manager = CheckpointManager(durable, local=own, **options)  # type: ignore[arg-type]
    manager.save(1, _state("shards", 1))
    reader = storage_at(f"{own}/step-1").share(".metadata")
    for step in (2, 3):
        manager.save(step, _state("shards", step))
    torch.distributed.barrier()
    assert manager.restore(_state("shards", 0), 1) == 1 and reader is not None
    reader.release()
    torch.distributed.barrier()
    manager.save(4, _state("shards", 4))
    torch.distributed.barrier()
    return manager.steps()


def _two_managers(rank: int, own: str, durable: str) -> None:
    managers = [CheckpointManager(durable, local=own, async_checkpoint=False) for _ in range(2)]
    for step in range(1, 4):
        managers[step % 2].save(step, _state("shards", step))


def _refused(rank: int, own: str, durable: str) -> str:
    with pytest.raises(ValueError) as raised:
        CheckpointManager(durable, local=own, on_commit=print)
    return str(raised.value)


def _latest(rank: int, own: str, durable: str) -> tuple[int | None, int | None]:
    with CheckpointManager(durable, local=own) as manager:
        return manager.latest(), manager.latest(full=True)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _obey(rank: int, pipe: Connection) -> None:
    """Runs what the test calls for, one after another: starting ranks takes longer."""
    steps.limit("seconds until a network file system shows a file to all machines", 0.1).start()
    while (call := pipe.recv()) != "end":
        function, *args = call
        try:
            pipe.send((function(rank, *args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


class Job:
    """The ranks of a job on machines, in a folder of each that no other test uses."""

    def __init__(self, machines: Machines, ranks: Ranks, directory: Path, name: str) -> None:
        self._machines, self._ranks = machines, ranks
        self.own = str(machines.own / name)
        self.durable = directory / name
        self.name = name

    def folder(self, machine: int, step: int) -> Path:
        return self._machines.folder(machine) / self.name / f"step-{step}"

    def replace(self, machine: int) -> None:
        shutil.rmtree(self._machines.folder(machine) / self.name)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self._ranks.say((function, *args))
        answers = self._ranks.hear()
        errors = [error for _, error in answers if error]
        assert not errors, errors[0]
        return [answer for answer, _ in answers]

    def save(self, kind: str, steps: list[int], **options: Any) -> dict[int, str]:
        tiers: dict[int, str] = self.call(_save, kind, self.own, str(self.durable), steps, options)[0]
        return tiers

    def restore(self, kind: str, step: int | None = None) -> tuple[int, str]:
        found = self.call(_restore, kind, self.own, str(self.durable), step)
        assert len({step for step, _ in found}) == 1
        return found[0][0], "\n".join(text for _, warned in found for text in warned)

    def data(self, machine: int, step: int) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder(machine, step).glob("*.distcp")}


SCENARIOS: list[Callable[[Job], None]] = []


def scenario(function: Callable[[Job], None]) -> Callable[[Job], None]:
    SCENARIOS.append(function)
    return function


def test_two_machines_of_two_ranks(tmp_path: Path) -> None:
    """All scenarios, by the same processes: each would take ten seconds more with its own."""
    with Machines(2) as machines, machines.start(_obey) as ranks:
        for run in SCENARIOS:
            job = Job(machines, ranks, tmp_path, run.__name__)
            try:
                run(job)
            except AssertionError as error:
                raise AssertionError(f"{run.__name__}: {error}") from error
        ranks.say("end")


@scenario
def steps_lie_on_the_machines_and_one_is_durable(job: Job) -> None:
    for kind in ("shards", "hsdp", "replicas"):
        tiers = job.save(kind, [1, 2, 3], max_to_keep=2)
        assert tiers[3] == "remote" and set(tiers) >= {2, 3}
        metadata = [job.folder(machine, 3).joinpath(".metadata").read_bytes() for machine in range(2)]
        assert metadata[0] == metadata[1]
        of_each = [job.data(machine, 3) for machine in range(2)]
        assert all(of_each) and (of_each[0] == of_each[1]) == (kind != "shards")
        assert not job.folder(0, 1).exists() and not job.folder(1, 1).exists()

        assert vescale_ckpt.verify(job.durable / "step-3").ok
        wanted: dict[str, Any] = {"w": torch.zeros(ROWS, 64), "b": torch.zeros(5), "step": 0}
        dcp.load(wanted, checkpoint_id=str(job.durable / "step-3"), no_dist=True)  # stock
        assert torch.equal(wanted["w"], numbers(ROWS, 64, first=3)) and wanted["step"] == 3
        assert job.restore(kind) == (3, "")
        assert job.restore(kind, 2) == (2, "")
        for machine in range(2):
            job.replace(machine)
        assert job.restore(kind) == (3, "")  # from the durable place
        shutil.rmtree(job.durable)


@scenario
def on_commit_is_refused(job: Job) -> None:
    answers = job.call(_refused, job.own, str(job.durable))
    assert answers == ["on_commit: with a local= folder of each node, no path holds the whole checkpoint"] * 4


@scenario
def a_cancelled_step_is_on_no_machine(job: Job) -> None:
    answers = job.call(_cancel, job.own, str(job.durable))
    assert answers == [(None, "SaveCancelledError", [1, 3])] * 3 + [(True, "SaveCancelledError", [1, 3])]
    assert not any(job.folder(machine, 2).exists() for machine in range(2)) and not (job.durable / "step-2").exists()
    assert job.restore("shards") == (3, "")


@scenario
def the_step_that_training_goes_on_from_stays(job: Job) -> None:
    assert job.call(_goes_back, job.own, str(job.durable)) == [[1, 4]] * 4


@scenario
def two_managers_of_a_job_are_one_run(job: Job) -> None:
    job.call(_two_managers, job.own, str(job.durable))
    assert job.restore("shards") == (3, "")


@scenario
def a_replaced_machine_gets_its_part_from_the_other(job: Job) -> None:
    for kind in ("hsdp", "replicas"):
        job.save(kind, [1, 2])
        for machine in (1, 0):  # the coordinator's last: what came to the other one is whole
            job.replace(machine)
            shutil.rmtree(job.durable)
            assert job.restore(kind) == (2, "")
            assert job.data(0, 2) == job.data(1, 2) != {}
            assert vescale_ckpt.verify(job.durable / "step-2").ok  # a step that was restored is durable again


@scenario
def what_other_machines_have_is_no_damage(job: Job) -> None:
    job.save("shards", [1, 2])
    for quick in (True, False):
        report = vescale_ckpt.verify(job.folder(1, 2), quick=quick)
        assert not report.ok and not report.damaged and "one node's part" in report.reason
    info = vescale_ckpt.inspect(job.folder(1, 2))
    assert info.is_node_part and list(info.files.values()).count(-1) == 2
    assert not vescale_ckpt.inspect(job.durable / "step-2").is_node_part
    with pytest.raises(CheckpointError, match="missing"):
        vescale_ckpt.load(job.folder(1, 2))
    pruned = prune(str(job.folder(1, 2).parent), Retention(1), dry_run=False)
    assert pruned.removed == [] and pruned.kept == [1, 2]  # nobody can tell here which step is whole
    assert job.restore("shards") == (2, "")


@scenario
def a_job_goes_on_with_one_machine(job: Job) -> None:
    job.save("replicas", [1, 2])
    job.save("shards", [3])
    local, durable = job.folder(0, 3).parent, job.durable
    shutil.rmtree(durable)
    with CheckpointManager(durable, local=local, max_to_keep=4) as manager:
        state = {"w": torch.zeros(ROWS, 64), "b": torch.zeros(5), "step": 0}
        assert manager.restore(state) == 2 and torch.equal(state["w"], numbers(ROWS, 64, first=2))
        manager.save(4, state)
    assert manager.tiers() == {1: "remote", 2: "remote", 3: "local", 4: "remote"}
    assert job.folder(0, 3).joinpath(".metadata").exists()  # a part: nobody knows here whether it is whole


@scenario
def what_no_machine_has_is_durable(job: Job) -> None:
    """Only what no machine has is read there."""
    for machine in (0, 1):
        job.save("shards", [1, 2])
        lost = job.data(machine, 2)
        job.replace(machine)
        for path in job.durable.glob("step-2/*"):
            if path.name not in lost:  # as if the copy of this step had not come to its end
                path.unlink()
        found, warned = job.restore("shards")
        assert found == 2 and "they come from the durable place" in warned, warned
        assert job.data(machine, 2).items() >= lost.items()
    job.replace(1)  # the other machine has nothing of what it lost
    for name in lost:
        _flip(job.durable / "step-2" / name)
    assert job.call(_latest, job.own, str(job.durable)) == [(2, 1)] * 4
    found, warned = job.restore("shards")
    assert found == 1 and "in the durable place does not count" in warned and "no node has a sound copy" in warned, (
        warned
    )


@scenario
def a_machine_that_was_stopped_in_the_commit(job: Job) -> None:
    """Its data is there, its metadata is not."""
    job.save("shards", [1, 2])
    shutil.rmtree(job.durable)
    for name in (".metadata", ".metadata.index"):
        os.remove(job.folder(1, 2) / name)
    assert job.restore("shards") == (2, "")
    assert job.folder(1, 2).joinpath(".metadata").exists()


@scenario
def only_due_steps_are_durable(job: Job) -> None:
    tiers = job.save("shards", [4, 5, 7], durable_interval_steps=5, async_checkpoint=False)
    assert tiers == {4: "local", 5: "remote", 7: "remote"}  # the last one, too


@scenario
def a_machine_that_cannot_store_what_it_lacks(job: Job) -> None:
    """Nothing older takes the place of a step that other machines have."""
    job.save("hsdp", [1, 2])
    local = job.folder(1, 2).parent
    job.replace(1)
    local.write_text("no folder")
    assert job.restore("hsdp")[0] == 2  # the durable copy
    shutil.rmtree(job.durable / "step-2")
    with pytest.raises(AssertionError, match="is no folder"):
        job.restore("hsdp")
    os.remove(local)
    assert job.restore("hsdp") == (2, "")


def _losses(rank: int, own: str, durable: str) -> dict[int, int]:
    with CheckpointManager(durable, local=own) as manager:
        return manager.losses_survived()


@scenario
def the_folders_have_at_most_so_many_bytes(job: Job) -> None:
    part = ROWS * 64 * 4 // 2  # of a machine, with shards
    for kind, copies, holders in (("shards", 0, 1), ("hsdp", 0, 2), ("shards", 1, 2)):
        limit = part * holders * 7 // 2 if not copies else None
        options = {"async_checkpoint": False, "durable_interval_steps": 100, "keep_period": 1}
        job.save(kind, [1, 2, 3, 4], local_max_bytes=limit, copies=copies, **options)
        losses = job.call(_losses, job.own, str(job.durable))
        assert losses[0][4] == holders - 1 and losses == losses[:1] * 4
        for machine in range(2):
            stays = [step for step in range(1, 5) if job.folder(machine, step).exists()]
            assert stays == list(losses[0]) == ([3, 4] if limit else [1, 2, 3, 4]), (kind, machine, losses, stays)
        for machine in range(2):
            job.replace(machine)
        shutil.rmtree(job.durable)


@scenario
def damaged_metadata_is_replaced(job: Job) -> None:
    job.save("shards", [1])
    shutil.rmtree(job.durable)
    before = job.folder(0, 1).joinpath(".metadata").read_bytes()
    for machine in (1, 0):
        _flip(job.folder(machine, 1) / ".metadata")
        assert job.restore("shards")[0] == 1
        assert job.folder(machine, 1).joinpath(".metadata").read_bytes() == before
        shutil.rmtree(job.durable)


@scenario
def one_step_that_cannot_be_read_does_not_hide_the_others(job: Job) -> None:
    job.save("shards", [1, 2])
    shutil.rmtree(job.durable)
    job.folder(1, 1).joinpath("__9_00000000.distcp").symlink_to("nowhere")
    found, warned = job.restore("shards")
    assert found == 2 and "part of step 1 does not count" in warned


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_world_size(before: int, after: int, tmp_path: Path) -> None:
    with Machines(2, ranks=before) as machines:
        machines.run(_save, "shards", str(machines.own), str(tmp_path / "durable"), [1], {})
        shutil.rmtree(tmp_path / "durable")
        for machine in range(2):
            shutil.copytree(machines.folder(machine), tmp_path / str(machine))
    with Machines(2, ranks=after) as machines:
        for machine in range(2):
            shutil.copytree(tmp_path / str(machine), machines.folder(machine), dirs_exist_ok=True)
        found = machines.run(_restore, "shards", str(machines.own), str(tmp_path / "durable"))
        assert found == [(1, [])] * (2 * after)
