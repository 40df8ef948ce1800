"""Faults of a job whose machines each have a folder of their own: what the survivors do, and what a restart finds."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness.machines import why_not
from harness.node_jobs import NEVER, NodeJob, restart, start_again, started

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SAVE = [
    *("write tensors", "finish files", "may commit", "commit on a machine", "commit the metadata"),
    "clean up on a machine",
]
COPY = ["send copies", "read a file to send", "write a file that comes", "check a file that came"]
DRAIN = ["copy a file to the durable place", "commit in the durable place", "clean up the durable place"]
RESTORE = ["tell the steps of a machine", "install metadata", "bring files", "read a checkpoint"]


def _cases(steps: list[str], quick: int, kinds: tuple[str, str] = ("shards", "hsdp")) -> Any:
    """Each machine before and behind each step. By turns it loses power, or its connections are closed, and machines
    hold replicas or not. `quick`: the case that always runs."""
    cases = []
    for number, (step, machine, where) in enumerate(itertools.product(steps, (0, 1), ("before", "behind"))):
        kind = kinds[(machine == 0) == (where == "behind")]
        if machine == 0 or step not in DRAIN or (step == DRAIN[0] and kind == "shards"):  # others have nothing to do
            marks = [] if number == quick else [pytest.mark.slow]
            cases.append(pytest.param(kind, step, machine, where, number % 3 == 0, marks=marks))
    return pytest.mark.parametrize(("kind", "step", "machine", "where", "silently"), cases)


@_cases(SAVE, quick=17)
def test_a_machine_is_lost_in_a_save(
    kind: str, step: str, machine: int, where: str, silently: bool, tmp_path: Path, two: NodeJob
) -> None:
    with started(tmp_path, 2) as job:
        job.open(kind, max_to_keep=2, async_checkpoint=silently)
        job.save(1, 2)
        job.halt(machine, step, where)
        job.say("save", 3)
        job.wait_until_halted()
        job.end([machine], silently)
        (answer,) = job.hear_those_left(machine)
        if step == "clean up on a machine":  # the step is there; the next save cannot be
            assert not answer.error, answer
            job.say("save", 4)
            (later,) = job.hear_those_left(machine)
            assert later.error and later.committed is False, later
        else:
            assert answer.error, answer
        steps = {True: {3}, False: {2}, None: {2, 3}}[answer.committed]
        restart(job, two, kind, steps)
        restart(job, two, kind, steps if kind == "hsdp" else {2}, empty=[machine])


def lose_in_the_background(job: NodeJob, machine: int, step: str, where: str, silently: bool) -> None:
    """A machine ends in what follows save 3. The next save fails."""
    job.halt(machine, step, where)
    job.call("save", 3)
    job.wait_until_halted()
    job.end([machine], silently)
    for command in (("save", 4), ("close",)):
        job.say(*command)
        (answer,) = job.hear_those_left(machine)
        assert command == ("close",) or answer.error, answer


@_cases(COPY, quick=11, kinds=("shards", "shards"))
def test_a_machine_is_lost_while_it_copies(
    kind: str, step: str, machine: int, where: str, silently: bool, tmp_path: Path, two: NodeJob
) -> None:
    """The copies of the step before are complete."""
    with started(tmp_path, 2) as job:
        job.open(kind, max_to_keep=1, copies=1, durable_interval_steps=NEVER)
        job.save(1, 2)
        lose_in_the_background(job, machine, step, where, silently)
        restart(job, two, kind, {3}, copies=1)
        restart(job, two, kind, {2, 3}, empty=[machine], copies=1)


@_cases(DRAIN, quick=5)
def test_a_machine_is_lost_while_it_drains(
    kind: str, step: str, machine: int, where: str, silently: bool, tmp_path: Path, two: NodeJob
) -> None:
    with started(tmp_path, 2) as job:
        job.open(kind, max_to_keep=2)
        job.save(1, 2)
        lose_in_the_background(job, machine, step, where, silently)
        # Of the second machine the only file has come; what the first one does behind the commit is no matter.
        is_durable = step == DRAIN[2] or (step, where) == (DRAIN[1], "behind") or (machine, where) == (1, "behind")
        assert job.durable.joinpath("step-3", ".metadata").exists() == is_durable
        restart(job, two, kind, {3})
        # Before the commit all data is in the durable place: one machine with the metadata is enough.
        is_there = is_durable or kind == "hsdp" or step == DRAIN[1]
        restart(job, two, kind, {3} if is_there else {2}, empty=[machine])
        restart(job, two, kind, {3} if is_durable else {2}, empty=[0, 1])


@_cases(RESTORE, quick=10)
def test_a_machine_is_lost_in_a_restore(
    kind: str, step: str, machine: int, where: str, silently: bool, tmp_path: Path, two: NodeJob
) -> None:
    """Of two machines the second was replaced by an empty one before."""
    before = start_again(two, two, empty=[0, 1])
    before.open(kind, copies=1, timeout=20, durable_interval_steps=NEVER)
    before.save(1, 2)
    with started(tmp_path, 2) as job:
        shutil.copytree(before.folder(0), job.folder(0))
        before.call("close")
        job.open(kind, copies=1)
        job.halt(machine, step, where)
        job.say("restore")
        job.wait_until_halted()
        job.end([machine], silently)
        (answer,) = job.hear_those_left(machine)
        assert answer.error or (step, where) == (RESTORE[3], "behind"), answer
        job.say("close")
        job.hear_those_left(machine)
        restart(job, two, kind, {2}, copies=1)
        restart(job, two, kind, {2}, empty=[1], copies=1)
