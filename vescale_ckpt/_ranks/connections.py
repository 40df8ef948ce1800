"""Connects the ranks of a group by gloo for the collectives of `Exchange`, with a deadline for every wait.

No wait is longer than the timeout of the call plus `GRACE`. That holds for waits for a rank, for the store, while
connecting and while closing; it holds whether a peer is late, stopped, dead or cut off. A rank uses `GRACE` to find out
which ranks to name: those whose notes are missing in the store. If it cannot reach the store, its error says so.

A rank connects to its neighbours in the tree of ranks at the beginning, and to another rank at the first collective of
`peers` with it. So sockets do not grow with the number of ranks.

The connections are not made by `new_group`. That numbers groups by how many each rank has made, which differs between
the ranks of subgroups; and a group that failed cannot be made again under its number.

The first failure ends a generation of connections. The rank that notices it writes a failure report to the store, then
closes its connections. Its neighbours notice that, read the report, raise the same error and close theirs.

If a connection ends, gloo wakes only a rank that waits for a message of which no byte has come yet. It does not wake a
rank that waits for a send or for the rest of a message (`signalException` in its `tcp/pair.cc`). So ranks wait only for
messages of the first kind: a short message, the trailer, follows a long one, and the receiver may answer with a
receipt.
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
_LONGEST_END = 5.0  # after a failure a rank waits at most so many seconds for others: less than GRACE
# Messages with one gloo tag arrive in the order in which they are sent.
_MESSAGES, _TRAILERS, _RECEIPTS, _HELLOS, _NOTHING = range(5)  # nobody sends the last
_SHORT_BYTES = 1024  # a message of at most so many bytes fits in one packet of any network, so it has no trailer


class Arrival(Protocol):
    """A message that a rank waits for, or a word in memory that it shares with the peer."""

    def wait(self, timeout: timedelta) -> object:
        """Raises RuntimeError if it does not arrive in time, and as soon as it cannot arrive any more."""


class _Awaited(NamedTuple):
    """An arrival from `peer` that a rank waits for: the last of `works`. The others must live until then."""

    peer: int
    works: list[Arrival]
    receipt: bool = False  #: whether the peer waits for a receipt


def subtree(rank: int, size: int) -> list[int]:
    """Returns a rank and all below it in the tree of ranks: each before those below it, and lower ones first."""
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

    All ranks make it together. Raises CheckpointTimeoutError that names the ranks that did not come within `timeout`
    seconds.
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
        self.kept: dict[str, object] = {}  #: users keep values here as long as these connections are good
        self._device_groups = 0  # the number of groups made so far
        self.ranks = ranks
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + timeout
        self._farthest = 0  # the largest distance of two ranks in the tree
        at = parent_of(self.size - 1)
        while at is not None:
            self._farthest += 2
            at = parent_of(at)
        # Only these queues hold work in flight. gloo closes only after all of it is released.
        self._pending: deque[_Awaited] = deque()
        self._receipts: deque[_Awaited] = deque()
        self._sent: deque[tuple[int, list[Arrival]]] = deque()  # (number of the collective, sends without a receipt)
        self._short_message = torch.zeros(1, dtype=torch.uint8, device="cpu")  # every trailer and receipt is this
        self._connected = {self.rank}  # ranks that this one can send to and receive from
        self._addresses: dict[int, bytes] = {}  # {rank: its address}, of this rank and those that it has connected to
        # gloo ends the process if it is closed while it connects, and then cannot connect.
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
        """Connects this rank to others, which connect to it at the same time. It waits for each in turn, from the
        lowest rank on: so of all pairs that are not connected, the two ranks of the first wait for each other."""
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
        """Whether there is a failure report. A rank that waits for a first connection does not notice that others have
        closed theirs."""
        with suppress(StoreGoneError):
            return self._rendezvous.failure() is not None
        return False

    def make_devices(self, device: CudaDevice, timeout: float) -> None:
        """Makes `devices`. NCCL connects at the first swap."""
        self._device_groups += 1
        store = self._rendezvous.store_for_devices(self._device_groups)
        self.devices = DeviceGroup(device, nccl.nccl_backend(store, self.rank, self.size, timeout), timeout)

    @contextmanager
    def collective(self, kind: str, phase: str, timeout: float, peers: Iterable[int] = ()) -> Iterator[None]:
        """A context for this rank's part of a collective, made of `send`, `receive` and `wait` to and from neighbours
        in the tree and `peers`, whose own `peers` must have this rank.

        It begins with a greeting between neighbours. It ends when all messages of this rank are done, as after `wait`.
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
        """Names the ranks that this one waits for, as far as known; empty if a lower rank has arrived, which logs
        them. Any thread may call it."""
        rendezvous = self._rendezvous
        if not all(late_ranks(rendezvous.notes([lower]), self.calls) for lower in range(self.rank)):
            return ""
        notes = rendezvous.notes()
        if late := late_ranks(notes, self.calls) or ranks_behind(notes, self.calls, self._progress):
            return f"{rendezvous.named(late)}{rendezvous.last_seen(late)}"
        with suppress(IndexError):  # the message may just have come
            return f"a message of rank {(self._pending or self._receipts)[0].peer} of {self.size}"
        return "other ranks"

    def progress(self, progress: int) -> None:
        """Notes the progress of this rank in a long collective, for the error of a rank that times out."""
        self._progress = progress
        self._rendezvous.note(self.calls, self._step, progress)

    def may_commit(self, timeout: float) -> None:
        """Call this before a step that cannot be undone. Raises if other ranks have given up, or if the store does not
        answer. After it returns, the error of a rank that gives up says that the commit may have been made."""
        with self._lock:
            if self.failure is None:
                failure = self._rendezvous.may_commit(self.calls, timeout)
                if failure is None:
                    return
                self.failure = failure
                self._close()
            raise self.failure.error()

    def first_word(self) -> FirstWord:
        """A word to agree on after the last collective. All ranks must have run the same ones."""
        return self._rendezvous.first_word(self.calls)

    def send(self, peer: int, tensor: torch.Tensor, receipt: bool = False) -> None:
        """Begins to send a CPU tensor.

        With `receipt`, `wait` returns only when the peer has the message. Without it, the tensor must never change, and
        this rank must at some time wait for a message that the peer sends only after it has begun to receive this one.
        The reason: gloo sends a message when the peer has begun to receive it.
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
        """Makes `wait` also wait for an arrival from `peer` that does not come over these connections."""
        self._pending.append(_Awaited(peer, [arrival]))

    def wait(self, receipts: bool = True) -> None:
        """Returns when all receives and expected arrivals are done; with `receipts`, also all receipts."""
        # Receives come first: the peers may wait for receipts of this rank.
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
        # A greeting from a neighbour proves that ranks d hops away have finished collective n - d. So buffers that were
        # sent earlier can be freed.
        while self._sent and self._sent[0][0] + self._farthest < self.calls:
            self._sent.popleft()

    def _end(self, phase: str, step: str, timeout: float, error: BaseException) -> FailureReport:
        """Makes or reads the failure report, then closes the connections. All ranks get the same report."""
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
        """Closes connections that no rank uses any more."""
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
        """Closes the sockets. Without that gloo would go on reading a message whose tensor is gone, and never close
        (`Loop::shutdown` in its `tcp/loop.cc` waits until nothing comes)."""
        for peer in self._connected - {self.rank}:
            with suppress(RuntimeError):  # a wait that ends closes all; one for a rank that is gone begins none
                gloo.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _NOTHING).wait(_SHORTEST)


def tensor_over(buffer: bytearray) -> torch.Tensor:
    """Returns the buffer's own memory as a tensor of bytes."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8, device="cpu")
