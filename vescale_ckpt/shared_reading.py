"""Ranks that read for each other: what it takes to begin, taken by all of them or by none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from . import device_group
from .errors import LoadFailedError
from .exchange import Exchange
from .packed import PackedReads
from .routed_read import LEAST_GAIN, RoutedRead
from .routes import Reads, routes_of_all


@dataclass(frozen=True)
class SharedReading:
    """The ranks of one load. `way`: whether to share in any case, or if it turns out to be faster."""

    exchange: Exchange
    way: Literal["auto", True]
    phase: str

    def begin(
        self, reads_of: Callable[[], PackedReads | None], save_of: Callable[[], tuple[str, int]], verify: bool
    ) -> tuple[PackedReads | None, RoutedRead]:
        """What `reads_of` says that this rank needs (None: nothing that others may read), and who reads it.

        `save_of` names the save that this rank loads, and its bytes: ranks that look at different ones share nothing.
        Raises on all ranks if it fails on one.
        """
        reads, told, device, error, wanted, stored_bytes = None, None, None, None, 0, 0
        try:
            reads = reads_of()
            save, stored_bytes = save_of()
            told = Reads.of(None, b"", "") if reads is None else Reads.of(reads.plan, reads.reads, save)
            if reads is not None:
                wanted = reads.bytes_read_alone(verify)
            device = device_group.device_for([] if reads is None else reads.description.tensors)
        except Exception as raised:
            error = raised
        ready, on_devices, least_stored, not_most_wanted = self.exchange.agree(
            [int(error is None), int(self.exchange.may_swap_on(device)), stored_bytes, ~wanted], f"{self.phase}: begin"
        )
        if not ready:
            self.exchange.fail_together(error, self.phase, LoadFailedError)
        assert told is not None
        devices = self.exchange.device_group(device, self.phase) if device is not None and on_devices else None
        measure = self.way == "auto"
        # If all want about as much, and together what there is, they hardly want the same: what each wants, which is
        # much for thousands of ranks, is then not even asked.
        of_all = ~not_most_wanted * self.exchange.size
        alone = measure and 0.95 * least_stored <= of_all < LEAST_GAIN * least_stored
        told = replace(told, rows=b"") if alone else told
        routes = routes_of_all(self.exchange, told, verify, self.phase, devices is not None, measure)
        return reads, RoutedRead(self.exchange, routes, self.phase, measure, devices, alone)
