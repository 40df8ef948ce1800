"""Starts a load of all ranks, for `vescale_ckpt.load` and managers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from .._dcp.storage_reader import StorageReader
from .._observe.timeline import Timeline
from .._ranks.exchange import Exchange
from .._ranks.groups import place_in
from .._state.key_selection import Selection
from ..settings import Broadcast
from .load import CollectiveLoad
from .node_files import NodeFiles


@contextmanager
def start_load(
    reader: StorageReader,
    selection: Selection,
    strict: bool,
    broadcast: Broadcast,
    process_group: dist.ProcessGroup | None,
    timeout: float | None,
    extra_files: dict[str, bytes] | None = None,
    node_files: NodeFiles | None = None,
) -> Iterator[CollectiveLoad]:
    """A context that gives a load of what `reader` reads. `node_files`: that of `CollectiveLoad`."""
    timeline = Timeline("load", reader.path, f"loading {reader.given_path}", *place_in(process_group))
    with timeline.here():
        exchange = Exchange.of(process_group, timeout, purpose="load")
        timeline.begin()
        reader.timeout = exchange.timeout
        yield CollectiveLoad(exchange, reader, selection, strict, broadcast, timeline, extra_files, node_files)
