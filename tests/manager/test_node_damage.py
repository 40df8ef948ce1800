"""Folders of machines that are damaged, spoiled or old: what saves do, and what a restart finds."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from harness.files import flip
from harness.machines import why_not
from harness.node_jobs import NEVER, NodeJob, check_restart, start_again

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(two: NodeJob) -> NodeJob:
    """Step 2 was saved last, in a second attempt that went on from step 1; step 3 of the first one is abandoned. Both
    machines have all, the durable place has steps 1 and 2."""
    job = start_again(two, two, empty=[0, 1])
    for attempt, steps in ((1, (1, 2, 3)), (2, (2,))):
        job.open("shards", attempt, copies=1)
        if attempt == 2:
            job.call("restore", 1)
            job.call("settle")
        job.save(*steps, metrics={"loss": attempt / 8})
        job.call("close")
    shutil.rmtree(job.durable / "step-3")
    return job


def files_of(kind: str, folder: Path, machine: int) -> list[Path]:
    """Files of a kind in the folder of a machine's step."""
    if kind in ("own data", "data of the other"):
        return [*folder.glob(f"__{machine if kind == 'own data' else 1 - machine}_*.distcp")]
    return [folder / kind]


KINDS = ["own data", "data of the other", ".metadata", ".metadata.index", ".order", ".node", "metrics.json"]
SAYS = {"own data": "does not count", ".metadata": "metadata", ".order": "is damaged"}


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=SLOW) for number in (1, 2))])
@pytest.mark.parametrize(
    ("kind", "machine"),
    [
        pytest.param(kind, machine, marks=[] if (kind, machine) == ("own data", 1) else [SLOW])
        for kind in KINDS
        for machine in (0, 1)
    ],
)
def test_a_bit_is_flipped_on_one_machine(kind: str, machine: int, number: int, saved: NodeJob, two: NodeJob) -> None:
    again = start_again(saved, two, durable=False)
    for path in files_of(kind, again.folder(machine) / "step-2", machine):
        flip(path, random.Random(number).randrange(8 * (path.stat().st_size or 1)) if number else None)
    step, attempt, told = check_restart(again, "shards", 3, copies=1)
    assert (step, attempt) == (2, 2), told
    assert number > 0 or SAYS.get(kind, "") in told, told
    again.open("shards", 3, copies=1)
    assert all(found in ({}, {"loss": 0.25}) for found in again.call("metrics", 2))
    again.call("close")


@SLOW
@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_is_flipped_on_all_machines(kind: str, is_durable: bool, saved: NodeJob, two: NodeJob) -> None:
    again = start_again(saved, two, durable=is_durable)
    for machine in (0, 1):
        for path in files_of(kind, again.folder(machine) / "step-2", machine):
            flip(path)
    step, attempt, told = check_restart(again, "shards", 3, copies=1)
    if kind == ".order" and not is_durable:
        assert (step, attempt) in ((2, 2), (3, 1)), told  # nobody knows any more what was saved last
        assert "nobody knows when its checkpoint was saved" in told
    elif kind == ".metadata" and not is_durable:
        assert (step, attempt) == (1, 1) and "step 2" in told, told
    else:
        assert (step, attempt) == (2, 2), told


@SLOW
@pytest.mark.parametrize("machine", [0, 1])
def test_a_copy_is_damaged_and_the_machine_is_lost(machine: int, saved: NodeJob, two: NodeJob) -> None:
    again = start_again(saved, two, empty=[1 - machine], durable=False)
    for path in files_of("data of the other", again.folder(machine) / "step-2", machine):
        flip(path)
    step, attempt, told = check_restart(again, "shards", 3, copies=1)
    assert (step, attempt) == (1, 1) and "no node has a sound copy" in told, told


@SLOW
@pytest.mark.parametrize("kind", ["data", ".metadata", ".metadata.index", ".order", "metrics.json"])
def test_a_bit_is_flipped_in_the_durable_place(kind: str, saved: NodeJob, two: NodeJob) -> None:
    again = start_again(saved, two, empty=[0, 1])
    folder = again.durable / "step-2"
    flip(next(folder.glob("*.distcp")) if kind == "data" else folder / kind)
    step, attempt, told = check_restart(again, "shards", 3, copies=1)
    assert (step, attempt) == ((1, 1) if kind in ("data", ".metadata") else (2, 2)), told


# --- A folder is spoiled


