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
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from harness.ranks import Pool, forks, imported, pipe_to_parent

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
        return Ranks(self, function, args)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, *args)` returns on each rank."""
        with self.start(_once, function.__module__, function.__qualname__, args) as ranks:
            return ranks.hear()

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

    def __init__(self, machines: Machines, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._machines = machines
        self.machine_of = [machine for machine in range(machines.count) for _ in range(machines.ranks)]
        self._store = forks().Process(target=_host_store, args=(machines,), daemon=True)
        if machines.store_apart:
            self._store.start()
        self._pool = Pool(len(self.machine_of), partial(_join, machines))
        self._pool.begin(_talk, function.__module__, function.__qualname__, args)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_store()
        self._pool.kill()

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
        if self._machines.store_apart:
            self._store.kill()
            self._store.join(10)

    def kill(self, machine: int) -> None:
        """All its ranks get SIGKILL: their connections are closed."""
        for rank in self.on(machine):
            self._pool.processes[rank].kill()
            self._pool.processes[rank].join(10)

    def lose(self, machine: int) -> None:
        """The machine loses power: nobody is told, as no packet leaves it any more."""
        self._machines.part("lost", machine)
        self.kill(machine)

    def _pid(self, rank: int) -> int:
        pid = self._pool.processes[rank].pid
        assert pid is not None
        return pid

    def say(self, word: Any, to: Iterable[int] | None = None) -> None:
        """To these ranks; None: to all."""
        for pipe in self._pool.pipes if to is None else map(self._pool.pipes.__getitem__, to):
            with contextlib.suppress(OSError):  # of a machine that is lost
                pipe.send(word)

    def hear(self, seconds: float = _START_TIMEOUT, but: Iterable[int] = ()) -> list[Any]:
        """One message of each rank; all stacks are in the error if one has none in time."""
        return self._pool.answers("what was to be told", seconds, but=but)


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


def _talk(module: str, name: str, args: tuple[Any, ...]) -> None:
    getattr(imported(module), name)(int(os.environ["RANK"]), pipe_to_parent(), *args)


def _once(rank: int, pipe: Connection, module: str, name: str, args: tuple[Any, ...]) -> None:
    pipe.send(getattr(imported(module), name)(rank, *args))


def _host_store(machines: Machines) -> None:
    machines.enter(0)
    import torch.distributed as dist

    store = dist.TCPStore(f"{_network(0)}.2", _PORT, is_master=True, wait_for_workers=False)
    signal.pause()
    del store


def _join(machines: Machines, rank: int, size: int, directory: str) -> None:
    import torch.distributed as dist

    machine = rank // machines.ranks
    machines.enter(machine)
    os.environ.update(LOCAL_WORLD_SIZE=str(machines.ranks), GLOO_SOCKET_IFNAME="eth0", VESCALE_CKPT_NODE=str(machine))
    is_host = rank == 0 and not machines.store_apart
    timeout = timedelta(seconds=_START_TIMEOUT)
    store = dist.TCPStore(f"{_network(0)}.2", _PORT, size, is_host, timeout, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
