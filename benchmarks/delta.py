"""Saves of a LoRA training that write only what changed: ``python -m benchmarks delta``.

A frozen model in bfloat16, adapters in float32 and their AdamW state. Before each save the adapters and the state
change. Candidates: a full save, a save with ``base=`` the one before ("delta"), the same with ``frozen=`` the model
("delta, unread"), the same where the model changes, too ("delta, all changed"), and stock DCP.

"save" is durable when it returns. "blocked" and "durable" are of an asynchronous save. The columns "disk x" and
"calls x" tell what was written, over the bytes of the state.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt
from benchmarks import command
from benchmarks.command import Alternate
from benchmarks.harness.by_turns import STOCK, Sample, Steps
from benchmarks.harness.room import check_room
from benchmarks.harness.saves_and_loads import WrongContentsError
from benchmarks.harness.usage import Usage, measure, settle

State = dict[str, Any]
MIB = 2**20
RANK = 16  # of the adapters


def build(mib: int, seed: int) -> State:
    """Square layers of `mib` MiB in all, and what trains on them."""
    generator = torch.Generator().manual_seed(seed)
    width = 2048 if mib >= 64 else 256
    layers = max(1, mib * MIB // (2 * width * width))
    frozen, adapters = {}, {}
    for number in range(layers):
        frozen[f"layer{number}.weight"] = torch.randn(width, width, generator=generator).bfloat16()
        adapters[f"layer{number}.a"] = torch.randn(RANK, width, generator=generator)
        adapters[f"layer{number}.b"] = torch.zeros(width, RANK)
    moments = {
        f"{name}.{key}": torch.zeros_like(value) for name, value in adapters.items() for key in ("avg", "square")
    }
    return {"model": frozen, "adapters": adapters, "optimizer": moments}


def train(state: State, parts: Sequence[str]) -> None:
    for part in parts:
        for value in state[part].values():
            value.add_(1 / 16)


def tensors_of(state: State) -> list[torch.Tensor]:
    return [value for part in state.values() for value in part.values()]


class Run:
    """The saves of one candidate, one directory after another."""

    def __init__(self, name: str, directory: Path, state: State) -> None:
        self._root = directory / name.replace(", ", "-")
        self._trained = ["adapters", "optimizer", *(["model"] if name.endswith("all changed") else [])]
        self._state = dict(state)  # what nobody changes is everybody's
        for part in self._trained:
            self._state[part] = {key: value.clone() for key, value in state[part].items()}
        self._stock = name == STOCK
        self._options: Callable[[Path], dict[str, Any]] = lambda base: {}
        if name.startswith("delta"):
            self._options = lambda base: {"base": base}
        if name.endswith("unread"):
            self._options = lambda base: {"base": base, "frozen": list(state["model"].values())}
        self._step = 0
        self._bytes = sum(tensor.nbytes for tensor in tensors_of(state))
        self._save(asynchronous=False)  # the first writes everything

    def _path(self, step: int) -> Path:
        return self._root / f"step-{step}"

    def _save(self, *, asynchronous: bool) -> Any:
        path = self._path(self._step)
        if self._stock:
            dcp.save(self._state, storage_writer=dcp.FileSystemWriter(path, thread_count=4, sync_files=True))
            return None
        base = self._path(max(0, self._step - 1))
        return vescale_ckpt.save(path, self._state, async_checkpoint=asynchronous, **self._options(base))

    def _next(self) -> None:
        self._step += 1
        train(self._state, self._trained)
        if self._step > 2:  # the first one has the files that deltas name
            shutil.rmtree(self._path(self._step - 2))
        settle(self._root)

    def turn(self) -> Steps:
        found: dict[str, Usage | float] = {}
        self._next()
        found["save"] = self._measured(lambda: self._save(asynchronous=False))
        if not self._stock:
            self._next()
            began, handles = time.perf_counter(), []
            handles.append(self._save(asynchronous=True))
            found["blocked"] = time.perf_counter() - began
            found["durable"] = self._measured(handles[0].result)
            found["durable"] = dataclasses.replace(found["durable"], seconds=time.perf_counter() - began)
        return found

    def _measured(self, step: Callable[[], object]) -> Usage:
        return dataclasses.replace(measure(step), state_bytes=self._bytes)

    def check(self) -> None:
        """Raises WrongContentsError unless the last checkpoint holds the state, bit for bit."""
        found = {
            part: {name: torch.empty_like(value) for name, value in self._state[part].items()} for part in self._state
        }
        vescale_ckpt.load(self._path(self._step), found)
        for one, other in zip(tensors_of(found), tensors_of(self._state), strict=True):
            if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                raise WrongContentsError(f"{self._path(self._step)} does not hold what was saved")


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status."""
    parser = command.parser("benchmarks delta", __doc__)
    parser.add_argument("--mib", type=command.positive, default=256, metavar="N", help="of the frozen part")
    options = parser.parse_args(arguments)

    def measured(directory: Path, alternate: Alternate) -> Iterator[Sample]:
        names = ("full", "delta", "delta, unread", "delta, all changed", STOCK)
        check_room(directory, 16 * options.mib * MIB, 10 * options.mib * MIB)
        state = build(options.mib, options.seed)
        runs = {name: Run(name, directory, state) for name in names}
        small = sum(tensor.nbytes for part in ("adapters", "optimizer") for tensor in state[part].values())
        case = f"{options.mib} MiB frozen, {small / MIB:.1f} MiB that change"
        yield from alternate(case, {name: run.turn for name, run in runs.items()})
        for run in runs.values():
            run.check()

    return command.run(options, measured, baseline="full")
