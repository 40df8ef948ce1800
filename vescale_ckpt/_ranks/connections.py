"""Connects the ranks of a group by gloo for the collectives of `Exchange`, with a deadline for every wait.

No wait is longer than the timeout of the call plus `GRACE`. This applies to waits for a rank and for the store, while
connecting and while closing, whether a peer is late, stopped, dead or cut off. A rank uses `GRACE` to find out which
ranks to name: those whose notes are missing in the store. If it cannot reach the store, its error reports that.

A rank connects to its neighbours in the tree of ranks at first use, and to another rank at the first collective of
`peers` with it, so the number of sockets does not grow with the number of ranks.

`new_group` is not used: it numbers groups by how many a rank has created, which differs between ranks of subgroups, and
a failed group cannot be created again under its number.

The first failure ends a generation of connections. The rank that detects it writes a failure report to the store, then
closes its connections. Its neighbours detect that, read the report, raise the same error and close theirs.

If a connection ends, gloo wakes only a rank that waits for a message of which no byte has arrived. It does not wake a
rank that waits for a send or for the remainder of a message (`signalException` in its `tcp/pair.cc`). So ranks wait
only for messages of the first kind: a long message is followed by a short one, the trailer, and the receiver may
confirm it with a receipt.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from .._engine.torch_private import gloo_of_addresses, shut_down_connections
from .._observe.phase_times import WAIT
from .._observe.timeline import doing
from .._observe.timeline import phase as observed_phase
from . import nccl
from .diagnose import ElsewhereError, Failure, LostError, late_ranks, ranks_behind
from .nccl import CudaDevice, DeviceGroup
from .rendezvous import FailureReport, FirstWord, Rendezvous, is_in_background
from .store_thread import STORE_SECONDS, StoreGoneError, in_time

FANOUT = 16  # children of a rank in the tree
_GREETING_BYTES = 160
DIGEST_BYTES = 16
_TICK = 0.002  # seconds; gloo waits in whole milliseconds, and 0 milliseconds mean no limit
_SHORTEST = timedelta(milliseconds=1)
_LONGEST_END = 5.0  # seconds that a rank waits for others after a failure, at most; less than GRACE
# Messages with one gloo tag arrive in the order in which they are sent.
_MESSAGES, _TRAILERS, _RECEIPTS, _HELLOS, _NOTHING = range(5)  # the last is never sent
_SHORT_BYTES = 1024  # messages up to this size fit in one packet of any network, so they have no trailer


class Arrival(Protocol):
    """A message that a rank waits for, or a flag in memory shared with the peer."""

    def wait(self, timeout: timedelta) -> object:
        """Raises RuntimeError if it does not arrive in time, or as soon as it can no longer arrive."""


class _Awaited(NamedTuple):
    """An arrival from `peer` that a rank waits for: the last of `works`, which keeps the others alive until then."""

    peer: int
    works: list[Arrival]
    receipt: bool = False  #: whether the peer waits for a receipt


def subtree(rank: int, size: int) -> list[int]:
    """Returns a rank and its descendants in the tree of ranks: parents before children, lower ranks first."""
    found = [rank]
    for child in children_of(rank, size):
        found += subtree(child, size)
    return found


def children_of(rank: int, size: int) -> range:
    return range(rank * FANOUT + 1, min((rank + 1) * FANOUT + 1, size))


def parent_of(rank: int) -> int | None:
    """Returns the parent of a rank in the tree of ranks; None for the root."""
    return (rank - 1) // FANOUT if rank else None


class Connections:
    """One rank's connections of one generation. `ranks`: the ranks of the group, as the default group numbers them.

    The constructor is collective. Raises a CheckpointTimeoutError that names the ranks that did not arrive within
    `timeout` seconds.
    """

    def __init__(self, rendezvous: Rendezvous, ranks: list[int], timeout: float) -> None:
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        self.generation = rendezvous.generation
        self.parent = parent_of(self.rank)
        self.children = children_of(self.rank, self.size)
        self.calls = 0
        connecting = self._step = doing("connecting the ranks")
        self._progress = 0
        self.failure: FailureReport | None = None
        self.devices: DeviceGroup | None = None  #: the connections among the ranks' devices, once `devices_tried`
        self.devices_tried = False
        self.kept: dict[str, object] = {}  #: values of users that are valid for as long as these connections
        self._device_groups = 0  # the number of groups made so far
        self.ranks = ranks
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + timeout
        self._farthest = 0  # the diameter of the tree
        at = parent_of(self.size - 1)
        while at is not None:
            self._farthest += 2
            at = parent_of(at)
        # Only these queues hold work in flight. gloo closes only after all of it is released.
        self._pending: deque[_Awaited] = deque()
        self._receipts: deque[_Awaited] = deque()
        self._sent: deque[tuple[int, list[Arrival]]] = deque()  # (number of the collective, sends without a receipt)
        self._short_message = torch.zeros(1, dtype=torch.uint8, device="cpu")  # used for every trailer and receipt
        self._connected = {self.rank}  # ranks that this one can send to and receive from
        self._addresses: dict[int, bytes] = {}  # {rank: its address}, of this rank and those that it has connected to
        # gloo terminates the process if it is closed while connecting and the connection then fails.
        self._connects = False
        self._gloo: dist.ProcessGroupGloo | None = None
        failed: Exception | None = None
        address = b""
        try:
            made = partial(gloo_of_addresses, self.rank, self.size, timedelta(seconds=timeout))
            self._gloo, address, self._tell = in_time(made, timeout, "vescale_ckpt opens a port")
        except (RuntimeError, TimeoutError) as error:
            failed = error
        with observed_phase(WAIT, connecting, self._awaited, place=self._watched):
            rendezvous.meet(connecting, timeout, address, self._deadline)
        self._addresses[self.rank] = address
        try:
            if failed is not None:
                raise failed
            self._connect(self._neighbours)
        except (RuntimeError, TimeoutError, LostError) as error:
            raise self._end(connecting, connecting, timeout, error).error() from error

    @property
    def _watched(self) -> tuple[int, int] | None:
        """None in the background, where copies of large files take long and delay no call."""
        return None if is_in_background() else (self.rank, self.size)

    @property
    def _neighbours(self) -> list[int]:
        return [*self.children] if self.parent is None else [self.parent, *self.children]

    def _connect(self, peers: Iterable[int]) -> None:
        """Connects this rank to others, which connect to it at the same time. It waits for each in turn, in ascending
        order; so, of all pairs not yet connected, the two ranks of the first pair always wait for each other."""
        fresh = sorted({*peers} - self._connected)
        if not fresh:
            return
        for peer, address in self._rendezvous.addresses(fresh).items():
            if not address:
                raise LostError(peer, in_time=True)  # it has left with an error
            self._tell(peer, address)
            self._addresses[peer] = address
        gloo: Any = self._gloo
        waiting_for = [0]

        def connect() -> list[_Awaited]:
            hellos = []
            for peer in fresh:
                waiting_for[0] = peer
                # `recv` returns when there is a connection.
                came = gloo.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _HELLOS)
                hellos.append(_Awaited(peer, [gloo.send([self._short_message], peer, _HELLOS), came]))
            return hellos

        self._connects = True
        try:
            self._pending.extend(in_time(connect, self._left(), "vescale_ckpt connects", self._others_have_failed))
        except (RuntimeError, TimeoutError) as error:
            raise self._lost(waiting_for[0]) from error
        self._connects = False
        self._connected.update(fresh)
        self.wait()

    def _others_have_failed(self) -> bool:
        """Whether there is a failure report. A rank that waits for a first connection does not detect that others have
        closed theirs."""
        with suppress(StoreGoneError):
            return self._rendezvous.failure() is not None
        return False

    def make_devices(self, device: CudaDevice, timeout: float) -> None:
        """Creates `devices`. NCCL connects at the first swap."""
        self._device_groups += 1
        store = self._rendezvous.store_for_devices(self._device_groups)
        self.devices = DeviceGroup(device, nccl.nccl_backend(store, self.rank, self.size, timeout), timeout)

    @contextmanager
    def collective(self, kind: str, phase: str, timeout: float, peers: Iterable[int] = ()) -> Iterator[None]:
        """A context manager for this rank's part of a collective: `send`, `receive` and `wait` with neighbours in the
        tree and with `peers`, whose own `peers` must contain this rank.

        It begins with a greeting between neighbours, and ends when all messages of this rank are done, as after `wait`.
        Any exception raised inside ends these connections on all ranks.
        """
        with self._lock:
            if self.failure is not None:
                raise self.failure.error()
            self.calls += 1
            self._deadline = time.monotonic() + timeout
            step = self._step = f"{phase} ({kind})"
            self._progress = 0
            self._rendezvous.note(self.calls, step)
            try:
                with observed_phase(WAIT, step, self._awaited, meets=True, place=self._watched):
                    self._greet(step)
                    self._connect(peers)
                    yield
                    self.wait()
                self._rendezvous.note(self.calls, step, inside=False)
            except (LostError, ElsewhereError) as error:
                raise self._end(phase, step, timeout, error).error() from error.__cause__
            except BaseException as error:
                self._end(phase, step, timeout, error)
                raise

    def _awaited(self) -> str:
        """Names the ranks that this one waits for, as far as known; empty if a lower rank has arrived, which logs them
        instead. Any thread may call it."""
        rendezvous = self._rendezvous
        if not all(late_ranks(rendezvous.notes([lower]), self.calls) for lower in range(self.rank)):
            return ""
        notes = rendezvous.notes()
        if late := late_ranks(notes, self.calls) or ranks_behind(notes, self.calls, self._progress):
            return f"{rendezvous.named(late)}{rendezvous.last_seen(late)}"
        with suppress(IndexError):  # the message may just have arrived
            return f"a message of rank {(self._pending or self._receipts)[0].peer} of {self.size}"
        return "other ranks"

    def progress(self, progress: int) -> None:
        """Records this rank's progress in a long collective, for the error of a rank that times out."""
        self._progress = progress
        self._rendezvous.note(self.calls, self._step, progress)

    def may_commit(self, timeout: float) -> None:
        """Called before a step that cannot be undone. Raises if other ranks have timed out, or if the store does not
        answer. After it returns, the error of a rank that times out states that the commit may have been made."""
        with self._lock:
            if self.failure is None:
                failure = self._rendezvous.may_commit(self.calls, timeout)
                if failure is None:
                    return
                self.failure = failure
                self._close()
            raise self.failure.error()

    def first_word(self) -> FirstWord:
        """Returns a write-once cell to decide on after the last collective. All ranks must have run the same ones."""
        return self._rendezvous.first_word(self.calls)

    def send(self, peer: int, tensor: torch.Tensor, receipt: bool = False) -> None:
        """Begins to send a CPU tensor.

        With `receipt`, `wait` returns only when the peer has the message. Without it, the tensor must never change, and
        this rank must later wait for a message that the peer sends only after it has started to receive this one,
        because gloo sends a message only when the peer has started to receive it.
        """
        works: list[Arrival] = []
        if receipt:
            self._receipts.append(_Awaited(peer, works))
            works.append(self._begin("recv", peer, self._short_message, _RECEIPTS))
        else:
            self._sent.append((self.calls, works))
        works.insert(0, self._begin("send", peer, tensor, _MESSAGES))
        if tensor.nbytes > _SHORT_BYTES:
            works.insert(0, self._begin("send", peer, self._short_message, _TRAILERS))

    def receive(self, peer: int, tensor: torch.Tensor, receipt: bool = False) -> None:
        """Begins to receive a tensor of exactly the size that the peer sends. `receipt`: the same as in its `send`."""
        works: list[Arrival] = []
        self._pending.append(_Awaited(peer, works, receipt))
        works.append(self._begin("recv", peer, tensor, _MESSAGES))
        if tensor.nbytes > _SHORT_BYTES:
            works.append(self._begin("recv", peer, self._short_message, _TRAILERS))

    def expect(self, peer: int, arrival: Arrival) -> None:
        """Makes `wait` also wait for an arrival from `peer` outside these connections."""
        self._pending.append(_Awaited(peer, [arrival]))

    def wait(self, receipts: bool = True) -> None:
        """Returns when all receives and expected arrivals are done; with `receipts`, also all receipts."""
        # Receives first: peers may be waiting for this rank's receipts.
        for awaited in (self._pending, self._receipts) if receipts else (self._pending,):
            while awaited:
                try:
                    awaited[0].works[-1].wait(timedelta(seconds=self._left()))
                except RuntimeError as error:
                    raise self._lost(awaited[0].peer) from error
                if awaited[0].receipt:
                    self._sent.append(
                        (self.calls, [self._begin("send", awaited[0].peer, self._short_message, _RECEIPTS)])
                    )
                awaited.popleft()

    def _begin(self, way: str, peer: int, tensor: torch.Tensor, tag: int) -> Arrival:
        assert peer in self._connected, f"rank {self.rank} is not connected to rank {peer}"
        try:
            work: Arrival = getattr(self._gloo, way)([tensor], peer, tag)
            return work
        except RuntimeError as error:
            raise self._lost(peer) from error

    def _left(self) -> float:
        return max(_TICK, self._deadline - time.monotonic())

    def _lost(self, peer: int) -> LostError:
        return LostError(peer, in_time=time.monotonic() < self._deadline - _TICK)

    def _greet(self, step: str) -> None:
        digest = hashlib.blake2b(f"{self.calls} {step}".encode(), digest_size=DIGEST_BYTES).digest()
        greeting = (digest + step.encode())[:_GREETING_BYTES].ljust(_GREETING_BYTES, b"\0")
        said = tensor_over(bytearray(greeting))
        heard = {peer: bytearray(_GREETING_BYTES) for peer in self._neighbours}
        for peer, buffer in heard.items():
            self.receive(peer, tensor_over(buffer))
            self.send(peer, said)
        self.wait()
        for peer, buffer in heard.items():
            if buffer != greeting:
                raise ElsewhereError(peer, buffer[DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace"))
        # A greeting from a neighbour proves that ranks d hops away have finished collective n - d, so buffers sent
        # before that can be freed.
        while self._sent and self._sent[0][0] + self._farthest < self.calls:
            self._sent.popleft()

    def _end(self, phase: str, step: str, timeout: float, error: BaseException) -> FailureReport:
        """Creates or reads the failure report, equal on all ranks, then closes the connections."""
        until, store_answers = time.monotonic() + _LONGEST_END, True
        failed = Failure(self._rendezvous, self.calls, phase, step, self._progress, timeout, error)
        try:
            failure = None
            if isinstance(error, LostError) and error.in_time:  # the peer closed it, perhaps after a report
                failure = self._rendezvous.failure(wait=STORE_SECONDS)
            if failure is None:
                failure = self._rendezvous.settle(failed.diagnose)
        except StoreGoneError as gone:
            store_host = self.ranks.index(0) if 0 in self.ranks else None
            failure = replace(failed.diagnose_without_store(gone, store_host), commit_is_known=False)
            store_answers = False
        self.failure = failure
        self._rendezvous.note(self.calls, step, self._progress, inside=False)
        self._close()
        if store_answers:
            with suppress(StoreGoneError):
                if self.ranks[self.rank] == 0:  # this process hosts the store, unless the launcher does
                    left = until - time.monotonic()
                    self._rendezvous.wait_for_readers(failure.late, min(STORE_SECONDS, max(0.0, left)))
                else:
                    self._rendezvous.acknowledge()
        return failure

    def close(self) -> None:
        """Closes connections that no rank uses any longer."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._gloo is not None:
            cut = partial(self._cut, self._gloo)
            if self._connects:
                others = [address for rank, address in self._addresses.items() if rank != self.rank]
                cut = partial(shut_down_connections, self._addresses[self.rank], others)
            with suppress(TimeoutError):
                in_time(cut, STORE_SECONDS, "vescale_ckpt closing")
        for awaited in *self._pending, *self._receipts:
            awaited.works.clear()  # tracebacks may hold the list
        for _, works in self._sent:
            works.clear()
        for held in self._pending, self._receipts, self._sent:
            held.clear()
        # The list holds the only reference, so the thread of `in_time` destroys the group, not this thread.
        closing, self._gloo = [self._gloo], None
        with suppress(TimeoutError):
            in_time(closing.clear, STORE_SECONDS, "vescale_ckpt closing")
        if self.devices is not None:
            self.devices.end()
        self.kept.clear()

    def _cut(self, gloo: Any) -> None:
        """Closes the sockets. Otherwise gloo would keep reading a message whose tensor is freed, and never close
        (`Loop::shutdown` in its `tcp/loop.cc` waits until no data arrives)."""
        for peer in self._connected - {self.rank}:
            with suppress(RuntimeError):  # a wait that times out closes all sockets; one for a lost rank raises at once
                gloo.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _NOTHING).wait(_SHORTEST)


def tensor_over(buffer: bytearray) -> torch.Tensor:
    """Returns a byte tensor that shares the buffer's memory."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8, device="cpu")
