"""What a job on machines knows after a restart, and after what comes then: a kill, a lost machine, another run."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator

import pytest
from harness.machines import why_not
from harness.node_jobs import NEVER, NodeJob, start_again, started
from harness.node_model import Life, another_run, live

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeJob]:
    """Three machines: processes that no test ends. A job that is killed is one that goes on in a copy of its folders,
    as they are at that time."""
    with started(tmp_path_factory.mktemp("three"), 3) as job:
        yield job


@pytest.fixture(scope="module")
def other_run(three: NodeJob) -> NodeJob:
    return another_run(three)


def new_job(three: NodeJob) -> NodeJob:
    return start_again(three, three, empty=range(3))


def killed(job: NodeJob, three: NodeJob, empty: Iterable[int] = (), durable: bool = True) -> NodeJob:
    """The job starts again; nothing of it goes on. Machines of `empty` were replaced."""
    again = start_again(job, three, empty, durable=durable)
    job.call("close")
    return again


def found(job: NodeJob, step: int | None = None) -> tuple[int, int]:
    """The step and the attempt that a restore gives; all values are compared. It has its copies then: while they are
    sent, what is saved gets none."""
    (one,) = {answer[:2] for answer in job.call("restore", step)}
    job.call("settle_copies")
    return one


def copies(job: NodeJob, come: bool) -> None:
    job.call(*(("mend", "", "") if come else ("fail", "send copies")))


# --- One thing after another

EVENTS = [(), (0,), (1,)]  # which machines are lost, when the job is killed


@pytest.mark.parametrize(
    ("first", "second", "copies"),
    [
        pytest.param(*case, marks=[] if case == ((0,), (1,), "running") else SLOW)
        for case in itertools.product(EVENTS, EVENTS, ("come", "running", "none"))
    ],
)
def test_two_things_happen(first: tuple[int, ...], second: tuple[int, ...], copies: str, three: NodeJob) -> None:
    """After each restart the job saves. `copies`: whether those of the last step are on their way at the next event; or
    none are made from the first restart on."""
    life = Life(three, copies=1, max_to_keep=1)
    for lost in (first, second, ()):
        life.save()
        if copies == "running":
            life.hold_copies()
        life.save()
        life.restart(lost, come=copies != "none")
    life.end()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in range(1, 40))])
def test_anything_happens(seed: int, three: NodeJob, other_run: NodeJob) -> None:
    life = Life(three, other_run, seed, copies=1 + seed % 2, max_to_keep=1 + seed // 2 % 3)
    try:
        live(life, 12)
    finally:
        life.end()


# --- What retention keeps, and who decides


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=SLOW)])
@pytest.mark.parametrize("kept", [2, pytest.param(1, marks=SLOW)])
def test_the_last_step_with_copies_stays_until_a_later_one_has_them(kept: int, lost: int, three: NodeJob) -> None:
    options = {"copies": 1, "max_to_keep": kept, "durable_interval_steps": NEVER}
    job = new_job(three)
    job.open("shards", **options)
    job.save(1)
    copies(job, come=False)
    job.save(2)
    for step in (2, 3, 4):  # restarts, each of which saves one step that gets no copies
        job = killed(job, three)
        job.open("shards", **options)
        assert found(job) == (step, 1)
        job.save(step + 1)
    job = killed(job, three, empty=[lost])
    copies(job, come=True)
    job.open("shards", **options)
    # What machine 0 saved holds what all ranks read, so the restore of step 4 has brought it to all.
    last = 1 if lost else 4
    assert found(job) == (last, 1)
    job = killed(job, three, empty=[(lost + 1) % 3])
    job.open("shards", **options)
    assert found(job) == (last, 1)
    job.save(6, 7)
    assert job.call("losses_survived")[0][7] == 1
    job.call("close")
    assert all(not (job.folder(machine) / "step-1").exists() for machine in range(3))


@pytest.mark.parametrize("empty", [(0,), pytest.param((0, 1), marks=SLOW)])
def test_a_new_coordinator_knows_what_was_abandoned(empty: tuple[int, ...], three: NodeJob) -> None:
    options = {"copies": 2, "durable_interval_steps": NEVER}
    job = new_job(three)
    job.open("shards", **options)
    job.save(1, 2, 3)
    job = killed(job, three, empty)
    job.open("shards", 2, **options)
    assert found(job, 1) == (1, 1)
    job.save(2)
    job = killed(job, three, empty)
    job.open("shards", 3, **options)
    assert found(job) == (2, 2)
    job.save(3)
    job = killed(job, three, [2])
    job.open("shards", 4, **options)
    assert found(job) == (3, 3)
    job.call("close")


def test_the_best_step_is_that_of_all_machines(three: NodeJob) -> None:
    options = {"copies": 1, "durable_interval_steps": NEVER, "best": "loss", "best_mode": "min", "max_to_keep": 2}
    job = new_job(three)
    job.open("shards", **options)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4)):
        job.save(step, metrics={"loss": loss})
    job = killed(job, three, [0])
    job.open("shards", 2, **options)
    assert found(job) == (3, 1) and job.call("best_step") == [2, 2, 2]
    job.save(4, 5, metrics={"loss": 0.6})
    assert job.call("best_step") == [2, 2, 2]
    job.call("close")


# --- The durable place is away


@pytest.mark.parametrize("machine", [0, pytest.param(1, marks=SLOW)])
def test_a_store_that_loses_packets_stops_no_restart(machine: int, three: NodeJob) -> None:
    """Also where the coordinator's machine is new, and none waits for the store when it closes."""
    job = new_job(three)
    job.open("shards", copies=1, durable_interval_steps=NEVER)
    job.save(1, 2)
    job = killed(job, three, [machine], durable=False)
    three.call("lose_packets")
    job.call("open", "shards", str(job.own), "s3://bucket/run", 2, {"copies": 1, "timeout": 6})
    assert found(job) == (2, 1)
    job.told()
    job.save(3, settle=False)
    job.call("settle_copies")
    job.call("close")
    told = job.told()
    assert told.count("do not count now") == 0, told  # it was asked once, before
    assert "is not uploaded yet" in told
    job.call("mend", "", "")


