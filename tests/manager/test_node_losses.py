"""Jobs that lose several machines, the coordinator's, the store or the network, or go on with other machines: what the
survivors do, and what a restart finds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from harness.machines import FAULTS, Fault, why_not
from harness.node_jobs import NEVER, Answer, NodeJob, restart, start_again, started

import vescale_ckpt

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeJob]:
    with started(tmp_path_factory.mktemp("four"), 4) as job:
        yield job


def new_job(checkers: NodeJob, kind: str = "shards", copies: int = 1, durable: bool = False) -> NodeJob:
    """What a job has left that saved steps 1 and 2. `durable`: whether they are durable, too."""
    job = start_again(checkers, checkers, empty=range(4))
    job.open(kind, copies=copies, durable_interval_steps=None if durable else NEVER)
    job.save(1, 2)
    job.call("close")
    if not durable:
        shutil.rmtree(job.durable)
    return job


def to_find(answers: Iterable[Answer], step: int) -> set[int]:
    """What a restart may find, by what the survivors of a save of `step` were told."""
    told = {True if not answer.error else answer.committed for answer in answers}
    assert not {True, False} <= told, answers
    return {step} if True in told else {step - 1} if False in told else {step - 1, step}


# --- Several machines


@pytest.mark.parametrize(
    ("doing", "step", "where", "lost", "silently"),
    [
        pytest.param("save", "finish files", "before", (1, 2), True, marks=SLOW),
        pytest.param("save", "commit on a machine", "behind", (0, 3), False, marks=SLOW),
        pytest.param("copy", "write a file that comes", "before", (0, 1), True, marks=SLOW),
        pytest.param("copy", "check a file that came", "behind", (2, 3), False, marks=SLOW),
        pytest.param("drain", "copy a file to the durable place", "before", (1, 3), False, marks=SLOW),
        pytest.param("drain", "commit in the durable place", "before", (0, 2), True, marks=SLOW),
        pytest.param("restore", "bring files", "before", (1, 3), True, marks=SLOW),
        pytest.param("restore", "read a checkpoint", "before", (0, 3), False, marks=SLOW),
    ],
)
def test_two_machines_of_four_are_lost_at_once(
    doing: str, step: str, where: str, lost: tuple[int, int], silently: bool, tmp_path: Path, four: NodeJob
) -> None:
    """Two copies are enough. Before a restore the last machine was replaced by an empty one."""
    with started(tmp_path, 4) as job:
        if doing == "restore":
            before = new_job(four, copies=2)
            for machine in range(3):
                shutil.copytree(before.folder(machine), job.folder(machine))
        job.open("shards", copies=2, durable_interval_steps=None if doing == "drain" else NEVER)
        if doing != "restore":
            job.save(1, 2)
        job.halt(lost[0], step, where)
        if doing in ("save", "restore"):
            job.say("save" if doing == "save" else "restore", *([3] if doing == "save" else []))
        else:
            job.call("save", 3)
        job.wait_until_halted()
        if doing == "drain":
            job.call("settle_copies")
        job.end(lost, silently)
        steps = {3}
        if doing == "save":
            answers = job.hear_those_left(*lost)
            assert all(answer.error for answer in answers), answers
            steps = to_find(answers, 3)
        elif doing == "restore":
            steps = {2}
            assert all(answer.error for answer in job.hear_those_left(*lost))
        else:
            job.say("save", 4)
            assert all(answer.error and answer.committed is False for answer in job.hear_those_left(*lost))
        job.say("close")
        job.hear_those_left(*lost)
        restart(job, four, "shards", steps, copies=2)
        at_least = {"save": {2}, "copy": {2, 3}, "drain": {3}, "restore": {2}}[doing]
        restart(job, four, "shards", at_least, empty=lost, copies=2)


@pytest.mark.parametrize("kind", ["shards", "replicas"])
@pytest.mark.parametrize(
    ("doing", "step"),
    [
        pytest.param("", "", marks=SLOW),
        ("save", "commit on a machine"),
        pytest.param("copy", "write a file that comes", marks=SLOW),
        pytest.param("restore", "bring files", marks=SLOW),
    ],
)
def test_the_coordinators_machine_is_lost_for_good(
    doing: str, step: str, kind: str, tmp_path: Path, two: NodeJob
) -> None:
    """The job goes on with the two other machines. Nothing is in the durable place."""
    with started(tmp_path, 3) as job:
        job.open(kind, copies=1, durable_interval_steps=NEVER)
        job.save(1, 2)
        steps = {2}
        if doing:
            if doing == "copy" and kind == "replicas":
                step = "send copies"  # nothing is missing
            job.halt(0, step, "behind" if doing == "save" else "before")
            if doing == "copy":
                job.call("save", 3)
            else:
                job.say(*(("save", 3) if doing == "save" else ("restore",)))
            job.wait_until_halted()
        job.end([0], silently=kind == "shards" and doing == "copy")
        if doing in ("save", "restore"):
            answers = job.hear_those_left(0)
            assert all(answer.error for answer in answers), answers
            steps = {2} if doing == "restore" or kind == "shards" else to_find(answers, 3)
        elif doing == "copy":
            steps = {2, 3} if kind == "shards" else {3}
        job.say("save", 4)
        assert all(answer.error and answer.committed is False for answer in job.hear_those_left(0))
        job.say("close")
        job.hear_those_left(0)
        assert not [*job.durable.glob("step-*/.metadata")]
        restart(job, two, kind, steps, places={0: 1, 1: 2}, durable=False, copies=1)


@SLOW
@pytest.mark.parametrize("kind", ["shards", "hsdp", "replicas"])
def test_twice_as_many_machines(kind: str, two: NodeJob, four: NodeJob) -> None:
    job = new_job(two, kind)
    for places in ({0: 0, 1: 1}, {2: 1, 3: 0}, {1: 0}):
        restart(job, four, kind, {2}, places=places, copies=1)


@pytest.mark.parametrize(
    "kind", [pytest.param("shards"), *(pytest.param(kind, marks=SLOW) for kind in ("hsdp", "replicas"))]
)
def test_half_as_many_machines(kind: str, two: NodeJob, four: NodeJob) -> None:
    job = new_job(four, kind, durable=True)
    for places in ({0: 0, 1: 1}, {0: 3, 1: 2}) if kind == "hsdp" else ({0: 0, 1: 2}, {0: 3, 1: 1}):
        restart(job, two, kind, {2}, places=places, durable=False, copies=1)
    told = restart(job, two, kind, {2}, places={0: 1, 1: 0}, copies=1)
    # Machines 2 and 3 had the files of machine 2.
    assert kind != "shards" or "no node that lives has the files __2_" in told, told


@SLOW
@pytest.mark.parametrize("kind", ["shards", "hsdp", "replicas"])
def test_machines_in_another_order(kind: str, four: NodeJob) -> None:
    job = new_job(four, kind)
    restart(job, four, kind, {2}, places={0: 3, 1: 1, 2: 0, 3: 2}, copies=1)
    restart(job, four, kind, {2}, places={0: 3, 1: 0, 3: 1}, copies=1)


@SLOW
def test_restores_one_after_another_get_their_copies(two: NodeJob) -> None:
    job = new_job(two)
    shutil.rmtree(job.folder(0))
    job.open("shards", copies=1, durable_interval_steps=NEVER)
    job.told()
    job.hold(1, "send copies", "before")
    for step in (2, 1):
        assert {found[0] for found in job.call("restore", step)} == {step}
    job.wait_until_halted()
    job.go_on()
    job.call("settle")
    job.call_on(1, "mend", "", "")
    assert "fewer copies" not in job.told()
    assert job.call("losses_survived")[0] == {1: 1, 2: 1}
    job.call("close")


# --- The durable place


@SLOW
def test_two_steps_are_half_drained(tmp_path: Path, two: NodeJob) -> None:
    """All machines are lost while step 2 is copied and step 3 waits, and then again while step 3 is."""
    with started(tmp_path / "first", 2) as first:
        first.open("shards", copies=1)
        first.save(1)
        first.halt(1, "copy a file to the durable place", "before")
        first.call("save", 2)
        first.wait_until_halted()
        first.call("settle_copies")
        first.call("save", 3)
        first.call("settle_copies")
        first.end([0, 1], silently=False)
        check_claims(first, {1})
        restart(first, two, "shards", {3}, copies=1)
        restart(first, two, "shards", {3}, empty=[0], copies=1)
        restart(first, two, "shards", {1}, empty=[0, 1], copies=1)
        with started(tmp_path / "second", 2) as checkers:
            second = start_again(first, checkers)
            second.open("shards", copies=1)
            second.halt(0, "commit in the durable place", "before")
            assert [step for step, *_ in second.call("restore")] == [3, 3]
            second.wait_until_halted()
            second.end([0, 1], silently=True)
            check_claims(second, {1})
            assert len([*second.durable.glob("step-3/*.distcp")]) == 2
            restart(second, two, "shards", {3}, copies=1)
            restart(second, two, "shards", {1}, empty=[0, 1], copies=1)


def check_claims(job: NodeJob, steps: set[int]) -> None:
    """The durable place has these steps and claims no other."""
    claimed = [path.parent for path in job.durable.glob("step-*/.metadata")]
    assert {path.name for path in claimed} == {f"step-{step}" for step in steps}
    assert all(vescale_ckpt.verify(path).ok for path in claimed)


# --- The store and the network

MOMENTS = [
    ("save", "write tensors", "behind"),
    ("save", "may commit", "before"),
    ("save", "commit on a machine", "behind"),
    ("copy", "send copies", "before"),
    ("copy", "write a file that comes", "before"),
    ("drain", "copy a file to the durable place", "before"),
    ("restore", "bring files", "before"),
]


def begin(job: NodeJob, doing: str) -> None:
    """Says what shall be interrupted, and waits until one machine halts in it."""
    if doing in ("save", "restore"):
        job.say(*(("save", 3) if doing == "save" else ("restore",)))
    else:
        job.call("save", 3)
    job.wait_until_halted()


@pytest.mark.parametrize(
    ("machine", "doing", "step", "where"),
    [
        *(pytest.param(number % 2, *moment, marks=SLOW) for number, moment in enumerate(MOMENTS)),
        pytest.param(0, *MOMENTS[1], marks=SLOW),  # the other machine has committed
    ],
)
def test_the_store_is_lost(machine: int, doing: str, step: str, where: str, tmp_path: Path, two: NodeJob) -> None:
    with started(tmp_path, 2, store_apart=True) as job:
        job.open("shards", copies=1, durable_interval_steps=None if doing == "drain" else NEVER)
        job.save(1, 2)
        job.hold(machine, step, where)
        begin(job, doing)
        job.ranks.kill_store()
        job.go_on()
        steps = {2} if doing == "restore" else {3}
        if doing == "save":
            answers = job.hear_those_left()
            steps = to_find(answers, 3)
        elif doing == "restore":
            job.hear_those_left()  # values were compared, if it has not raised
        else:
            job.call("settle")
        answers = job.ask("save", 4)
        later = to_find(answers, 4)
        if later != {3}:
            steps = later if later == {4} else {*steps, 4}
        job.ask("close")
        restart(job, two, "shards", steps, copies=1)


@pytest.mark.parametrize(
    ("is_short", "doing", "step", "where"),
    [
        pytest.param(is_short, *moment, marks=[] if is_short and moment == MOMENTS[0] else SLOW)
        for is_short in (True, False)
        for moment in MOMENTS
    ],
)
def test_a_partition_heals(is_short: bool, doing: str, step: str, where: str, tmp_path: Path, two: NodeJob) -> None:
    """Before the timeout a save, a copy or a restore goes on; behind it all ranks have an error, and the next save or
    the one after it is made."""
    number = MOMENTS.index((doing, step, where))
    fault: Fault = FAULTS[number % len(FAULTS)]
    machine = number % 2
    with started(tmp_path, 2) as job:
        timeout = 60 if is_short else 5
        job.open("shards", copies=1, durable_interval_steps=None if doing == "drain" else NEVER, timeout=timeout)
        job.save(1, 2)
        job.hold(machine, step, where)
        begin(job, doing)
        job.machines.part(fault, 1)
        job.go_on()
        if is_short:
            time.sleep(2)  # the partition's length
            job.machines.heal(fault, 1)
        steps = {2} if doing == "restore" else {3}
        if doing in ("save", "restore"):
            answers = job.hear_those_left()
            assert is_short != any(answer.error for answer in answers), answers
            if doing == "save":
                steps = to_find(answers, 3)
                job.ask("settle")  # raises the error of the save, once
        job.call("settle")
        if not is_short:
            job.machines.heal(fault, 1)
        latest = job.ask("latest")  # ranks that have failed in different calls may fail once more
        assert all(answer.value[0] in steps if not answer.error else not is_short for answer in latest), latest
        last = 4
        if any(answer.error for answer in job.ask("save", 4)):
            assert not is_short
            last = 5
            job.call("save", 5)
        job.call("settle")
        assert job.call("losses_survived")[0][last] == 1
        assert not is_short or doing not in ("copy", "save") or job.call("losses_survived")[0][3] == 1
        job.call("close")
        for empty in ([], [0], [1]):
            restart(job, two, "shards", {last}, empty=empty, copies=1)
