"""Measures ways to do something on a device by turns, and records figures of a run of scripts/check_gpu.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.figures import record
from benchmarks.harness.by_turns import STOCK, Row, Sample, Turn, alternate, summarize, table
from benchmarks.harness.usage import synchronize

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def timed(action: Callable[[], object]) -> float:
    synchronize()
    started = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - started


def measured(
    case: str,
    turns: Mapping[str, Turn],
    rounds: int,
    figures: Callable[[Row], Mapping[str, object]],
    baseline: str = STOCK,
) -> list[Row]:
    """Alternates the candidates, the first round not counted. Records the figures of their rows after every round, as
    medians of what there is, and prints their table."""
    samples: list[Sample] = []
    for sample in alternate(case, turns, rounds, warmup=1):
        samples.append(sample)
        if sample.round >= 0:
            for row in summarize(samples, baseline):
                if (row.step, row.candidate) == (sample.step, sample.candidate):
                    record(**figures(row))
    rows = summarize(samples, baseline)
    print(table(rows, baseline), flush=True)
    return rows


def peak(rounds: int, *, to_host: bool = True) -> float:
    """Bytes a second of one large pinned copy, in this process."""
    on_device = torch.empty(GiB, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(GiB, dtype=torch.uint8, pin_memory=True)
    source, target = (on_device, pinned) if to_host else (pinned, on_device)
    turn: Turn = lambda: {"copy": timed(lambda: target.copy_(source, non_blocking=True))}  # noqa: E731
    return GiB / summarize(alternate("", {"": turn}, rounds, warmup=1))[0].seconds
