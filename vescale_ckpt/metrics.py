"""Publishes per-save and per-load metrics to JSON lines or your own listener."""

from __future__ import annotations

import json
import os
import time

from ._observe.listeners import Finished, Listener, on_finish

__all__ = ["Finished", "JsonLines", "Listener", "figures", "on_finish"]


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
    """Appends one line of JSON per save and load to a file, on rank 0.

    `on_finish(JsonLines("checkpoints.jsonl"))`
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def __call__(self, finished: Finished) -> None:
        if finished.rank == 0:
            line = {"time": time.time(), "path": finished.path, "step": finished.step, "rank": finished.rank}
            line |= {"error": None if finished.error is None else repr(finished.error), **figures(finished)}
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
