"""The proof, before the first byte of a save, that its ranks write to one directory.

A path that machines do not share is there on all of them, and each would hold a part of the checkpoint. So the
coordinator leaves a file in the directory, of a name that nobody can have looked for before, and the others look for
it. Where each node is meant to have a directory of its own, those of a node compare what their kernel says it is.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import time
from collections.abc import Sequence

from .._engine import _C
from .._storage import place
from .._storage.directory import directory_at, stat_of
from .._storage.place import PLACE_PREFIX
from ..errors import CheckpointError
from .node import node_of_this_process

NO_NUMBER = 1 << 62  # what ranks say that have left nothing: the least of all is the coordinator's
_PATIENCE = 2.0  # seconds after which what a network file system does not show is not there
_IDENTITY = struct.Struct("<qQQ")


class SeparateDirectoriesError(CheckpointError):
    """Ranks that should write to one directory do not."""

    path: str
    ranks: list[int]  #: that do not see what the others see

    def __init__(self, path: str, ranks: Sequence[int], message: str) -> None:
        super().__init__(message, path=path, ranks=[*ranks])


def separate(path: str, ranks: Sequence[int]) -> SeparateDirectoriesError:
    """Of ranks that do not see what the coordinator has written to `path`."""
    shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    who = f"rank{'s' if len(ranks) != 1 else ''} {shown}"
    text = (
        f"{path} is not one directory: {who} would write to another than rank 0, which coordinates. Save to a "
        "directory that all nodes share (an absolute path, mounted alike on all nodes and in all containers); or, for "
        "each node to keep a whole checkpoint on a disk of its own, with SavePlanner(placement='local')"
    )
    return SeparateDirectoriesError(path, ranks, text)


class PlaceToken:
    """What the coordinator leaves in the directory, while the others look for it."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.number = NO_NUMBER  #: tells it from all others, where this rank has left it
        self._name: str | None = None

    def leave(self) -> None:
        """Raises OSError."""
        number = secrets.randbelow(NO_NUMBER)
        place.leave(self.directory, _name(number))
        self.number, self._name = number, _name(number)

    def look(self, number: int, rank: int) -> None:
        """Raises SeparateDirectoriesError if what the coordinator has left under that number is not there."""
        if number == NO_NUMBER or number == self.number:
            return
        deadline = time.monotonic() + _PATIENCE
        while not place.is_seen(self.directory, _name(number)):
            if time.monotonic() >= deadline:
                raise separate(self.directory, [rank])
            time.sleep(0.05)

    def take_away(self) -> None:
        """May be called again."""
        if self._name is not None:
            with contextlib.suppress(_C.EngineError):
                directory_at(self.directory).remove(self._name)
        self._name = None


def _name(number: int) -> str:
    return f"{PLACE_PREFIX}{number:016x}"


def identity(directory: str) -> bytes:
    """This rank's node, and which directory of it this is. Raises OSError."""
    device, inode, *_ = stat_of(directory).identity
    return _IDENTITY.pack(node_of_this_process(), device, inode)


def check_nodes(directory: str, identities: Sequence[bytes]) -> None:
    """Raises SeparateDirectoriesError if ranks of one node write to several directories; `identities` by rank."""
    first: dict[int, tuple[int, bytes]] = {}
    for rank, of_rank in enumerate(identities):
        node, _, _ = _IDENTITY.unpack(of_rank)
        other, its = first.setdefault(node, (rank, of_rank))
        if its != of_rank:
            raise SeparateDirectoriesError(
                directory,
                [rank],
                f"{directory} is not one directory: ranks {other} and {rank}, which run on one node, would write to "
                "different ones, and with placement='local' one rank of a node commits for all of it. Give the ranks "
                "of a node one directory (an absolute path, mounted alike in all containers); or, where containers are "
                "to be nodes of their own, set VESCALE_CKPT_NODE to another whole number in each",
            )
