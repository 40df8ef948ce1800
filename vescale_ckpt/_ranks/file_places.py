"""Chooses which nodes get copies of which files, and who sends them, where each node has a folder of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from .send_files import FileMessage

Places = dict[str, dict[int, int]]  # {file: {rank whose node has it, or `DURABLE` of a restore: bytes}}


def copies_of_each(places: Places, leaders: Sequence[int], domains: Sequence[str], copies: int) -> dict[int, set[str]]:
    """{leader: the files that it gets}, so that `copies` nodes beside one have each file.

    The nodes form a ring in which failure domains alternate. A file goes to the nodes behind the first one that has it,
    those of other failure domains first. `domains`: of each rank; empty: it is not known, and each node is one.
    """
    of_domains: dict[str, list[int]] = {}
    for leader in sorted(leaders):
        of_domains.setdefault(domains[leader] or f"node {leader}", []).append(leader)
    domain_of = {leader: domain for domain, of_domain in of_domains.items() for leader in of_domain}
    ring = [leader for round_ in zip_longest(*of_domains.values()) for leader in round_ if leader is not None]
    position = {leader: at for at, leader in enumerate(ring)}
    names: dict[frozenset[int], list[str]] = {}  # files that lie on the same nodes go to the same
    for name, ranks in places.items():
        names.setdefault(frozenset(ranks), []).append(name)
    wanted: dict[int, set[str]] = {}
    for holders, of_holders in names.items():
        have, held_by = set(holders), {domain_of[leader] for leader in holders}
        first = position[min(holders)]
        while len(have) < min(copies + 1, len(ring)):
            behind = (ring[(first + step) % len(ring)] for step in range(1, len(ring)))
            left = (leader for leader in behind if leader not in have)
            if len(held_by) < len(of_domains):
                left = (leader for leader in left if domain_of[leader] not in held_by)
            chosen = next(left)
            wanted.setdefault(chosen, set()).update(of_holders)
            have.add(chosen)
            held_by.add(domain_of[chosen])
    return wanted


def messages_to_send(places: Places, wanted: Iterable[tuple[str, int]]) -> Iterator[FileMessage]:
    """Yields a message for each (file, rank that gets it). Those that have a file send about equally many bytes."""
    sent: dict[int, int] = {}
    for name, target in sorted(wanted):
        source = min(places[name], key=lambda rank: (sent.get(rank, 0), rank))
        sent[source] = sent.get(source, 0) + places[name][source]
        yield FileMessage(name, places[name][source], source, target)
