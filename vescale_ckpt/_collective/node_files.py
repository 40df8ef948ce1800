"""`NodeFiles` copies the data files that ranks need from other nodes' folders, to load a checkpoint that is spread over
nodes.

Each node's folder holds a part of the checkpoint's files (`NodeLayout`). A file is copied whole, verified against the
checksums of the checkpoint on arrival, and then counts as one more copy. A copy that is damaged or cannot be read is
dropped from `NodeFiles.places`, and the next one is tried. Files that no node has may be in the durable place.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from .._checkpoint.check_records import check_file
from .._checkpoint.loadable import LoadableCheckpoint
from .._checkpoint.native.native_checkpoint import NativeCheckpoint
from .._ranks.exchange import Exchange
from .._ranks.node import node_of_this_process
from .._ranks.send_files import Check, FileError, FileMessage, send_files
from ..errors import CheckpointError, CorruptCheckpointError, LoadFailedError

logger = logging.getLogger(__name__)

Places = dict[str, dict[int, int]]  #: {file: {rank whose node has it, or `DURABLE`: bytes}}
DURABLE = -1  #: a rank in `Places`: the durable place


class DurableFiles(Protocol):
    """The files of a checkpoint in the durable place, which all nodes see."""

    def size_of(self, name: str) -> int | None:
        """Returns the length of a file in bytes; None if the file is not known to be there."""

    def fetch(self, name: str, check: Check) -> None:
        """Copies a file to this node. `check` verifies it, as in `send_files`. Raises `CheckpointError` with
        `rank=DURABLE` if the file cannot be read there, and other errors if it cannot be stored here."""


def leaders_of(exchange: Exchange, phase: str) -> list[int]:
    """Returns the lowest rank of each rank's node. Collective."""
    nodes = exchange.share(str(node_of_this_process()).encode(), phase)
    first: dict[bytes, int] = {}
    return [first.setdefault(node, rank) for rank, node in enumerate(nodes)]


