"""How evenly the bytes of a save lie on ranks: the busiest rank's over their mean, ours and stock's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.harness.by_turns import aligned
from benchmarks.planning import stock
from benchmarks.planning.models import MODELS, Entry, with_adam
from benchmarks.planning.simulated_job import Parallelism, SimulatedState, bytes_by_rank, gather, planned

_TABLE = (128256, 8192)


class Case(NamedTuple):
    name: str
    entries: Sequence[Entry]
    parallelism: Parallelism


def _model(name: str) -> list[Entry]:
    return MODELS[name].entries(torch.bfloat16)


def _two_tables() -> list[Entry]:
    return replace(MODELS["llama-70b"], layers=4).entries(torch.bfloat16)


def _experts(layers: int, vocabulary: int) -> list[Entry]:
    return replace(MODELS["mixtral-8x7b"], layers=layers, vocabulary=vocabulary).entries(torch.bfloat16)


def _matrices_then_a_table() -> list[Entry]:
    matrices = [Entry(f"layers.{number}.weight", (4096, 4096), torch.bfloat16) for number in range(64)]
    return [*matrices, Entry("embedding.weight", _TABLE, torch.bfloat16)]


def _tables_replicated(entries: Iterable[Entry]) -> list[Entry]:
    """Under names that tensor parallelism does not cut."""
    return [
        entry._replace(name=entry.name.replace("embed_tokens", "embedding").replace("lm_head", "head"))
        for entry in entries
    ]


def cases() -> list[Case]:
    """Those of the table of stock's imbalances that planning set out from."""
    with_8b = with_adam(_model("llama-8b"))
    untied_1b = with_adam(replace(MODELS["llama-1b"], tied=False).entries(torch.bfloat16))
    found = [Case(f"Llama 8B replicated on {ranks}", _model("llama-8b"), Parallelism(ranks)) for ranks in (8, 64)]
    found += [
        Case("8B + Adam on 8", with_8b, Parallelism(8)),
        Case("70B on 8", _model("llama-70b"), Parallelism(8)),
        Case("1B (two tables) + Adam on 8", untied_1b, Parallelism(8)),
    ]
    for ranks in (8, 64):
        found.append(Case(f"4 layers of 70B and two tables on {ranks}", _two_tables(), Parallelism(ranks)))
    for ranks in (8, 64):
        found.append(Case(f"64 small matrices, a table on {ranks}", _matrices_then_a_table(), Parallelism(ranks)))
    tables = _tables_replicated(_model("llama-70b"))
    found += [
        Case("HSDP 2 x 4, 8B + Adam", with_8b, Parallelism(8, fsdp=4)),
        Case("HSDP 8 x 8, 8B + Adam", with_8b, Parallelism(64, fsdp=8)),
        Case("70B, TP 8 x DP 8, tables replicated", tables, Parallelism(64, tensor=8)),
        Case("Mixtral, EP 4 x DP 2", _experts(32, 32000), Parallelism(8, expert=4)),
        Case("Mixtral, EP 4 x DP 8", _experts(32, 32000), Parallelism(32, expert=4)),
        Case("6 layers of it and large tables, EP 4 x DP 2", _experts(6, 128256), Parallelism(8, expert=4)),
        Case("6 layers of it and large tables, EP 4 x DP 8", _experts(6, 128256), Parallelism(32, expert=4)),
        Case("2 layers of it, EP 4 x DP 8", _experts(2, 32000), Parallelism(32, expert=4)),
    ]
    return found


def balance(case: Case) -> tuple[float, float]:
    """Bytes of the busiest rank over the mean, ours and stock's; 1 is perfect."""
    inventories, _ = gather(SimulatedState(case.entries, case.parallelism))
    _, parts = planned(inventories, "balanced")
    return _imbalance(bytes_by_rank(inventories, parts)), _imbalance(stock.bytes_by_rank(inventories))


def _imbalance(by_rank: Sequence[int]) -> float:
    return max(by_rank) * len(by_rank) / sum(by_rank)


def table() -> str:
    lines = [("max / mean of bytes", "vescale", "stock")]
    lines += ((case.name, *map("{:.3f}".format, balance(case))) for case in cases())
    return aligned(lines, left=(0,))
