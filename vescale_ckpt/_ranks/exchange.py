"""`Exchange` runs the collectives of saves and loads for one group of ranks, each with a timeout.

Messages travel along a tree of ranks with the coordinator as its root; those of `peers` go directly from rank to rank.
They are point-to-point sends of plain tensors, so a failure identifies the rank that caused it. Each collective begins
with a greeting between neighbours in the tree, which names the collective, so that ranks in different collectives raise
before any data is sent.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import pickle
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import compress, takewhile
from typing import TypeVar

import torch
import torch.distributed as dist

from .. import settings
from .._observe.timeline import Call
from .._observe.timeline import phase as observed_phase
from ..errors import CheckpointError, CheckpointTimeoutError, RankFailedError, SaveFailedError, of_rank
from .connections import DIGEST_BYTES, Connections, children_of, parent_of, subtree, tensor_over
from .groups import check_alone_on_purpose, place_in, resolve_group
from .message import pack, unpack
from .nccl import CudaDevice, DeviceGroup
from .rendezvous import FirstWord, Purpose, Rendezvous, is_in_background
from .store_thread import StoreGoneError

logger = logging.getLogger(__name__)

_LONGEST_TEXT = 2000  # characters; longer error texts are truncated before they are sent to other ranks
_LONG_PART = 4096  # bytes above which a part is worth new connections between its recipients
_NO_ERROR = 1

_Result = TypeVar("_Result")


class Exchange:
    """Collectives of the ranks of a process group, numbered within it; rank 0 coordinates.

    Every rank calls the same methods in the same order. `phase` names the purpose of a call in errors. If ranks differ
    in the phase or the method, all raise CheckpointError. `phase` contains the save's path, so a rank that is one save
    late gets an error instead of taking part in the wrong save.

    Every method raises CheckpointTimeoutError, on every rank, if a rank does not arrive within `timeout` seconds of the
    call, dies, or leaves with an error of its own. After that, every call of this exchange raises; `Exchange.of`
    creates the next one. Any thread may call, but only one at a time.
    """

    def __init__(self, links: Connections | None, timeout: float) -> None:
        self._links = links
        self.timeout = timeout
        self.rank = 0 if links is None else links.rank
        self.size = 1 if links is None else links.size
        self.ranks = () if links is None else tuple(links.ranks)  #: numbers in the default group; () for a single rank

    @staticmethod
    def of(
        process_group: dist.ProcessGroup | None = None, timeout: float | None = None, purpose: Purpose = "save"
    ) -> Exchange:
        """Returns the exchange of a group (None: the default group); without torch.distributed, of a single rank.

        Each `purpose` has its own connections, so that a background save and a load can run at the same time.

        Collective at first use and after a failure: all ranks of the group connect. The connections are kept while the
        group exists. The group itself is not used. `timeout`: seconds; None: the setting. Raises like the methods.
        """
        limit = settings.timeout(timeout)
        group = resolve_group(process_group)
        if group is None:
            if purpose != "load":
                check_alone_on_purpose()
            return Exchange(None, limit)
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not a rank of the process group")
        if dist.get_world_size(group) == 1:
            return Exchange(None, limit)
        with _places_lock:
            of_group = _groups.setdefault(group, _Group())
        return Exchange(of_group.links(group, purpose, limit), limit)

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    @property
    def generation(self) -> int:
        """A number that changes after each failure, equal on all ranks; 0 for a single rank."""
        return 0 if self._links is None else self._links.generation

    @property
    def kept(self) -> dict[str, object]:
        """Values that users keep from one exchange to the next, while these have the same connections."""
        return {} if self._links is None else self._links.kept

    def agree(self, values: Sequence[int], phase: str, sums: Sequence[int] = ()) -> list[int]:
        """All-reduce: returns the minimum of each of `values` over all ranks, then the sum of each of `sums`, modulo
        2^64. All are 64-bit integers; every rank passes equally many."""
        links = self._links
        least = torch.tensor([*values, *sums], dtype=torch.int64, device="cpu")
        if links is not None:
            with links.collective(f"agree on {len(values)}", phase, self.timeout):
                theirs = [torch.empty_like(least) for _ in links.children]
                for child, vector in zip(links.children, theirs, strict=True):
                    links.receive(child, vector)
                links.wait()
                together, count = torch.stack([least, *theirs]), len(values)
                least = torch.cat([together[:, :count].amin(0), together[:, count:].sum(0)])
                if links.parent is not None:
                    answer = torch.empty_like(least)
                    links.receive(links.parent, answer)
                    links.send(links.parent, least)
                    links.wait()
                    least = answer
                for child in links.children:
                    links.send(child, least)  # the child has begun to receive
        result: list[int] = least.tolist()
        return result

    def gather(self, data: bytes, phase: str) -> list[bytes] | None:
        """Returns every rank's bytes, by rank, on the coordinator, which holds all of them in memory; None on other
        ranks."""
        links = self._links
        if links is None:
            return [data]
        with links.collective("gather", phase, self.timeout):
            below = [subtree(child, self.size) for child in links.children]
            lengths = [torch.empty(len(ranks), dtype=torch.int64, device="cpu") for ranks in below]
            for child, of_ranks in zip(links.children, lengths, strict=True):
                links.receive(child, of_ranks)
            links.wait()
            buffers = [bytearray(int(of_ranks.sum())) for of_ranks in lengths]
            for child, buffer in zip(links.children, buffers, strict=True):
                links.receive(child, tensor_over(buffer), receipt=True)
            if links.parent is not None:
                links.wait()
                own = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
                links.send(links.parent, torch.cat([own, *lengths]))
                links.send(links.parent, tensor_over(bytearray().join([data, *buffers])), receipt=True)
                buffers.clear()
                return None
        parts = dict.fromkeys(range(self.size), data)
        buffers.reverse()
        for ranks, of_ranks in zip(below, lengths, strict=True):
            buffer = buffers.pop()  # freed after its copy, so that memory never holds everything twice
            parts.update(zip(ranks, _parts_of(buffer, of_ranks), strict=True))
        return list(parts.values())

    def gather_distinct(self, parts: Sequence[bytes], phase: str) -> list[list[bytes]] | None:
        """Returns every rank's `parts`, by rank, on the coordinator; None on other ranks. All ranks pass equally many.

        Equal parts are sent once, and are a single object on the coordinator: a replica of a table costs 16 bytes.
        """
        if self._links is None:
            return [list(parts)]
        digests = [hashlib.blake2b(part, digest_size=DIGEST_BYTES).digest() for part in parts]
        of_all = self.gather(b"".join(digests), phase)
        wanted: list[bytes] | None = None
        if of_all is not None:
            rows = [[row[at : at + DIGEST_BYTES] for at in range(0, len(row), DIGEST_BYTES)] for row in of_all]
            wanted = _first_of_each(rows)
        mine = self.scatter(wanted, phase)
        sent = self.gather(pack(*compress(parts, mine)), phase)
        if sent is None or wanted is None:
            return None
        sent.reverse()
        found: dict[bytes, bytes] = {}
        for row, mask in zip(rows, wanted, strict=True):
            found.update(zip(compress(row, mask), unpack(sent.pop()), strict=True))
        return [[found[digest] for digest in row] for row in rows]

    def scatter(self, parts: Sequence[bytes] | None, phase: str) -> bytes:
        """Returns this rank's element of `parts`. The coordinator passes one part per rank; other ranks pass None."""
        links = self._links
        if links is not None:
            with links.collective("scatter", phase, self.timeout):
                ranks = subtree(self.rank, self.size)
                if links.parent is not None:
                    parts = _receive(links, links.parent, len(ranks))
                elif parts is not None:
                    parts = [parts[rank] for rank in ranks]
                assert parts is not None
                at = 1
                for child in links.children:
                    of_child = parts[at : at + len(subtree(child, self.size))]
                    at += len(of_child)
                    _send(links, [child], of_child)
        assert parts is not None
        return parts[0]

    def scatter_contents(self, contents: Sequence[tuple[bytes, ...]] | None, phase: str) -> tuple[bytes, ...]:
        """Returns this rank's element of `contents`. The coordinator passes one element per rank; most may be empty.

        If several recipients' first part is the same long object, it is broadcast along a tree of these ranks, so that
        the coordinator neither holds nor sends it once per rank.
        """
        messages: list[bytes] | None = None
        if contents is not None:
            messages = [b""] * len(contents)
            alike = defaultdict[int, list[int]](list)  # ranks by their first part; otherwise one entry per rank
            for rank, content in enumerate(contents):
                if content:
                    alike[id(content[0]) if len(content[0]) >= _LONG_PART else -rank].append(rank)
            for whom in alike.values():
                count = _count_shared([contents[rank] for rank in whom])
                for number, rank in enumerate(whom):
                    # Its parent in their tree, which is itself for the root, and its children.
                    near = [whom[parent_of(number) or 0], *(whom[child] for child in children_of(number, len(whom)))]
                    head = struct.pack(f"<{1 + len(near)}q", count, *near)
                    messages[rank] = pack(head, *contents[rank][count if number else 0 :])
        message = self.scatter(messages, phase)
        head, *own = unpack(message) if message else [struct.pack("<2q", 0, self.rank)]
        count, parent, *children = struct.unpack(f"<{len(head) // 8}q", head)
        if parent == self.rank:
            shared, own = own[:count], own[count:]
        if self._links is not None:
            with self.peers("broadcast to some", phase, {parent, *children} - {self.rank}) as links:
                if parent != self.rank:
                    shared = _receive(links, parent, count)
                if children:
                    _send(links, children, shared)
        return (*shared, *own)

    def broadcast(self, data: bytes | None, phase: str) -> bytes:
        """Returns the coordinator's bytes on every rank."""
        links = self._links
        if links is not None:
            with links.collective("broadcast", phase, self.timeout):
                if links.parent is not None:
                    (data,) = _receive(links, links.parent, 1)
                assert data is not None
                if links.children:
                    _send(links, links.children, [data])
        assert data is not None
        return data

    def first_word(self) -> FirstWord:
        """Returns a write-once cell that the ranks share from now on, while they are in other collectives. All ranks
        create it between the same two collectives, at most one there."""
        return FirstWord(None, "", 0) if self._links is None else self._links.first_word()

    def share(self, data: bytes, phase: str) -> list[bytes]:
        """All-gather: returns every rank's bytes, by rank, on every rank. For short messages."""
        gathered = self.gather(data, phase)
        return unpack(self.broadcast(None if gathered is None else pack(*gathered), phase))

    def may_commit(self) -> None:
        """Called after the last collective, before a step that cannot be undone. Raises CheckpointTimeoutError if other
        ranks have timed out, or if the store does not answer."""
        if self._links is not None:
            self._links.may_commit(self.timeout)

    @contextmanager
    def commit_in_doubt(self, committed: Callable[[], bool], by_others: bool = False) -> Iterator[None]:
        """A context manager for the steps after `may_commit`. It sets `committed` of a CheckpointTimeoutError.
        `committed`: whether this rank has committed. `by_others`: whether one rank of each node commits."""
        links = self._links
        since = 0 if links is None else links.calls
        try:
            yield
        except CheckpointTimeoutError as error:
            failure = None if links is None else links.failure  # None: all ranks have this error of another rank
            if committed():
                text, known = "this rank had committed: the new checkpoint is there", True
            elif by_others if failure is None else failure.commit >= since or not failure.commit_is_known:
                text, known = "a commit may have begun: whether the new checkpoint is there is not known", None
            else:
                raise
            raise CheckpointTimeoutError(
                error.phase, error.late_ranks, f"{error.message}; {text}", committed=known
            ) from error.__cause__

    @contextmanager
    def peers(self, kind: str, phase: str, whom: Iterable[int]) -> Iterator[Connections]:
        """A context manager for a collective of messages from rank to rank, all of which are sent and received within
        it. An exception raised inside ends the exchange. Needs at least two ranks. `whom`: the ranks that this one
        sends to or receives from; the first such collective of two ranks connects them, which costs each a socket."""
        assert self._links is not None
        with self._links.collective(kind, phase, self.timeout, whom):
            yield self._links

    def may_swap_on(self, device: CudaDevice | None) -> bool:
        """Whether this rank can take part in `device_group` with this device."""
        links = self._links
        if device is None or links is None:
            return False
        devices = links.devices
        return not links.devices_tried or (
            devices is not None and devices.usable and devices.device.device == device.device
        )

    def device_group(self, device: CudaDevice, phase: str) -> DeviceGroup | None:
        """Returns the connections among the devices of all ranks, created at the first call; collective. None on all
        ranks if that fails, for example because ranks share a device. `may_swap_on` must be true on all ranks."""
        links = self._links
        assert links is not None
        if links.devices_tried:
            return links.devices
        if len(set(self.share(device.identity().encode(), phase))) == self.size:
            steps = (lambda: links.make_devices(device, self.timeout), lambda: _first_swap(links))
            if not all(self._succeed(step, phase) for step in steps) and links.devices is not None:
                links.devices.end()
                links.devices = None
        links.devices_tried = True
        return links.devices

    def end_device_group(self, phase: str) -> None:
        """Ends the connections of `device_group`, if any, whose buffers take hundreds of MiB on each device. The next
        `device_group` creates new ones. Collective; called on each rank when its last swap is done."""
        links = self._links
        if links is None or links.devices is None:
            return
        (usable,) = self.agree([int(links.devices.usable)], f"{phase}: the last swap is done")
        links.devices.end()
        if usable:  # otherwise no rank tries it again
            links.devices, links.devices_tried = None, False

    def _succeed(self, step: Callable[[], None], phase: str) -> bool:
        """Runs a step that connects devices. Returns whether it succeeds on all ranks."""
        done = True
        try:
            step()
        except Exception as error:
            done = False
            logger.warning("%s: no connection to the devices of other ranks: %s", phase, error)
        return self.agree([int(done)], phase) == [1]

    def all_have(self, data: bytes, phase: str) -> bool:
        """Whether all ranks have the same bytes."""
        number = digest(data)
        least, not_most = self.agree((number, ~number), phase)
        return least == ~not_most

    def together(
        self, step: Callable[[], _Result], phase: str, kind: type[RankFailedError] = SaveFailedError
    ) -> _Result:
        """Runs a step on all ranks; collective. If it fails on any, all ranks raise as in `fail_together`."""
        results: list[_Result] = []
        error = None
        try:
            results.append(step())
        except Exception as raised:
            error = raised
        self.fail_together(error, phase, kind)
        return results[0]

    def from_coordinator(
        self, find: Callable[[], _Result], phase: str, kind: type[RankFailedError] = SaveFailedError
    ) -> _Result:
        """Calls `find` on the coordinator only. Returns its result, which must be JSON, on all ranks. If it fails, all
        ranks raise as in `fail_together`."""
        found = self.together(lambda: json.dumps(find()).encode() if self.is_coordinator else None, phase, kind)
        result: _Result = json.loads(self.broadcast(found, phase))
        return result

    def fail_together(
        self,
        error: BaseException | None,
        phase: str,
        kind: type[RankFailedError] = SaveFailedError,
        least: Sequence[int] = (),
        sums: Sequence[int] = (),
    ) -> list[int]:
        """If no rank has an error, returns the minima of `least` over all ranks and the sums of `sums`, after one
        `agree`. Otherwise all ranks raise. The exchange can be used again.

        All ranks raise the error of the lowest failed rank, with the texts of all failed ranks in `failures`. An error
        of this package keeps its class, so that StorageFullError can be caught on every rank, and gets the attribute
        `rank`. Any other error becomes a `kind`. If an exception cannot be pickled, its text is sent. A rank whose
        error is not an `Exception` (KeyboardInterrupt) raises it unchanged. A single process raises an error of this
        package unchanged.
        """
        if self._links is None:
            if error is None:
                return [*least, *sums]
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise error
            text = f"{type(error).__name__}: {error}"
            # The new error takes over the traceback, so that it is printed once.
            raise kind(0, error, f"{phase}: {text}", {0: text}).with_traceback(error.__traceback__) from None
        fine, *agreed = self.agree([_NO_ERROR if error is None else 0, *least], phase, sums)
        if fine == _NO_ERROR:
            return agreed
        reports = self.gather(b"" if error is None else _report(error), phase)
        lowest = None
        if reports is not None:
            failed = {rank: pickle.loads(report) for rank, report in enumerate(reports) if report}
            first = min(failed)
            lowest = pickle.dumps((first, failed[first][1], {rank: text for rank, (text, _) in failed.items()}))
        first, pickled, failures = pickle.loads(self.broadcast(lowest, phase))
        if error is not None and not isinstance(error, Exception):
            raise error
        cause = pickle.loads(pickled) if pickled else failures[first]
        texts = [f"rank {rank}: {text}" for rank, text in list(failures.items())[:10]]
        message = "; ".join(texts) + (f"; and {len(failures) - 10} more ranks" if len(failures) > 10 else "")
        if isinstance(cause, CheckpointError):
            raise of_rank(cause, first, message, failures) from error
        origin = cause if isinstance(cause, BaseException) else None
        raise kind(first, cause, f"{phase}: {message}", failures) from error or origin


