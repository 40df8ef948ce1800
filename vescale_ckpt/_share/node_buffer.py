"""Memory of the rounds of a load, which other ranks of the node may look at.

Anonymous files (memfd), which no quota of /dev/shm limits and which vanish with the last process that maps them.
"""

from __future__ import annotations

import os
import secrets
import struct
import threading
from collections.abc import Iterable, Sequence

import torch

from .._engine import _C
from .._ranks.connections import Connections, tensor_over
from ..errors import CheckpointError
from .routes import Round

_PAGE = 4096
_HELLO = struct.Struct("<qqq16s")  # process, file, bytes, token


class NodeBuffer:
    """This rank's memories, one for each of `sizes`, and those of its neighbours on the node. Each starts at a page."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = [-(-size // _PAGE) * _PAGE for size in sizes]
        self._token = secrets.token_bytes(16)
        self._file = -1
        self._file = os.memfd_create("vescale_ckpt")
        try:
            os.ftruncate(self._file, sum(self._sizes) + _PAGE)
            self._own = _Mapped(self._file, self._sizes)
        except BaseException:
            self.close()
            raise
        self._own.end[: len(self._token)] = tensor_over(bytearray(self._token))
        self._of_peers: dict[int, _Mapped] = {}

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._own.memories[number % len(self._sizes)]

    def swap(self, peers: Connections, number: int, of: Round) -> CheckpointError | None:
        """Sends and receives the messages of a round."""
        memory = self[number]
        for peer, offset, size in of.messages(of.receives):
            peers.receive(peer, memory[offset : offset + size] if size else _word())
        for peer, offset, size in of.messages(of.sends):
            peers.send(peer, memory[offset : offset + size] if size else _word())
        peers.wait()
        return None

    def swapped(self, number: int, of: Round) -> dict[int, torch.Tensor]:
        """By peer (-1: none), in what memory that lies which the round's places name."""
        found = {-1: self[number]}
        for peer in of.near(of.receives):
            memories = self._of_peers[peer].memories
            found[peer] = memories[number % len(memories)]
        return found

    def give_back(self, peers: Connections, of: Round) -> None:
        """Tells those whose memory was looked at in a round, and hears from those who looked at this rank's."""
        for peer in of.near(of.sends):
            peers.receive(peer, _word())
        for peer in of.near(of.receives):
            peers.send(peer, _word())
        peers.wait()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Nobody else can open it from now on; who has it keeps it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def let_go(self) -> None:
        """Gives it all back, which takes a while, in a thread of its own."""
        held = [self._own, self._of_peers]
        del self._own, self._of_peers
        threading.Thread(target=held.clear, name="vescale_ckpt memory", daemon=True).start()

    def meet(self, peers: Connections, near: Iterable[int]) -> CheckpointError | None:
        """Opens the memories of `near` ranks, which do the same within the same collective. What went wrong, if any."""
        hello = _HELLO.pack(os.getpid(), self._file, len(self._sizes), self._token)
        said = tensor_over(bytearray(hello + struct.pack(f"<{len(self._sizes)}q", *self._sizes)))
        heard = {peer: bytearray(len(said)) for peer in near}
        for peer, buffer in heard.items():
            peers.receive(peer, tensor_over(buffer))
            peers.send(peer, said)
        peers.wait()
        for peer, buffer in heard.items():
            try:
                self._of_peers[peer] = _open(buffer)
            except (OSError, ValueError, _C.EngineError) as error:
                return CheckpointError(f"the memory of rank {peer}, of the same node, cannot be seen: {error}")
        return None


def _word() -> torch.Tensor:
    """A message that says no more than that it came."""
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


class _Mapped:
    """A file of memories, one behind another, and a page with their token."""

    def __init__(self, file: int, sizes: Sequence[int]) -> None:
        whole = torch.frombuffer(_C.SharedMap(file, sum(sizes) + _PAGE), dtype=torch.uint8)
        self.memories: list[torch.Tensor] = list(torch.split(whole[:-_PAGE], list(sizes)))
        self.end = whole[-_PAGE:]


def _open(hello: bytearray) -> _Mapped:
    process, number, count, token = _HELLO.unpack_from(hello)
    sizes = struct.unpack_from(f"<{count}q", hello, _HELLO.size)
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size != sum(sizes) + _PAGE:  # to look beyond a file's end kills the process
            raise ValueError("a file of another size is in its place")
        mapped = _Mapped(file, sizes)
    finally:
        os.close(file)
    if bytes(mapped.end[: len(token)].tolist()) != token:
        raise ValueError("another file is in its place")
    return mapped
