"""Checks that all ranks of a save see the same directory, before they write anything.

A path may exist on every machine without being shared. Then each machine would hold a part of the checkpoint. So the
coordinator makes a file with a random name in the directory, and the other ranks look for it; in object stores only at
the first save to a bucket, because each look is a request. Where each node has its own directory, the ranks of a node
compare its device and inode numbers.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import time
from collections.abc import Sequence

from .._engine import _C
from .._storage.open_storage import stat_of, storage_at
from .._storage.storage import MARKER_PREFIX
from ..errors import CheckpointError
from .node import node_of_this_process

NO_NUMBER = 1 << 62  # from ranks without a marker file, so that the minimum over all ranks is the coordinator's number
_VISIBLE_SECONDS = 2.0  # a network file system shows a new file to all machines within this time
_IDENTITY = struct.Struct("<qQQ")


class SeparateDirectoriesError(CheckpointError):
    """Ranks that should write to the same directory do not."""

    path: str
    ranks: list[int]  #: these ranks do not see the files of the others


def separate_directories(path: str, ranks: Sequence[int]) -> SeparateDirectoriesError:
    """Returns the error for `ranks` that do not see the coordinator's files in `path`."""
    shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    who = f"rank{'s' if len(ranks) != 1 else ''} {shown}"
    text = (
        f"{path} is not one directory: {who} would write to another than rank 0, which coordinates. Save to a "
        "directory that all nodes share (an absolute path, mounted alike on all nodes and in all containers); or, for "
        "disks of each node, with vescale_ckpt.CheckpointManager(directory, tier=vescale_ckpt.Tier(local=…))"
    )
    return SeparateDirectoriesError(text, path=path, ranks=[*ranks])


class MarkerFile:
    """A file that the coordinator makes in the directory, and that the other ranks look for.

    `kept`: that of the ranks' exchange, which notes object stores that were found to be one for all ranks.
    """

    def __init__(self, directory: str, kept: dict[str, object] | None = None) -> None:
        self.directory = directory
        self.number = NO_NUMBER  #: a part of the file's name, after this rank has made the file
        self._kept = {} if kept is None else kept

    def make(self) -> None:
        """Raises OSError."""
        storage = storage_at(self.directory)
        if storage.store not in self._kept:
            number = secrets.randbelow(NO_NUMBER)
            storage.make_marker(_name(number))
            self.number = number

    def look(self, number: int, rank: int) -> None:
        """Raises SeparateDirectoriesError if the coordinator's marker file of that number is not in the directory, and
        another `CheckpointError` if a store does not answer."""
        if number == NO_NUMBER or number == self.number:
            return
        directory = storage_at(self.directory)
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while not directory.has(_name(number)):
            if time.monotonic() >= deadline:
                raise separate_directories(self.directory, [rank])
            time.sleep(0.05)

    def note_shared(self) -> None:
        """Notes that all ranks have found the file."""
        if (store := storage_at(self.directory).store) is not None:
            self._kept[store] = True

    def remove(self) -> None:
        """Removes the file. Idempotent; raises nothing, because a file that remains is an orphan."""
        if self.number != NO_NUMBER:
            with contextlib.suppress(OSError, CheckpointError, _C.EngineError):
                storage_at(self.directory).remove(_name(self.number))


def _name(number: int) -> str:
    return f"{MARKER_PREFIX}{number:016x}"


def identity(directory: str) -> bytes:
    """Packs the number of this rank's node, and the directory's device and inode. Raises OSError."""
    device, inode, *_ = stat_of(directory).identity
    return _IDENTITY.pack(node_of_this_process(), device, inode)


def check_nodes(directory: str, identities: Sequence[bytes]) -> None:
    """Raises SeparateDirectoriesError if ranks of one node write to several directories. `identities`: by rank."""
    first: dict[int, tuple[int, bytes]] = {}
    for rank, of_rank in enumerate(identities):
        node, _, _ = _IDENTITY.unpack(of_rank)
        other, its = first.setdefault(node, (rank, of_rank))
        if its != of_rank:
            raise SeparateDirectoriesError(
                f"{directory} is not one directory: ranks {other} and {rank}, which run on one node, would write to "
                "different ones, and one rank of a node commits for all of it. Give the ranks "
                "of a node one directory (an absolute path, mounted alike in all containers); or, where containers are "
                "to be nodes of their own, set VESCALE_CKPT_NODE to another whole number in each",
                path=directory,
                ranks=[rank],
            )