class NodeFiles:
    """The data files of one checkpoint in the folders of all nodes. Equal on all ranks.

    Args:
        leaders: for each rank, the lowest rank of its node, which sends and receives files for the node.
        places: which leaders have each file, and its length there in bytes.
        durable: the source of files that no node has; None: no such source.
    """

    def __init__(self, leaders: Sequence[int], places: Places, durable: DurableFiles | None = None) -> None:
        self.leaders = leaders
        self.places = places
        self._durable = durable
        self._not_durable: set[str] = set()  # files that could not be read from it

    def first_with(self, rank: int) -> set[str]:
        """The files for which `rank` is the lowest rank that has them."""
        return {name for name, ranks in self.places.items() if min(ranks, default=None) == rank}

    def bring_lost(self, exchange: Exchange, phase: str, path: str) -> bool:
        """Copies to the coordinator's node, from the durable place, the files that no node has. Collective. Returns
        whether all were found."""
        checkpoint = exchange.together(partial(NativeCheckpoint.by_metadata, path, None), phase, LoadFailedError)
        lost = [name for name, ranks in self.places.items() if ranks.keys() <= {DURABLE}]
        try:
            self.bring(exchange, phase, checkpoint, lost if exchange.is_coordinator else ())
        except CorruptCheckpointError:
            return False
        return True

    def bring(
        self,
        exchange: Exchange,
        phase: str,
        checkpoint: LoadableCheckpoint,
        names: Collection[str],
        bytes_per_second: int = 0,
    ) -> None:
        """Copies the files `names` to this rank's node. Collective; each rank passes the files that it needs. Raises on
        all ranks, with the name of the file, if no undamaged copy exists, or if a node cannot store one.
        `bytes_per_second`: send limit per node; 0: no limit."""
        own = self.leaders[exchange.rank]
        while True:
            lacking = sorted(name for name in names if own not in self.places.get(name, ()))
            if exchange.agree([], phase, [len(lacking)]) == [0]:
                return
            gathered = exchange.gather(json.dumps(lacking).encode(), phase)
            plan = partial(self._plan, gathered, checkpoint)
            planned, is_all = exchange.from_coordinator(plan, phase, LoadFailedError)
            messages = [FileMessage(*message) for message in planned]

            def check(path: str, name: str) -> None:
                check_file(checkpoint, name, path)

            from_nodes = [message for message in messages if message.source != DURABLE]
            failed = send_files(
                exchange, phase, from_nodes, checkpoint.path, check=check, bytes_per_second=bytes_per_second
            )
            failed |= self._fetch(exchange, phase, messages, check)
            if self._note(exchange, phase, messages, failed) and is_all:
                return

    def _fetch(
        self, exchange: Exchange, phase: str, messages: Sequence[FileMessage], check: Check
    ) -> dict[str, FileError]:
        """Copies files from the durable place; the timeout applies to each file. Returns this rank's errors by file."""
        failed: dict[str, FileError] = {}
        durable = [message for message in messages if message.source == DURABLE]
        mine = [message.name for message in durable if message.target == exchange.rank]

        def fetch() -> None:
            if mine:
                assert self._durable is not None
                try:
                    self._durable.fetch(mine[-1], check)
                except (CheckpointError, OSError) as error:
                    failed[mine[-1]] = error
                mine.pop()

        for _ in range(max(Counter(message.target for message in durable).values(), default=0)):
            exchange.together(fetch, phase)
        return failed

    def _plan(self, gathered: list[bytes] | None, checkpoint: LoadableCheckpoint) -> tuple[list[FileMessage], bool]:
        """Chooses a source for each transfer. Returns the transfers, and whether they complete the request: only one
        node fetches a file from the durable place, and the others receive it from that node in the next round."""
        assert gathered is not None
        lacking = zip(self.leaders, map(json.loads, gathered), strict=True)
        wanted = {(name, leader) for leader, names in lacking for name in names}
        sources: Places = {}
        now = set()
        for name, target in sorted(wanted):
            places = {rank: size for rank, size in self.places.get(name, {}).items() if rank != DURABLE}
            if not places and self._durable is not None and name not in self._not_durable:
                if name in sources:
                    continue
                if (size := self._durable.size_of(name)) is not None:
                    places = {DURABLE: size}
            if not places:
                raise CorruptCheckpointError(
                    f"{checkpoint.path}: no node has a sound copy of {name}", key=None, file=name
                )
            sources[name] = places
            now.add((name, target))
        return [*messages_to_send(sources, now)], now == wanted

    def _note(
        self, exchange: Exchange, phase: str, messages: Sequence[FileMessage], failed: dict[str, FileError]
    ) -> bool:
        """Records on all ranks which files have arrived. Returns whether all have. Raises if one could not be stored on
        its target node."""
        own_fault = next((error for error in failed.values() if not _is_of_the_copy(error)), None)
        (failures,) = exchange.fail_together(own_fault, phase, LoadFailedError, sums=[len(failed)])
        lost: list[dict[str, str]] = [{}] * exchange.size
        if failures:
            told = json.dumps({name: str(error) for name, error in failed.items()}).encode()
            lost = [*map(json.loads, exchange.share(told, phase))]
        for message in messages:
            if (reason := lost[message.target].get(message.name)) is None:
                self.places[message.name][message.target] = message.bytes
                continue
            if message.source == DURABLE:
                self._not_durable.add(message.name)
            is_new = self.places[message.name].pop(message.source, None) is not None or message.source == DURABLE
            if is_new and exchange.is_coordinator:
                where = "in the durable place" if message.source == DURABLE else f"with rank {message.source}"
                logger.warning("the copy of %s %s does not count: %s", message.name, where, reason)
        return not failures

    def check_own(self, exchange: Exchange, phase: str, path: str) -> bool:
        """Verifies all files of the checkpoint in this node's folder, after a load found damage, and drops damaged ones
        from `places`. Collective. Returns whether any was damaged, on any node."""
        damaged: list[str] = []
        checkpoint = exchange.together(partial(NativeCheckpoint.by_metadata, path, None), phase, LoadFailedError)
        if self.leaders[exchange.rank] == exchange.rank:
            for name in sorted(name for name, places in self.places.items() if exchange.rank in places):
                try:
                    check_file(checkpoint, name, os.path.join(path, name))
                except (CheckpointError, OSError) as error:
                    logger.warning("the copy of %s on this node does not count: %s", name, error)
                    damaged.append(name)
        of_all = [*map(json.loads, exchange.share(json.dumps(damaged).encode(), phase))]
        for rank, names in enumerate(of_all):
            for name in names:
                self.places[name].pop(rank, None)
        return any(of_all)


def _is_of_the_copy(error: BaseException) -> bool:
    """Whether the source of a transfer caused the error: its copy is damaged, or its rank cannot read it."""
    return isinstance(error, CorruptCheckpointError) or getattr(error, "rank", None) is not None


def copies_of_each(places: Places, leaders: Sequence[int], copies: int) -> dict[int, set[str]]:
    """Returns {leader: files it receives}, so that `copies` nodes in addition to the first holder have each file.

    The nodes form a ring. A file is copied to the nodes that follow its first holder.
    """
    ring = sorted(leaders)
    position = {leader: at for at, leader in enumerate(ring)}
    names: dict[frozenset[int], list[str]] = {}  # files with the same holders go to the same nodes
    for name, ranks in places.items():
        names.setdefault(frozenset(ranks), []).append(name)
    wanted: dict[int, set[str]] = {}
    for holders, of_holders in names.items():
        first = position[min(holders)]
        behind = (ring[(first + step) % len(ring)] for step in range(1, len(ring)))
        left = [leader for leader in behind if leader not in holders]
        for chosen in left[: max(0, copies + 1 - len(holders))]:
            wanted.setdefault(chosen, set()).update(of_holders)
    return wanted


def messages_to_send(places: Places, wanted: Iterable[tuple[str, int]]) -> Iterator[FileMessage]:
    """Yields one message per (file, receiving rank). Holders of files send about equally many bytes."""
    sent: dict[int, int] = {}
    for name, target in sorted(wanted):
        source = min(places[name], key=lambda rank: (sent.get(rank, 0), rank))
        sent[source] = sent.get(source, 0) + places[name][source]
        yield FileMessage(name, places[name][source], source, target)
