"""Numbers the machine of this process for ranks that compare their machines."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

from .. import settings
from .._engine import _C

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_of_this_process() -> int:
    """Returns a number in 0 … 2**63 - 1 that is equal for all processes of one machine, containers included.

    The environment variable VESCALE_CKPT_NODE, a whole number, takes precedence.
    """
    from_environment = settings.node()
    if from_environment is not None:
        return from_environment
    try:
        machine = _BOOT_ID.read_bytes()
    except OSError:
        machine = socket.gethostname().encode()
    return int.from_bytes(hashlib.blake2b(machine, digest_size=8).digest(), "big") >> 1


def memory_domain() -> str:
    """Returns a text that is equal for processes that may open each other's files in /proc. They have the same machine,
    process namespace and user."""
    return f"{node_of_this_process()} {_C.process_space()} {os.getuid()}"


class Process:
    """A process of this machine. It is not confused with a later process of the same number."""

    def __init__(self, number: int) -> None:
        self._path = f"/proc/{number}/stat"
        _, self._start = self._state_and_start()

    def lives(self) -> bool:
        """Whether the process runs. False also for a zombie."""
        state, start = self._state_and_start()
        return start == self._start and state not in ("Z", "X")

    def _state_and_start(self) -> tuple[str, str]:
        try:
            fields = Path(self._path).read_bytes().rpartition(b")")[2].split()  # a name may hold spaces
        except OSError:
            return "X", ""
        return fields[0].decode(), fields[19].decode()
