"""`Look` answers questions about objects again for decisions that ask many: each request takes some 40 ms.

A look belongs to one thread and ends with its context. Within it an object is as it was when it was first asked for, or
listed, but for what this thread has changed. Decisions that need the present state begin a fresh look. When that ends,
the look around it knows what the fresh one has listed. Contents are asked for each time.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from .object_clients import ObjectMissingError

MOST_LISTED = 10_000  #: objects; where there are more, each is asked for

Properties = dict[str, Any]


class _Client(Protocol):
    url: str
    key: str

    def list_below(self, most: int) -> list[Properties] | None: ...


class Look:
    """What one thread has learnt of the objects below a URL."""

    def __init__(self, root: _Client, lists: bool) -> None:
        self.root = root
        self._start = root.url.rstrip("/") + "/"
        self._lists = lists
        self._found: dict[str, Properties | None] = {}  # {key: properties, or None if there is no such object}
        self._is_listed = False

    def covers(self, url: str) -> bool:
        return url == self.root.url or url.startswith(self._start)

    def is_unasked(self) -> bool:
        """Whether the look will list all objects, and has not yet."""
        return self._lists and not self._is_listed

    def lists(self) -> bool:
        """Whether the look knows all objects. Lists them at the first call."""
        if self._lists and not self._is_listed:
            found = None
            with contextlib.suppress(OSError):  # each question raises its own error
                found = self.root.list_below(MOST_LISTED)
            self._lists = self._is_listed = found is not None
            self._found = {**_without_folders(found or ()), **self._found}
        return self._lists

    def listed(self) -> list[Properties]:
        return [found for found in self._found.values() if found is not None]

    def knows(self, client: _Client) -> bool:
        return client.key in self._found or self.lists()

    def head(self, client: _Client) -> Properties:
        """The properties of an object that the look knows. Raises `ObjectMissingError` if there is none."""
        found = self._found.get(client.key)
        if found is None:
            raise ObjectMissingError(errno.ENOENT, f"{client.url}: there is no such object", client.url)
        return found

    def note(self, client: _Client, found: Properties | None) -> None:
        self._found[client.key] = found

    def forget(self, client: _Client) -> None:
        """After a request that may have changed the object: the list does not tell of it any more."""
        self._found.pop(client.key, None)
        self._lists = False

    def take(self, newer: Look) -> None:
        """Takes over the list of a look that covered as much and began later."""
        if newer._is_listed:
            self._found, self._lists, self._is_listed = newer._found, newer._lists, True

    def forget_all(self) -> None:
        self._found, self._lists = {}, False


def _without_folders(found: Iterable[Properties]) -> dict[str, Properties]:
    """Leaves out the empty objects `folder/` that some servers and tools keep. In a list their keys end before the
    slash."""
    objects = {one["path"]: one for one in found}
    folders = {key.rpartition("/")[0] for key in objects}
    return {key: one for key, one in objects.items() if one["size"] or key not in folders}


class _OfThread(threading.local):
    """Not of a context: that may be handed to another thread, as asyncio.to_thread does."""

    looks: tuple[Look, ...] = ()  #: the innermost last


_here = _OfThread()


@contextlib.contextmanager
def look(root: _Client, *, lists: bool, fresh: bool) -> Iterator[None]:
    """A context in which this thread's questions are answered by a look: by the one that covers the URL already, if
    that knows as much. A `fresh` look knows nothing that was asked for before, and covers as much."""
    before = covering(root.url)
    if before is not None and (before.is_unasked() if fresh else before.lists() or not lists):
        yield
        return
    made = Look(root if before is None else before.root, lists)
    outer = _here.looks
    _here.looks = (*outer, made)
    try:
        yield
    finally:
        _here.looks = outer
        if before is not None:
            before.take(made)


def covering(url: str) -> Look | None:
    return next((one for one in reversed(_here.looks) if one.covers(url)), None)


@contextlib.contextmanager
def changing(client: _Client) -> Iterator[None]:
    """A context for a request that changes an object. After an error the looks do not know the object."""
    try:
        yield
    except BaseException:
        for one in _here.looks:
            one.forget(client)
        raise


def note(client: _Client, found: Properties | None) -> None:
    """Notes in all looks what a request has returned; None: there is no such object."""
    for one in _here.looks:
        if one.covers(client.url):
            one.note(client, found)


def forget_all() -> None:
    for one in _here.looks:
        one.forget_all()
