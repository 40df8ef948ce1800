"""Who is where: each rank of a group notes its latest collective in the store that the processes share.

Nobody reads it while all goes well. When a rank waits in vain, this is where the names of the missing come from, and
where the first to give up leaves its verdict, so that all ranks raise the same error and a rank that comes later
learns at once that the others have gone. A rank that waits repeats its note; one that is stopped or cut off does not.

A group whose ranks fell out of step meets anew: each meeting has a number, its generation. A rank's next generation
follows its last one, so ranks that call equally often meet in the same one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, TypeVar

from .._engine import torch_private
from .._engine.torch_private import PrefixStore, Store
from ..errors import CheckpointError, CheckpointTimeoutError
from .store_clerk import GRACE_SECONDS, StoreClerk

GRACE = 6.0  # seconds: a rank that has waited for its timeout raises no later than so long after it
_BEATS_OF_SILENCE = 5  # after which a rank that should repeat its note, and has not, is silent
_COMMIT = "commit "  # what stands in the place of the verdict from then on, with the number of the collective before it

_Result = TypeVar("_Result")


class Note(NamedTuple):
    """Where a rank is: in its `calls`-th collective, a `step`, and how far in it, or behind that if not `inside`."""

    calls: int
    step: str
    progress: int
    inside: bool
    beat: int  #: rises while it is inside


Notes = dict[int, Note | None]  #: by rank; None where it has not come


@dataclass(frozen=True)
class FailureReport:
    """Why a generation ended. `calls`: the number of the collective that failed, 0 for the meeting itself."""

    calls: int
    phase: str
    late: list[int]
    text: str
    mismatch: bool = False  # ranks were in different collectives
    commit: int = 0  # the collective behind which the latest commit began
    commit_is_known: bool = True

    def error(self) -> CheckpointError:
        if self.mismatch:
            return CheckpointError(self.text, phase=self.phase)
        return CheckpointTimeoutError(self.phase, self.late, self.text)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes) -> FailureReport:
        return FailureReport(**json.loads(text))


class Rendezvous:
    """The notes of one generation of a group. `connect` makes a client of the store, of its own.

    Whatever reads raises StoreGoneError if the store does not answer within seconds.
    """

    def __init__(
        self, connect: Callable[[], Store], rank: int, size: int, clerk: StoreClerk | None = None, generation: int = 0
    ) -> None:
        self.rank = rank
        self.size = size
        self._generation = generation
        self._connect = connect
        self._beat = 0.4 + size / 10_000  # seconds: a store can take the notes of ten thousand ranks that wait
        self._clerk = clerk if clerk is not None else StoreClerk(connect, self._beat)

    def next(self, failed_before: bool, timeout: float) -> Rendezvous:
        """Of the next generation; `failed_before`: of the next but those that failed meanwhile without this rank.

        Not so at first: a generation that failed while this rank was on its way has failed for it too.
        """
        # A client that waits for an answer does so until TCP gives up, which may be long after the network is back.
        clerk = self._clerk if self._clerk.answers else StoreClerk(self._connect, self._beat)
        key = f"generation/{self.rank}"
        while True:
            generation = clerk.ask(lambda store: store.add(key, 1), timeout)
            roll = Rendezvous(self._connect, self.rank, self.size, clerk, generation)
            if not (failed_before and roll.verdict() is not None):
                return roll

    def meet(self, phase: str, timeout: float) -> None:
        """Returns when all ranks have come to this generation. Raises CheckpointTimeoutError if one does not."""
        outcome, present = self._key("outcome"), self._key("present")
        self.note(0, phase)

        def come(store: Store) -> None:
            if store.add(present, 1) == self.size:
                store.compare_set(outcome, "", "met")

        def judge(notes: Notes) -> FailureReport:
            absent = [rank for rank, note in notes.items() if note is None]
            return FailureReport(0, phase, absent, f"{phase}: {self.named(absent)} did not come within {timeout:g} s")

        deadline = time.monotonic() + timeout
        self._clerk.ask(come, timeout)
        self._look_until(lambda store: store.check([outcome]), deadline)
        end = self._clerk.ask(lambda store: bytes(store.compare_set(outcome, "", "given up")))
        if end != b"met":
            raise self.settle(judge).error()

    def store_for_connections(self) -> Store:
        """Of the client that the notes go by: to be used for moments."""
        return PrefixStore(self._key("connections"), self._clerk.ask(lambda store: store))

    def store_for_devices(self) -> Store:
        """A client of its own: the ranks' devices wait for each other in it."""
        return PrefixStore(self._key("devices"), self._clerk.ask(torch_private.clone_of))

    def note(self, calls: int, step: str, progress: int = 0, inside: bool = True) -> None:
        """Says where this rank is: in its `calls`-th collective, a `step`, and how far in it; or that it has left it.
        Costs microseconds."""

        def text(beat: int) -> str:
            return json.dumps(Note(calls, step, progress, inside, beat))

        self._clerk.note(self._key(f"at/{self.rank}"), text, repeated=inside)

    def verdict(self, wait: float = 0.0) -> FailureReport | None:
        """The verdict on this generation, once there is one; None if there is none within `wait` seconds."""
        return self._look_until(self._verdict, time.monotonic() + wait)

    def may_commit(self, calls: int, timeout: float) -> FailureReport | None:
        """Says that a commit begins behind the `calls`-th collective, and returns None; or the verdict that is there
        already. Whoever gives up from now on learns that the commit has begun."""
        key, said = self._key("verdict"), f"{_COMMIT}{calls}"

        def begin(store: Store) -> FailureReport | None:
            there = b""
            while True:
                now = bytes(store.compare_set(key, there.decode(), said))
                if now == said.encode():
                    return None
                if not now.startswith(_COMMIT.encode()):
                    return FailureReport.decode(now)
                there = now  # another rank's, or that of an earlier save

        return self._clerk.ask(begin, timeout)

    def settle(self, judge: Callable[[Notes], FailureReport]) -> FailureReport:
        """The one verdict on this generation: the first that a rank leaves. `judge` makes one from all ranks' notes.

        Where many ranks fail at once, one judges and the others wait for it.
        """
        first = self._clerk.ask(lambda store: store.add(self._key("judges"), 1) == 1)
        verdict = None if first else self.verdict(wait=GRACE_SECONDS + self._seconds_of_silence)
        return self._leave(judge(self.notes())) if verdict is None else verdict

    def silent(self, before: Notes, among: list[int]) -> list[int]:
        """Which of the ranks, all inside a collective as of the notes `before`, do not repeat their notes: they are
        stopped or cut off. Takes as long as that takes to tell."""

        def beat(notes: Notes, rank: int) -> int:
            note = notes[rank]
            return -1 if note is None else note.beat

        still = [rank for rank in among if rank != self.rank]
        deadline = time.monotonic() + self._seconds_of_silence
        while still and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, self._beat))
            now = self.notes()
            still = [rank for rank in still if beat(now, rank) == beat(before, rank)]
        return still

    def notes(self) -> Notes:
        """Where all ranks are."""
        keys = {self._key(f"at/{rank}"): rank for rank in range(self.size)}

        def read(store: Store) -> list[tuple[str, bytes]]:
            there = list(keys) if store.check(list(keys)) else [key for key in keys if store.check([key])]
            return list(zip(there, store.multi_get(there), strict=True)) if there else []

        notes: Notes = dict.fromkeys(range(self.size))
        for key, text in self._clerk.ask(read, GRACE_SECONDS + self.size / 1000):  # many notes take long to read
            notes[keys[key]] = Note(*json.loads(text))
        return notes

    def named(self, ranks: list[int], most: int = 10) -> str:
        """'rank 3 of 8', 'ranks 3, 5 of 8'."""
        if not ranks:  # they came in the moment in which another gave up
            return f"some of {self.size} ranks"
        shown = ", ".join(str(rank) for rank in ranks[:most])
        more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
        return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more} of {self.size}"

    @property
    def _seconds_of_silence(self) -> float:
        return _BEATS_OF_SILENCE * self._beat

    def _verdict(self, store: Store) -> FailureReport | None:
        key = self._key("verdict")
        if not store.check([key]):
            return None
        text = bytes(store.get(key))
        return None if text.startswith(_COMMIT.encode()) else FailureReport.decode(text)

    def _leave(self, verdict: FailureReport) -> FailureReport:
        """The verdict that counts: this one, if there is none."""
        key = self._key("verdict")

        def leave(store: Store) -> FailureReport:
            there, mine = b"", verdict
            while True:
                now = bytes(store.compare_set(key, there.decode(), mine.encode()))
                if not now.startswith(_COMMIT.encode()):
                    return FailureReport.decode(now)
                there, mine = now, replace(verdict, commit=int(now[len(_COMMIT) :]))

        return self._clerk.ask(leave)

    def _look_until(self, question: Callable[[Store], _Result], deadline: float) -> _Result:
        """Asks until the answer is something, or the time is over. The store could wait, but nobody else could ask."""
        nap = 0.002
        while True:
            left = deadline - time.monotonic()  # a store that does not answer may do so again meanwhile
            answer = self._clerk.ask(question, max(GRACE_SECONDS, left))
            if answer or left <= 0:
                return answer
            time.sleep(min(nap, left))
            nap = min(nap * 1.5, self._beat)

    def _key(self, name: str) -> str:
        return f"{self._generation}/{name}"
