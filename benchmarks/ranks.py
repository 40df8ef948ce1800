"""Ranks that live as long as a benchmark needs them, each a process that does what it is told."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import BrokenBarrierError
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing  # so that tensors travel between processes by their shared memory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.harness.random_states import State
from benchmarks.harness.room import BenchmarkError
from benchmarks.harness.usage import Usage, measure

_Result = TypeVar("_Result")

_PATIENCE = timedelta(minutes=10)
_PATIENCE_AT_THE_END = 10.0
_PAUSE_BEFORE_DESTROY = 0.5  # gloo aborts where a peer still reads from its socket


class RankFailedError(BenchmarkError):
    """A rank raised, died, or did not answer."""


@dataclass
class Rank:
    """What a function has that is called on the ranks. ``kept`` is what it leaves to the next one."""

    rank: int
    size: int
    mesh: DeviceMesh
    barrier: Any
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timed:
    """When an operation began and ended on a rank, by the clock of the machine, and what it used there."""

    start: float
    end: float
    usage: Usage


def timed(barrier: Callable[[], object], operation: Callable[[], object]) -> Timed:
    """Runs ``operation``, which begins on all ranks at the same time: behind the barrier."""
    times: list[float] = []

    def all_at_once() -> None:
        barrier()
        times.append(time.perf_counter())
        operation()
        times.append(time.perf_counter())

    usage = measure(all_at_once)
    return Timed(times[0], times[1], usage)


def together(parts: Sequence[Timed]) -> Usage:
    """Of all ranks: seconds from the first that began to the last that ended; sums, and the greatest peak."""
    usages = [part.usage for part in parts]
    peaks = [usage.peak_extra_bytes for usage in usages if usage.peak_extra_bytes is not None]
    return Usage(
        seconds=max(part.end for part in parts) - min(part.start for part in parts),
        cpu_seconds=sum(usage.cpu_seconds or 0 for usage in usages),
        peak_extra_bytes=max(peaks) if len(peaks) == len(usages) else None,
        disk_bytes=sum(usage.disk_bytes or 0 for usage in usages),
        call_bytes=sum(usage.call_bytes or 0 for usage in usages),
    )


def distributed(state: State, mesh: DeviceMesh, dim: int | None) -> State:
    """DTensors of what all ranks have, sharded along ``dim`` (or their last one, if they have fewer) or replicated."""
    return {
        name: distribute_tensor(
            tensor, mesh, [Replicate() if dim is None else Shard(min(dim, tensor.ndim - 1))], src_data_rank=None
        )
        for name, tensor in state.items()
    }


def in_new_process(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Calls it where there is no process group yet, and nothing cached."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """As the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Ranks:
    """``size`` processes that are a gloo group."""

    def __init__(self, processes: list[BaseProcess], pipes: list[Connection]) -> None:
        self._processes = processes
        self._pipes = pipes
        self.size = len(processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls ``function(rank, *arguments)`` on all ranks, and returns what each returned.

        It must stand at the top level of a module. Raises RankFailedError as soon as one fails: then the ranks are out
        of step, and nothing is left but to end them.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return self.answers()

    def answers(self) -> list[Any]:
        found: dict[Connection, Any] = {}
        deadline = time.monotonic() + _PATIENCE.total_seconds()
        while len(found) < self.size:
            ready = wait([pipe for pipe in self._pipes if pipe not in found], deadline - time.monotonic())
            if not ready:
                raise RankFailedError(f"no answer from {self.size - len(found)} of {self.size} ranks in time")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    failure, found[pipe] = pipe.recv()
                except (EOFError, OSError) as error:
                    raise RankFailedError(f"rank {rank} died") from error
                if failure is not None:
                    raise RankFailedError(f"rank {rank}: {failure}")
        return [found[pipe] for pipe in self._pipes]


@contextlib.contextmanager
def ranks_on(size: int, *, apart: bool = False, backend: str = "gloo") -> Iterator[Ranks]:
    """Ranks on one node, or each on a node of its own, over the loopback.

    The default group has this backend. Hundreds of ranks need "fake", which sends nothing: gloo connects all with all.
    """
    context = multiprocessing.get_context("forkserver")  # torch is imported once
    context.set_forkserver_preload(
        [
            *("torch.distributed.checkpoint", "torch.distributed.tensor", "vescale_ckpt.api", __name__),
            "torch.testing._internal.distributed.fake_pg",  # makes the backend known
        ]
    )
    barrier = context.Barrier(size)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end, processes, pipes)
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, apart, backend, store.port, barrier, theirs)
            process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        ranks = Ranks(processes, pipes)
        ranks.answers()
        yield ranks
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(_PATIENCE_AT_THE_END)


def _end(processes: list[BaseProcess], pipes: list[Connection]) -> None:
    for process in processes:
        process.kill()
        process.join()
    for pipe in pipes:
        pipe.close()


# --- What runs in a rank's process


def _serve(rank: int, size: int, apart: bool, backend: str, port: int, barrier: Any, pipe: Connection) -> None:
    try:
        mesh = _join(rank, size, apart, backend, port)
    except Exception:
        pipe.send((traceback.format_exc(), None))
        return
    pipe.send((None, None))
    own = Rank(rank, size, mesh, barrier)
    while (request := _next(pipe)) is not None:
        function, arguments = request
        failure = result = None
        try:
            result = function(own, *arguments)
        except BrokenBarrierError:
            failure = "another rank did not come to the barrier"
        except Exception:
            failure = traceback.format_exc()
        pipe.send((failure, result))
        del request, arguments, result  # memory that they hold
    time.sleep(_PAUSE_BEFORE_DESTROY)
    dist.destroy_process_group()
    os._exit(0)  # no destructors: they are where gloo aborts


def _join(rank: int, size: int, apart: bool, backend: str, port: int) -> DeviceMesh:
    torch.set_num_threads(1)
    if apart:
        os.environ["VESCALE_CKPT_NODE"] = str(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    return init_device_mesh("cpu", (size,))


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # who commands is gone
        os._exit(1)