class _Group:
    """The connections of one process group: one place per purpose."""

    def __init__(self) -> None:
        self._places: dict[Purpose, _Place] = {}
        self._failures = 0  # of calls

    def links(self, group: dist.ProcessGroup, purpose: Purpose, timeout: float) -> Connections:
        self._count_failures()
        with _places_lock:
            place = self._places.setdefault(purpose, _Place(purpose, self._failures))
        late = place.missed()
        self._count_failures()
        if late is not None:
            raise late
        return place.links(group, timeout)

    def _count_failures(self) -> None:
        with _places_lock:
            for failed in self._places.values():
                for in_background in failed.new_failures():
                    # After a failed call, all places start a new generation, because other ranks may have been in any.
                    self._failures += not in_background
                    for place in [failed] if in_background else self._places.values():
                        place.failures += 1


class _Place:
    """Keeps the connections of one process group for one purpose. A new generation replaces a failed one."""

    def __init__(self, purpose: Purpose, failures: int) -> None:
        self.failures = failures  #: since the ranks connected last; guarded by `_places_lock`
        self._purpose: Purpose = purpose
        self._lock = threading.Lock()
        self._rendezvous: Rendezvous | None = None
        self._links: Connections | None = None
        self._not_connected: list[bool] = []  # failures to connect: whether in the background

    def new_failures(self) -> list[bool]:
        """Returns for each failure since the last call whether it was in the background."""
        found, self._not_connected = self._not_connected, []
        if self._links is not None and self._links.failure is not None:
            found.append(self._links.failure.in_background)
            self._links = None
        return found

    def missed(self) -> CheckpointError | None:
        """Checks for a failure of other ranks, unless this one has failed. Returns their error if they have timed out
        in a collective that this rank has not reached yet."""
        with self._lock:
            links, rendezvous = self._links, self._rendezvous
            if links is None or rendezvous is None or self.failures:
                return None
            with suppress(StoreGoneError):  # collectives need the store only if they fail
                links.failure = rendezvous.failure()
            failure = links.failure
            return None if failure is None or links.calls >= failure.calls else failure.error()

    def links(self, group: dist.ProcessGroup, timeout: float) -> Connections:
        with self._lock:
            if self._rendezvous is None:
                ranks = dist.get_process_group_ranks(group)
                digest = hashlib.blake2b(str(ranks).encode(), digest_size=8).hexdigest()
                name = f"{group.group_name}/{digest}"
                self._rendezvous = Rendezvous(self._purpose, name, dist.get_rank(group), len(ranks))
            before = self._links
            with _places_lock:
                failures, self.failures = self.failures, 0
            if before is not None and not failures:
                return before
            try:
                with observed_phase("connect", "to the store, then to other ranks"):
                    self._rendezvous = self._rendezvous.next(failures, timeout)
                    self._links = Connections(self._rendezvous, dist.get_process_group_ranks(group), timeout)
            except BaseException:
                self._not_connected.append(is_in_background())
                raise
            if before is not None:  # only now: no rank uses them any more
                before.close()
            return self._links


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Group] = weakref.WeakKeyDictionary()
_places_lock = threading.Lock()
# gloo's threads must have ended before the process's destructors run.
atexit.register(_groups.clear)


