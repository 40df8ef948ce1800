"""Two machines on one: network namespaces with a router between them, which can lose what it is given.

`Network()` makes them and removes them. `network.start(function, *args)` runs `function(rank, pipe, *args)` on four
ranks of a gloo group, two on each machine; the store is with rank 0. Only addresses of these namespaces are used.

What the router loses, nobody is told of: both machines' links stay up. A link that is down is one that the machine of
ranks 2 and 3 sees go down.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from rank_pool import _forks

Fault = Literal["down", "lost"]
FAULTS: tuple[Fault, ...] = ("down", "lost")
RANKS = 4
_CLONE_NEWNET = 0x40000000
_PORT = 29500
_START_TIMEOUT = 120.0


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip` (iproute2)"
    try:
        with Network():
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        told = getattr(error, "stderr", b"") or str(error).encode()
        return f"network namespaces cannot be made here: {told.decode(errors='replace').strip()}"


class Network:
    """Machines a (ranks 0 and 1) and b (2 and 3), and the router r."""

    def __init__(self) -> None:
        self._names = {machine: f"vckpt{os.getpid()}{machine}" for machine in "rab"}
        self._directory = Path(tempfile.mkdtemp(prefix="network_"))

    def __enter__(self) -> Network:
        try:
            for name in self._names.values():
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            for number, machine in enumerate("ab", 1):
                router, name, link = self._names["r"], self._names[machine], f"v{machine}"
                _run("ip", "-n", router, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
                _run("ip", "-n", router, "addr", "add", f"10.213.{number}.1/24", "dev", link)
                _run("ip", "-n", router, "link", "set", link, "up")
                _run("ip", "-n", name, "addr", "add", f"10.213.{number}.2/24", "dev", "eth0")
                self._link_up(machine, number)
            self._forward(True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def part(self, fault: Fault) -> None:
        if fault == "lost":
            self._forward(False)
        else:
            _run("ip", "-n", self._names["b"], "link", "set", "eth0", "down")

    def heal(self, fault: Fault) -> None:
        if fault == "lost":
            self._forward(True)
        else:
            self._link_up("b", 2)

    def start(self, function: Callable[..., Any], *args: Any) -> Ranks:
        return Ranks([self._names["a"], self._names["a"], self._names["b"], self._names["b"]], function, args)

    def _forward(self, on: bool) -> None:
        _run("ip", "netns", "exec", self._names["r"], "sh", "-c", f"echo {int(on)} > /proc/sys/net/ipv4/ip_forward")

    def _link_up(self, machine: str, number: int) -> None:
        _run("ip", "-n", self._names[machine], "link", "set", "eth0", "up")
        _run("ip", "-n", self._names[machine], "route", "replace", "default", "via", f"10.213.{number}.1")


class Ranks:
    """A function that runs on all ranks. What they `tell` comes in the order in which it was told."""

    def __init__(self, namespaces: list[str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._directory = tempfile.mkdtemp(prefix="ranks_")
        self._processes, self._pipes = [], []
        call = pickle.dumps((function.__module__, function.__qualname__, args))
        for rank, namespace in enumerate(namespaces):
            ours, theirs = _forks().Pipe()
            process = _forks().Process(target=_serve, args=(rank, namespace, theirs, call, self._directory))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def stop(self, rank: int) -> None:
        os.kill(self._pid(rank), signal.SIGSTOP)

    def go_on(self, rank: int) -> None:
        os.kill(self._pid(rank), signal.SIGCONT)

    def _pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def say(self, word: str) -> None:
        for pipe in self._pipes:
            pipe.send(word)

    def hear(self, seconds: float = _START_TIMEOUT, but: int | None = None) -> list[Any]:
        """One message of each rank; all stacks are in the error if one has none in time."""
        heard: list[Any] = [None] * len(self._pipes)
        missing = {rank: pipe for rank, pipe in enumerate(self._pipes) if rank != but}
        deadline = time.monotonic() + seconds
        while missing and (left := deadline - time.monotonic()) > 0:
            ready = wait(list(missing.values()), left)
            for rank, pipe in list(missing.items()):
                if pipe in ready:
                    heard[rank] = pipe.recv()
                    del missing[rank]
                    if isinstance(heard[rank], _Failure):
                        raise AssertionError(f"rank {rank}: {heard[rank].text}")
        if missing:
            raise AssertionError(f"ranks {list(missing)} said nothing for {seconds:g} s\n{self._stacks(list(missing))}")
        return heard

    def _stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid(rank), signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(f"--- rank {r}\n{Path(self._directory, f'stacks_{r}').read_text()}" for r in ranks)


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


# --- What runs in a rank's process


def _serve(rank: int, namespace: str, pipe: Connection, call: bytes, directory: str) -> None:
    stacks = open(os.path.join(directory, f"stacks_{rank}"), "w")  # noqa: SIM115  # faulthandler keeps it
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    machine = rank // 2
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        GLOO_SOCKET_IFNAME="eth0",
        OMP_NUM_THREADS="1",
        VESCALE_CKPT_NODE=str(machine),
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://10.213.1.2:{_PORT}",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=_START_TIMEOUT),
        )
        module, name, args = pickle.loads(call)
        getattr(__import__(module, fromlist=[name]), name)(rank, pipe, *args)
    except BaseException:
        pipe.send(_Failure(traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # no destructors: they would wait for the other machine
