"""Chooses which nodes get copies of which files, and who sends them, where each node has a folder of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .send_files import FileMessage

Places = dict[str, dict[int, int]]  # {file: {rank whose node has it, or `DURABLE` of a restore: bytes}}


def copies_of_each(places: Places, leaders: Sequence[int], copies: int) -> dict[int, set[str]]:
    """{leader: the files that it gets}, so that `copies` nodes beside one have each file.

    The nodes form a ring. A file goes to the nodes behind the first one that has it.
    """
    ring = sorted(leaders)
    position = {leader: at for at, leader in enumerate(ring)}
    names: dict[frozenset[int], list[str]] = {}  # files that lie on the same nodes go to the same
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
    """Yields a message for each (file, rank that gets it). Those that have a file send about equally many bytes."""
    sent: dict[int, int] = {}
    for name, target in sorted(wanted):
        source = min(places[name], key=lambda rank: (sent.get(rank, 0), rank))
        sent[source] = sent.get(source, 0) + places[name][source]
        yield FileMessage(name, places[name][source], source, target)
