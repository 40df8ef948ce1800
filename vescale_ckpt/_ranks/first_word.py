"""`FirstWord` is a word on which the ranks of a group agree without meeting: the first that any of them says."""

from __future__ import annotations

from .._engine.torch_private import Store
from .store_thread import STORE_SECONDS, StoreThread


class FirstWord:
    """What is said about one thing. Any thread may use it, also while another thread is in a collective.

    Args:
        store_thread: where the ranks say it; None for a single rank.
        key: its place in the store. Later things take the same place.
        number: of the thing. Numbers rise.
    """

    def __init__(self, store_thread: StoreThread | None, key: str, number: int) -> None:
        self._store_thread, self._key, self._number = store_thread, key, number
        self._own: list[str] = []  # what a single rank has said

    def say(self, word: str, seconds: float = STORE_SECONDS) -> str:
        """Says a word. Returns the first word, which is this one if nobody has said one before; "" if a later thing has
        taken the place. Raises StoreGoneError if the store does not answer in so many seconds."""
        if self._store_thread is None:
            self._own.append(word)
            return self._own[0]

        def say(store: Store) -> str:
            there = ""
            while True:
                now = bytes(store.compare_set(self._key, there, f"{self._number} {word}")).decode()
                number, _, first = now.partition(" ")
                if int(number) >= self._number:
                    return first if int(number) == self._number else ""
                there = now

        return self._store_thread.ask(say, seconds)
