"""`ObjectStore` keeps checkpoints in a folder of an object store for `Storage`: objects whose keys begin with its own.

An object store has no folders, locks, renames or syncs. An object appears whole or not at all. Each method says what
it does instead.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch.distributed as dist

from .. import settings
from .._engine import _C, options
from .._engine.engine_errors import of_system
from ..errors import CheckpointError
from . import paths
from .object_clients import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStoreError,
    is_panic,
    limit_wait,
    named,
    obstore,
    reconnect,
    refuses,
    store_at,
)
from .storage import BEGINNING_BYTES, COMMITTED_MEANWHILE, CheckBeginning, Stat, Storage

_MOST_SINGLE_PUT = 64 << 20  # bytes; stores take 5 GB in one request, but a retry sends all of it again
# These names are random, so no save writes to one again.
_OUR_DATA_FILE = re.compile(r"/__\d+_[0-9a-f]{8}(_\d+)?\.distcp$")
_PROBE, _PROBE_SECONDS = ".metadata.tmp.probe.", 5
_exclusive: set[str] = set()  # the roots of stores that are known to heed conditions
_NO_RANGE = re.compile(r"status code: 416|InvalidRange")
_ATTEMPTS = 3  # a range or a list that came short is requested so often


class Client:
    """One object, or the objects below one key. Raises OSError with the URL in its text."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.root, self.key = paths.split(url)
        self.store = store_at(self.root)

    def at(self, name: str) -> Client:
        return Client(paths.joined(self.root, f"{self.key}/{name}" if self.key else name)) if name else self

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (_C.EngineError, ObjectStoreError):
            raise
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise named(error, self.url) from error

    def head(self) -> dict[str, Any]:
        with self._named():
            try:
                found: dict[str, Any] = obstore().head(self.store, self.key)
            except Exception as error:
                if isinstance(error, FileNotFoundError) or not refuses(error):
                    raise
                found, _ = self.get((0, 1))  # the answer to HEAD has no body; the answer to GET says what is wrong
        return found

    def version(self) -> tuple[Any, ...] | None:
        """Returns size, ETag and time, which identify a version of the object. None if there is no object."""
        try:
            found = self.head()
        except ObjectMissingError:
            return None
        return found["size"], found["e_tag"], found["last_modified"]

    def get(self, part: Any = None, etag: str | None = None) -> tuple[dict[str, Any], Callable[[], Any]]:
        """Returns the object's properties, and a function that reads the object or a `part` of it (obstore's
        ranges)."""
        options: dict[str, Any] = {}
        if part is not None:
            options["range"] = part
        if etag is not None:
            options["if_match"] = etag
        with self._named():
            result = obstore().get(self.store, self.key, options=options)
            found: dict[str, Any] = result.meta
        if etag is not None and found["e_tag"] not in (etag, None):  # some stores ignore If-Match
            raise ObjectChangedError(errno.EIO, f"{self.url} was replaced while it was read", self.url)

        def content() -> Any:
            with self._named():
                return result.bytes()

        return found, content

    def end(self, length: int) -> tuple[dict[str, Any], bytes]:
        """Returns the object's properties, and so many bytes from its end. Raises OSError if all answers were cut
        off."""
        for _ in range(_ATTEMPTS):  # obstore does not notice a body that ends too early
            with self._named():
                size = None
                try:
                    result = obstore().get(self.store, self.key, options={"range": {"suffix": length}})
                except Exception as error:
                    # Azure knows no such range, and an empty object has none.
                    if type(error).__name__ != "NotSupportedError" and not _NO_RANGE.search(str(error)):
                        raise
                    size = obstore().head(self.store, self.key)["size"]
                    options = {"range": (max(0, size - length), size)} if size else {}
                    result = obstore().get(self.store, self.key, options=options)
                found: dict[str, Any] = result.meta
                is_end = size in (None, found["size"])  # otherwise it was replaced between the two requests
                if is_end and len(content := bytes(result.bytes())) == min(length, found["size"]):
                    return found, content
        raise ObjectStoreError(errno.EIO, f"{self.url}: its last bytes came short {_ATTEMPTS} times", self.url)

    def put(self, content: Any, *, create: bool = False) -> None:
        single = create or len(content) <= _MOST_SINGLE_PUT
        mode = "create" if create else "overwrite"
        with self._named():
            obstore().put(self.store, self.key, content, mode=mode, use_multipart=not single)

    def put_parts(self, parts: Iterator[Any], part_bytes: int) -> None:
        """Sends the parts as one multipart upload. If `parts` raises, aborts the upload and raises that error. So few
        are sent at a time that those of a rank take no more memory than small ones."""
        at_once = min(_requests_in_flight(), _bytes_in_flight() // part_bytes)
        with self._named():
            obstore().put(
                self.store,
                self.key,
                parts,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=max(2, at_once),
            )

    def delete(self) -> None:
        with self._named():
            obstore().delete(self.store, self.key)

    def delete_all(self, keys: Sequence[str]) -> None:
        """Removes objects anywhere in the store: a thousand with one request, if the store can."""
        if not keys:
            return
        try:
            with self._named():
                obstore().delete(self.store, [*keys])
        except OSError:  # some stores refuse if one of them is gone already
            for key in keys:
                with contextlib.suppress(ObjectMissingError):
                    Client(paths.joined(self.root, key)).delete()

    def listed(self) -> tuple[list[str], list[dict[str, Any]]]:
        """Returns the keys of the folders directly below, and the objects directly below."""
        found = self._list(lambda: obstore().list_with_delimiter(self.store, self.key or None))
        return list(found["common_prefixes"]), self._without_itself(found["objects"])

    def all_below(self) -> list[dict[str, Any]]:
        return self._without_itself(self._list(lambda: obstore().list(self.store, self.key or None).collect()))

    def _list(self, request: Callable[[], Any]) -> Any:
        """Returns the answer to a request for a list. Repeats a request whose answer broke off: obstore does not."""
        for attempts_left in range(_ATTEMPTS - 1, -1, -1):
            with self._named():
                try:
                    return request()
                except Exception as error:
                    if not attempts_left or "response body" not in str(error):
                        raise
        raise AssertionError

    def _without_itself(self, found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Leaves out the empty object `folder/` that some servers and tools keep for a folder."""
        return [one for one in found if one["path"].rstrip("/") != self.key]


class ObjectStore(Storage):
    """A folder in an object store. It exists as long as objects are in it. All its methods raise OSError."""

    by_requests = can_be_away = rereads = True
    has_locks = renames = False

    @cached_property
    def _client(self) -> Client:
        return Client(self.path)  # made at first use: asking for a class attribute opens no connection

    @property
    def store(self) -> str:
        return self._client.root

    def check_mounted(self, what: str, instead: str) -> None:
        raise CheckpointError(f"{self.path}: {what} cannot be in an object store. {instead}", path=self.path)

    def limit_wait(self, seconds: int) -> contextlib.AbstractContextManager[None]:
        return limit_wait(seconds)

    # --- What is there

    def names(self) -> list[str]:
        """Returns the names of objects and of folders. Raises `FileNotFoundError` if there are none."""
        folders, objects = self._client.listed()
        if not folders and not objects:
            raise ObjectMissingError(errno.ENOENT, f"{self.path}: there is nothing below it", self.path)
        return [_last(key) for key in (*folders, *(found["path"] for found in objects))]

    def folders(self) -> list[str]:
        return [_last(key) for key in self._client.listed()[0]]

    def has(self, name: str) -> bool:
        try:
            self._client.at(name).head()
        except ObjectMissingError:
            return False
        except OSError as error:
            raise of_system(error, self.path) from error
        return True

    def stat(self, name: str = "") -> Stat:
        client = self._client.at(name)
        try:
            if client.key:
                return _stat(client.head())
        except ObjectMissingError:
            # The answer to HEAD has no body. The answer to a list says whether the bucket is missing.
            below = client.all_below()
            if not below:
                raise
        else:
            below = client.all_below()
        newest = max((found["last_modified"].timestamp() for found in below), default=0.0)
        identity = int.from_bytes(hashlib.sha256(client.url.encode()).digest()[:7], "big")
        return Stat(0, int(newest * 1e9), (identity,), int(newest * 1e9), False, True)

    def sizes(self) -> dict[str, int]:
        return {_last(found["path"]): found["size"] for found in self._client.listed()[1]}

    def age(self, modified_ns: int, enough: float) -> float:
        # This machine's clock is right within minutes: otherwise the store refuses its signatures.
        return time.time() - modified_ns / 1e9

    def is_inconclusive(self, number: int) -> bool:
        # After access denied, too many requests, no such bucket or no network, nothing is known of the object.
        return number != errno.ENOENT

    # --- Reads

    def read(self, name: str, check: CheckBeginning | None = None) -> bytes:
        client = self._client.at(name)
        found, content = client.get()  # the body comes when it is asked for
        size = found["size"]
        if check is not None and size > BEGINNING_BYTES:
            _, beginning = client.get((0, BEGINNING_BYTES), found["e_tag"])
            check(bytes(beginning()), size)
        return bytes(content())

    def read_range(self, name: str, begin: int, length: int) -> tuple[Stat, bytes]:
        client = self._client.at(name)
        try:
            if begin < 0:
                found, end = client.end(-begin)
                return _stat(found), end[:length]
            found, content = client.get((begin, begin + length))
            return _stat(found), bytes(content())[:length]
        except ObjectMissingError:
            raise
        except OSError:
            found = client.head()
            if found["size"] > max(begin, 0):
                raise
            return _stat(found), b""  # there is no such range

    def drop_caches(self) -> None:
        """Makes new connections."""
        reconnect(self._client.root)

    # --- Writes

    def make(self) -> None:
        """Does nothing: a key needs no folder."""

    def write(self, name: str, content: bytes) -> None:
        """Puts an object, which appears when it is complete and is durable then."""
        self._client.at(name).put(content)

    def commit(self, name: str, content: bytes | _C.PendingFile, overwrite: bool) -> None:
        """Makes one conditional request. Of several jobs with `overwrite=False` one succeeds."""
        assert isinstance(content, bytes)
        client = self._client.at(name)
        try:
            client.put(content, create=not overwrite)
        except OSError as error:
            # The answer to the first request may have been lost. A repeated request then finds its own object.
            try:
                _, found = client.get()
                is_ours = bytes(found()) == content
            except ObjectMissingError:
                is_ours = False
            except OSError as unknown:
                raise ObjectStoreError(
                    error.errno or errno.EIO,
                    f"{error}. Whether the checkpoint was committed is not known, because {client.url} cannot be read "
                    f"either ({unknown}): look there when the store is back",
                    client.url,
                ) from error
            if is_ours:
                return
            if isinstance(error, ObjectExistsError):
                raise ObjectExistsError(
                    errno.EEXIST,
                    f"{self.path} holds a checkpoint already and overwrite=False{COMMITTED_MEANWHILE}",
                    client.url,
                ) from error
            raise

    def check_exclusive_commits(self) -> None:
        """Makes two conditional requests, once in a process for each bucket. Some stores do not know such requests, and
        some ignore the condition."""
        root = self._client.root
        if root in _exclusive:
            return
        with limit_wait(_PROBE_SECONDS):
            probe = self._client.at(f"{_PROBE}{secrets.token_hex(8)}")
            why = "does not heed the condition of a request"
            try:
                probe.put(b"", create=True)
                probe.put(b"", create=True)
            except ObjectExistsError:
                _exclusive.add(root)
                return
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:  # the save will raise this error itself
                    return
                why = "does not know conditional requests"
            finally:
                with contextlib.suppress(OSError):
                    probe.delete()
        raise CheckpointError(
            f"{self.path}: the store {why}, so overwrite=False cannot keep another job's checkpoint from being "
            "replaced. Save to a folder that no other job uses, with overwrite=True",
            path=self.path,
        )

    def sync(self, name: str = "") -> None:
        """Does nothing: an object is durable when it appears."""

    # --- Removals

    def remove(self, name: str) -> bool:
        """Returns True if the object is gone: stores do not tell whether it was there."""
        try:
            self._client.at(name).delete()
        except ObjectMissingError:
            return False
        return True

    def remove_all(self, names: Iterable[str]) -> None:
        self._client.delete_all([self._client.at(name).key for name in names])

    def remove_folder(self, name: str) -> None:
        folder = self._client.at(name)
        folder.delete_all([found["path"] for found in folder.all_below()])

    def set_aside(self, name: str, first: str) -> None:
        """Removes the folder, and the object `first` before all others, because there is no rename. An interruption
        leaves a folder without `first`, or a whole one."""
        folder = self._client.at(name)
        below = folder.all_below()
        ObjectStore(folder.url).remove(first)
        folder.delete_all([found["path"] for found in below])

    def erase_set_aside(self, is_one: Callable[[str], bool], first: str) -> None:
        """Does nothing: `set_aside` has removed everything."""

    # --- Whether ranks use one folder

    def make_marker(self, name: str) -> None:
        self._client.at(name).put(b"", create=True)

    # --- Others who use it: there are no locks, so nobody is kept from removing anything

    @contextlib.contextmanager
    def lock_if_abandoned(self, names: Sequence[str], locked: str | None, grace_seconds: float) -> Iterator[bool]:
        newest = max((self.stat(name).modified_ns for name in names), default=0) if grace_seconds else 0
        yield not grace_seconds or self.age(newest, grace_seconds) >= grace_seconds


def _last(key: str) -> str:
    return key.rstrip("/").rpartition("/")[2]


def _stat(found: dict[str, Any]) -> Stat:
    modified = int(found["last_modified"].timestamp()) * 10**9  # a list has milliseconds, other answers have none
    tag = int.from_bytes(hashlib.sha256(str(found["e_tag"]).encode()).digest()[:7], "big")
    return Stat(found["size"], modified, (tag, found["size"], modified), modified, True, False)


# --- What the engine reads and writes


class _OpenObject:
    """Reads the version of an object that was opened."""

    def __init__(self, url: str) -> None:
        self._client = Client(url)
        found = self._client.head()
        self.size, self._etag = found["size"], found["e_tag"]

    def read(self, offset: int, length: int) -> Any:
        for _ in range(_ATTEMPTS):  # obstore does not notice a body that ends too early
            _, content = self._client.get((offset, offset + length), self._etag)
            if len(found := content()) == length:
                break
        return found


def _upload(window: _C.PartWindow) -> None:
    client = Client(window.path)
    # The writer waits for the end of this thread. At its end the process waits for asynchronous saves, or cancels them.
    threading.Thread(target=_send, args=(client, window), name="vescale_ckpt upload", daemon=True).start()


def _send(client: Client, window: _C.PartWindow) -> None:
    """Sends a file, in one request if it has one part."""
    before, length = None, 0  # the length is that of the whole file, once its last part was taken

    def all_parts(ready: list[Any]) -> Iterator[Any]:
        nonlocal length
        total = 0
        while (part := ready.pop() if ready else window.next()) is not None:
            total += len(part)
            yield part
            del part  # the client alone holds it
        length = total

    try:
        if _OUR_DATA_FILE.search(client.url) is None:
            before = client.version()
        first = window.next()
        second = None if first is None else window.next()
        if first is None or second is None:
            client.put(b"" if first is None else bytes(first))
        else:
            ready = [second, first]
            del first, second  # nothing here holds a part that was sent
            client.put_parts(all_parts(ready), window.part_bytes)
    except BaseException as error:
        # The answer to the last request may have been lost. An object that was not there before is this file.
        with contextlib.suppress(OSError):
            there = client.version() if length else None
            if there is not None and there != before and there[0] == length:
                window.uploaded()
                return
        window.fail(str(error), getattr(error, "errno", None) or errno.EIO)
    else:
        window.uploaded()


_STARTED_A_SECOND = 3500 * (128 << 20) // (80 << 20)


def _bytes_in_flight() -> int:
    return settings.number("object_store_requests") * options.SLOT_BYTES


def _writers() -> int:
    """How many ranks may write large files at a time."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _requests_in_flight() -> int:
    """Returns how many parts a rank sends at a time, of which each holds its share of 128 MiB: so few that all ranks,
    at 80 MB/s for each request, begin no more than the 3,500 PUT requests a second that S3 takes below one prefix; two
    at least."""
    return max(2, min(settings.number("object_store_requests"), math.isqrt(_STARTED_A_SECOND // _writers())))


def _most_part_bytes(url: str) -> int:
    """Returns how large the parts of a large file should be."""
    return min(_MOST_SINGLE_PUT, _bytes_in_flight() // _requests_in_flight())


_C.set_remote_store(_OpenObject, _upload, _most_part_bytes)
