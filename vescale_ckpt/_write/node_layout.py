"""`NodeLayout` saves into a folder of each node: together they hold one checkpoint, each the files of its own ranks.

All folders get the same `.metadata`, byte for byte, after the data of all nodes is durable. So one `.metadata` in one
folder proves that the save is whole, as far as the files that it names are found in some folder.

Nodes that hold the same chunks (replicas) write the same files. These get the names of the lowest node's: a file of one
name has the same bytes on all nodes. A file of which no node before has an equal one, and that the metadata does not
name, is removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

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
from .layout import SaveOptions
from .native_layout import NativeLayout


class NodeLayout(NativeLayout):
    """The files of one save in folders of the nodes. For plans with `placement="local"`."""

    # Replicas of a part are found by equal locations, and so must not depend on a node's threads; and a commit renames
    # files one by one, of which the first must not go before the others.
    _may_spread = False

    def __init__(self, options: SaveOptions, extra_files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(options, extra_files)
        self._planned = b""  # what this rank writes; equal on ranks that write the same

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
        numbers = sorted(set(nodes))  # as plans number nodes
        names = [of_rank.files for of_rank in locations]
        save_id = stamped(self.options.save_id, len(messages))
        metadata, index = planned.files(locations, self.options.path, save_id)
        named = set(_C.Index.from_bytes(index).files)
        first: dict[tuple[int, bytes], list[str]] = {}  # {digest, and how many ranks of the node have it: names}
        new_names: dict[int, dict[str, str]] = {node: {} for node in numbers}  # "": the file is not needed
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

    def commit(self, *content: bytes) -> None:
        """Gives the node's files their names, and commits its copy of the metadata. `content`: of the metadata, of the
        index, and {name of a file: its name on the lowest node that has it}."""
        metadata, index, new_names = content
        storage = storage_at(self.options.path)
        with named_system_errors(self.options.path):
            for own, other in json.loads(new_names).items():
                if other:
                    storage.rename(own, other)
                else:
                    storage.remove(own)
            storage.write(NODE_MARKER, b"")
        super().commit(metadata, index)
