"""Several machines on one: namespaces of networks and mounts, with links of a given bandwidth, joined by a router.

`Machines(2)` makes them and removes them. `machines.start(function, *args)` runs `function(rank, pipe, *args)` on the
ranks of a gloo group, some on each machine; the store is with rank 0, on machine 0. Only addresses of these namespaces
are used. Every machine has a folder of its own, which its ranks see at `machines.own`; other folders are shared.
VESCALE_CKPT_NODE is the machine's number.

What the router loses, nobody is told of: all links stay up. A link that is down is one that its machine sees go down.
A machine that is lost is silent at once and its processes are gone. A machine that is frozen keeps its connections.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from harness.ranks import forks

#: `down`: the machine's link is. `lost`: the router loses all from and to it. `deaf`: only what is sent to it.
Fault = Literal["down", "lost", "deaf"]
FAULTS: tuple[Fault, ...] = ("down", "lost", "deaf")
_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MS_RDONLY, _MS_REMOUNT, _MNT_DETACH = 1, 32, 2
_PORT = 29500
_START_TIMEOUT = 120.0
_numbers = itertools.count()  # of the networks of this process


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if shutil.which("ip") is None:
        return "namespaces of networks need the command `ip` (iproute2)"
    if os.geteuid() != 0:
        return "namespaces of networks and mounts need root"
    try:
        with Machines(1):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        told = getattr(error, "stderr", b"") or str(error).encode()
        return f"namespaces of networks cannot be made here: {told.decode(errors='replace').strip()}"


@dataclass(frozen=True)
class Traffic:
    """Bytes over a machine's link, with the headers of packets."""

    received: int
    sent: int


