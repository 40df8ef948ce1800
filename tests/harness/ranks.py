"""Runs a function on several gloo ranks, each a process of its own.

`run_ranks(2, function, *args)` calls `function(*args)` on two ranks and returns what each returned. Ranks live as long
as the test session and are reused, because starting them costs more than most tests; a run that goes wrong ends them,
and the next one starts fresh. Nothing waits without a limit: ranks that are late print all their stacks and are
killed, and where one rank has failed, the others get a few seconds more.

`function` is found by its module and name, so it must be at the top level of a module. Arguments, results and
exceptions travel as pickles; state that a function leaves behind (environment, faults, cached plans) is undone.
A test that does all on the ranks is marked with `@on_ranks(2)`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec
from unittest import mock

from _pytest.assertion import rewrite

P = ParamSpec("P")
TIMEOUT = 300.0  # seconds a run may take
_START_TIMEOUT = 300.0  # the first ranks wait for torch to be imported, from a cold disk perhaps
_PATIENCE_AFTER_FAILURE = 10.0
# gloo's own limit is half an hour; a rank left alone in a collective should say so before the run is ended.
_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# Two-rank gloo programs abort at exit in some percent of cases, while a peer is still reading from a socket.
_PAUSE_BEFORE_DESTROY = 0.5
_PRELOADED = [
    *("torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.fsdp", "pytest"),
    "torch._dynamo",  # the first optimizer of a process imports it
    "torch.testing._internal.distributed.fake_pg",  # of `many_ranks`
    *("vescale_ckpt.api", "vescale_ckpt.manager.manager", "vescale_ckpt.safetensors"),
]


class RanksFailedError(AssertionError):
    """Some ranks raised, died or were too late. `failures`: the exception by rank."""

    def __init__(self, what: str, failures: dict[int, BaseException], details: dict[int, str]) -> None:
        texts = [f"--- rank {rank}: {details[rank]}" for rank in sorted(details)]
        super().__init__("\n".join([f"{what} failed on ranks {sorted(failures)}", *texts]))
        self.failures = failures


class RankDiedError(RuntimeError):
    """The rank's process ended before it answered."""


class RankTimeoutError(RuntimeError):
    """The rank did not answer in time and was killed."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, check: bool = True
) -> list[Any]:
    """Calls `function(*args)` on every rank of a gloo group; returns the results by rank.

    Raises `RanksFailedError` if a rank raised, died or took more than `timeout` seconds. With `check=False` the
    exceptions stand in the list in place of results instead, and what other ranks do after a failure has its time too.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = Pool(world_size)
    try:
        return pool.run(function, *args, timeout=timeout, check=check)
    finally:
        # After a failure the group may be out of step: a rank that raised left others in a collective.
        if pool.failed:
            _pools.pop(world_size).kill()


def in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Calls it in a new process, where torch is imported and nothing else has happened."""
    pool = ProcessPoolExecutor(1, mp_context=forks())
    answer = pool.submit(_call, function.__module__, function.__qualname__, args)
    try:
        return answer.result(TIMEOUT)
    finally:
        if not answer.done():  # the pool would wait for its process
            for process in pool._processes.values():
                process.kill()
        pool.shutdown()


def on_ranks(world_size: int, timeout: float = TIMEOUT) -> Callable[[Callable[P, object]], Callable[P, None]]:
    """Makes a test run on every rank of a gloo group, by `run_ranks`."""
    return _elsewhere(functools.partial(run_ranks, world_size, timeout=timeout))


def forked(test: Callable[P, object]) -> Callable[P, None]:
    """Makes a test run in a new process, by `in_fork`."""
    return _elsewhere(in_fork)(test)


def _elsewhere(run: Callable[..., Any]) -> Callable[[Callable[P, object]], Callable[P, None]]:
    def decorate(test: Callable[P, object]) -> Callable[P, None]:
        @functools.wraps(test)
        def called(*args: P.args, **options: P.kwargs) -> None:
            run(test, *inspect.signature(test).bind(*args, **options).args)

        return called

    return decorate


def close_ranks() -> None:
    """Ends all ranks; for the end of a test session."""
    for pool in _pools.values():
        pool.ask_to_end()
    while _pools:
        _pools.popitem()[1].close()


def forks() -> ForkServerContext:
    """Forks of one process that has imported what they need: a new process costs milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class _Failure:
    def __init__(self, error: BaseException, details: str) -> None:
        self.error = error
        self.details = details


