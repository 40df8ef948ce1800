"""Diagnoses why a collective failed, for the error that all ranks raise: who is late, silent, elsewhere or lost."""

from __future__ import annotations

from typing import NamedTuple

from .rendezvous import FailureReport, Notes, Rendezvous
from .store_thread import StoreGoneError


class LostError(Exception):
    """A message from or to `peer` failed. `in_time`: it failed before the deadline, so the connection is closed."""

    def __init__(self, peer: int, in_time: bool) -> None:
        self.peer = peer
        self.in_time = in_time


class ElsewhereError(Exception):
    """`peer` is in another collective."""

    def __init__(self, peer: int, step: str) -> None:
        self.peer = peer
        self.step = step


class Failure(NamedTuple):
    """The failure of a rank's `calls`-th collective, which is `step` of `phase`; 0 calls: the ranks still connect."""

    rendezvous: Rendezvous
    calls: int
    phase: str
    step: str
    progress: int  #: how far this rank had come
    timeout: float
    error: BaseException

    def diagnose(self, notes: Notes) -> FailureReport:
        error = self.error
        if isinstance(error, ElsewhereError):
            return self._elsewhere(error.peer, error.step)
        if self.calls == 0:
            came = [rank for rank, note in notes.items() if note is not None]
            silent = self.rendezvous.silent(notes, came)
            why = (
                f"; {self.rendezvous.named(silent)} went silent (stopped, or cut off from the network)"
                if silent
                else ""
            )
            return self._report(silent, f"{self._this_rank} could not connect{self._where}: {self._cause}{why}")
        if not isinstance(error, LostError):
            text = f"{self._this_rank} has left with {type(error).__name__}: {error}"
            return self._report([self.rendezvous.rank], text)
        if error.in_time:
            text = f"the connection to {self.rendezvous.named([error.peer])} is closed: it has died or ended"
            return self._report([error.peer], text + self.rendezvous.last_seen([error.peer]))
        for rank, note in notes.items():
            if note is not None and note.inside and note.calls == self.calls and note.step != self.step:
                return self._elsewhere(rank, note.step)
        return self._diagnose_silence(error.peer, notes)

    def diagnose_without_store(self, gone: StoreGoneError, store_host: int | None) -> FailureReport:
        """Makes the report when the store is gone, and with it the notes. `store_host`: the rank that hosts it; None if
        it is none of these ranks."""
        error = self.error
        if self.calls == 0:
            return self._report([], f"{self._this_rank} could not connect{self._where}: {self._cause}; {gone}")
        if not isinstance(error, LostError):
            return self.diagnose({})
        # A peer may be silent because it waits for a third rank. It does not if there is no third rank, or if it hosts
        # the store, which is gone.
        certain = self.rendezvous.size == 2 or error.peer == store_host
        what = (
            "the connection to it is closed" if error.in_time else f"nothing arrived from it within {self.timeout:g} s"
        )
        text = f"{self.rendezvous.named([error.peer])} is lost, {what}, and {gone}"
        return self._report([error.peer] if certain else [], text)

    def _diagnose_silence(self, peer: int, notes: Notes) -> FailureReport:
        """Makes the report for the case that all ranks are in one collective, no connection is closed, and nothing came
        from `peer`. The peer may itself wait for another rank."""
        named = self.rendezvous.named
        late = late_ranks(notes, self.calls)
        waiting = {rank: note for rank, note in notes.items() if note is not None and note.inside}
        silent = self.rendezvous.silent(notes, [*waiting])
        if late or silent:
            texts = [f"{named(late)} did not come within {self.timeout:g} s"] if late else []
            if silent:
                texts.append(f"{named(silent)} came, and then went silent (stopped, or cut off from the network)")
            missing = sorted([*late, *silent])
            return self._report(missing, "; ".join(texts) + self.rendezvous.last_seen(missing))
        if behind := ranks_behind(notes, self.calls, self.progress):
            text = f"{named(behind)} did not come within {self.timeout:g} s{self.rendezvous.last_seen(behind)}"
            return self._report(behind, text)
        # If the peer has left the collective, its message was lost. Otherwise the two ranks cannot reach each other,
        # although both reach the store.
        late = [] if peer in waiting else [peer]
        return self._report(
            late, f"all ranks came, but nothing arrived from {named([peer])} for the rest of {self.timeout:g} s"
        )

    def _elsewhere(self, rank: int, there: str) -> FailureReport:
        other = self.rendezvous.named([rank])
        text = f"ranks are in different places: {self._this_rank} in {self.step}, {other} in {there}"
        return self._report([], text, mismatch=True)

    def _report(self, late: list[int], text: str, mismatch: bool = False) -> FailureReport:
        return FailureReport(self.calls, self.phase, late, f"{self.phase}: {text}", mismatch)

    @property
    def _where(self) -> str:
        return f" to {self.rendezvous.named([self.error.peer])}" if isinstance(self.error, LostError) else ""

    @property
    def _cause(self) -> BaseException:
        return self.error.__cause__ or self.error

    @property
    def _this_rank(self) -> str:
        return self.rendezvous.named([self.rendezvous.rank])


def late_ranks(notes: Notes, calls: int) -> list[int]:
    """Returns the ranks that have not come to the `calls`-th collective."""
    return [rank for rank, note in notes.items() if note is None or (not note.inside and note.calls < calls)]


def ranks_behind(notes: Notes, calls: int, progress: int) -> list[int]:
    """Returns the ranks with the least progress of all that are inside collectives, if it is less than `progress` in
    the `calls`-th."""
    places = {rank: (note.calls, note.progress) for rank, note in notes.items() if note is not None and note.inside}
    last = min(places.values(), default=(0, 0))  # all other ranks wait for these
    return [rank for rank, place in places.items() if place == last < (calls, progress)]
