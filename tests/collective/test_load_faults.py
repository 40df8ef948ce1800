"""Something fails on one rank in a load in which ranks read for each other: all raise, in bounded time, naming rank and
cause, no object is given anything, and the next load works."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import faults, steps
from harness.children import wait_for
from harness.ranks import run_ranks
from harness.states import MiB, Witness, assert_same, sharded
from torch import nn
from torch.distributed.tensor import Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointTimeoutError, LoadFailedError, PerRank

SLOW = pytest.mark.slow
RANKS = 3
FOREVER = 30.0  # seconds; the timeout of each step where nobody is late
SHORT = 2.0  # the same where somebody is
ROUNDS = 9  # of the checkpoint that is loaded


def _values() -> dict[str, torch.Tensor]:
    numbers = torch.arange(1 << 20, dtype=torch.float32)
    return {"everywhere": numbers.view(512, 2048) * 3, "halves": numbers.view(2048, 512) + 1}


def _own() -> torch.Tensor:
    return torch.full((70_000,), float(dist.get_rank()))


def _prepare(directory: Path) -> None:
    os.environ.update(
        VESCALE_CKPT_NODE=str(dist.get_rank() // 2),  # two see each other's memory, the third gets messages
        VESCALE_CKPT_MEMORY_BYTES=str(8 * MiB),
        VESCALE_CKPT_DIRECT_IO="off",
    )
    layer = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5)
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    objects_ = {"layer": layer, "optimizer": optimizer, "witness": Witness(), "rng": PerRank(dist.get_rank()), "n": 7}
    own = {f"own{dist.get_rank()}": _own()}
    vescale_ckpt.save(directory, {**_values(), **objects_, **own})


class Target:
    """A state to load into, with one of everything that is handed over at the end."""

    def __init__(self) -> None:
        with torch.device("meta"):
            self.layer = nn.Linear(3, 4)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.25)
        self.witness = Witness()
        self.rng: PerRank = PerRank("untouched")
        values = _values()
        self.state: dict[str, Any] = {
            "everywhere": torch.zeros_like(values["everywhere"]),
            "halves": sharded(torch.zeros_like(values["halves"]), Shard(1)),
            f"own{dist.get_rank()}": torch.zeros_like(_own()),
            "layer": self.layer,
            "optimizer": self.optimizer,
            "witness": self.witness,
            "rng": self.rng,
            "n": "untouched",
        }

    def assert_untouched(self) -> None:
        assert self.witness.loads == 0 and self.rng.obj == self.state["n"] == "untouched"
        assert self.layer.weight.is_meta and not self.optimizer.state and self.optimizer.param_groups[0]["lr"] == 0.25

    def assert_filled(self) -> None:
        values = _values()
        assert_same(self.state["everywhere"], values["everywhere"])
        expected = values["halves"].chunk(RANKS, 1)
        assert_same(self.state["halves"].to_local(), expected[dist.get_rank()])
        assert_same(self.state[f"own{dist.get_rank()}"], _own())
        assert self.witness.loads == 1 and self.rng.obj == dist.get_rank() and self.state["n"] == 7
        assert not self.layer.weight.is_meta and len(self.optimizer.state) == 2


def _raised(directory: Path, target: Target, timeout: float) -> CheckpointError:
    try:
        vescale_ckpt.load(directory, target.state, broadcast_checkpoint=True, timeout=timeout)
    except CheckpointError as error:
        target.assert_untouched()
        return error
    raise AssertionError("nothing was raised")


# --- Errors of one rank, in each step


def _acting(step: str, act: Callable[[], object], after: int = 0) -> Callable[[], Any]:
    """A patch in which something else happens before a step, from its call number `after` on."""
    owner, name = steps.STEPS.get(step, (os, step))

    def patch() -> Any:
        function, calls = getattr(owner, name), itertools.count()

        def acts(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= after:
                act()
            return function(*args, **kwargs)

        return mock.patch.object(owner, name, acts)

    return patch


def _failing(step: str, error: BaseException, after: int = 0) -> Callable[[], Any]:
    return _acting(step, mock.Mock(side_effect=error), after)


@contextlib.contextmanager
def _disk_fails(skip: int) -> Iterator[None]:
    faults.inject("read", 5, skip=skip, times=1000)
    yield
    faults.clear()


Fault = tuple[Callable[[], Any], int, type[CheckpointError], str]

#: in each step: how it fails, on which rank, what all raise, and what stands in the text
FAULTS: dict[str, Fault] = {
    "reading metadata": (_failing("read the metadata", OSError(5, "gone")), 0, LoadFailedError, "gone"),
    "planning": (_failing("see what does not fit", MemoryError("small")), 0, LoadFailedError, "small"),
    "planning the reading": (_failing("plan the reading", KeyError("x")), 2, LoadFailedError, "KeyError"),
    "planning the routes": (_failing("plan the routes", MemoryError("routes")), 0, LoadFailedError, "routes"),
    "reading all, the index too": (lambda: _disk_fails(0), 1, CheckpointError, "Input/output error"),
    "the first round": (lambda: _disk_fails(1), 1, CheckpointError, "Input/output error"),
    "a later round": (lambda: _disk_fails(6), 1, CheckpointError, "Input/output error"),
    "packing": (_failing("pack a round", MemoryError("packed")), 0, LoadFailedError, "packed"),
    "placing": (_failing("place a round", MemoryError("placed"), 2), 2, LoadFailedError, "placed"),
    "placing the last": (_failing("place a round", MemoryError("late"), ROUNDS - 1), 1, LoadFailedError, "late"),
    "reading objects": (_failing("read objects", OSError(5, "objects")), 2, LoadFailedError, "objects"),
    "unpickling": (_failing("unpickle an object", ValueError("odd")), 1, LoadFailedError, "odd"),
}


def _fail(directory: Path) -> list[tuple[str, int | None, str]]:
    _prepare(directory)
    told = []
    for name, (patch, rank, _, _) in FAULTS.items():
        try:
            with patch() if rank == dist.get_rank() else contextlib.nullcontext():
                error = _raised(directory, Target(), FOREVER)
        except AssertionError as wrong:
            raise AssertionError(f"{name}: {wrong}") from wrong
        told.append((type(error).__name__, getattr(error, "rank", None), str(error)))
        dist.barrier()
    _load_after(directory)
    return told


def _load_after(directory: Path) -> None:
    target = Target()
    vescale_ckpt.load(directory, target.state, broadcast_checkpoint=True, timeout=FOREVER)
    target.assert_filled()


def test_all_ranks_hear_who_failed_and_why(checkpoint: Path) -> None:
    results = run_ranks(RANKS, _fail, checkpoint)
    assert all(told == results[0] for told in results)
    for (name, (_, rank, kind, text)), told in zip(FAULTS.items(), results[0], strict=True):
        assert told[:2] == (kind.__name__, rank) and text in told[2], f"{name}: {told}"


# --- Dead and late ranks


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


#: where a rank stops
STOPS: dict[str, tuple[str, int]] = {
    "before the rounds": ("begin the rounds", 0),
    "reading a round": ("read a round", 2),
    "between reading and sending": ("send a round", 3),
    "placing a round": ("place a round", ROUNDS // 2),
    "placing the last round": ("place a round", ROUNDS - 1),
    "after the rounds": ("read objects", 0),
}


def _die(directory: Path, where: str) -> list[int]:
    _prepare(directory)
    _load_after(directory)  # connects
    dist.barrier()
    target = Target()
    with _acting(STOPS[where][0], _kill, STOPS[where][1])() if dist.get_rank() == 1 else contextlib.nullcontext():
        error = _raised(directory, target, FOREVER)
    assert isinstance(error, CheckpointTimeoutError) and "died" in str(error), error
    return error.late_ranks


@pytest.mark.parametrize(
    "where", ["reading a round", *(pytest.param(f"{when} the rounds", marks=SLOW) for when in ("before", "after"))]
)
def test_a_dead_rank_is_named(checkpoint: Path, where: str) -> None:
    first, dead, last = run_ranks(RANKS, _die, checkpoint, where, check=False)
    assert (first, last) == ([1], [1]) and "died" in str(dead)


def _be_late(directory: Path, places: list[str]) -> list[tuple[str, list[int], str]]:
    _prepare(directory)
    late, told = dist.get_rank() == 1, []
    for where in places:
        step, after = STOPS[where]
        given_up = directory / f"{where} was given up"

        with _acting(step, functools.partial(wait_for, given_up), after)() if late else contextlib.nullcontext():
            error = _raised(directory, Target(), SHORT)
        given_up.touch()
        assert isinstance(error, CheckpointTimeoutError), f"{where}: {error}"
        told.append((where, error.late_ranks, str(error)))
        dist.barrier()
        given_up.unlink(missing_ok=True)
        dist.barrier()
    _load_after(directory)
    return told


@pytest.mark.parametrize(
    "places",
    [
        ["before the rounds", "placing a round", "placing the last round"],
        pytest.param(["reading a round", "between reading and sending", "after the rounds"], marks=SLOW),
    ],
)
def test_a_late_rank_is_named(checkpoint: Path, places: list[str]) -> None:
    results = run_ranks(RANKS, _be_late, checkpoint, places)
    assert all(told == results[0] for told in results)
    for where, late, text in results[0]:
        assert late == [1] and "rank 1" in text, f"{where}: {late} {text}"
