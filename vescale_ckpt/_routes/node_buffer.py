"""Buffers for the rounds of a broadcast load or an export, and what sends them: shared memory that other ranks of the
node map, and messages (gloo) to other nodes.

The file is a memfd: it is not limited by the size of /dev/shm, and disappears with the last process that maps it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch

from .._engine import _C
from .._ranks.connections import Connections, tensor_over
from .._ranks.exchange import Exchange
from .._ranks.node import Process
from ..errors import CheckpointError
from .pipeline import Buffers
from .routes import Round

_PAGE = 4096
_FILLED, _PLACED = 64, 128  # offsets of the counters in the last page, in lines of the cache of their own
_LEFT = (1 << 32) - 1  # a counter of a rank that has left after an error
_LOOK_SECONDS = 0.05  # so often a rank that waits looks whether the other one lives
_HELLO = struct.Struct("<qqq16s")  # process, file, bytes, token


_Made = TypeVar("_Made", bound=Buffers)


def open_on_all(
    exchange: Exchange, phase: str, make: Callable[[], _Made], near: Iterable[int], ready: bool = True
) -> tuple[_Made | None, Exception | None]:
    """Creates this rank's buffer and maps those of the ranks `near`; collective.

    Returns (buffer, this rank's error or None). The buffer is None on all ranks unless every rank has created its own
    and mapped its neighbours'. `ready`: whether this rank can take part.
    """
    memory, error = None, None
    try:
        memory = make() if ready else None
    except Exception as raised:
        error = raised
    if exchange.agree([int(memory is not None)], f"{phase}: take memory") == [1]:
        assert memory is not None
        if exchange.size > 1:
            with exchange.peers("open buffers", phase, near) as peers:
                error = memory.open_neighbours(peers, near)
        if exchange.agree([int(error is None)], phase) == [1]:
            memory.close()
            return memory, None
    if memory is not None:
        memory.close()
        memory.release()
    return None, error


class NodeBuffer(Buffers):
    """This rank's buffers, one for each of `sizes` (bytes), and those of its neighbours: ranks of the same node.

    Each buffer is page-aligned.
    """

    sends_by_exchange = True

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = [-(-size // _PAGE) * _PAGE for size in sizes]
        self._token = secrets.token_bytes(16)
        self._file = -1
        self._file = os.memfd_create("vescale_ckpt")
        try:
            os.ftruncate(self._file, sum(self._sizes) + _PAGE)
            self._own = _Mapped(self._file, self._sizes, Process(os.getpid()))
        except BaseException:
            self.close()
            raise
        self._own.end[: len(self._token)] = tensor_over(bytearray(self._token))
        self._of_peers: dict[int, _Mapped] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._own.memories[index % len(self._sizes)]

    def exchange_messages(self, peers: Connections, index: int, round_: Round) -> CheckpointError | None:
        """Exchanges the round's messages between nodes. Then signals the neighbours that what this rank read and
        received is in its buffer, and waits for the same signal from them."""
        memory = self[index]
        for peer, offset, size in round_.messages(round_.receives):
            if size:
                peers.receive(peer, memory[offset : offset + size], receipt=True)
        for peer, offset, size in round_.messages(round_.sends):
            if size:
                peers.send(peer, memory[offset : offset + size], receipt=True)
        peers.wait(receipts=False)  # `acknowledge` waits for them
        self.meet_neighbours(peers, index, round_)
        return None

    def sources(self, index: int, round_: Round) -> dict[int, torch.Tensor]:
        """Returns the source buffers of the round's placements, by peer (-1: this rank)."""
        return self._buffers(index, round_.same_node_peers(round_.receives))

    def targets(self, index: int, round_: Round) -> dict[int, torch.Tensor]:
        """Returns the destination buffers of an export's round, by peer (-1: this rank)."""
        return self._buffers(index, round_.same_node_peers(round_.sends))

    def _buffers(self, index: int, peers: Iterable[int]) -> dict[int, torch.Tensor]:
        found = {-1: self[index]}
        for peer in peers:
            memories = self._of_peers[peer].memories
            found[peer] = memories[index % len(memories)]
        return found

    def meet_neighbours(self, peers: Connections, index: int, round_: Round) -> None:
        """Signals the neighbours that this rank has reached the round, and waits for those whose buffers it needs."""
        self._own.filled.set(index + 1)
        for peer in round_.same_node_peers(round_.receives):
            owner = self._of_peers[peer]
            peers.expect(peer, _Counted(owner.filled, owner.process, index + 1))
        peers.wait(receipts=False)

    def acknowledge(self, peers: Connections, index: int, round_: Round) -> None:
        self._own.placed.set(index + 1)
        for peer in round_.same_node_peers(round_.sends):
            owner = self._of_peers[peer]
            peers.expect(peer, _Counted(owner.placed, owner.process, index + 1))
        peers.wait()

    def leave(self) -> None:
        self._own.filled.set(_LEFT)
        self._own.placed.set(_LEFT)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def release(self) -> None:
        """Unmaps all buffers, on a separate thread, because that takes a while."""
        held = [self._own, self._of_peers]
        del self._own, self._of_peers
        threading.Thread(target=held.clear, name="vescale_ckpt memory", daemon=True).start()

    def open_neighbours(self, peers: Connections, near: Iterable[int]) -> CheckpointError | None:
        hello = _HELLO.pack(os.getpid(), self._file, len(self._sizes), self._token)
        sent = tensor_over(bytearray(hello + struct.pack(f"<{len(self._sizes)}q", *self._sizes)))
        received = {peer: bytearray(len(sent)) for peer in near}
        for peer, buffer in received.items():
            peers.receive(peer, tensor_over(buffer))
            peers.send(peer, sent)
        peers.wait()
        for peer, buffer in received.items():
            try:
                self._of_peers[peer] = _open(buffer)
            except (OSError, ValueError, _C.EngineError) as error:
                return CheckpointError(f"the memory of rank {peer}, of the same node, cannot be seen: {error}")
        return None


class _Mapped:
    """A mapped file of consecutive buffers, followed by a page that begins with the token. `process`: its creator.

    The last page also has two counters of the owner: the rounds for which its buffer is `filled`, and the rounds for
    which it has `placed` what it read in its neighbours' buffers.
    """

    def __init__(self, file: int, sizes: Sequence[int], process: Process) -> None:
        size = sum(sizes)
        mapped = mmap.mmap(file, size + _PAGE)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        self.memories: list[torch.Tensor] = list(torch.split(whole[:-_PAGE], list(sizes)))
        self.end = whole[-_PAGE:]
        self.filled, self.placed = (_C.SharedCounter(mapped, size + at) for at in (_FILLED, _PLACED))
        self.process = process


class _Counted:
    """Waits, in `Connections.wait`, until a neighbour's counter has reached a value."""

    def __init__(self, counter: _C.SharedCounter, owner: Process, value: int) -> None:
        self._counter = counter
        self._process = owner
        self._value = value

    def wait(self, timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while (left := end - time.monotonic()) > 0:
            found = self._counter.wait(self._value, min(left, _LOOK_SECONDS))
            if found == _LEFT:
                raise RuntimeError("the neighbour has left")
            if found >= self._value:
                return
            if not self._process.lives():
                raise RuntimeError("the neighbour has died")
        raise RuntimeError("the neighbour is late")


def _open(hello: bytearray) -> _Mapped:
    process, descriptor, count, token = _HELLO.unpack_from(hello)
    sizes = struct.unpack_from(f"<{count}q", hello, _HELLO.size)
    file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_size != sum(sizes) + _PAGE:  # an access beyond a file's end kills the process
            raise ValueError("a file of another size is in its place")
        mapped = _Mapped(file, sizes, Process(process))
    finally:
        os.close(file)
    if bytes(mapped.end[: len(token)].tolist()) != token:
        raise ValueError("another file is in its place")
    return mapped