class Pool:
    """Processes that are the ranks of a group. `join(rank, world_size, directory)` makes each of them a rank of it."""

    def __init__(self, world_size: int, join: Callable[[int, int, str], object] | None = None) -> None:
        context = forks()
        self.failed = False  #: whether a rank has failed in a run
        self.directory = Path(tempfile.mkdtemp(prefix="ranks_"))
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, theirs, str(self.directory), join or _join), name=f"rank {rank}"
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        started = self._collect(_START_TIMEOUT, _PATIENCE_AFTER_FAILURE)
        failures = [answer.details for answer in started if isinstance(answer, _Failure)]
        if failures:
            self.kill()
            raise RuntimeError("ranks did not start: " + "\n".join(failures))

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, check: bool = True) -> list[Any]:
        """What `run_ranks` does."""
        self.begin(function, *args)
        return self.answers(f"{function.__module__}.{function.__qualname__}", timeout, check)

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        request = pickle.dumps((function.__module__, function.__qualname__, args))
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a dead rank is noticed by `answers`
                pipe.send_bytes(request)

    def answers(self, what: str, timeout: float, check: bool = True, but: Iterable[int] = ()) -> list[Any]:
        """One message of each rank, by rank; None for the ranks `but`. Raises as `run_ranks` does."""
        answers = self._collect(timeout, _PATIENCE_AFTER_FAILURE if check else timeout, but)
        failures = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, _Failure)}
        self.failed = self.failed or bool(failures)
        if failures and check:
            raise RanksFailedError(
                what,
                {rank: failure.error for rank, failure in failures.items()},
                {rank: failure.details for rank, failure in failures.items()},
            )
        return [answer.error if isinstance(answer, _Failure) else answer for answer in answers]

    def ask_to_end(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")

    def close(self) -> None:
        deadline = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _collect(self, timeout: float, patience: float, but: Iterable[int] = ()) -> list[Any]:
        answers: list[Any] = [None] * len(self.pipes)
        missing = {rank: pipe for rank, pipe in enumerate(self.pipes) if rank not in but}
        deadline = time.monotonic() + timeout
        while missing and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(missing.values()), left)
            for rank, pipe in list(missing.items()):
                if pipe in ready:
                    answers[rank] = self._receive(rank, pipe)
                    del missing[rank]
                    if isinstance(answers[rank], _Failure):  # who waits for it in a collective waits in vain
                        deadline = min(deadline, time.monotonic() + patience)
        if missing:
            for rank, stacks in self._stacks(list(missing)).items():
                error = RankTimeoutError(f"rank {rank} gave no answer in time")
                answers[rank] = _Failure(error, f"{error}; its stacks:\n{stacks}")
        return answers

    def _receive(self, rank: int, pipe: Connection) -> Any:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join(5)
            error = RankDiedError(f"rank {rank} died with exit code {self.processes[rank].exitcode}")
            return _Failure(error, f"{error}\n{self._stack_file(rank).read_text()}")
        except Exception as error:
            return _Failure(error, f"its answer cannot be unpickled: {traceback.format_exc()}")

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)  # faulthandler writes all stacks
        time.sleep(1)
        return {rank: self._stack_file(rank).read_text() for rank in ranks}

    def _stack_file(self, rank: int) -> Path:
        return self.directory / f"stacks_{rank}"


_pools: dict[int, Pool] = {}


# --- What runs in a rank's process


def _serve(
    rank: int, world_size: int, pipe: Connection, directory: str, join: Callable[[int, int, str], object]
) -> None:
    gc.freeze()  # what was imported before the fork is no garbage
    stacks = open(os.path.join(directory, f"stacks_{rank}"), "w")  # noqa: SIM115  # faulthandler keeps it
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    join(rank, world_size, directory)
    _answer(pipe, None)
    _pipe_to_parent.append(pipe)
    environment = dict(os.environ)
    while request := _next_request(pipe):
        try:
            answer = _call(*pickle.loads(request))
        except BaseException as error:
            answer = _Failure(error, traceback.format_exc())
        _tidy(environment)
        _answer(pipe, answer)
    time.sleep(_PAUSE_BEFORE_DESTROY)
    dist.destroy_process_group()
    os._exit(0)  # no destructors: they are where gloo aborts


_pipe_to_parent: list[Connection] = []


def pipe_to_parent() -> Connection:
    """For functions that a rank runs and that tell more than their result; `Pool.answers` hears it."""
    return _pipe_to_parent[0]


def _call(module: str, name: str, args: tuple[Any, ...]) -> Any:
    return inspect.unwrap(getattr(imported(module), name))(*args)


def imported(name: str) -> ModuleType:
    """A module of tests as pytest has compiled it, with asserts that report the compared values."""
    if name not in sys.modules and (spec := importlib.util.find_spec(name)) and spec.origin:
        path = Path(spec.origin)
        if code := rewrite._read_pyc(path, rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)):
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            exec(code, vars(module))
    return importlib.import_module(name)


def _join(rank: int, world_size: int, directory: str) -> None:
    import torch.distributed as dist

    _share_gloo_device()
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT
    )


def _share_gloo_device() -> None:
    """Lets all process groups of this process share one device of gloo. Each device has a thread that wakes up 100
    times a second: those of the hundreds of groups that tests leave would take a quarter of the processor."""
    from torch.distributed import distributed_c10d

    gloo = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class SharedDeviceGloo(gloo):  # type: ignore[misc, valid-type]
        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta = _COLLECTIVE_TIMEOUT, **_of_newer_torch: Any
        ) -> None:
            options = gloo._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo


def _next_request(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except EOFError:  # the session is gone
        os._exit(0)


def _answer(pipe: Connection, answer: Any) -> None:
    try:
        data = pickle.dumps(answer)
    except Exception:
        text = answer.details if isinstance(answer, _Failure) else repr(type(answer))
        error = RuntimeError(f"a rank's answer cannot be pickled: {text}")
        data = pickle.dumps(_Failure(error, f"{error}\n{traceback.format_exc()}"))
    pipe.send_bytes(data)


def _tidy(environment: dict[str, str]) -> None:
    from torch.distributed.checkpoint.planner import SavePlanner

    from harness import faults

    os.environ.clear()
    os.environ.update(environment)
    faults.clear()
    mock.patch.stopall()
    for name in vars(SavePlanner):
        if name.startswith("_cached_"):
            getattr(SavePlanner, name).clear()
    executor: Any = sys.modules.get("torch.distributed.checkpoint._async_process_executor")
    if executor is not None:
        executor._CHECKPOINT_PROCESS = None  # DCP's own ends when nobody holds it; left alone it dies with a traceback
