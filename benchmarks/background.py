"""Asynchronous saves: ``python -m benchmarks.background``.

How long a save stops training, how much it slows training down until it is durable, how long that takes, and what
memory it needs; ours beside ``dcp.async_save`` at its best (stagers and writers kept, no pinning without a GPU).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import shutil
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import vescale_ckpt
from benchmarks import cache, report, rounds, states, timing
from benchmarks.ceiling import RawFile

COPIERS = 2  # threads of the memcpy that stalls are compared with: all cores of a small machine


class Candidate(ABC):
    """One way to save in the background."""

    @abstractmethod
    def start(self, state: states.State, directory: Path) -> Future[Any] | vescale_ckpt.SaveHandle:
        """Returns when training may go on."""

    @abstractmethod
    def save(self, state: states.State, directory: Path) -> None:
        """The same, synchronously."""


class Ours(Candidate):
    def start(self, state: states.State, directory: Path) -> vescale_ckpt.SaveHandle:
        return vescale_ckpt.save(directory, state, async_checkpoint=True)

    def save(self, state: states.State, directory: Path) -> None:
        vescale_ckpt.save(directory, state)


class OurStager(Candidate):
    """Our plug points under ``dcp.async_save``."""

    def __init__(self) -> None:
        self._stager = vescale_ckpt.Stager()
        self._planner = vescale_ckpt.SavePlanner()

    def start(self, state: states.State, directory: Path) -> Future[Any]:
        writer = vescale_ckpt.StorageWriter(directory)
        return _future(async_save(state, async_stager=self._stager, storage_writer=writer, planner=self._planner))

    def save(self, state: states.State, directory: Path) -> None:
        dcp_save(state, storage_writer=vescale_ckpt.StorageWriter(directory), planner=self._planner)


class Stock(Candidate):
    """torch's own stager and writer."""

    def __init__(self, kind: AsyncCheckpointerType) -> None:
        self._kind = kind
        shared = kind is AsyncCheckpointerType.PROCESS
        self._stager = DefaultStager(StagingOptions(False, shared, False, False))

    def start(self, state: states.State, directory: Path) -> Future[Any]:
        writer = FileSystemWriter(directory, thread_count=4)
        return _future(
            async_save(state, async_stager=self._stager, storage_writer=writer, async_checkpointer_type=self._kind)
        )

    def save(self, state: states.State, directory: Path) -> None:
        dcp_save(state, storage_writer=FileSystemWriter(directory, thread_count=4))


def _future(answer: Any) -> Future[Any]:
    return answer if isinstance(answer, Future) else answer.upload_completion


class Training:
    """A model that fits no cache, trained on one core: what a save in the background takes from it shows as time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        width = 512
        self._model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(64, width)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()

    def seconds(self, steps: int) -> float:
        start = perf_counter()
        for _ in range(steps):
            self.step()
        return perf_counter() - start


class Copying:
    """A parallel memcpy of the state's bytes into touched memory: what a stall cannot be much shorter than."""

    def __init__(self, state: states.State) -> None:
        self._target = torch.zeros(sum(tensor.nbytes for tensor in state.values()), dtype=torch.uint8)
        self._pieces: list[tuple[int, int, int]] = []
        at = self._target.data_ptr()
        for tensor in state.values():
            for begin in range(0, tensor.nbytes, 8 << 20):
                size = min(8 << 20, tensor.nbytes - begin)
                self._pieces.append((at + begin, tensor.data_ptr() + begin, size))
            at += tensor.nbytes
        self._pool = ThreadPoolExecutor(COPIERS)

    def seconds(self) -> float:
        start = perf_counter()
        list(self._pool.map(self._copy, range(COPIERS)))
        return perf_counter() - start

    def _copy(self, worker: int) -> None:
        for target, source, size in self._pieces[worker::COPIERS]:
            ctypes.memmove(target, source, size)


class Run:
    def __init__(self, directory: Path, kind: str, gib: float) -> None:
        self._directory = directory
        self._state = states.build(states.shapes_of(kind, gib), 0)
        self._training = Training()
        self._copying = Copying(self._state)
        self._raw = RawFile()
        self._step_seconds = min(self._training.seconds(50) for _ in range(5)) / 50

    def ceiling(self) -> timing.Steps:
        """Raw I/O of the same bytes for what is durable, a memcpy for the stall."""
        path = self._fresh("ceiling")
        start = perf_counter()
        self._raw.write(path, sum(tensor.nbytes for tensor in self._state.values()))
        durable = perf_counter() - start
        shutil.rmtree(path)
        return {"stall": min(self._copying.seconds() for _ in range(3)), "durable": durable}

    def candidate(self, name: str, candidate: Candidate) -> timing.Steps:
        path = self._fresh(name)
        start = perf_counter()
        going_on = candidate.start(self._state, path)
        stall = perf_counter() - start
        going_on.result()
        durable = perf_counter() - start

        going_on = candidate.start(self._state, self._fresh(name))
        start = perf_counter()
        steps = 0
        while not going_on.done():
            self._training.step()
            steps += 1
        lost = perf_counter() - start - steps * self._step_seconds
        going_on.result()

        path = self._fresh(name)
        start = perf_counter()
        candidate.save(self._state, path)
        synchronous = perf_counter() - start
        shutil.rmtree(path)
        return {"stall": stall, "durable": durable, "training lost": max(lost, 1e-6), "synchronous save": synchronous}

    def _fresh(self, name: str) -> Path:
        path = self._directory / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path


def main(arguments: list[str] | None = None) -> int:
    """Runs what ``arguments`` ask for and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.background", description=__doc__)
    add = parser.add_argument
    add("--state", choices=states.KINDS, default="llama", help="what to save (default %(default)s)")
    add("--gib", type=float, default=1.0, metavar="N", help="its size (default %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="(default %(default)s)")
    add("--dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR", help="where (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.gib <= 0 or not options.dir.is_dir():
        parser.error("--rounds and --gib must be positive, --dir a directory")
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)  # a line for each save of stock's process
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # stock's process wants one
    made: dict[str, Candidate] = {
        "ours": Ours(),
        "our stager": OurStager(),
        timing.STOCK: Stock(AsyncCheckpointerType.THREAD),
        "stock, process": Stock(AsyncCheckpointerType.PROCESS),
    }
    with rounds.working_directory(options.dir) as directory:
        run = Run(directory, options.state, options.gib)
        turns = {name: (lambda name=name: run.candidate(name, made[name])) for name in made}
        for name, turn in turns.items():  # what is kept is made now
            turn()
            print(f"{name} is warm", flush=True)
        turns["memcpy, raw file"] = run.ceiling
        samples = timing.alternate(options.state, turns, dict.fromkeys(turns, options.rounds))
    rows = timing.summarize(samples)
    about = report.machine(options.dir, cache.file_system_of(options.dir))
    print(f"{timing.table(rows)}\n\n" + ", ".join(f"{name} {value}" for name, value in about.items()))
    if options.json:
        found = {"about": {key: str(value) for key, value in about.items()}, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
