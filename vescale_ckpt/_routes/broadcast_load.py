"""Sets up a broadcast load: all ranks agree to read for each other, or none does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from .._plan.read_plan import Reads
from .._ranks import nccl
from .._ranks.exchange import Exchange
from .._ranks.node import node_of_this_process
from ..errors import LoadFailedError
from .rounds import RoutedRead
from .routes import Needs, routes_of_all


@dataclass(frozen=True)
class BroadcastLoad:
    """The wish of one load that ranks read for each other. `broadcast`: True always; "auto" by the rule of `pays`.
    `through_cache`: whether ranks of a node read each byte once anyway, because the node keeps it; no object store's
    bytes are kept."""

    exchange: Exchange
    broadcast: Literal["auto", True]
    phase: str
    through_cache: bool = True

    def begin(
        self, needs_of: Callable[[], tuple[Reads | None, str, int]], verify: bool
    ) -> tuple[Reads | None, RoutedRead | None]:
        """Agrees with all ranks on who reads what.

        `needs_of` returns what this rank needs (None: nothing that other ranks may read), the id of the save that it
        loads, and the bytes that are stored of that: ranks that load different saves share nothing. Returns what this
        rank needs, and the routes; None in their place if each rank reads all that it needs itself. Raises on all ranks
        if it fails on one.
        """
        reads, needs, device, error, wanted, stored_bytes, node = None, None, None, None, 0, 0, 0
        try:
            reads, save, stored_bytes = needs_of()
            needs = Needs.of(reads, save)
            if reads is not None:
                wanted = reads.bytes_read_alone(verify)
            device = nccl.device_for([] if reads is None else reads.state.tensors)
            node = node_of_this_process()
        except Exception as raised:
            error = raised
        ready, on_devices, least_stored, not_most_wanted, least_node, not_most_node = self.exchange.agree(
            [int(error is None), int(self.exchange.may_swap_on(device)), stored_bytes, ~wanted, node, ~node],
            f"{self.phase}: begin",
        )
        if not ready:
            self.exchange.fail_together(error, self.phase, LoadFailedError)
        assert needs is not None
        devices = self.exchange.device_group(device, self.phase) if device is not None and on_devices else None
        one_node = least_node == ~not_most_node and self.through_cache

        def pays_here(alone_bytes: float, once_bytes: float) -> bool:
            return self.broadcast is True or pays(one_node, devices is not None, alone_bytes, once_bytes)

        if not pays_here(math.inf, 1):
            self.exchange.end_device_group(self.phase)
            return reads, None
        # Ranks that all need about as many bytes, in sum about the stored bytes, hardly need the same bytes. Then the
        # tables of needs, which are large on thousands of ranks, are not gathered. Objects are still read once.
        most_alone = ~not_most_wanted * self.exchange.size
        own_only = reads_own_only(most_alone, least_stored, pays_here)
        needs = replace(needs, rows=b"") if own_only else needs
        routes = routes_of_all(self.exchange, needs, verify, self.phase, devices is not None)
        own_only = own_only or not pays_here(routes.alone_bytes, routes.once_bytes)
        return reads, RoutedRead(self.exchange, routes, self.phase, devices, own_only)


def reads_own_only(most_alone: float, stored: float, pays_here: Callable[[float, float], bool]) -> bool:
    """Whether all ranks need about as many bytes (`most_alone` in sum, at most), in sum about the stored bytes, as
    shards do: then each reads its own, and the tables of needs are not gathered."""
    return most_alone >= 0.95 * stored and not pays_here(most_alone, stored)


def pays(one_node: bool, on_devices: bool, alone_bytes: float, once_bytes: float) -> bool:
    """Decides `broadcast_checkpoint="auto"`, equally on all ranks: whether ranks read for each other.

    `alone_bytes`: what all ranks read in sum if each reads what it needs; `once_bytes`: the same with each byte counted
    once. Measured in docs/tuning.md.
    """
    # Ranks of a node share its page cache: the storage reads each byte once. A message between ranks costs more than a
    # copy from the cache, unless the targets lie on devices: there it replaces a copy from the host.
    if one_node and not on_devices:
        return False
    # Below this ratio the messages cost more than the reads they replace.
    return alone_bytes >= 1.3 * once_bytes
