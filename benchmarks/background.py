"""Asynchronous saves: ``python -m benchmarks background``.

How long a save stops training, how much it slows training down until it is durable, how long that takes, and what
memory it needs; ours beside ``dcp.async_save`` at its best (stagers and writers kept, memory pinned where there is a
GPU). The ceiling is a parallel memcpy of the state for the stall, and raw I/O of as many bytes for what is durable.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import vescale_ckpt
from benchmarks import candidates, command, states
from benchmarks.command import Alternate
from benchmarks.harness import random_states, saves_and_loads
from benchmarks.harness.by_turns import CEILING, STOCK, Sample, Steps, Turn
from benchmarks.harness.random_states import State
from benchmarks.harness.saves_and_loads import Candidate
from benchmarks.harness.usage import settle, synchronize
from benchmarks.ranks import alone

TRAINING_STEPS, TRIES = 50, 5  # whose fastest try says how long a step takes without a save

Save = Callable[[State, Path], Any]
Ways = tuple[Save, Save]  # one that returns when training may go on, with a future; and the same, synchronously


def ways(state: State) -> dict[str, Ways]:
    """What they keep from save to save is their own. Stock's process wants a process group."""
    stager, planner = vescale_ckpt.Stager(), vescale_ckpt.SavePlanner()
    gate = torch.optim.SGD([torch.nn.Parameter(value) for value in state.values()])

    def with_our_stager(state: State, path: Path) -> Future[Any]:
        writer = vescale_ckpt.StorageWriter(path)
        return _future(async_save(state, async_stager=stager, storage_writer=writer, planner=planner))

    return {
        "ours": (partial(_ours, async_checkpoint=True), _ours),
        "ours, gate": (partial(_ours, async_checkpoint=True, gate=gate), _ours),
        "our stager": (
            with_our_stager,
            lambda state, path: dcp_save(state, storage_writer=vescale_ckpt.StorageWriter(path), planner=planner),
        ),
        STOCK: _stock(AsyncCheckpointerType.THREAD),
        "stock, process": _stock(AsyncCheckpointerType.PROCESS),
    }


def _ours(state: State, path: Path, **options: Any) -> Any:
    return vescale_ckpt.save(path, state, **options)


def _stock(kind: AsyncCheckpointerType) -> Ways:
    """torch's own stager and writer."""
    shared = kind is AsyncCheckpointerType.PROCESS
    stager = stock_stager(StagingOptions(torch.cuda.is_available(), shared, False, False))

    def start(state: State, path: Path) -> Future[Any]:
        writer = FileSystemWriter(path, thread_count=4)
        return _future(async_save(state, async_stager=stager(), storage_writer=writer, async_checkpointer_type=kind))

    return start, lambda state, path: dcp_save(state, storage_writer=FileSystemWriter(path, thread_count=4))


def stock_stager(options: StagingOptions) -> Callable[[], DefaultStager]:
    """Gives stock's stager for each call: one that is kept, or a new one where it serves one call only (torch 2.11)."""
    serves_once = "close()" in inspect.getsource(DefaultStager._stage)
    kept = DefaultStager(options)
    return lambda: DefaultStager(options) if serves_once else kept


def _future(answer: Any) -> Future[Any]:
    return answer if isinstance(answer, Future) else answer.upload_completion


class Training:
    """A model that fits no cache, trained on one core: what a save in the background takes from it shows as time."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        width = 512
        self._model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8))).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(64, width, device=device)
        self.step_seconds = min(_seconds(self._steps) for _ in range(TRIES)) / TRAINING_STEPS

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        if self._batch.is_cuda:
            torch.cuda.current_stream().synchronize()  # alone: copies may go on

    def _steps(self) -> None:
        for _ in range(TRAINING_STEPS):
            self.step()


def _seconds(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


class Saves:
    """Saves of one state in a directory, beside training on the state's device."""

    def __init__(self, directory: Path, state: State) -> None:
        self._directory = directory
        self._state = state
        self._training = Training(next(iter(state.values())).device.type)

    def turns(self, names: list[str] | None = None) -> dict[str, Turn]:
        """Of the candidates with these names, or of all; and of the ceiling, where memory is the host's."""
        made = ways(self._state)
        turns: dict[str, Turn] = {
            name: partial(self._turn, name, *made[name]) for name in made if names is None or name in names
        }
        if not next(iter(self._state.values())).is_cuda:
            turns[CEILING] = partial(self._ceiling, candidates.memcpy(), saves_and_loads.raw())
        return turns

    def _ceiling(self, copy: Candidate, raw: Candidate) -> Steps:
        """A parallel memcpy of as many bytes into touched memory, and direct I/O of as many."""
        settle(self._directory)
        path = self._fresh(CEILING)
        copy.save(self._state, path)
        stall = min(_seconds(lambda: copy.load(self._state, path)) for _ in range(3))
        durable = _seconds(lambda: raw.save(self._state, path))
        shutil.rmtree(path)
        return {"stall": stall, "durable": durable}

    def _turn(self, name: str, begin: Save, save: Save) -> Steps:
        settle(self._directory)
        path = self._fresh(name)
        start = perf_counter()
        going_on = begin(self._state, path)
        stall = perf_counter() - start
        going_on.result()
        durable = perf_counter() - start

        going_on = begin(self._state, self._fresh(name))
        start = perf_counter()
        steps = 0
        while not going_on.done():
            self._training.step()
            steps += 1
        lost = perf_counter() - start - steps * self._training.step_seconds
        going_on.result()

        path = self._fresh(name)
        synchronous = _seconds(lambda: save(self._state, path))
        shutil.rmtree(path)
        return {"stall": stall, "durable": durable, "training lost": max(lost, 1e-6), "synchronous save": synchronous}

    def _fresh(self, name: str) -> Path:
        path = self._directory / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        synchronize()
        return path


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status."""
    parser = command.parser("benchmarks background", __doc__)
    add = parser.add_argument
    add("--state", choices=states.KINDS, default="llama", help="what to save (default %(default)s)")
    add("--gib", type=command.size, default=1.0, metavar="N", help="its size (default %(default)s)")
    add("--candidates", type=command.listed(str), metavar="A,B,…", help="(default all)")
    options = parser.parse_args(arguments)

    def measured(directory: Path, alternate: Alternate) -> Iterator[Sample]:
        with alone():
            state = random_states.build(states.shapes_of(options.state, options.gib))
            yield from alternate(options.state, Saves(directory, state).turns(options.candidates))

    return command.run(options, measured)
