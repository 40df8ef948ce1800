"""Sets up a broadcast load: either all ranks read for each other, or none does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from .._plan.read_plan import Reads
from .._ranks import nccl
from .._ranks.exchange import Exchange
from .._ranks.node import node_of_this_process
from .._storage.open_storage import storage_at
from ..errors import LoadFailedError
from .routed_read import RoutedRead
from .routes import Needs, routes_of_all


@dataclass(frozen=True)
class BroadcastLoad:
    """Options of a load whose ranks may read for each other. `broadcast`: True always; "auto" by the rule of `pays`.
    `path`: of the checkpoint."""

    exchange: Exchange
    broadcast: Literal["auto", True]
    phase: str
    path: str

    def begin(
        self, needs_of: Callable[[], tuple[Reads | None, str, int]], verify: bool
    ) -> tuple[Reads | None, RoutedRead | None]:
        """Agrees on which rank reads what; collective.

        `needs_of` returns what this rank needs (None: nothing that other ranks may read), the id of the save that it
        loads, and how many bytes that save stores. Ranks that load different saves share nothing. Returns this rank's
        needs, and the routes, or None if each rank reads all that it needs itself. Raises on all ranks if any fails.
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
        # Ranks of a node share its page cache, which keeps no object store's bytes.
        one_cache = least_node == ~not_most_node and not storage_at(self.path).by_requests

        def pays_here(alone_bytes: float, once_bytes: float) -> bool:
            return self.broadcast is True or pays(one_cache, devices is not None, alone_bytes, once_bytes)

        if not pays_here(math.inf, 1):
            self.exchange.end_device_group(self.phase)
            return reads, None
        # If all ranks need about equally many bytes, and together about the stored bytes, they hardly share any. Then
        # the tables of needs, which are large with thousands of ranks, are not gathered. Objects are still read once.
        most_alone = ~not_most_wanted * self.exchange.size
        own_only = reads_own_only(most_alone, least_stored, pays_here)
        needs = replace(needs, rows=b"") if own_only else needs
        routes = routes_of_all(self.exchange, needs, verify, self.phase, devices is not None)
        own_only = own_only or not pays_here(routes.alone_bytes, routes.once_bytes)
        return reads, RoutedRead(self.exchange, routes, self.phase, devices, own_only)


def reads_own_only(most_alone: float, stored: float, pays_here: Callable[[float, float], bool]) -> bool:
    """Whether all ranks need about equally many bytes (`most_alone` bounds their sum), and together about the stored
    bytes, as with shards: then each rank reads its own, and the tables of needs are not gathered."""
    return most_alone >= 0.95 * stored and not pays_here(most_alone, stored)


def pays(one_cache: bool, on_devices: bool, alone_bytes: float, once_bytes: float) -> bool:
    """Decides `broadcast_checkpoint="auto"`, equally on all ranks: whether ranks read for each other.

    `one_cache`: whether all ranks read through one page cache. `alone_bytes`: what all ranks read in sum if each reads
    what it needs; `once_bytes`: the same with each byte counted once. Measured in docs/tuning.md.
    """
    # With one page cache the storage reads each byte once. A message between ranks costs more than a copy from the
    # cache, unless the targets lie on devices: there it replaces a copy from the host.
    if one_cache and not on_devices:
        return False
    # Below this ratio the messages cost more than the reads they replace.
    return alone_bytes >= 1.3 * once_bytes
