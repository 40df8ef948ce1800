"""`Look` answers questions about objects again for decisions that ask many: each request takes some 40 ms.

A look belongs to one thread and ends with its context. Within it an object is as it was when it was first asked for, or
listed, but for what this thread has changed. Decisions that need the present state begin a fresh look. When that ends,
the look around it knows what the fresh one has found.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import Any, Protocol

from .object_clients import ObjectMissingError

MOST_LISTED = 10_000  #: objects; where there are more, each is asked for
TAIL_BYTES = 1 << 16  #: the first question about an object brings so many bytes from its end
_MOST_KEPT, _MOST_KEPT_OF_ALL = 1 << 20, 16 << 20  # bytes of an object's content, and of all that a process keeps
_MD5 = re.compile("[0-9a-f]{32}")
_OF_EACH = 1 << 10  # bytes that an entry takes besides its content

Properties = dict[str, Any]


class _Client(Protocol):
    url: str
    key: str
    store: Any

    def end(self, length: int) -> tuple[Properties, bytes]: ...

    def list_below(self, most: int) -> list[Properties] | None: ...


class Look:
    """What one thread has learnt of the objects below a URL."""

    def __init__(self, root: _Client, lists: bool) -> None:
        self.root = root
        self._start = root.url.rstrip("/") + "/"
        self._lists = lists
        self._found: dict[str, Properties | None] = {}  # {key: properties, or None if there is no such object}
        self._tails: dict[str, bytes] = {}
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

    def head(self, client: _Client) -> Properties:
        """Raises OSError, as `Client.end` does."""
        if self._asks(client):
            try:
                self._ask(client, TAIL_BYTES)
            except ObjectMissingError:
                self.note(client, None)
        found = self._found.get(client.key)
        if found is None:
            raise ObjectMissingError(errno.ENOENT, f"{client.url}: there is no such object", client.url)
        return found

    def content(self, client: _Client, part: Any) -> tuple[Properties, bytes] | None:
        """Returns an object's properties and its content, or the part of it; None if it has to be asked for. Raises as
        `head` does."""
        is_end = isinstance(part, dict)
        if not is_end and self._asks(client):
            return None  # one request brings all
        found = self.head(client)
        tail = self._tails.get(client.key, b"")
        whole = tail if len(tail) == found["size"] else kept(client, found)
        if whole is None and is_end:
            if part["suffix"] > len(tail):
                whole_is_small = found["size"] if found["size"] <= _MOST_KEPT else 0
                found, tail = self._ask(client, max(part["suffix"], TAIL_BYTES, whole_is_small))
            return found, tail[-part["suffix"] :]
        if whole is None:
            return None
        begin, end = (0, None) if part is None else (-part["suffix"], None) if is_end else part
        return (found, whole[begin:end]) if part is None or is_end or begin < len(whole) else None

    def _ask(self, client: _Client, length: int) -> tuple[Properties, bytes]:
        found, tail = client.end(length)
        self.note(client, found)
        self._tails[client.key] = tail
        if len(tail) == found["size"]:
            keep(client, found["e_tag"], tail)
        return found, tail

    def _asks(self, client: _Client) -> bool:
        """Whether nothing is known of an object."""
        return client.key not in self._found and not self.lists()

    def note(self, client: _Client, found: Properties | None) -> None:
        self._tails.pop(client.key, None)
        self._found[client.key] = found

    def forget(self, client: _Client) -> None:
        """After a request that may have changed the object: the list does not tell of it any more."""
        self._tails.pop(client.key, None)
        self._found.pop(client.key, None)
        self._lists = False

    def take(self, newer: Look) -> None:
        """Takes over the answers of a look that covered as much and began later."""
        if newer._is_listed:
            self._found, self._tails = newer._found, newer._tails
            self._lists, self._is_listed = newer._lists, True
        else:
            self._tails = {key: tail for key, tail in self._tails.items() if key not in newer._found} | newer._tails
            self._found.update(newer._found)

    def forget_all(self) -> None:
        self._tails, self._found, self._lists = {}, {}, False


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


def note_put(client: _Client, size: int, e_tag: str | None) -> None:
    now = datetime.now(timezone.utc)
    for one in _here.looks:
        one.note(client, {"path": client.key, "size": size, "e_tag": e_tag, "last_modified": now})


def note_deleted(client: _Client) -> None:
    for one in _here.looks:
        one.note(client, None)


# --- Contents of small objects, by their ETags

_contents: OrderedDict[tuple[str, str], tuple[Any, bytes]] = OrderedDict()  # the store keeps its id from being reused
_lock = threading.Lock()


def keep(client: _Client, e_tag: str | None, content: bytes) -> None:
    """Keeps the content of a version of an object, if it is small, and it came as it was sent: many ETags are MD5."""
    # A weak ETag may be that of another content, too, and an empty object need not be read.
    if e_tag is None or e_tag.startswith("W/") or not 0 < len(content) <= _MOST_KEPT:
        return
    tag = e_tag.strip('"')
    if _MD5.fullmatch(tag) and tag != hashlib.md5(content, usedforsecurity=False).hexdigest():
        return  # with some encryption an ETag of this form is no MD5: then the content is read again
    with _lock:
        _contents[client.url, e_tag] = client.store, content
        _contents.move_to_end((client.url, e_tag))
        while sum(len(one) + _OF_EACH for _, one in _contents.values()) > _MOST_KEPT_OF_ALL:
            _contents.popitem(last=False)


def kept(client: _Client, found: Properties) -> bytes | None:
    with _lock:
        store, content = _contents.get((client.url, found["e_tag"]), (None, b""))
    return content if store is client.store and len(content) == found["size"] else None


def forget_contents(root: str) -> None:
    """Forgets what a bucket's objects held, and what looks of this thread have learnt."""
    with _lock:
        for key in [key for key in _contents if key[0].startswith(root)]:
            del _contents[key]
    for one in _here.looks:
        one.forget_all()
