"""Loads by planners of others: the steps of `dcp.load`, over our exchanges, for their bounds and their errors."""

from __future__ import annotations

import pickle
from collections.abc import MutableMapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from .._dcp.storage_reader import StorageReader
from .._ranks.exchange import Exchange
from .._state.application import Application
from .._state.flatten import flatten, place
from .._state.per_rank import counted
from ..errors import CheckpointError, LoadFailedError
from ..reports import LoadReport


def load_by_planner(
    exchange: Exchange, reader: StorageReader, planner: LoadPlanner, state: MutableMapping[str, Any]
) -> LoadReport:
    """Fills `state`, with modules, optimizers and what else restores itself. Raises on all ranks if one has failed."""
    application = Application(state)

    def hand_over() -> None:
        values, paths = flatten(application.form)
        for key, value in values.items():
            if not application.owns(paths[key]):
                place(state, paths[key], value)
        application.restore(set(values))

    try:
        exchange.together(application.prepare, _phase(reader, "prepare"), LoadFailedError)
        _load_items(exchange, reader, planner, application.form)
        exchange.together(hand_over, _phase(reader, "hand over"), LoadFailedError)
    except BaseException:
        application.abandon()
        raise
    assert reader.last_stats is not None
    return LoadReport([], [], [], reader.last_stats)


def _load_items(exchange: Exchange, reader: StorageReader, planner: LoadPlanner, state: dict[str, Any]) -> None:
    """Fills `state`. Raises on all ranks if one has failed."""
    with counted(exchange.rank, exchange.size):
        plan, packed = exchange.together(
            lambda: _local_plan(exchange, reader, planner, state), _phase(reader, "plan"), LoadFailedError
        )
    gathered = exchange.gather(packed, _phase(reader, "gather plans"))
    plans: list[LoadPlan] = []

    def plan_all() -> list[bytes] | None:
        if gathered is None:
            return None
        plans[:] = planner.create_global_plan([plan, *map(pickle.loads, gathered[1:])])
        plans[:] = reader.prepare_global_plan([*plans])
        return [b"", *map(pickle.dumps, plans[1:])]

    answers = exchange.together(plan_all, _phase(reader, "plan for all"), LoadFailedError)
    answer = exchange.scatter(answers, _phase(reader, "scatter plans"))

    def read() -> None:
        final = plans[0] if plans else pickle.loads(answer)
        reader.read_data(planner.finish_plan(final), planner).wait()

    exchange.together(read, _phase(reader, "read"), LoadFailedError)


def _local_plan(
    exchange: Exchange, reader: StorageReader, planner: LoadPlanner, state: dict[str, Any]
) -> tuple[LoadPlan, bytes]:
    """And as the coordinator, which plans for all, is sent it."""
    metadata, of_all = _metadata(reader, exchange.rank)
    planner.set_up_planner(state, metadata, exchange.is_coordinator)
    reader.set_up_storage_reader(metadata, exchange.is_coordinator, rank=exchange.rank, use_collectives=of_all)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    return plan, b"" if exchange.is_coordinator else pickle.dumps(plan)


def _metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """And whether it is that of all ranks."""
    try:
        return reader.read_metadata(), True
    except CheckpointError as error:
        try:
            return reader.read_metadata(rank=rank), False
        except CheckpointError:
            raise error from None


def _phase(reader: StorageReader, step: str) -> str:
    return f"loading {reader.given_path}: {step}"
