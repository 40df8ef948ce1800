"""`NodeLayout` saves into a folder on each node: together they hold one checkpoint, each the files of its own ranks.

All folders get the same `.metadata`, byte for byte, after the data of all nodes is durable. So a single `.metadata`
proves that the save is complete, provided that each file it names is found in some folder.

Nodes that hold the same chunks (replicas) write equal files, which are renamed to the names on the lowest of these
nodes: files with the same name have the same bytes on all nodes. A file that has no equal on a lower node, and that
the metadata does not name, is removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .._checkpoint.native.file_names import NODE_MARKER
from .._checkpoint.native.save_facts import stamped
from .._engine import _C
from .._engine.engine_errors import named_system_errors
from .._plan.global_plan import GlobalPlan, Locations
from .._plan.local_plan import LocalPlan
from .._ranks.message import pack, unpack
from .._ranks.node import node_of_this_process
from .._ranks.steps import Steps
from .._storage.open_storage import storage_at
from ..errors import StorageFullError
from .layout import SaveOptions
from .native_layout import NativeLayout


class NodeLayout(NativeLayout):
    """The files of one save in one folder per node. For plans with `placement="local"`."""

    # Replicas are recognized by equal locations, which must not depend on a node's number of threads. Also, a commit
    # renames files one by one; the lock on a rank's first file protects its other files, so that file would have to be
    # renamed last.
    _may_spread = False

    def __init__(self, options: SaveOptions, extra_files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(options, extra_files)
        self._planned = b""  # describes what this rank writes; equal on ranks that write the same

    def values(self, state: dict[str, Any], is_coordinator: bool) -> dict[str, Any]:
        return super().values(state, True)  # the plan has them written by one rank of each node

    def place(self, steps: Steps, plan: LocalPlan, planned: GlobalPlan | None) -> None:
        _, *what_it_holds = _C.inventory_parts(plan.state.inventory)  # the head has the node's number
        self._planned = pack(*what_it_holds, plan.table)

    def message(self) -> bytes:
        located = self.located()
        # Checksums are part of the locations: ranks with equal digests have written the same bytes.
        same = hashlib.blake2b(pack(self._planned, located.table), digest_size=32).digest()
        return pack(located.pack(), same, str(node_of_this_process()).encode())

    def contents(self, planned: GlobalPlan, messages: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        located, digests, of_nodes = zip(*map(unpack, messages), strict=True)
        locations, nodes = list(map(Locations.unpack, located)), list(map(int, of_nodes))
        numbers = sorted(set(nodes))  # in the order of the plan
        names = [of_rank.files for of_rank in locations]
        save_id = stamped(self.options.save_id, len(messages))
        metadata, index = planned.files(locations, self.options.path, save_id)
        named = set(_C.Index.from_bytes(index).files)
        first: dict[tuple[int, bytes], list[str]] = {}  # {(number among such ranks of a node, digest): names}
        new_names: dict[int, dict[str, str]] = {node: {} for node in numbers}  # "": not needed
        for node in numbers:
            seen: dict[bytes, int] = {}
            for rank in (rank for rank, its in enumerate(nodes) if its == node):
                same = digests[rank]
                seen[same] = seen.get(same, -1) + 1
                theirs = first.setdefault((seen[same], same), names[rank])
                for own, other in zip(names[rank], theirs, strict=True):
                    if own != other and other in named and own not in named:
                        new_names[node][own] = other
                    elif own not in named:
                        new_names[node][own] = ""
        contents: list[tuple[bytes, ...]] = [()] * len(messages)
        for node, of_node in new_names.items():
            contents[nodes.index(node)] = (metadata, index, json.dumps(of_node).encode())
        return contents

    def hand_out(self, steps: Steps, contents: Sequence[tuple[bytes, ...]] | None) -> tuple[bytes, ...]:
        exchange = steps.exchange
        if exchange.is_coordinator and contents is None:
            contents = [()] * exchange.size
        return exchange.scatter_contents(contents, steps.phase("metadata"))

    def commit(self, *content: bytes) -> None:
        """Gives the node's files their names, and commits its copy of the metadata. `content`: the metadata, the index,
        and {name of a file: its name on the lowest node that has it}."""
        try:
            self._commit(*content)
        except StorageFullError as error:  # other nodes may have committed
            raise error.in_doubt() from error

    def _commit(self, metadata: bytes, index: bytes, new_names: bytes) -> None:
        storage = storage_at(self.options.path)
        with named_system_errors(self.options.path):
            for own, other in json.loads(new_names).items():
                if other:
                    storage.rename(own, other)
                else:
                    storage.remove(own)
            storage.write(NODE_MARKER, b"")
        super().commit(metadata, index)
