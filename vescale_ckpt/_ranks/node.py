"""Numbers the machine that this process runs on, so that ranks can compare their machines."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

from .. import settings

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_of_this_process() -> int:
    """Equal for processes of one machine (containers on it included), in 0 … 2**63 - 1.

    The environment variable VESCALE_CKPT_NODE, a whole number, wins.
    """
    said = settings.node()
    if said is not None:
        return said
    try:
        machine = _BOOT_ID.read_bytes()
    except OSError:
        machine = socket.gethostname().encode()
    return int.from_bytes(hashlib.blake2b(machine, digest_size=8).digest(), "big") >> 1


def memory_domain() -> str:
    """Equal for processes that may open each other's files in /proc: of one machine, process namespace and user."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = f"of {os.getpid()} alone"
    return f"{node_of_this_process()} {namespace} {os.getuid()}"


def ranks_of_this_node(otherwise: int) -> int:
    """`LOCAL_WORLD_SIZE`, which the launcher sets, if it is a number above 0; else `otherwise`."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else otherwise


class Process:
    """A process of this machine. When it has ended, another one may get its number."""

    def __init__(self, number: int) -> None:
        self._path = f"/proc/{number}/stat"
        _, self._start = self._state_and_start()

    def lives(self) -> bool:
        """False also for a process that has ended and that its parent has not waited for."""
        state, start = self._state_and_start()
        return start == self._start and state not in ("Z", "X")

    def _state_and_start(self) -> tuple[str, str]:
        try:
            fields = Path(self._path).read_bytes().rpartition(b")")[2].split()  # a name may hold spaces
        except OSError:
            return "X", ""
        return fields[0].decode(), fields[19].decode()
