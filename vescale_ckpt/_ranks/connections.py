"""gloo connections among the ranks of a group, with a deadline, and with names for what broke them.

No wait here is longer than the timeout of the call and `GRACE`, in which it is found out whom to name: neither for a
rank, nor for the store, nor while connecting or closing, whether a peer is late, stopped, dead or cut off. A rank that
can reach the store names the ranks that the store has not heard of; one that cannot says that.

Made beside the group, not by `new_group`: that numbers groups by how many each rank has made, which differs between the
ranks of subgroups, and a failed one cannot be made again.

The first failure ends a generation of connections: the rank that notices leaves a verdict in the roll call, then
closes its connections. Its neighbours see that, find the verdict, raise the same error and close theirs.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from .._engine.torch_private import Store
from . import nccl
from .nccl import Device, DeviceGroup
from .rendezvous import FailureReport, Notes, Rendezvous
from .store_clerk import GRACE_SECONDS, StoreGoneError

FANOUT = 16  # children of a rank in the tree
_GREETING_BYTES = 160
_DIGEST_BYTES = 16
_TICK = 0.002  # seconds; gloo waits in whole milliseconds, and for ever where they are none
_CONNECTING = "connecting the ranks"

_Result = TypeVar("_Result")


class _LostError(Exception):
    """Nothing came from `peer` (or it took nothing): the time is over, or the connection is closed."""

    def __init__(self, peer: int, in_time: bool) -> None:
        self.peer = peer
        self.in_time = in_time


class _ElsewhereError(Exception):
    """`peer` is in another collective."""

    def __init__(self, peer: int, step: str) -> None:
        self.peer = peer
        self.step = step


class Connections:
    """What one rank holds of one generation. `ranks`: the group's, as the default group numbers them.

    Made by all ranks together; raises CheckpointTimeoutError, naming who did not come within `timeout` seconds.
    """

    def __init__(self, roll: Rendezvous, ranks: list[int], timeout: float) -> None:
        self.rank = roll.rank
        self.size = roll.size
        self.parent = (self.rank - 1) // FANOUT if self.rank else None
        self.children = range(self.rank * FANOUT + 1, min((self.rank + 1) * FANOUT + 1, self.size))
        self.calls = 0
        self._step = _CONNECTING
        self._progress = 0
        self.verdict: FailureReport | None = None
        self.devices: DeviceGroup | None = None  #: among the ranks' devices, once `devices_tried`
        self.devices_tried = False
        self._ranks = ranks
        self._roll = roll
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + timeout
        # All work in flight, here and in no other variable: gloo closes only when nobody holds any of it.
        self._pending: deque[tuple[int, dist.Work]] = deque()
        self._gloo: dist.ProcessGroupGloo | None = None
        roll.meet(_CONNECTING, timeout)
        try:
            self._gloo = self._connected(roll.store_for_connections())
        except (RuntimeError, TimeoutError) as error:
            raise self._end(_CONNECTING, _CONNECTING, timeout, error).error() from error

    def _connected(self, store: Store) -> dist.ProcessGroupGloo:
        """Raises TimeoutError if gloo, or the store that it looks into, does not keep to its time."""
        left = timedelta(seconds=self._left())

        def connect() -> dist.ProcessGroupGloo:
            return dist.ProcessGroupGloo(store, self.rank, self.size, left)

        return in_time(connect, self._left() + 1, "vescale_ckpt connecting")

    def make_devices(self, device: Device, timeout: float) -> None:
        """Makes `devices`, which connects when they first swap."""
        backend = nccl.nccl_backend(self._roll.store_for_devices(), self.rank, self.size, timeout)
        self.devices = DeviceGroup(device, backend, timeout)

    @contextmanager
    def collective(self, kind: str, phase: str, timeout: float) -> Iterator[None]:
        """Within it: this rank's part of a collective, by `send`, `receive` and `wait`; it begins with a greeting.

        Whatever is raised inside ends these connections, on all ranks.
        """
        with self._lock:
            if self.verdict is not None:
                raise self.verdict.error()
            self.calls += 1
            self._deadline = time.monotonic() + timeout
            step = self._step = f"{phase} ({kind})"
            self._progress = 0
            self._roll.note(self.calls, step)
            try:
                self._greet(step)
                yield
                self._roll.note(self.calls, step, inside=False)
            except (_LostError, _ElsewhereError) as error:
                raise self._end(phase, step, timeout, error).error() from error.__cause__
            except BaseException as error:
                self._end(phase, step, timeout, error)
                raise

    def progress(self, progress: int) -> None:
        """Within a long collective: says how far this rank has come in it, for who waits in vain."""
        self._progress = progress
        self._roll.note(self.calls, self._step, progress)

    def may_commit(self, timeout: float) -> None:
        """To be asked before what cannot be taken back is done. Raises if other ranks have given up, or if that cannot
        be known; if not, those that give up from now on learn that it was done, perhaps."""
        with self._lock:
            if self.verdict is None:
                verdict = self._roll.may_commit(self.calls, timeout)
                if verdict is None:
                    return
                self.verdict = verdict
                self._close()
            raise self.verdict.error()

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        """Begins to send a CPU tensor; it must not change until `wait`."""
        self._begin("send", peer, tensor)

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        """Begins to receive a tensor of the very size that the peer sends."""
        self._begin("recv", peer, tensor)

    def wait(self) -> None:
        """Returns when all that was begun is done."""
        while self._pending:
            try:
                self._pending[0][1].wait(timedelta(seconds=self._left()))
            except RuntimeError as error:
                raise self._lost(self._pending[0][0]) from error
            self._pending.popleft()

    def _begin(self, way: str, peer: int, tensor: torch.Tensor) -> None:
        try:
            self._pending.append((peer, getattr(self._gloo, way)([tensor], peer, 0)))
        except RuntimeError as error:
            raise self._lost(peer) from error

    def _left(self) -> float:
        return max(_TICK, self._deadline - time.monotonic())

    def _lost(self, peer: int) -> _LostError:
        return _LostError(peer, in_time=time.monotonic() < self._deadline - _TICK)

    def _greet(self, step: str) -> None:
        digest = hashlib.blake2b(f"{self.calls} {step}".encode(), digest_size=_DIGEST_BYTES).digest()
        greeting = (digest + step.encode())[:_GREETING_BYTES].ljust(_GREETING_BYTES, b"\0")
        said = tensor_over(bytearray(greeting))
        neighbours = [*self.children] if self.parent is None else [self.parent, *self.children]
        heard = {peer: bytearray(_GREETING_BYTES) for peer in neighbours}
        for peer, buffer in heard.items():
            self.receive(peer, tensor_over(buffer))
            self.send(peer, said)
        self.wait()
        for peer, buffer in heard.items():
            if buffer != greeting:
                raise _ElsewhereError(peer, buffer[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace"))

    def _end(self, phase: str, step: str, timeout: float, error: BaseException) -> FailureReport:
        """Finds out what is to be said of a failure, says it to the other ranks, then closes the connections."""
        try:
            verdict = None
            if isinstance(error, _LostError) and error.in_time:  # the peer closed: has it said why?
                verdict = self._roll.verdict(wait=GRACE_SECONDS)
            if verdict is None:
                verdict = self._roll.settle(lambda notes: self._judge(phase, step, timeout, error, notes))
        except StoreGoneError as gone:
            verdict = replace(self._judge_alone(phase, timeout, error, gone), commit_is_known=False)
        self.verdict = verdict
        self._roll.note(self.calls, step, self._progress, inside=False)
        self._close()
        return verdict

    def _close(self) -> None:
        self._pending.clear()
        # Not in `in_time`'s hands alone: this thread must hold none of it.
        closing, self._gloo = [self._gloo], None
        with suppress(TimeoutError):
            in_time(closing.clear, GRACE_SECONDS, "vescale_ckpt closing")
        if self.devices is not None:
            self.devices.end()

    def _judge(self, phase: str, step: str, timeout: float, error: BaseException, notes: Notes) -> FailureReport:
        def verdict(late: list[int], text: str, mismatch: bool = False) -> FailureReport:
            return FailureReport(self.calls, phase, late, f"{phase}: {text}", mismatch)

        def named(rank: int) -> str:
            return self._roll.named([rank])

        def last_seen(ranks: list[int]) -> str:
            steps = {rank: note.step for rank in ranks[:3] if (note := notes[rank]) is not None}
            return "".join(f"; rank {rank} was last seen in: {there}" for rank, there in steps.items())

        def elsewhere(rank: int, there: str) -> FailureReport:
            text = f"ranks are in different places: {named(self.rank)} in {step}, {named(rank)} in {there}"
            return verdict([], text, mismatch=True)

        if isinstance(error, _ElsewhereError):
            return elsewhere(error.peer, error.step)
        if self.calls == 0:
            came = [rank for rank, note in notes.items() if note is not None]
            silent = self._roll.silent(notes, came)
            why = f"; {self._roll.named(silent)} went silent (stopped, or cut off from the network)" if silent else ""
            return verdict(silent, f"{named(self.rank)} could not connect: {error}{why}")
        if not isinstance(error, _LostError):
            return verdict([self.rank], f"{named(self.rank)} has left with {type(error).__name__}: {error}")
        if error.in_time:
            text = f"the connection to {named(error.peer)} is closed: it has died or ended"
            return verdict([error.peer], text + last_seen([error.peer]))
        for rank, note in notes.items():
            if note is not None and note.inside and note.calls == self.calls and note.step != step:
                return elsewhere(rank, note.step)
        return self._judge_by_notes(error.peer, phase, timeout, notes, last_seen)

    def _judge_by_notes(
        self, peer: int, phase: str, timeout: float, notes: Notes, last_seen: Callable[[list[int]], str]
    ) -> FailureReport:
        """Nobody is elsewhere, no connection is closed, and yet nothing has come from `peer`, who may wait as this rank
        does."""
        roll = self._roll
        late = [rank for rank, note in notes.items() if note is None or (not note.inside and note.calls < self.calls)]
        waiting = {rank: note for rank, note in notes.items() if note is not None and note.inside}
        silent = roll.silent(notes, [*waiting])
        if late or silent:
            texts = [f"{roll.named(late)} did not come within {timeout:g} s"] if late else []
            if silent:
                texts.append(f"{roll.named(silent)} came, and then went silent (stopped, or cut off from the network)")
            missing = sorted([*late, *silent])
            return FailureReport(self.calls, phase, missing, f"{phase}: {'; '.join(texts)}{last_seen(missing)}")
        places = {rank: (note.calls, note.progress) for rank, note in waiting.items()}
        last = min(places.values(), default=(0, 0))  # the others wait for those that are there
        behind = [rank for rank, place in places.items() if place == last < (self.calls, self._progress)]
        if behind:
            text = f"{roll.named(behind)} did not come within {timeout:g} s"
            return FailureReport(self.calls, phase, behind, f"{phase}: {text}{last_seen(behind)}")
        # What it has sent was lost, if it has gone on; else the two cannot reach each other, and both reach the store.
        late = [] if peer in waiting else [peer]
        text = f"all ranks came, but nothing arrived from {roll.named([peer])} for the rest of {timeout:g} s"
        return FailureReport(self.calls, phase, late, f"{phase}: {text}")

    def _judge_alone(self, phase: str, timeout: float, error: BaseException, gone: StoreGoneError) -> FailureReport:
        if self.calls == 0:
            return FailureReport(
                0, phase, [], f"{phase}: {self._roll.named([self.rank])} could not connect: {error}; {gone}"
            )
        if not isinstance(error, _LostError):
            return self._judge(phase, "", timeout, error, {})
        # A peer may be silent only because of a third rank. Not so if there is none, or if the store died with it.
        certain = self.size == 2 or self._ranks[error.peer] == 0
        what = "the connection to it is closed" if error.in_time else f"nothing arrived from it within {timeout:g} s"
        text = f"{phase}: {self._roll.named([error.peer])} is lost, {what}, and {gone}"
        return FailureReport(self.calls, phase, [error.peer] if certain else [], text)


def tensor_over(buffer: bytearray) -> torch.Tensor:
    """The buffer's own memory as a tensor of bytes."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8, device="cpu")


def in_time(function: Callable[[], _Result], seconds: float, name: str) -> _Result:
    """The result of a function of others, which may forget the time: a thread has to wait for it then. Raises
    TimeoutError."""
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError as late:  # a class of its own before Python 3.11
        raise TimeoutError(f"{name}: not done within {seconds:.0f} s") from late
