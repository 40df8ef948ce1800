"""Records each rank's current collective in the TCPStore for `Connections`, so that a timeout can name missing ranks.

The notes are read only after a failure. They show a rank that times out which ranks are missing. The first rank that
times out writes a failure report to the store. Then all ranks raise the same error, and a rank that arrives later
raises immediately. A waiting rank repeats its note as a heartbeat; a rank that is stopped or cut off does not.

After a failure, the ranks of a group connect again. Each attempt has a number, its generation. Each rank counts its own
generations: one more per failed call, whatever its purpose. So ranks that failed equally often meet in the same
generation, even if one failed in a save and another in a load.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple, TypeVar, get_args

from .._engine import torch_private
from .._engine.torch_private import PrefixStore, Store
from ..errors import CheckpointError, CheckpointTimeoutError
from . import store_thread
from .store_thread import STORE_SECONDS, StoreThread

GRACE = 6.0  # seconds after its timeout within which a rank raises
_HEARTBEATS_OF_SILENCE = 5  # a waiting rank counts as silent after this many missed heartbeats
_COMMIT = "commit "  # replaces a failure report when a commit begins; the number of its collective follows

_Result = TypeVar("_Result")

Purpose = Literal["save", "load", "manager", "busy", "convert", "pretrained", "copies"]  #: of connections


class Note(NamedTuple):
    """Where a rank is: in its `calls`-th collective, `step`, at `progress`. `inside`: False if it has left that."""

    calls: int
    step: str
    progress: int
    inside: bool
    heartbeat: int  #: increments while the rank is inside


Notes = dict[int, Note | None]  #: {rank: note, or None for a rank that has not arrived}


def is_in_background() -> bool:
    """Whether this is a thread of this package: a save after its call, or copies between nodes."""
    return threading.current_thread().name.startswith("vescale_ckpt ")


@dataclass(frozen=True)
class FailureReport:
    """Why a generation ended. `calls`: the number of the collective that failed; 0: connecting failed."""

    calls: int
    phase: str
    late: list[int]
    text: str
    mismatch: bool = False  # ranks were in different collectives
    commit: int = 0  # the number of the collective after which the latest commit began
    commit_is_known: bool = True
    in_background: bool = field(default_factory=is_in_background)  # no call of the user's has failed

    def error(self) -> CheckpointError:
        if self.mismatch:
            return CheckpointError(self.text, phase=self.phase)
        return CheckpointTimeoutError(self.phase, self.late, self.text)

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> FailureReport:
        return FailureReport(**json.loads(text))


class Rendezvous:
    """The notes and the failure report of one generation of a group's connections for one purpose. `group`: its name.

    All methods that read raise StoreGoneError if the store does not answer within seconds.
    """

    def __init__(self, purpose: Purpose, group: str, rank: int, size: int, generation: int = 0) -> None:
        self.rank = rank
        self.size = size
        self._purpose: Purpose = purpose
        self._group = group
        self._prefix = self._prefix_of(purpose)
        self.generation = generation
        self._heartbeat = 0.4 + size / 10_000  # seconds; more ranks write less often, to bound the load on the store
        self._store_thread = store_thread.of_default_group()
        weakref.finalize(self, self._store_thread.forget, self._key(f"at/{rank}"))

    def next(self, failures: int, timeout: float) -> Rendezvous:
        """Returns the rendezvous of this rank's next generation, which is one more after each of its `failures`.

        If there were any, generations that have since failed without this rank are skipped. Otherwise a generation that
        failed before this rank arrived has failed for this rank, too.
        """
        key, steps = self._generation_key(self._purpose, self.rank), failures + (self.generation == 0)
        while True:
            generation = store_thread.of_default_group().ask(lambda store: store.add(key, steps), timeout)  # noqa: B023
            rendezvous = Rendezvous(self._purpose, self._group, self.rank, self.size, generation)
            if not (failures and rendezvous.failure() is not None):
                return rendezvous
            steps = 1

    def meet(self, phase: str, timeout: float, address: bytes, deadline: float) -> None:
        """Returns when all ranks have arrived in this generation. Raises CheckpointTimeoutError if one does not arrive
        by `deadline`, `timeout` seconds after this rank. `address`: this rank's address."""
        outcome, present = self._key("outcome"), self._key("present")
        self.note(0, phase)

        def come(store: Store) -> None:
            store.set(self._key(f"address/{self.rank}"), address.hex())
            if store.add(present, 1) == self.size:
                store.compare_set(outcome, "", "met")

        def diagnose(notes: Notes) -> FailureReport:
            absent = [rank for rank, note in notes.items() if note is None]
            text = f"{phase}: {self.named(absent)} did not come within {timeout:g} s{self.last_seen(absent)}"
            return FailureReport(0, phase, absent, text)

        self._store_thread.ask(come, max(STORE_SECONDS, deadline - time.monotonic()))
        self._look_until(lambda store: store.check([outcome]), deadline)
        end = self._store_thread.ask(lambda store: bytes(store.compare_set(outcome, "", "given up")))
        if end != b"met":
            raise self.settle(diagnose).error()

    def addresses(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """Returns the addresses that `ranks` passed to `meet`, which has returned."""
        keys = [self._key(f"address/{rank}") for rank in ranks]

        def read(some: list[str], store: Store) -> list[bytes]:
            return store.multi_get(some)

        found = [address for some in _batched(keys) for address in self._store_thread.ask(partial(read, some))]
        return {rank: bytes.fromhex(address.decode()) for rank, address in zip(ranks, found, strict=True)}

    def store_for_devices(self, number: int) -> Store:
        """Returns a new client of the store, because the ranks' devices block in it until their peers arrive. `number`:
        counts the connections among devices, each of which starts with an empty store."""
        return PrefixStore(self._key(f"devices/{number}"), self._store_thread.ask(torch_private.clone_of))

    def note(self, calls: int, step: str, progress: int = 0, inside: bool = True) -> None:
        """Records where this rank is; see `Note` for the arguments. Costs microseconds."""

        def text(heartbeat: int) -> str:
            return json.dumps(Note(calls, step, progress, inside, heartbeat))

        self._store_thread.note(self._key(f"at/{self.rank}"), text, self._heartbeat if inside else None)

    def failure(self, wait: float = 0.0) -> FailureReport | None:
        """Returns the failure report of this generation. None if there is none within `wait` seconds."""
        return self._look_until(self._read_failure, time.monotonic() + wait)

    def may_commit(self, calls: int, timeout: float) -> FailureReport | None:
        """Records that a commit begins after the `calls`-th collective, and returns None. If there is a failure report,
        returns it and records nothing. Reports written after the record state that the commit had begun."""
        said = f"{_COMMIT}{calls}"

        def begin(there: str) -> str | None:  # in place of a commit of another rank or of an earlier save
            return said if not there or there.startswith(_COMMIT) else None

        now = self._store_thread.ask(partial(_set, self._key("failure"), begin), timeout)
        return None if now == said else FailureReport.decode(now)

    def first_word(self, number: int) -> FirstWord:
        """Returns the write-once cell `number` of this generation; numbers increase."""
        return FirstWord(self._store_thread, self._key("first word"), number)

    def settle(self, diagnose: Callable[[Notes], FailureReport]) -> FailureReport:
        """Returns the failure report of this generation, the first that a rank writes. `diagnose` makes it from the
        notes of all ranks.

        If many ranks fail at once, one of them makes the report and the others wait for it.
        """
        first = self._store_thread.ask(lambda store: store.add(self._key("diagnoses"), 1) == 1)
        failure = None if first else self.failure(wait=STORE_SECONDS + self._seconds_of_silence)
        return self._leave(diagnose(self.notes())) if failure is None else failure

    def acknowledge(self) -> None:
        """Records that this rank has read the failure report."""
        self._store_thread.ask(lambda store: store.set(self._key(f"read/{self.rank}"), "1"))

    def wait_for_readers(self, late: list[int], seconds: float) -> None:
        """Waits until all ranks except the `late` ones have read the failure report, at most `seconds`. Called on the
        rank that hosts the store: if its process ended earlier, nobody could read the report, and all would name that
        rank."""
        keys = [self._key(f"read/{rank}") for rank in range(self.size) if rank != self.rank and rank not in late]
        self._look_until(lambda store: not keys or store.check(keys), time.monotonic() + seconds)

    def silent(self, before: Notes, among: list[int]) -> list[int]:
        """Returns the ranks of `among` that do not repeat their notes, because they are stopped or cut off. All of them
        were inside a collective in the notes `before`. Takes up to `_seconds_of_silence`."""
        still = [rank for rank in among if rank != self.rank]
        deadline = time.monotonic() + self._seconds_of_silence
        while still and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, self._heartbeat))
            now = self.notes()
            still = [rank for rank in still if now[rank] == before[rank]]  # each note has another heartbeat
        return still

    def notes(self, ranks: Iterable[int] | None = None) -> Notes:
        """Returns the notes of ranks; None: of all."""
        keys = {self._key(f"at/{rank}"): rank for rank in (range(self.size) if ranks is None else ranks)}

        def read(some: list[str], store: Store) -> list[tuple[str, bytes]]:
            there = some if store.check(some) else [key for key in some if store.check([key])]
            return list(zip(there, store.multi_get(there), strict=True)) if there else []

        notes: Notes = dict.fromkeys(keys.values())
        for some in _batched(keys):
            for key, text in self._store_thread.ask(partial(read, some)):
                notes[keys[key]] = Note(*json.loads(text))
        return notes

    def last_seen(self, ranks: list[int]) -> str:
        """Returns a text with the last step that each of the first three ranks recorded, for any purpose."""

        def read(store: Store) -> str:
            text = ""
            for rank in ranks[:3]:
                numbers = {purpose: store.add(self._generation_key(purpose, rank), 0) for purpose in get_args(Purpose)}
                keys = [f"{self._prefix_of(purpose)}/{number}/at/{rank}" for purpose, number in numbers.items()]
                notes = [Note(*json.loads(store.get(key))) for key in keys if store.check([key])]
                if notes:
                    text += f"; rank {rank} was last seen in: {max(notes, key=lambda note: note.heartbeat).step}"
            return text

        return self._store_thread.ask(read)

    def named(self, ranks: list[int], most: int = 10) -> str:
        """Returns 'rank 3 of 8' or 'ranks 3, 5 of 8'."""
        if not ranks:  # the missing ranks came just when another rank gave up
            return f"some of {self.size} ranks"
        shown = ", ".join(str(rank) for rank in ranks[:most])
        more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
        return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more} of {self.size}"

    @property
    def _seconds_of_silence(self) -> float:
        return _HEARTBEATS_OF_SILENCE * self._heartbeat

    def _read_failure(self, store: Store) -> FailureReport | None:
        key = self._key("failure")
        if not store.check([key]):
            return None
        text = bytes(store.get(key))
        return None if text.startswith(_COMMIT.encode()) else FailureReport.decode(text)

    def _leave(self, failure: FailureReport) -> FailureReport:
        """Writes the report if there is none yet. Returns the report in the store."""

        def leave(there: str) -> str | None:
            if not there:
                return failure.encode()
            if there.startswith(_COMMIT):
                return replace(failure, commit=int(there.removeprefix(_COMMIT))).encode()
            return None

        return FailureReport.decode(self._store_thread.ask(partial(_set, self._key("failure"), leave)))

    def _look_until(self, question: Callable[[Store], _Result], deadline: float) -> _Result:
        """Repeats a query until its result is true or the deadline has passed. It polls, because a wait inside the
        store would block other queries."""
        nap = 0.002
        while True:
            left = deadline - time.monotonic()  # a store that does not answer now may answer before the deadline
            answer = self._store_thread.ask(question, max(STORE_SECONDS, left))
            if answer or left <= 0:
                return answer
            time.sleep(min(nap, left))
            nap = min(nap * 1.5, self._heartbeat)

    def _prefix_of(self, purpose: Purpose) -> str:
        return f"vescale_ckpt/{purpose}/{self._group}"

    def _generation_key(self, purpose: Purpose, rank: int) -> str:
        return f"{self._prefix_of(purpose)}/generation/{rank}"

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self.generation}/{name}"


