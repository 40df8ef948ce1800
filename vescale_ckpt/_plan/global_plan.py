"""`GlobalPlan` is the coordinator's plan of a save, made of what ranks request and answered with what each one writes.

With the locations of all records it makes the metadata.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .._engine import _C
from .._engine.rows import LEAST_PIECE_BYTES, NO_LIMIT, Inventory
from .._ranks.message import pack, unpack
from .._state.structure import Structure
from ..errors import CheckpointError
from ..settings import Placement

NOT_KEPT = bytes(16)  #: the id of plans that the coordinator does not keep, so that no rank refers to them later


@dataclass(frozen=True)
class PlanRequest:
    """What one rank holds: its inventory, or only the id of the plan that it has kept for that."""

    plan_id: bytes = b""
    position: int = -1  #: the kept local plan is for this one of the planned ranks
    inventory: Inventory | None = None  #: None: the inventory that plan `plan_id` was made from
    paths: bytes = b""  #: DCP's planner_data, packed
    structure: str = ""  #: `Structure.pack`: what the paths leave out
    digests: bytes = b""  #: a checksum of each object, in the order of the inventory
    replicas: bytes = b""  #: `replicas.offered_hashes`
    check: int = 0  #: `replicas.replica_sum`, if this is only an id
    of_items: bool = False  #: whether another planner's items are planned, which are written whole


@dataclass(frozen=True)
class PlanAnswer:
    """What one rank writes: its local plan, or only the id of the plan that it has kept."""

    plan_id: bytes
    position: int  #: the local plan is for this one of the planned ranks
    local_plan: bytes | None = None  #: None: the kept one
    holders: bytes = b""  #: with a local plan, `_C.GlobalPlan.holders`


class Locations(NamedTuple):
    """Where the records of one rank's local plan lie."""

    table: bytes  #: `LOCATION_ROW` integers for each row of the plan
    files: list[str]  #: the names of the rank's files, by their number in the table

    def pack(self) -> bytes:
        return pack(self.table, *map(str.encode, self.files))

    @classmethod
    def unpack(cls, message: bytes) -> Locations:
        table, *files = unpack(message)
        return cls(table, list(map(bytes.decode, files)))


class GlobalPlan:
    """Which rank writes what in a save, and all that metadata needs except the locations of records.

    Args:
        requests: of all ranks, each with an inventory.
        kept: whether the coordinator keeps the plan for later saves.

    Raises `CheckpointError`, with the key and the ranks, if inventories do not fit together.
    """

    def __init__(
        self, requests: Sequence[PlanRequest], placement: Placement = "lowest_rank", kept: bool = False
    ) -> None:
        self.inventories = [request.inventory for request in requests if request.inventory is not None]
        self.paths = [request.paths for request in requests]
        self.structure = Structure.merged(request.structure for request in requests)
        pieces = not any(request.of_items for request in requests)  # of a large tensor, written by several ranks
        hashes = [request.replicas for request in requests] if pieces and len(requests) > 1 else []
        least = LEAST_PIECE_BYTES if pieces else NO_LIMIT
        try:
            self.plan = _C.GlobalPlan(self.inventories, placement, least, hashes=hashes)
        except _C.EngineError as error:
            raise CheckpointError(str(error)) from None
        # The id is random, not a hash of the inputs: equal inputs may give different plans, and all local plans must
        # belong to one plan.
        self.plan_id = secrets.token_bytes(16) if kept else NOT_KEPT

    def request_of(self, rank: int) -> PlanRequest:
        """What a rank has requested, without what belongs to that save alone."""
        return PlanRequest(inventory=self.inventories[rank], paths=self.paths[rank], structure=self.structure)

    def answer(self, rank: int, fresh: bool) -> PlanAnswer:
        """The answer to a rank. `fresh`: the ranks have not kept this plan."""
        if not fresh:
            return PlanAnswer(self.plan_id, rank)
        return PlanAnswer(self.plan_id, rank, self.plan.local_plan(rank), self.plan.holders(rank))

    def files(
        self,
        locations: Sequence[Locations],
        directory: str,
        save_id: str,
        target: _C.PendingFile | None = None,
    ) -> tuple[bytes, bytes]:
        """Makes the bytes of `.metadata` and of the index from the locations of each rank's records. With `target`,
        writes `.metadata` to it as it is made, and returns its last `TRAILER_BYTES` only."""
        tables, names = zip(*locations, strict=True)
        return _C.checkpoint_files(
            self.catalog, list(tables), list(names), self.paths, directory, save_id, self.structure, target
        )

    @cached_property
    def catalog(self) -> _C.Catalog:
        return self.plan.catalog()
