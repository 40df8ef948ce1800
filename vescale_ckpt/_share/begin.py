"""Sets up a load in which ranks read for each other: all ranks agree to share reads, or none does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from .. import settings
from .._plan.read_plan import PackedReads
from .._ranks import nccl
from .._ranks.exchange import Exchange
from .._ranks.node import node_of_this_process
from ..errors import LoadFailedError
from .rounds import RoutedRead
from .routes import Reads, routes_of_all


@dataclass(frozen=True)
class SharedReading:
    """The ranks of one load. `broadcast`: share in any case, or where it pays by the rule of `_pays`."""

    exchange: Exchange
    broadcast: Literal["auto", True]
    phase: str

    def begin(
        self, reads_of: Callable[[], PackedReads | None], save_of: Callable[[], tuple[str, int]], verify: bool
    ) -> tuple[PackedReads | None, RoutedRead | None]:
        """What `reads_of` says that this rank needs (None: nothing that others may read), and who reads it; None if
        each rank reads all of its own.

        `save_of` names the save that this rank loads, and its bytes: ranks that look at different ones share nothing.
        Raises on all ranks if it fails on one.
        """
        reads, told, device, error, wanted, stored_bytes, node = None, None, None, None, 0, 0, 0
        try:
            reads = reads_of()
            save, stored_bytes = save_of()
            told = Reads.of(None, b"", "") if reads is None else Reads.of(reads.plan, reads.reads, save)
            if reads is not None:
                wanted = reads.bytes_read_alone(verify)
            device = nccl.device_for([] if reads is None else reads.description.tensors)
            node = -1 if settings.value("broadcast_scope") == "node" else node_of_this_process()
        except Exception as raised:
            error = raised
        ready, on_devices, least_stored, not_most_wanted, least_node, not_most_node = self.exchange.agree(
            [int(error is None), int(self.exchange.may_swap_on(device)), stored_bytes, ~wanted, node, ~node],
            f"{self.phase}: begin",
        )
        if not ready:
            self.exchange.fail_together(error, self.phase, LoadFailedError)
        assert told is not None
        devices = self.exchange.device_group(device, self.phase) if device is not None and on_devices else None
        one_node = least_node == ~not_most_node

        def pays(alone_bytes: float, once_bytes: float) -> bool:
            return self.broadcast is True or _pays(one_node, devices is not None, alone_bytes, once_bytes)

        if not pays(math.inf, 1):
            return reads, None
        # If all want about as much, and together what there is, they hardly want the same: what each wants, which is
        # much for thousands of ranks, is then not even asked. Objects, which all want, are still read once.
        most_alone = ~not_most_wanted * self.exchange.size
        own_only = most_alone >= 0.95 * least_stored and not pays(most_alone, least_stored)
        told = replace(told, rows=b"") if own_only else told
        routes = routes_of_all(self.exchange, told, verify, self.phase, devices is not None)
        own_only = own_only or not pays(routes.alone_bytes, routes.once_bytes)
        return reads, RoutedRead(self.exchange, routes, self.phase, devices, own_only)


def _pays(one_node: bool, on_devices: bool, alone_bytes: float, once_bytes: float) -> bool:
    """The rule of `broadcast_checkpoint="auto"`, equal on all ranks: whether ranks read for each other.

    `alone_bytes`: what all ranks together would read if each reads its own; `once_bytes`: the same with each byte once.
    Measured in docs/tuning.md.
    """
    # Ranks of a node share its page cache: the storage gives each byte once whoever reads it, and sending it from rank
    # to rank costs more than copying it from the cache. On devices it saves the copies from the host.
    if one_node and not on_devices:
        return False
    # Less is not worth the messages.
    return alone_bytes >= 1.3 * once_bytes