@contextmanager
def calling(name: str, process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """A context manager for a collective call. If it waits for long, a log line names the late ranks."""
    with Call(name, *place_in(process_group)).here():
        yield


def digest(data: bytes) -> int:
    """Returns a hash of bytes, for comparisons between ranks."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def _first_of_each(rows: list[list[bytes]]) -> list[bytes]:
    """Returns a mask per row: 1 where a value occurs for the first time, otherwise 0."""
    seen: set[bytes] = set()
    masks = []
    for row in rows:
        mask = bytearray()
        for value in row:
            mask.append(value not in seen)
            seen.add(value)
        masks.append(bytes(mask))
    return masks


def _first_swap(links: Connections) -> None:
    assert links.devices is not None
    device = links.devices.device
    device.begin()
    with device.queued():  # torch's allocator orders uses of memory within one stream only
        sent = torch.zeros(links.size, dtype=torch.uint8, device=device.device)
        received = torch.zeros_like(sent)
    links.devices.connect(torch.split(received, 1), torch.split(sent, 1))


def _count_shared(contents: Sequence[tuple[bytes, ...]]) -> int:
    """Returns how many first parts are the same object in all of the contents."""
    alike = takewhile(lambda parts: len({*map(id, parts)}) == 1, zip(*contents, strict=False))
    return sum(1 for _ in alike)


def _send(links: Connections, peers: Sequence[int], parts: Sequence[bytes]) -> None:
    lengths = torch.tensor([*map(len, parts)], dtype=torch.int64, device="cpu")
    payload = tensor_over(bytearray().join(parts))
    for peer in peers:
        links.send(peer, lengths)
        links.send(peer, payload, receipt=True)


def _receive(links: Connections, peer: int, count: int) -> list[bytes]:
    lengths = torch.empty(count, dtype=torch.int64, device="cpu")
    links.receive(peer, lengths)
    links.wait()
    buffer = bytearray(int(lengths.sum()))
    links.receive(peer, tensor_over(buffer), receipt=True)
    links.wait()
    return _parts_of(buffer, lengths)


def _parts_of(data: bytearray, lengths: torch.Tensor) -> list[bytes]:
    parts, at = [], 0
    with memoryview(data) as view:
        for length in lengths.tolist():
            parts.append(bytes(view[at : at + length]))
            at += length
    return parts


def _report(error: BaseException) -> bytes:
    """Packs an error for other ranks: its text, and its pickle if it can be pickled."""
    text = f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = b""
    return pickle.dumps((text, pickled))
