"""A manager whose machines each have a folder of their own, in front of a durable place that all see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.files import flip
from harness.logs import logged
from harness.machines import why_not
from harness.node_jobs import NodeJob, check_durable, started, values
from harness.snapshots import held
from harness.states import assert_same

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, Retention, Tier
from vescale_ckpt._storage.open_storage import storage_at
from vescale_ckpt.manager.clean_up import prune

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Job(NodeJob):
    def open(self, kind: str, *args: Any, **options: Any) -> None:
        super().open(kind, *args, **{"timeout": 60, **options})

    def saves(self, kind: str, *steps: int, **options: Any) -> dict[int, str]:
        """A manager saves these steps and ends. Returns the place of each."""
        self.open(kind, **options)
        self.save(*steps, settle=False)
        self.call("close")
        self.open(kind)
        tiers: dict[int, str] = self.call("latest")[0][1]
        self.call("close")
        return tiers

    def restores(self, kind: str, step: int | None = None) -> tuple[int, str]:
        """The step, whose values were compared, and what was warned of."""
        self.open(kind)
        try:
            found = self.call("restore", step)
            warned = [text for *_, texts in found for text in texts]
        finally:
            warned_at_the_end = [text for texts in self.call("close") for text in texts]
        assert len({step for step, *_ in found}) == 1
        texts = [*warned, *warned_at_the_end]
        return found[0][0], "\n".join(text for text in texts if "has no id of a run" not in text)

    def of_step(self, machine: int, step: int) -> Path:
        return self.folder(machine) / f"step-{step}"

    def replace(self, machine: int) -> None:
        shutil.rmtree(self.folder(machine))

    def lose_all(self) -> None:
        for folder in (self.folder(0), self.folder(1), self.durable):
            shutil.rmtree(folder)

    def data(self, machine: int, step: int) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.of_step(machine, step).glob("*.distcp")}


def _cancel(manager: CheckpointManager, state: Callable[[int], dict[str, Any]]) -> tuple[bool | None, str, list[int]]:
    """Cancels the second of three saves on the last rank."""
    manager.save(1, state(1))
    manager.wait()
    with held() as event:
        handle = manager.save(2, state(2), metrics={"loss": 2})
        assert handle is not None
        said = manager.cancel() if torch.distributed.get_rank() == 3 else None
        torch.distributed.barrier()
        event.set()
        kind = type(handle.exception(60)).__name__
    torch.distributed.barrier()
    manager.save(3, state(3))
    manager.wait()
    return said, kind, manager.steps()


def _goes_back(manager: CheckpointManager, state: Callable[[int], dict[str, Any]], own: str) -> list[int]:
    """To a step that retention would have removed, if it had not been in use."""
    manager.save(1, state(1))
    reader = storage_at(f"{own}/step-1").share(".metadata")
    for step in (2, 3):
        manager.save(step, state(step))
    torch.distributed.barrier()
    assert manager.restore(state(0), 1) == 1 and reader is not None
    reader.release()
    torch.distributed.barrier()
    manager.save(4, state(4))
    torch.distributed.barrier()
    return manager.steps()


def _latest(manager: CheckpointManager, _: Any) -> tuple[int | None, int | None]:
    return manager.latest(), manager.latest(full=True)


def _proves(manager: CheckpointManager, state: Callable[[int], dict[str, Any]]) -> list[str]:
    with logged() as texts:
        manager.restore(state(0), prepare=False)
    return [text for text in texts if "not proved" in text or "what was restored" in text]


class _Raises(Tier):
    def becomes_durable(self, step: int) -> bool:
        raise ZeroDivisionError


def _rule_raises(manager: CheckpointManager, state: Callable[[int], dict[str, Any]]) -> dict[int, str]:
    """On one machine: no step of the two is copied, and both are saved."""
    assert manager.tier is not None
    before = manager._folders._tier  # type: ignore[attr-defined]
    if torch.distributed.get_rank() < 2:
        manager._folders._tier = _Raises(manager.tier.local)  # type: ignore[attr-defined]
    for step in (1, 2):
        manager.save(step, state(step))
    manager.wait()
    manager._folders._tier = before  # type: ignore[attr-defined]
    torch.distributed.barrier()
    return dict(manager.tiers())


SCENARIOS: list[Callable[[Job], None]] = []


def scenario(function: Callable[[Job], None]) -> Callable[[Job], None]:
    SCENARIOS.append(function)
    return function


def test_two_machines_of_two_ranks(tmp_path: Path) -> None:
    """All scenarios, by the same processes: each would take ten seconds more with its own."""
    with started(tmp_path, 2, ranks=2) as all_jobs:
        for run in SCENARIOS:
            job = Job(all_jobs.machines, all_jobs.ranks, run.__name__, tmp_path / run.__name__)
            try:
                run(job)
            except AssertionError as error:
                raise AssertionError(f"{run.__name__}: {error}") from error


@scenario
def steps_lie_on_the_machines_and_one_is_durable(job: Job) -> None:
    for kind in ("shards", "hsdp", "replicas"):
        tiers = job.saves(kind, 1, 2, 3, max_to_keep=2)
        assert tiers[3] == "durable" and set(tiers) >= {2, 3}
        metadata = [job.of_step(machine, 3).joinpath(".metadata").read_bytes() for machine in range(2)]
        assert metadata[0] == metadata[1]
        of_each = [job.data(machine, 3) for machine in range(2)]
        assert all(of_each) and (of_each[0] == of_each[1]) == (kind != "shards")
        assert not job.of_step(0, 1).exists() and not job.of_step(1, 1).exists()

        check_durable(job.durable, 3, 1)
        assert job.restores(kind) == (3, "")
        assert job.restores(kind, 2) == (2, "")
        for machine in range(2):
            job.replace(machine)
        assert job.restores(kind) == (3, "")  # from the durable place
        shutil.rmtree(job.durable)


@scenario
def a_restore_from_the_machines_is_proved(job: Job) -> None:
    job.saves("shards", 1, fingerprint=True)
    for _ in range(2):
        job.open("shards", prove=True)
        (line,), *others = job.call("run", _proves)
        job.call("close")
        assert "what was restored is what was saved: 4 keys are equal" in line and others == [[]] * 3, line
        job.replace(1)  # its files come from the durable place


@scenario
def on_commit_is_refused(job: Job) -> None:
    answers = job.ask("open", "shards", str(job.own), str(job.durable), 1, {"on_commit": print})
    told = "ValueError: on_commit: with a Tier(local=) of each node, no path holds the whole checkpoint"
    assert [answer.error for answer in answers] == [told] * 4


@scenario
def a_cancelled_step_is_on_no_machine(job: Job) -> None:
    job.open("shards")
    answers = job.call("run", _cancel)
    job.call("close")
    assert answers == [(None, "SaveCancelledError", [1, 3])] * 3 + [(True, "SaveCancelledError", [1, 3])]
    assert not any(job.of_step(machine, 2).exists() for machine in range(2)) and not (job.durable / "step-2").exists()
    assert job.restores("shards") == (3, "")


@scenario
def the_step_that_training_goes_on_from_stays(job: Job) -> None:
    job.open("shards", max_to_keep=2, durable_interval_steps=100, async_checkpoint=False)
    assert job.call("run", _goes_back, str(job.own)) == [[1, 4]] * 4
    job.call("close")


@scenario
def two_managers_of_a_job_are_one_run(job: Job) -> None:
    names = ("one", "other")
    for name in names:
        job.open("shards", name=name, async_checkpoint=False)
    for step in range(1, 4):
        job.save(step, settle=False, name=names[step % 2])
    for name in names:
        job.call("close", name=name)
    assert job.restores("shards") == (3, "")


@scenario
def a_replaced_machine_gets_its_part_from_the_other(job: Job) -> None:
    for kind in ("hsdp", "replicas"):
        job.saves(kind, 1, 2)
        for machine in (1, 0):  # the coordinator's last: what came to the other one is whole
            job.replace(machine)
            shutil.rmtree(job.durable)
            assert job.restores(kind) == (2, "")
            assert job.data(0, 2) == job.data(1, 2) != {}
            assert vescale_ckpt.verify(job.durable / "step-2").ok  # a step that was restored is durable again


@scenario
def what_other_machines_have_is_no_damage(job: Job) -> None:
    job.saves("shards", 1, 2)
    for quick in (True, False):
        report = vescale_ckpt.verify(job.of_step(1, 2), quick=quick)
        assert not report.ok and not report.damaged and "one node's part" in report.reason
    info = vescale_ckpt.inspect(job.of_step(1, 2))
    assert info.is_node_part and list(info.files.values()).count(-1) == 2
    assert not vescale_ckpt.inspect(job.durable / "step-2").is_node_part
    with pytest.raises(CheckpointError, match="missing"):
        vescale_ckpt.load(job.of_step(1, 2))
    pruned = prune(str(job.of_step(1, 2).parent), Retention(1), dry_run=False)
    assert pruned.removed == [] and pruned.kept == [1, 2]  # nobody can tell here which step is whole
    assert job.restores("shards") == (2, "")


@scenario
def a_job_goes_on_with_one_machine(job: Job) -> None:
    job.saves("replicas", 1, 2)
    job.saves("shards", 3)
    local, durable = job.of_step(0, 3).parent, job.durable
    shutil.rmtree(durable)
    with CheckpointManager(durable, tier=Tier(local), max_to_keep=4) as manager:
        state = values(0)
        assert manager.restore(state) == 2
        assert_same(state, values(2, 1))
        manager.save(4, state)
    assert manager.tiers() == {1: "durable", 2: "durable", 3: "local", 4: "durable"}
    assert job.of_step(0, 3).joinpath(".metadata").exists()  # a part: nobody knows here whether it is whole


@scenario
def what_no_machine_has_is_durable(job: Job) -> None:
    """Only what no machine has is read there."""
    for machine in (0, 1):
        job.saves("shards", 1, 2)
        lost = job.data(machine, 2)
        job.replace(machine)
        for path in job.durable.glob("step-2/*"):
            if path.name not in lost:  # as if the copy of this step had not come to its end
                path.unlink()
        found, warned = job.restores("shards")
        assert found == 2 and "they come from the durable place" in warned, warned
        assert job.data(machine, 2).items() >= lost.items()
    job.replace(1)  # the other machine has nothing of what it lost
    for name in lost:
        flip(job.durable / "step-2" / name)
    job.open("shards")
    assert job.call("run", _latest) == [(2, 1)] * 4
    job.call("close")
    found, warned = job.restores("shards")
    assert found == 1 and "in the durable place does not count" in warned and "no node has a sound copy" in warned, (
        warned
    )


@scenario
def a_machine_that_was_stopped_in_the_commit(job: Job) -> None:
    """Its data is there, its metadata is not."""
    job.saves("shards", 1, 2)
    shutil.rmtree(job.durable)
    for name in (".metadata", ".metadata.index"):
        os.remove(job.of_step(1, 2) / name)
    assert job.restores("shards") == (2, "")
    assert job.of_step(1, 2).joinpath(".metadata").exists()


@scenario
def only_due_steps_are_durable(job: Job) -> None:
    tiers = job.saves("shards", 4, 5, 7, durable_interval_steps=5, async_checkpoint=False)
    assert tiers == {4: "local", 5: "durable", 7: "durable"}  # the last one, too


@scenario
def a_rule_for_durable_steps_raises_on_one_machine(job: Job) -> None:
    job.open("shards")
    assert job.call("run", _rule_raises) == [{1: "local", 2: "local"}] * 4
    job.call("close")  # copies the last one
    assert job.restores("shards") == (2, "")


@scenario
def a_machine_that_cannot_store_what_it_lacks(job: Job) -> None:
    """Nothing older takes the place of a step that other machines have."""
    job.saves("hsdp", 1, 2)
    local = job.of_step(1, 2).parent
    job.replace(1)
    local.write_text("no folder")
    assert job.restores("hsdp")[0] == 2  # the durable copy
    shutil.rmtree(job.durable / "step-2")
    with pytest.raises(AssertionError, match="is no folder"):
        job.restores("hsdp")
    os.remove(local)
    assert job.restores("hsdp") == (2, "")


@scenario
def all_say_which_losses_each_step_survives(job: Job) -> None:
    for kind, copies, holders in (("shards", 0, 1), ("hsdp", 0, 2), ("shards", 1, 2)):
        options = {"async_checkpoint": False, "durable_interval_steps": 100, "retention": Retention(period=1)}
        job.saves(kind, 1, 2, 3, 4, copies=copies, **options)
        job.open(kind)
        losses = job.call("losses_survived")
        job.call("close")
        assert losses[0][4] == holders - 1 and losses == losses[:1] * 4
        for machine in range(2):
            stays = [step for step in range(1, 5) if job.of_step(machine, step).exists()]
            assert stays == list(losses[0]) == [1, 2, 3, 4], (kind, machine, losses, stays)
        job.lose_all()


@scenario
def damaged_metadata_is_replaced(job: Job) -> None:
    job.saves("shards", 1)
    shutil.rmtree(job.durable)
    before = job.of_step(0, 1).joinpath(".metadata").read_bytes()
    for machine in (1, 0):
        flip(job.of_step(machine, 1) / ".metadata")
        assert job.restores("shards")[0] == 1
        assert job.of_step(machine, 1).joinpath(".metadata").read_bytes() == before
        shutil.rmtree(job.durable)


@scenario
def one_step_that_cannot_be_read_does_not_hide_the_others(job: Job) -> None:
    job.saves("shards", 1, 2)
    shutil.rmtree(job.durable)
    job.of_step(1, 1).joinpath("__9_00000000.distcp").symlink_to("nowhere")
    found, warned = job.restores("shards")
    assert found == 2 and "part of step 1 does not count" in warned
