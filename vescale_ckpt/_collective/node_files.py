"""`NodeFiles` brings the data files that ranks need from folders of other nodes, for loads of a checkpoint in parts.

Each node has a folder of its own with a part of the checkpoint's files (`NodeLayout`). A file is brought whole, checked
against the checksums of the checkpoint when it arrives, and then is one more copy. A copy that cannot be read or is
damaged does not count from then on, and the next one is tried.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Sequence
from functools import partial

from .._checkpoint.check_records import check_file
from .._checkpoint.loadable import LoadableCheckpoint
from .._checkpoint.native.native_checkpoint import NativeCheckpoint
from .._ranks.exchange import Exchange
from .._ranks.node import node_of_this_process
from .._ranks.send_files import FileMessage, send_files
from ..errors import CheckpointError, CorruptCheckpointError, LoadFailedError

logger = logging.getLogger(__name__)

Places = dict[str, dict[int, int]]  # {file: {rank whose node has it: bytes}}


def leaders_of(exchange: Exchange, phase: str) -> list[int]:
    """Returns for each rank the lowest rank of its node. All ranks call it together."""
    nodes = exchange.share(str(node_of_this_process()).encode(), phase)
    first: dict[bytes, int] = {}
    return [first.setdefault(node, rank) for rank, node in enumerate(nodes)]


class NodeFiles:
    """The data files of one checkpoint in the folders of all nodes. Equal on all ranks.

    Args:
        leaders: for each rank the lowest rank of its node, which sends and receives for it.
        places: which leaders have a file, and its length there.
    """

    def __init__(self, leaders: Sequence[int], places: Places) -> None:
        self.leaders = leaders
        self.places = places

    def first_with(self, rank: int) -> set[str]:
        """The files that `rank` has, and no rank below it."""
        return {name for name, ranks in self.places.items() if min(ranks, default=None) == rank}

    def bring(
        self,
        exchange: Exchange,
        phase: str,
        checkpoint: LoadableCheckpoint,
        names: Collection[str],
        bytes_per_second: int = 0,
    ) -> None:
        """Brings the files of `names` to this rank's node. All ranks call it together, each with what it needs. Raises
        on all ranks, with the name of the file, if no sound copy is left, or if a node cannot store one.
        `bytes_per_second`: most that a node sends; 0: no limit."""
        own = self.leaders[exchange.rank]
        while True:
            lacking = sorted(name for name in names if own not in self.places.get(name, ()))
            if exchange.agree([], phase, [len(lacking)]) == [0]:
                return
            gathered = exchange.gather(json.dumps(lacking).encode(), phase)
            planned = exchange.together(partial(self._plan, gathered, checkpoint), phase, LoadFailedError)
            messages = [FileMessage(*message) for message in json.loads(exchange.broadcast(planned, phase))]
            failed = send_files(
                exchange, phase, messages, checkpoint.path,
                check=lambda path, name: check_file(checkpoint, name, path), bytes_per_second=bytes_per_second,
            )  # fmt: skip
            self._note(exchange, phase, messages, failed)

    def _plan(self, gathered: list[bytes] | None, checkpoint: LoadableCheckpoint) -> bytes | None:
        """Chooses who sends what to whom; each of those that have a file sends about as many bytes."""
        if gathered is None:
            return None
        lacking = zip(self.leaders, map(json.loads, gathered), strict=True)
        wanted = {(name, leader) for leader, names in lacking for name in names}
        sent: dict[int, int] = {}
        messages = []
        for name, target in sorted(wanted):
            places = self.places.get(name, {})
            if not places:
                raise CorruptCheckpointError(
                    f"{checkpoint.path}: no node has a sound copy of {name}", key=None, file=name
                )
            source = min(places, key=lambda rank: (sent.get(rank, 0), rank))
            sent[source] = sent.get(source, 0) + places[source]
            messages.append(FileMessage(name, places[source], source, target))
        return json.dumps(messages).encode()

    def _note(
        self,
        exchange: Exchange,
        phase: str,
        messages: Sequence[FileMessage],
        failed: dict[str, CheckpointError | OSError],
    ) -> None:
        """Notes on all ranks which files have arrived. Raises if one could not be stored where it was needed."""
        own_fault = next((error for error in failed.values() if not _is_of_the_copy(error)), None)
        exchange.fail_together(own_fault, phase, LoadFailedError)
        told = json.dumps({name: str(error) for name, error in failed.items()}).encode()
        lost = [*map(json.loads, exchange.share(told, phase))]
        for message in messages:
            if (reason := lost[message.target].get(message.name)) is None:
                self.places[message.name][message.target] = message.bytes
            elif self.places[message.name].pop(message.source, None) is not None and exchange.is_coordinator:
                logger.warning("the copy of %s with rank %d does not count: %s", message.name, message.source, reason)

    def check_own(self, exchange: Exchange, phase: str, path: str) -> bool:
        """Reads all files of the checkpoint that lie on this rank's node, after a load found damage. Damaged ones do
        not count any more. All ranks call it together. Returns whether one was found."""
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
    """Whether a file did not arrive because of the copy that was sent: it is damaged, or its rank cannot read it."""
    return isinstance(error, CorruptCheckpointError) or getattr(error, "rank", None) is not None
