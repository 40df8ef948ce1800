"""Publishes per-save and per-load metrics to TensorBoard, Weights & Biases, JSON lines or your own listener."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ._observe.listeners import Finished, Listener, on_finish

__all__ = ["Finished", "JsonLines", "Listener", "TensorBoard", "WeightsAndBiases", "figures", "on_finish"]


def __dir__() -> list[str]:
    return __all__


def figures(finished: Finished) -> dict[str, float]:
    """Returns {name: value} for a save or load: seconds, bytes, bytes per second, seconds per phase, imbalance."""
    result: dict[str, float] = {"seconds": finished.seconds, "failed": float(finished.error is not None)}
    if (stats := finished.stats) is not None:
        count = stats.bytes if stats.job is None else stats.job.bytes
        result |= {"bytes": count, "bytes_per_second": count / max(finished.seconds, 1e-9)}
        result |= {"blocked_seconds": stats.blocked_seconds}
        result |= {f"{phase}_seconds": seconds for phase, seconds in stats.phases.items()}
        if stats.job is not None:
            result |= {"slowest_rank_seconds": stats.job.slowest_seconds, "imbalance": stats.job.imbalance}
    return {f"checkpoint/{finished.kind}/{name.replace(' ', '_')}": value for name, value in result.items()}


class JsonLines:
    """Appends one line of JSON per save and load to a file, on rank 0; with `all_ranks=True`, on every rank.

    `on_finish(JsonLines("checkpoints.jsonl"))`
    """

    def __init__(self, path: str | os.PathLike[str], *, all_ranks: bool = False) -> None:
        self.path, self.all_ranks = os.fspath(path), all_ranks

    def __call__(self, finished: Finished) -> None:
        if self.all_ranks or finished.rank == 0:
            line = {"time": time.time(), "path": finished.path, "step": finished.step, "rank": finished.rank}
            line |= {"error": None if finished.error is None else repr(finished.error), **figures(finished)}
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")


class TensorBoard:
    """Adds the metrics to a `torch.utils.tensorboard.SummaryWriter`, on rank 0. The step is the number at the end of
    the path; without one, saves and loads are counted.

    `on_finish(TensorBoard(writer))`
    """

    def __init__(self, writer: Any) -> None:
        self.writer, self.count = writer, 0

    def __call__(self, finished: Finished) -> None:
        if finished.rank == 0:
            self.count += 1
            step = self.count if finished.step is None else finished.step
            for name, value in figures(finished).items():
                self.writer.add_scalar(name, value, step)


class WeightsAndBiases:
    """Logs the metrics to a Weights & Biases run, on rank 0. The step is one of the metrics, because an asynchronous
    save ends while training logs later steps.

    `on_finish(WeightsAndBiases(wandb.run))`
    """

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, finished: Finished) -> None:
        if finished.rank == 0:
            step = {} if finished.step is None else {"checkpoint/step": finished.step}
            self.run.log({**figures(finished), **step})
