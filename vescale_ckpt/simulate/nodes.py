"""Simulates a job whose nodes each have a folder: what they write and send, and what a lost node costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .._engine import _C
from .._ranks.file_places import Places, copies_of_each, messages_to_send
from .models import Entry
from .parallelism import Parallelism, SimulatedState
from .simulation import gather, metadata_files, planned, written

_ALL_NAMED = 1.01  # the metadata names all files if they have at most so many times the bytes of the state


@dataclass(frozen=True)
class NodesSimulation:
    """The figures of a simulated save, and of a restore after the loss of one node. Sizes are in bytes, of contents."""

    ranks: int
    nodes: int
    stored: int  #: each tensor once
    written_most: int  #: most that a node writes of what its ranks hold; one in its place gets as much
    sent_most: int  #: most that a node sends, so that others have copies
    received_most: int
    held_most: int  #: most that a node has, with copies
    losses_survived: int  #: any so many nodes may be lost
    domain_survived: bool  #: whether any one failure domain may be lost, as a rack; a node, if none are known
    pairs_survived: float  #: share of the pairs of nodes that may be lost together
    restore_seconds: float | None  #: from the nodes, at least. None: not possible, or no bandwidth is given
    durable_restore_seconds: float | None  #: from the durable place, at least. None: no bandwidth is given


def simulate_nodes(
    entries: Sequence[Entry],
    parallelism: Parallelism,
    copies: int,
    node_size: int = 8,
    domain_nodes: int | None = None,
    storage: float = math.inf,
    link: float = math.inf,
    disk: float = math.inf,
) -> NodesSimulation:
    """Plans a save of `entries` by ranks of which `node_size` share a node, and `domain_nodes` nodes behind one another
    a failure domain. In bytes a second: what the durable place gives to all nodes, each node's link each way, and what
    a node reads from its folder."""
    ranks, leaders = parallelism.ranks, range(0, parallelism.ranks, node_size)
    stored = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries if entry.dtype)
    places = _places(entries, parallelism, node_size, stored)
    domains = [f"{rank // (node_size * domain_nodes)}" if domain_nodes else "" for rank in range(ranks)]
    own, sent, received = Counter[int](), Counter[int](), Counter[int]()
    for sizes in places.values():
        own.update(sizes)
    wanted = copies_of_each(places, leaders, domains, copies)
    messages = [*messages_to_send(places, ((name, leader) for leader, names in wanted.items() for name in names))]
    for message in messages:
        sent[message.source] += message.bytes
        received[message.target] += message.bytes
        places[message.name][message.target] = message.bytes
    holders = {frozenset(sizes) for sizes in places.values()}
    alone = frozenset[int]().union(*(one for one in holders if len(one) == 1))
    pairs, survived = math.comb(len(leaders), 2), min(map(len, holders), default=1) - 1
    lost_pairs = pairs - math.comb(len(leaders) - len(alone), 2)
    lost_pairs += sum(len(one) == 2 and not one & alone for one in holders)
    part = max(own.values(), default=0)
    return NodesSimulation(
        ranks=ranks,
        nodes=len(leaders),
        stored=stored,
        written_most=part,
        sent_most=max(sent.values(), default=0),
        received_most=max(received.values(), default=0),
        held_most=max((own + received).values(), default=0),
        losses_survived=survived,
        domain_survived=all(len({domains[leader] or leader for leader in one}) > 1 for one in holders),
        pairs_survived=1 - lost_pairs / pairs if pairs else 0.0,
        restore_seconds=(part / link + part / disk or None) if survived else None,
        durable_restore_seconds=max(stored / storage, part / link) or None,
    )


def _places(entries: Sequence[Entry], parallelism: Parallelism, node_size: int, stored: int) -> Places:
    """The files that nodes write. As in `NodeLayout` those of equal contents have one name, and others go if the
    metadata does not name them."""
    state = SimulatedState(entries, parallelism)
    inventories, _ = gather(state, node_size)
    plan, parts = planned(inventories, "local")
    by_rank, places, first = plan.bytes_by_rank(), Places(), dict[object, str]()
    seen: Counter[object] = Counter()
    for rank, (inventory, part) in enumerate(zip(inventories, parts, strict=True)):
        node, same = rank // node_size, (inventory[1:], part)
        seen[node, same] += 1
        name = first.setdefault((seen[node, same], same), f"__{rank}_00000000.distcp")
        if by_rank[rank]:
            places.setdefault(name, {})[node * node_size] = by_rank[rank]
    if sum(max(sizes.values()) for sizes in places.values()) > _ALL_NAMED * stored:
        index = metadata_files(plan, written(state, parts))[1]
        places = {name: places[name] for name in _C.Index.from_bytes(index).files}
    return places
