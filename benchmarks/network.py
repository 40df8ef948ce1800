"""Ranks on different nodes, on one machine: each with a network card of its own, of a given speed.

Every rank has a network namespace with one end of a virtual cable in it; the other ends meet in a bridge, in a
namespace that a process holds which ends with this one. So nothing remains, and the machine's own network is not
touched. The token bucket on both ends of a cable is the card's speed, each way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from benchmarks.storage import UnavailableError

CARD = "card0"
_TOOLS = ("ip", "tc", "nsenter", "unshare")
_CLONE_NEWNET = 0x40000000
_BRIDGE = "switch0"


class Network:
    """The switch, and the cables to it."""

    def __init__(self, holder: int, mb_per_second: float) -> None:
        self._holder = holder
        self._rate = _bucket(mb_per_second)
        self._mb_per_second = mb_per_second
        self._in_switch("ip", "link", "add", _BRIDGE, "type", "bridge")
        self._in_switch("ip", "link", "set", _BRIDGE, "up")

    def connect(self, rank: int, pid: int) -> None:
        """Gives a process that has called `leave_network` its card, which it has to `start_card`."""
        cable = f"port{rank}"
        self._in_switch("ip", "link", "add", cable, "type", "veth", "peer", "name", CARD, "netns", str(pid))
        self._in_switch("tc", "qdisc", "add", "dev", cable, "root", *self._rate)
        self._in_switch("ip", "link", "set", cable, "master", _BRIDGE, "up")

    def _in_switch(self, *command: str) -> None:
        _run("nsenter", f"--net=/proc/{self._holder}/ns/net", *command)


@contextlib.contextmanager
def network(mb_per_second: float) -> Iterator[Network]:
    """A network without cards yet. Raises UnavailableError where namespaces or their tools are not to be had."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise UnavailableError(f"the network cannot be limited: no {', '.join(missing)}")
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None and holder.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.write(b"in its namespace\n")
            holder.stdin.flush()
        if not holder.stdout.readline():
            raise UnavailableError("the network cannot be limited: no network namespace could be made")
        yield Network(holder.pid, mb_per_second)
    finally:
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.close()  # which ends it
        holder.wait()
        holder.stdout.close()


def leave_network() -> None:
    """Moves this thread, and those that it starts from now on, into a new namespace without any card."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace of its own")


def start_card(rank: int, mb_per_second: float) -> None:
    """Called in the process that was connected."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", f"10.77.{rank // 250}.{rank % 250 + 1}/16", "dev", CARD)
    _run("ip", "link", "set", CARD, "up")
    _run("tc", "qdisc", "add", "dev", CARD, "root", *_bucket(mb_per_second))
    os.environ["GLOO_SOCKET_IFNAME"] = CARD


def _bucket(mb_per_second: float) -> Sequence[str]:
    """A quarter of a second of traffic may wait: as much as TCP wants in flight, not so much that it is lost."""
    burst = max(256 * 1024, int(mb_per_second * 2000))  # 2 ms
    return ("tbf", "rate", f"{int(mb_per_second * 8e6)}bit", "burst", str(burst), "latency", "250ms")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(f"the network cannot be limited: {' '.join(command)}: {done.stderr.strip()}")