class Machines:
    """`count` machines of `ranks` ranks each, numbered from 0, and a router. `megabits`: of each link, each way, a
    second (None: as fast as it goes). `store_apart`: the store is with a process of its own on machine 0, as launchers
    have it. `below`: where their folders are; None: where temporary files are."""

    def __init__(
        self,
        count: int = 2,
        ranks: int = 2,
        megabits: int | None = None,
        store_apart: bool = False,
        below: Path | None = None,
    ) -> None:
        self.count = count
        self.ranks = ranks
        self.store_apart = store_apart
        self._megabits = megabits
        name = f"vckpt{os.getpid()}n{next(_numbers)}"
        self._router = f"{name}r"
        self._names = [f"{name}m{machine}" for machine in range(count)]
        self._directory = Path(tempfile.mkdtemp(prefix="machines_", dir=below))
        self.own = self._directory / "own"  #: where the ranks of each machine see its folder
        self.own.mkdir()

    def __enter__(self) -> Machines:
        try:
            for name in (self._router, *self._names):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            for machine, name in enumerate(self._names):
                self.folder(machine).mkdir()
                link = self._link(machine)
                _in(self._router, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
                _in(self._router, "addr", "add", f"{_network(machine)}.1/24", "dev", link)
                _in(self._router, "link", "set", link, "up")
                _in(name, "addr", "add", f"{_network(machine)}.2/24", "dev", "eth0")
                self._link_up(machine)
                self._limit(self._router, link)
                self._limit(name, "eth0")
            _run("ip", "netns", "exec", self._router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self._router, *self._names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def folder(self, machine: int) -> Path:
        """The folder that the machine's ranks see at `own`, as this process sees it."""
        return self._directory / f"machine{machine}"

    def replace(self, machine: int) -> None:
        """Puts an empty folder in the place of the machine's."""
        shutil.rmtree(self.folder(machine))
        self.folder(machine).mkdir()

    def part(self, fault: Fault, machine: int) -> None:
        """Parts a machine from the others."""
        if fault == "down":
            _in(self._names[machine], "link", "set", "eth0", "down")
            return
        _in(self._router, "route", "replace", "blackhole", f"{_network(machine)}.2/32")
        if fault == "lost":
            for other in range(self.count):
                if other != machine:  # a route of its own for what comes from the machine
                    _in(self._router, "rule", "add", "from", f"{_network(machine)}.2", "to", f"{_network(other)}.2",
                        "blackhole")  # fmt: skip

    def heal(self, fault: Fault, machine: int) -> None:
        """Undoes `part`."""
        if fault == "down":
            self._link_up(machine)
            return
        _in(self._router, "route", "del", "blackhole", f"{_network(machine)}.2/32")
        if fault == "lost":
            for other in range(self.count):
                if other != machine:
                    _in(self._router, "rule", "del", "from", f"{_network(machine)}.2", "to", f"{_network(other)}.2",
                        "blackhole")  # fmt: skip

    def traffic(self) -> list[Traffic]:
        """What went over each machine's link since it was made."""
        links = json.loads(_run("ip", "-n", self._router, "-s", "-j", "link", "show"))
        found = {link["ifname"].partition("@")[0]: link["stats64"] for link in links}
        of_machines = [found[self._link(machine)] for machine in range(self.count)]
        return [Traffic(received=link["tx"]["bytes"], sent=link["rx"]["bytes"]) for link in of_machines]

    def start(self, function: Callable[..., Any], *args: Any) -> Ranks:
        """Starts all ranks; machine by machine, as launchers number them."""
        return Ranks(self, [machine for machine in range(self.count) for _ in range(self.ranks)], function, args)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, *args)` returns on each rank."""
        with self.start(_once, function.__module__, function.__qualname__, args) as ranks:
            found = ranks.hear()
            ranks.say("end")  # no rank ends before all are done: the store is with one of them
            return found

    def enter(self, machine: int) -> None:
        """Moves this process, which has one thread, to the machine."""
        with open(f"/run/netns/{self._names[machine]}") as file:
            _call("setns", file.fileno(), _CLONE_NEWNET)
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _call("mount", bytes(self.folder(machine)), bytes(self.own), None, _MS_BIND, None)

    def _link(self, machine: int) -> str:
        return f"v{machine}"

    def _limit(self, namespace: str, link: str) -> None:
        if self._megabits is not None:
            rate = f"{self._megabits}mbit"
            limits = ("rate", rate, "burst", "256kb", "latency", "100ms")
            _run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", link, "root", "tbf", *limits)

    def _link_up(self, machine: int) -> None:
        _in(self._names[machine], "link", "set", "eth0", "up")
        _in(self._names[machine], "route", "replace", "default", "via", f"{_network(machine)}.1")


class Ranks:
    """A function that runs on all ranks. What they `tell` comes in the order in which it was told."""

    def __init__(
        self, machines: Machines, machine_of: list[int], function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self._machines = machines
        self.machine_of = machine_of
        self._directory = tempfile.mkdtemp(prefix="ranks_")
        self._processes, self._pipes = [], []
        call = pickle.dumps((function.__module__, function.__qualname__, args))
        self._store = forks().Process(target=_host_store, args=(machines,)) if machines.store_apart else None
        if self._store is not None:
            self._store.start()
        for rank, machine in enumerate(machine_of):
            ours, theirs = forks().Pipe()
            place = (rank, len(machine_of), machine)
            process = forks().Process(target=_serve, args=(machines, place, theirs, call, self._directory))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_store()
        for process in self._processes:
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def on(self, machine: int) -> list[int]:
        return [rank for rank, place in enumerate(self.machine_of) if place == machine]

    def stop(self, rank: int) -> None:
        os.kill(self._pid(rank), signal.SIGSTOP)

    def go_on(self, rank: int) -> None:
        os.kill(self._pid(rank), signal.SIGCONT)

    def freeze(self, machine: int) -> None:
        for rank in self.on(machine):
            self.stop(rank)

    def thaw(self, machine: int) -> None:
        for rank in self.on(machine):
            self.go_on(rank)

    def kill_store(self) -> None:
        """Ends the process of the store, if it has one of its own."""
        if self._store is not None:
            self._store.kill()
            self._store.join(10)

    def kill(self, machine: int) -> None:
        """All its ranks get SIGKILL: their connections are closed."""
        for rank in self.on(machine):
            self._processes[rank].kill()
            self._processes[rank].join(10)

    def lose(self, machine: int) -> None:
        """The machine loses power: nobody is told, as no packet leaves it any more."""
        self._machines.part("lost", machine)
        self.kill(machine)

    def _pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def say(self, word: Any, to: Iterable[int] | None = None) -> None:
        """To these ranks; None: to all."""
        for pipe in self._pipes if to is None else map(self._pipes.__getitem__, to):
            with contextlib.suppress(OSError):  # of a machine that is lost
                pipe.send(word)

    def hear(self, seconds: float = _START_TIMEOUT, but: Iterable[int] = ()) -> list[Any]:
        """One message of each rank; all stacks are in the error if one has none in time."""
        heard: list[Any] = [None] * len(self._pipes)
        silent = set(but)
        missing = {rank: pipe for rank, pipe in enumerate(self._pipes) if rank not in silent}
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


def _network(machine: int) -> str:
    return f"10.213.{machine + 1}"


def _in(namespace: str, *command: str) -> None:
    _run("ip", "-n", namespace, *command)


def _run(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


def _call(name: str, *args: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        raise OSError(ctypes.get_errno(), name)


# --- File systems that one rank sees, for machines of one rank


def make_read_only(folder: str) -> None:
    """Until `unmount`."""
    path = folder.encode()
    _call("mount", path, path, None, _MS_BIND, None)
    _call("mount", None, path, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY, None)


def mount_small(folder: str, size: int) -> None:
    """Puts an empty file system of so many bytes there, until `unmount`."""
    _call("mount", b"none", folder.encode(), b"tmpfs", 0, f"size={size}".encode())


def unmount(folder: str) -> None:
    _call("umount2", folder.encode(), _MNT_DETACH)


# --- What runs in a rank's process


def _once(rank: int, pipe: Connection, module: str, name: str, args: tuple[Any, ...]) -> None:
    pipe.send(getattr(__import__(module, fromlist=[name]), name)(rank, *args))
    pipe.recv()


def _host_store(machines: Machines) -> None:
    machines.enter(0)
    import torch.distributed as dist

    store = dist.TCPStore(f"{_network(0)}.2", _PORT, is_master=True, wait_for_workers=False)
    signal.pause()
    del store


def _serve(machines: Machines, place: tuple[int, int, int], pipe: Connection, call: bytes, directory: str) -> None:
    rank, size, machine = place
    stacks = open(os.path.join(directory, f"stacks_{rank}"), "w")  # noqa: SIM115  # faulthandler keeps it
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    try:
        machines.enter(machine)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(machines.ranks),
            GLOO_SOCKET_IFNAME="eth0",
            OMP_NUM_THREADS="1",
            VESCALE_CKPT_NODE=str(machine),
        )
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        is_host = rank == 0 and not machines.store_apart
        timeout = timedelta(seconds=_START_TIMEOUT)
        store = dist.TCPStore(f"{_network(0)}.2", _PORT, size, is_host, timeout, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        module, name, args = pickle.loads(call)
        getattr(__import__(module, fromlist=[name]), name)(rank, pipe, *args)
    except BaseException:
        pipe.send(_Failure(traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # no destructors: they would wait for the other machine
