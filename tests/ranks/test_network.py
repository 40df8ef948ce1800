"""Two machines between which the network is lost: no rank waits longer than the timeout and some grace, and who is
named is who cannot be reached.

`VESCALE_CKPT_NETWORK_TRIALS=40` runs so many trials of the soak, at random instants.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.machines import FAULTS, Fault, Machines, why_not
from harness.steps import SECONDS_OF_GRACE

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, CheckpointTimeoutError

TIMEOUT = 2.0  # seconds
LOAD_OF_THE_MACHINE = 15.0  # seconds that tests allow on top: to tell what ends from what hangs
OPERATIONS = ("save", "async", "manager", "load")
TRIALS = int(os.environ.get("VESCALE_CKPT_NETWORK_TRIALS", "0"))
REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def _state(fill: int) -> dict[str, Any]:
    return {"w": torch.full((1 << 18,), float(fill)), "step": fill}


def _operation(name: str, directory: str) -> Callable[[int], Any]:
    """What is done again and again; its argument is the number of times."""
    if name == "save":
        return lambda number: vescale_ckpt.save(directory, _state(number), timeout=TIMEOUT)
    if name == "async":
        return lambda number: vescale_ckpt.save(
            directory, _state(number), async_checkpoint=True, timeout=TIMEOUT
        ).result()
    if name == "load":
        return lambda number: vescale_ckpt.load(directory, _state(0), timeout=TIMEOUT, broadcast_checkpoint=True)
    manager = CheckpointManager(f"{directory}/managed", timeout=TIMEOUT, max_to_keep=2)
    return lambda number: manager.save(number, _state(number))


def _again_and_again(rank: int, pipe: Connection, name: str, directory: str, pause: float, heals: bool) -> None:
    """Tells the longest call and the errors: of two calls that fail, or of all until there is a word."""
    vescale_ckpt.save(directory, _state(0), timeout=60)
    operation = _operation(name, directory)
    operation(1)
    pipe.send("ready")
    errors: list[tuple[str, list[int], str]] = []
    longest = 0.0
    for number in itertools.count(2):
        time.sleep(pause)
        began = time.monotonic()
        try:
            operation(number)
        except CheckpointError as error:
            errors.append((type(error).__name__, getattr(error, "late_ranks", []), str(error)))
        longest = max(longest, time.monotonic() - began)
        if heals and pipe.poll():
            pipe.recv()
            break
        if not heals and len(errors) >= 2:
            break
    pipe.send((longest, errors))
    pipe.recv()  # the store stays, and so does what else the others need
    if heals:  # ranks may have failed another number of times: they find each other again
        pipe.send([_succeeds(operation, number) for number in range(1001, 1005)][-1])
        pipe.recv()


def _succeeds(operation: Callable[[int], Any], number: int) -> bool:
    try:
        operation(number)
    except CheckpointError:
        return False
    return True


def _part(directory: Path, name: str, fault: Fault, pause: float, after: float) -> list[tuple[float, Any]]:
    """The network parts for good."""
    with Machines() as machines, machines.start(_again_and_again, name, str(directory / "c"), pause, False) as ranks:
        ranks.hear()
        time.sleep(after)
        machines.part(fault, 1)
        # Two calls, each of which may wait for a save in the background before its own step.
        told = ranks.hear(4 * (TIMEOUT + SECONDS_OF_GRACE) + LOAD_OF_THE_MACHINE)
        ranks.say("end")
    return told


def _check(told: list[tuple[float, Any]]) -> None:
    for rank, (longest, errors) in enumerate(told):
        assert longest < TIMEOUT + 2 * SECONDS_OF_GRACE + LOAD_OF_THE_MACHINE, told
        kind, late, text = errors[0]
        healthy = {0, 1} if rank < 2 else {2, 3}
        assert kind in (CheckpointTimeoutError.__name__, "StoreGoneError", "SaveFailedError"), text
        assert not healthy & set(late), f"rank {rank} names a rank on its side: {text}"
        if rank < 2 and kind == CheckpointTimeoutError.__name__:
            assert set(late) == {2, 3} or "store" in text, text


# The pause between calls lets the network part where no rank waits for another.
@pytest.mark.parametrize(
    ("name", "fault", "pause"),
    [("save", "lost", 0.0), ("async", "down", 0.0), ("manager", "lost", 0.2), ("load", "down", 0.0)],
)
def test_no_rank_waits_long_when_the_network_parts(name: str, fault: Fault, pause: float, tmp_path: Path) -> None:
    _check(_part(tmp_path, name, fault, pause, 0.3))


def _heal(directory: Path, name: str, fault: Fault, seconds: float) -> None:
    with Machines() as machines, machines.start(_again_and_again, name, str(directory / "c"), 0.0, True) as ranks:
        ranks.hear()
        machines.part(fault, 1)
        time.sleep(seconds)
        machines.heal(fault, 1)
        ranks.say("enough")
        told = ranks.hear(4 * (TIMEOUT + SECONDS_OF_GRACE) + LOAD_OF_THE_MACHINE)
        ranks.say("go on")
        good = ranks.hear(8 * (TIMEOUT + SECONDS_OF_GRACE) + LOAD_OF_THE_MACHINE)
        ranks.say("end")
    assert all(longest < TIMEOUT + 2 * SECONDS_OF_GRACE + LOAD_OF_THE_MACHINE for longest, _ in told), told
    assert good == [True] * 4, told


@pytest.mark.parametrize(("name", "fault", "seconds"), [("save", "down", 1.0), ("async", "lost", 2 * TIMEOUT)])
def test_ranks_find_each_other_again_when_the_network_is_back(
    name: str, fault: Fault, seconds: float, tmp_path: Path
) -> None:
    _heal(tmp_path, name, fault, seconds)


@pytest.mark.parametrize("trial", range(TRIALS))
def test_soak(trial: int, tmp_path: Path) -> None:
    chosen = random.Random(trial)
    name, fault = OPERATIONS[trial % 4], chosen.choice(FAULTS)
    if chosen.random() < 0.3:
        _heal(tmp_path, name, fault, chosen.uniform(0.2, 2.5 * TIMEOUT))
        return
    told = _part(tmp_path, name, fault, chosen.choice([0.0, 0.1, 0.5]), chosen.uniform(0, 1))
    for rank, (longest, errors) in enumerate(told):
        print(f"{trial} {name} {fault}: rank {rank} at most {longest:.1f} s; {[(e[0], e[1]) for e in errors]}")
    _check(told)