class FirstWord:
    """A write-once cell in the job's key-value store: the first write wins, and every rank reads the winner. Any thread
    may use it, even while another thread is in a collective.

    Args:
        store_thread: the connection to the store; None for a single rank.
        key: the cell's key. Later cells reuse it.
        number: the number of the cell under this key; numbers increase.
    """

    def __init__(self, store_thread: StoreThread | None, key: str, number: int) -> None:
        self._store_thread, self._key, self._number = store_thread, key, number
        self._own: list[str] = []  # the writes of a single rank

    def say(self, word: str, seconds: float = STORE_SECONDS) -> str:
        """Writes `word` if the cell is empty. Returns the value that won; "" if a later cell has replaced this one.
        Raises StoreGoneError if the store does not answer within `seconds`."""
        if self._store_thread is None:
            self._own.append(word)
            return self._own[0]

        def say(there: str) -> str | None:
            return None if there and int(there.partition(" ")[0]) >= self._number else f"{self._number} {word}"

        number, _, first = self._store_thread.ask(partial(_set, self._key, say), seconds).partition(" ")
        return first if int(number) == self._number else ""


def _set(key: str, change: Callable[[str], str | None], store: Store) -> str:
    """Compare-and-set loop: sets a key to what `change` returns for its value ("" if unset), unless that is None.
    Returns the resulting value. Concurrent callers see each other's writes in order."""
    there = ""
    while (value := change(there)) not in (None, there):
        there = bytes(store.compare_set(key, there, value)).decode()
    return there


def _batched(keys: Iterable[str]) -> Iterator[list[str]]:
    """Splits keys into batches: during a query of very many keys, other groups' queries would wait."""
    left = iter(keys)
    while some := list(islice(left, 256)):
        yield some