# --- Another run


def test_a_folder_of_another_run_is_named(three: NodeJob) -> None:
    other, job = new_job(three), new_job(three)
    for one, steps in ((other, (7, 8)), (job, (1, 2))):
        one.open("replicas", durable_interval_steps=NEVER)
        one.save(*steps)
        one.call("close")
    shutil.rmtree(job.folder(1))
    shutil.copytree(other.folder(1), job.folder(1))
    (error,) = {answer.error for answer in job.ask("open", "replicas", str(job.own), str(job.durable), 2, {})}
    ids = [json.loads((one.folder(0) / ".run").read_text())["id"] for one in (other, job)]
    assert all(of in error for of in ids) and "ranks [1]" in error, error
    shutil.rmtree(job.folder(1))
    job.open("replicas", 2)
    assert found(job) == (2, 1)
    job.call("close")


# --- Machines that are fewer, or come back


@pytest.mark.parametrize("machine", [0, pytest.param(1, marks=SLOW)])
def test_a_copy_that_was_cut_short_is_made_again(machine: int, three: NodeJob) -> None:
    job = new_job(three)
    job.open("shards", copies=1, durable_interval_steps=NEVER)
    job.save(1)
    job.call("close")
    for path in (job.folder(machine) / "step-1").glob("*.distcp"):
        os.truncate(path, 100)
    job.open("shards", copies=1, durable_interval_steps=NEVER)
    assert found(job) == (1, 1)
    assert job.call("losses_survived")[0] == {1: 1}
    job.call("close")


@SLOW
@pytest.mark.parametrize("machine", [0, 1])
def test_copies_are_made_although_a_machine_has_an_older_attempt(machine: int, three: NodeJob) -> None:
    options = {"copies": 1, "durable_interval_steps": NEVER}
    job = new_job(three)
    job.open("shards", **options)
    job.save(1, 2)
    job.call("close")
    old = shutil.copytree(job.folder(machine), job.durable.with_name(f"{job.name} old"))
    job.open("shards", 2, **options)
    assert found(job, 1) == (1, 1)
    job.save(2)
    job.call("close")
    shutil.rmtree(job.folder(machine))
    shutil.move(old, job.folder(machine))
    for attempt in (3, 4):
        job.open("shards", attempt, **options)
        job.told()
        assert found(job) == (2, 2)
        job.call("settle")
        told = job.told()
        assert "fewer copies" not in told, told
        assert job.call("losses_survived")[0][2] == 1
        job.call("close")
