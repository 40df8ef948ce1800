"""Times what all ranks of a job do together, by turns, and prints the table on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from benchmarks.harness.by_turns import Turn, alternate, summarize, table


def seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def print_turns(case: str, turns: Mapping[str, Turn], rounds: int, baseline: str) -> None:
    """All ranks take the same turns: their random order has the same seed. The first round warms up."""
    rows = summarize(alternate(case, turns, rounds, warmup=1), baseline)
    if dist.get_rank() == 0:
        print(table(rows, baseline))
