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
from .._plan.save_plan import GlobalSavePlan, PackedItems
from .._ranks.message import pack, unpack
from .._ranks.node import node_of_this_process
from .._ranks.steps import Steps
from .._storage.open_storage import storage_at
from .layout import SaveOptions
from .native_layout import NativeLayout


class NodeLayout(NativeLayout):
    """The files of one save in folders of the nodes. For plans of `NodePlanner`."""

    # Replicas of a part are found by equal locations, and so must not depend on a node's threads; and a commit renames
    # files one by one, of which the first must not go before the others.
    _may_spread = False

    def __init__(self, options: SaveOptions, extra_files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(options, extra_files)
        self._planned = b""  # what this rank writes; equal on ranks that write the same

    def place(self, steps: Steps, items: PackedItems, planned: GlobalSavePlan | None) -> None:
        _, *what_it_holds = _C.inventory_parts(items.description.inventory)  # the head has the node's number
        self._planned = pack(*what_it_holds, items.local_plan)

    def message(self) -> bytes:
        locations, names = self.located()
        # Checksums are part of the locations: ranks with equal digests have written the same bytes.
        same = hashlib.blake2b(pack(self._planned, locations), digest_size=32).digest()
        return pack(locations, same, str(node_of_this_process()).encode(), *map(str.encode, names))

    def contents(self, planned: GlobalSavePlan, messages: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        of_all = list(map(unpack, messages))
        nodes = [int(node) for _, _, node, *_ in of_all]
        numbers = sorted(set(nodes))  # as plans number nodes
        names = [[name.decode() for name in names] for _, _, _, *names in of_all]
        save_id = stamped(self.options.save_id, len(of_all))
        metadata, index = planned.files([locations for locations, *_ in of_all], names, self.options.path, save_id)
        named = set(_C.Index.from_bytes(index).files)
        first: dict[tuple[int, bytes], list[str]] = {}  # {digest, and how many ranks of the node have it: names}
        new_names: dict[int, dict[str, str]] = {node: {} for node in numbers}  # "": the file is not needed
        for node in numbers:
            seen: dict[bytes, int] = {}
            for rank in (rank for rank, its in enumerate(nodes) if its == node):
                same = of_all[rank][1]
                seen[same] = seen.get(same, -1) + 1
                theirs = first.setdefault((seen[same], same), names[rank])
                for own, other in zip(names[rank], theirs, strict=True):
                    if own != other and other in named and own not in named:
                        new_names[node][own] = other
                    elif own not in named:
                        new_names[node][own] = ""
        contents: list[tuple[bytes, ...]] = [()] * len(of_all)
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