@pytest.mark.parametrize(
    ("how", "where", "machine"),
    [
        pytest.param(how, where, machine, marks=[] if (how, where, machine) == ("read-only", "", 1) else [SLOW])
        for how in ("removed", "emptied", "read-only", "full", "no space")
        for where in ("", "before write tensors", "behind write tensors", "before check a file that came")
        for machine in (0, 1)
        if how != "no space" or where in ("", "before write tensors")
    ],
)
def test_a_folder_is_spoiled_in_a_job(how: str, where: str, machine: int, two: NodeJob) -> None:
    job = start_again(two, two, empty=[0, 1])
    folder = str(job.own)
    for one in (0, 1):
        job.folder(one).mkdir()
    if how == "full":
        job.call_on(machine, "make_small", folder, 1 << 20)
    job.open("shards", copies=1, durable_interval_steps=NEVER, async_checkpoint=False)
    job.save(1, 2)
    job.told()
    if where:
        moment, _, step = where.partition(" ")
        job.call_on(machine, "spoil_at", step, moment, how, folder)
    else:
        job.call_on(machine, "spoil", how, folder)
    last, failures = 2, 0
    for step in range(3, 7):
        if step == 5 or (how == "no space" and step == 4):
            job.call_on(machine, "mend", how if step == 4 or how != "no space" else "", folder)
        answers = job.ask("save", step)
        assert len({bool(answer.error) for answer in answers}) == 1, answers
        failures += bool(answers[0].error)
        last = last if answers[0].error else step
        job.call("settle")
        # A machine may have committed before the other one failed: the step counts if all its files are there.
        found = job.ask("restore")
        if any(each.error for each in found):  # nothing older takes the place of a step that a machine cannot store
            assert how in ("read-only", "full") and step < 5, found
            assert all("Read-only" in each.error or "no room" in each.error for each in found), found
        else:
            assert {each.value[0] for each in found} <= ({last, step} if answers[0].error else {last}), found
        job.call("settle")
    told = job.told()
    assert last == 6 and failures <= 2
    assert job.call("losses_survived")[0][6] == 1
    job.call("close")
    if how in ("read-only", "full", "no space"):
        assert {"read-only": "ead-only", "full": "left", "no space": "space"}[how] in told, told
    if how == "full":
        job.call_on(machine, "make_large", folder)  # a restart without it
    else:
        found = check_restart(start_again(job, two, empty=[machine], durable=False), "shards", copies=1)
        assert found[:2] == (6, 1), found
    found = check_restart(
        start_again(job, two, empty=[1 - machine] if how != "full" else [machine]), "shards", copies=1
    )
    assert found[:2] == (6, 1), found


@SLOW
@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("how", ["read-only", "full", "removed", "emptied"])
@pytest.mark.parametrize("machine", [0, 1])
def test_a_folder_is_spoiled_before_a_restart(
    machine: int, how: str, lacks: bool, is_durable: bool, saved: NodeJob, two: NodeJob
) -> None:
    """`lacks`: whether the machine has nothing that it could read. Then another machine has all, and it stores none."""
    again = start_again(saved, two, empty=[machine] if lacks else [], durable=is_durable)
    folder = str(again.own)
    again.folder(machine).mkdir(exist_ok=True)
    if how == "full":
        again.call_on(machine, "make_small", folder, 1 << 20)
    again.call_on(machine, "spoil", how, folder)
    if how in ("read-only", "full"):
        again.told()
        again.open("shards", 3, copies=1)
        answers, told = again.ask("restore"), again.told()
        if not lacks or is_durable:
            assert {answer.value[:2] for answer in answers} == {(2, 2)}
            assert not lacks or f"loading {again.durable}/step-2" in told, told
            answers = again.ask("save", 3)
        assert all("Read-only" in answer.error or "room" in answer.error for answer in answers), answers
        again.ask("close")
        again.call_on(machine, "mend", how, folder)
    step, attempt, told = check_restart(again, "shards", 3, copies=1)
    assert (step, attempt) == (2, 2), told
    if how == "full":
        again.call_on(machine, "make_large", folder)


@SLOW
def test_an_error_in_a_commit_of_one_machine_tells_what_is_there(two: NodeJob) -> None:
    job = start_again(two, two, empty=[0, 1])
    for machine in (0, 1):
        job.folder(machine).mkdir()
    job.call_on(1, "make_small", str(job.own), 1 << 20)
    try:
        job.open("replicas", durable_interval_steps=NEVER, async_checkpoint=False)
        job.call("save", 1)
        job.call_on(1, "spoil_at", "commit on a machine", "before", "full", str(job.own))
        answers = job.ask("save", 2)
        assert all(answer.error for answer in answers), answers
        job.call_on(1, "mend", "full", str(job.own))
        (found,) = {found for found, *_ in job.call("restore")}
        job.call("close")
        assert found == 1 or not any("nothing was committed" in answer.error for answer in answers)
    finally:
        job.call_on(1, "make_large", str(job.own))


# --- A machine comes back


@SLOW
@pytest.mark.parametrize("kept_by", ["copies", "durable place", ""])
@pytest.mark.parametrize("old", ["an older attempt of the step", "older steps", "abandoned steps"])
@pytest.mark.parametrize("machine", [0, 1])
def test_a_machine_comes_back_with(old: str, machine: int, kept_by: str, two: NodeJob) -> None:
    job = start_again(two, two, empty=[0, 1])
    aside = job.durable.with_name(f"{job.name} aside")
    options = {"copies": int(kept_by == "copies"), "durable_interval_steps": NEVER}
    job.open("shards", 1, **options)
    job.save(*{"abandoned steps": (1, 2, 3), "older steps": (1,)}.get(old, (1, 2)))
    shutil.copytree(job.folder(machine), aside)
    job.call("close")
    job.open("shards", 2, **options)
    assert {found[0] for found in job.call("restore", 1)} == {1}
    job.call("settle")
    job.save(2)
    job.call("close")
    shutil.rmtree(job.folder(machine))
    shutil.copytree(aside, job.folder(machine))
    if kept_by != "durable place":
        shutil.rmtree(job.durable)
    step, attempt, told = check_restart(job, "shards", 3, copies=options["copies"])
    assert (step, attempt) == ((2, 2) if kept_by else (1, 1)), told
    if kept_by == "copies":
        assert "this node has the metadata of step 2 again" in told, told
    else:
        assert "no node that lives has" in told, told
