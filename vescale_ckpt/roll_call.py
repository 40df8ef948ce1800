"""Who is where: each rank of a group notes its latest collective in the store that the processes share.

Nobody reads it while all goes well. When a rank waits in vain, this is where the names of the missing come from, and
where the first to give up leaves its verdict, so that all ranks raise the same error and a rank that comes later
learns at once that the others have gone.

A group whose ranks fell out of step meets anew: each meeting has a number, its generation. A rank's next generation
follows its last one, so ranks that call equally often meet in the same one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

from . import stock
from .errors import CheckpointError, CheckpointTimeoutError
from .stock import PrefixStore, Store

PATIENCE = 2.0  # seconds that a store has to answer, and that a rank has to say why it left

#: by rank: its call, what that is, and how far it has come in it; None where it has not come
Notes = dict[int, tuple[int, str, int] | None]

_Result = TypeVar("_Result")
_STORE_GONE = (
    "the store that the ranks share does not answer: the process that hosts it (rank 0, where torch made it) has died "
    "or hangs"
)


class StoreGoneError(CheckpointTimeoutError):
    """The store fails or does not answer: the process that hosts it has died or hangs."""

    def __init__(self) -> None:
        super().__init__("asking the store that the ranks share", [], _STORE_GONE)


@dataclass(frozen=True)
class Verdict:
    """Why a generation ended. `calls`: the number of the collective that failed, 0 for the meeting itself."""

    calls: int
    phase: str
    late: list[int]
    text: str
    mismatch: bool = False  # ranks were in different collectives

    def error(self) -> CheckpointError:
        if self.mismatch:
            return CheckpointError(self.text, phase=self.phase)
        return CheckpointTimeoutError(self.phase, self.late, self.text)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes) -> Verdict:
        return Verdict(**json.loads(text))


class RollCall:
    """The notes of one generation of a group. `store` must be a client of its own: some calls hold it for long.

    Whatever reads raises StoreGoneError.
    """

    def __init__(self, store: Store, rank: int, size: int, generation: int = 0) -> None:
        self.rank = rank
        self.size = size
        self._generation = generation
        self._store = store

    def next(self, failed_before: bool, timeout: float) -> RollCall:
        """Of the next generation; `failed_before`: of the next but those that failed meanwhile without this rank.

        Not so at first: a generation that failed while this rank was on its way has failed for it too.
        """
        key = f"generation/{self.rank}"

        def move() -> RollCall:
            roll = RollCall(self._store, self.rank, self.size, self._store.add(key, 1))
            while failed_before and roll._verdict(0) is not None:
                roll = RollCall(self._store, self.rank, self.size, self._store.add(key, 1))
            return roll

        return _bounded(move, timeout)

    def meet(self, phase: str, timeout: float) -> None:
        """Returns when all ranks have come to this generation. Raises CheckpointTimeoutError if one does not."""
        outcome = self._key("outcome")

        def all_came() -> bool:
            self.note(0, phase)
            if self._store.add(self._key("present"), 1) == self.size:
                self._store.compare_set(outcome, "", "met")
            with contextlib.suppress(RuntimeError):  # how a store says that the time is over
                self._store.wait([outcome], timedelta(seconds=timeout))
            return bytes(self._store.compare_set(outcome, "", "given up")) == b"met"

        def judge(notes: Notes) -> Verdict:
            absent = [rank for rank, note in notes.items() if note is None]
            return Verdict(0, phase, absent, f"{phase}: {self.named(absent)} did not come within {timeout:g} s")

        if not _bounded(all_came, timeout + PATIENCE):
            raise self.settle(judge).error()

    def store_for_connections(self) -> Store:
        return PrefixStore(self._key("connections"), self._store)

    def store_for_devices(self) -> Store:
        """A client of its own: the ranks' devices wait for each other in it."""
        return PrefixStore(self._key("devices"), stock.clone_of(self._store))

    def note(self, calls: int, step: str, progress: int = 0) -> None:
        """Says where this rank is: in its `calls`-th collective, a `step`, and how far in it. Costs microseconds."""
        self._store.set(self._key(f"at/{self.rank}"), json.dumps([calls, step, progress]))

    def verdict(self, wait: float = 0.0) -> Verdict | None:
        """The verdict on this generation, once there is one; None if there is none within `wait` seconds."""
        return _bounded(lambda: self._verdict(wait), wait + PATIENCE)

    def settle(self, judge: Callable[[Notes], Verdict]) -> Verdict:
        """The one verdict on this generation: the first that a rank leaves. `judge` makes one from all ranks' notes.

        Where many ranks fail at once, one judges and the others wait for it.
        """

        def settle() -> Verdict:
            first = self._store.add(self._key("judges"), 1) == 1
            verdict = None if first else self._verdict(PATIENCE)
            if verdict is None:
                verdict = judge(self._read())
                verdict = Verdict.decode(self._store.compare_set(self._key("verdict"), "", verdict.encode()))
            return verdict

        return _bounded(settle, 2 * PATIENCE + self.size / 1000)  # many notes take long to read

    def _verdict(self, wait: float) -> Verdict | None:
        key = self._key("verdict")
        if wait > 0:
            with contextlib.suppress(RuntimeError):
                self._store.wait([key], timedelta(seconds=wait))
        return Verdict.decode(self._store.get(key)) if self._store.check([key]) else None

    def _read(self) -> Notes:
        keys = {self._key(f"at/{rank}"): rank for rank in range(self.size)}
        there = list(keys) if self._store.check(list(keys)) else [key for key in keys if self._store.check([key])]
        notes: Notes = dict.fromkeys(range(self.size))
        for key, text in zip(there, self._store.multi_get(there), strict=True):
            calls, step, progress = json.loads(text)
            notes[keys[key]] = (calls, step, progress)
        return notes

    def named(self, ranks: list[int], most: int = 10) -> str:
        """'rank 3 of 8', 'ranks 3, 5 of 8'."""
        if not ranks:  # they came in the moment in which another gave up
            return f"some of {self.size} ranks"
        shown = ", ".join(str(rank) for rank in ranks[:most])
        more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
        return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more} of {self.size}"

    def _key(self, name: str) -> str:
        return f"{self._generation}/{name}"


def _bounded(function: Callable[[], _Result], seconds: float) -> _Result:
    """The result of a function that talks to the store. A host that hangs, not dead, would hold it without limit."""
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="vescale_ckpt roll call", daemon=True).start()
    try:
        return future.result(seconds)
    except (RuntimeError, concurrent.futures.TimeoutError) as error:
        raise StoreGoneError from error
