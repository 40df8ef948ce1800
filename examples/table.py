"""Times and memory of ours beside stock DCP, candidates alternated round by round."""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.harness.by_turns import Steps, alternate, summarize, table
from benchmarks.harness.usage import Usage

MEASURE = Path(__file__).resolve().parent / "measure.py"
CANDIDATES = {"vescale_ckpt": "ours", "stock DCP, 1 thread": "stock-1", "stock DCP, 4 threads": "stock-4"}
"""Labels of rows, and the names that measure.py knows."""
BASELINE = "stock DCP, 4 threads"
TIMEOUT = 120.0  # seconds for one round


class Measurer:
    """A process of examples/measure.py that holds the state and answers round by round."""

    def __init__(self, name: str, checkpoint: Path) -> None:
        self.name = name
        self.rounds = itertools.count()
        command = [sys.executable, str(MEASURE), name, str(checkpoint)]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # finds the benchmarks' harness, too
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=path)

    def measure(self, directory: Path) -> Steps:
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        with suppress(BrokenPipeError):  # it is dead; that it does not answer is noticed below
            self.process.stdin.write(f"{directory / f'{self.name}-{next(self.rounds)}'}\n")
            self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT)
        answer = self.process.stdout.readline() if ready else ""
        if not answer:
            raise SystemExit(f"FAILED: measuring '{self.name}' gave no answer; see the messages above")
        found = {step: Usage(**usage) for step, usage in json.loads(answer).items()}
        print(
            f"   {self.name}: {', '.join(f'{step} {usage.seconds:.3f} s' for step, usage in found.items())}", flush=True
        )
        return found

    def finish(self) -> None:
        """Let it end by itself: a candidate whose threads crash at exit has not passed."""
        self.process.communicate(timeout=TIMEOUT)
        if self.process.returncode != 0:
            raise SystemExit(f"FAILED: measuring '{self.name}' ended with status {self.process.returncode}")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def table_of_candidates(directory: Path, checkpoint: Path, rounds: int) -> str:
    """All candidates in turn, round by round, so that a slow minute of the disk falls on all of them."""
    mib = sum(file.stat().st_size for file in checkpoint.iterdir()) / 2**20
    measurers: list[Measurer] = []
    try:
        for name in CANDIDATES.values():
            measurers.append(Measurer(name, checkpoint))
        turns = {
            label: partial(measurer.measure, directory) for label, measurer in zip(CANDIDATES, measurers, strict=True)
        }
        case = f"One process, {mib:.0f} MiB of state, durable saves, cold loads"
        rows = summarize(alternate(case, turns, rounds), BASELINE)
        for measurer in measurers:
            measurer.finish()
    finally:
        for measurer in measurers:
            measurer.kill()
    return table(rows, BASELINE)
