"""Starts a collective load, for `vescale_ckpt.load` and managers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from .._load.source import Source
from .._observe.timeline import Timeline
from .._ranks.exchange import Exchange
from .._ranks.groups import place_in
from .._state.key_selection import Selection
from ..settings import Broadcast
from .load import CollectiveLoad
from .node_files import NodeFiles


@contextmanager
def start_load(
    source: Source,
    selection: Selection,
    strict: bool,
    broadcast: Broadcast,
    process_group: dist.ProcessGroup | None,
    timeout: float | None,
    extra_files: dict[str, bytes] | None = None,
    node_files: NodeFiles | None = None,
) -> Iterator[CollectiveLoad]:
    """A context manager that yields a load of `source`. `node_files`: see `CollectiveLoad`."""
    timeline = Timeline("load", source.path, f"loading {source.given_path}", *place_in(process_group))
    with timeline.here():
        exchange = Exchange.of(process_group, timeout, purpose="load")
        timeline.begin()
        source.options = replace(source.options, timeout=exchange.timeout)
        yield CollectiveLoad(exchange, source, selection, strict, broadcast, timeline, extra_files, node_files)
