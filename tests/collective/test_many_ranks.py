"""Saves and loads of 64 and 256 real ranks, and what they do about a rank that is late or stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from harness import steps
from harness.children import wait_for
from harness.files import only_named_files
from harness.many_ranks import many_ranks
from harness.steps import SECONDS_OF_GRACE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import vescale_ckpt
from vescale_ckpt import CheckpointTimeoutError

pytestmark = pytest.mark.slow

SIZES = [64, 256]
PATIENCE = 150.0  # seconds for what all ranks do, on a busy machine
LOAD_OF_THE_MACHINE = 60.0  # seconds that tests allow on top: to tell what ends from what hangs
ROWS = 768  # of the sharded tensor: a multiple of all numbers of ranks here

Told = tuple[float, str, list[int]]  # seconds, the error's text, and the ranks that it names


def _state(fill: int) -> dict[str, Any]:
    """A sharded tensor, a replicated one, one of each rank, and an object."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(ROWS * 8.0).view(ROWS, 8) + fill
    mesh = init_device_mesh("cpu", (size,))
    return {
        "rows": DTensor.from_local(rows.chunk(size)[rank].clone(), mesh, [Shard(0)]),
        "all": torch.full((64,), float(fill)),
        f"of {rank}": torch.full((3,), float(fill + rank)),
        "step": fill,
    }


def _equal(state: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return state["step"] == wanted["step"] and all(
        torch.equal(value.to_local(), wanted[key].to_local()) if isinstance(value, DTensor)
        else torch.equal(value, wanted[key])
        for key, value in state.items() if key != "step"
    )  # fmt: skip


def _save(folder: str, fill: int) -> None:
    vescale_ckpt.save(folder, _state(fill), timeout=PATIENCE)


def _load(folder: str, fill: int) -> bool:
    """Whether what was saved is loaded. Of keys of one rank each, those that this world has."""
    state = _state(-1)
    vescale_ckpt.load(folder, state, timeout=PATIENCE)
    return _equal(state, _state(fill))


def _save_in_the_background(folder: str, fill: int) -> bool:
    """Whether values that change behind the call are saved as they were."""
    state = _state(fill)
    handle = vescale_ckpt.save(folder, state, async_checkpoint=True, timeout=PATIENCE)
    state["rows"].to_local().zero_()
    state["all"].zero_()
    handle.result()
    return _load(folder, fill)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_save_and_load_and_another_number_of_ranks_loads(size: int, checkpoint: Path) -> None:
    folder = str(checkpoint)
    with many_ranks(size) as ranks:
        ranks.run(_save, folder, 1, timeout=PATIENCE)
        assert set(ranks.run(_load, folder, 1, timeout=PATIENCE)) == {True}
        assert set(ranks.run(_save_in_the_background, folder, 2, timeout=PATIENCE)) == {True}
        ranks.run(_save, folder, 3, timeout=PATIENCE)
    assert only_named_files(checkpoint)
    with many_ranks(3 * size // 4) as ranks:
        assert set(ranks.run(_load, folder, 3, timeout=PATIENCE)) == {True}


# --- A rank that does not take part


Trouble = Literal["late", "stopped"]


def _without(victim: int, trouble: Trouble, folder: str) -> Told | None:
    """A save in which one rank is in trouble. Returns how it ended on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    over, pid = Path(f"{folder}.over"), Path(f"{folder}.pid")
    if rank == victim and trouble == "late":
        wait_for(over)
    elif rank == victim:
        pid.write_text(str(os.getpid()))
        steps.before("write tensors", lambda *_: os.kill(os.getpid(), signal.SIGSTOP)).start()
    began = time.monotonic()
    try:
        vescale_ckpt.save(folder, _state(2), timeout=_timeout(size))
    except CheckpointTimeoutError as error:
        return time.monotonic() - began, str(error), error.late_ranks
    finally:
        if rank == 0:
            over.touch()
            if trouble == "stopped":
                os.kill(int(pid.read_text()), signal.SIGCONT)
    return None


def _timeout(size: int) -> float:
    """Seconds after which a rank is missed: more than a save of so many ranks takes on a busy machine."""
    return size / 10


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("trouble", ["late", "stopped"])
def test_a_rank_that_is_late_or_stopped_is_named_and_the_next_save_goes_on(
    size: int, trouble: Trouble, checkpoint: Path
) -> None:
    victim = size - 2
    with many_ranks(size) as ranks:
        ranks.run(_save, str(checkpoint), 1, timeout=PATIENCE)
        files = sorted(checkpoint.iterdir())
        told = ranks.run(_without, victim, trouble, str(checkpoint), timeout=PATIENCE)
        # Notes are written with a delay: that a stopped rank has left the collective before may have come, or not.
        silent = ["went silent (stopped, or cut off from the network)"] if trouble == "stopped" else []
        _same_everywhere(told, victim, size, "did not come within", *silent)
        assert [*filter(Path.is_file, files)] == files, "a file of the old checkpoint is gone"
        assert set(ranks.run(_load, str(checkpoint), 1, timeout=PATIENCE)) == {True}
        ranks.run(_save, str(checkpoint), 3, timeout=PATIENCE)
        assert set(ranks.run(_load, str(checkpoint), 3, timeout=PATIENCE)) == {True}
    assert only_named_files(checkpoint)


def _same_everywhere(told: list[Told | None], victim: int, size: int, *what: str) -> None:
    """All ranks have the same error in time, which names the one in trouble and says one of `what` about it."""
    for answer in told:
        assert answer is not None, "a save without this rank succeeded"
        seconds, text, late = answer
        assert late == [victim] and f"rank {victim} of {size}" in text and any(one in text for one in what), text
        assert seconds < _timeout(size) + SECONDS_OF_GRACE + LOAD_OF_THE_MACHINE
    assert len({answer[1] for answer in told if answer is not None}) == 1
