"""Times and memory of ours beside stock DCP, candidates alternated round by round."""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from measure import Figures

MEASURE = Path(__file__).resolve().parent / "measure.py"
CANDIDATES = {"ours": "vescale_ckpt", "stock-1": "stock DCP, 1 thread", "stock-4": "stock DCP, 4 threads"}
"""Names that measure.py knows, and the labels of their rows."""
TIMEOUT = 120.0  # seconds for one round


class Measurer:
    """A process of examples/measure.py that holds the state and answers round by round."""

    def __init__(self, name: str, checkpoint: Path) -> None:
        self.name = name
        command = [sys.executable, str(MEASURE), name, str(checkpoint)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, directory: Path) -> Figures:
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        with suppress(BrokenPipeError):  # it is dead; that it does not answer is noticed below
            self.process.stdin.write(f"{directory}\n")
            self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT)
        answer = self.process.stdout.readline() if ready else ""
        if not answer:
            raise SystemExit(f"FAILED: measuring '{self.name}' gave no answer; see the messages above")
        return Figures(**json.loads(answer))

    def finish(self) -> None:
        """Let it end by itself: a candidate whose threads crash at exit has not passed."""
        self.process.communicate(timeout=TIMEOUT)
        if self.process.returncode != 0:
            raise SystemExit(f"FAILED: measuring '{self.name}' ended with status {self.process.returncode}")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def measure_candidates(directory: Path, checkpoint: Path, rounds: int) -> dict[str, list[Figures]]:
    """All candidates in turn, round by round, so that a slow minute of the disk falls on all of them."""
    figures: dict[str, list[Figures]] = {name: [] for name in CANDIDATES}
    measurers: list[Measurer] = []
    try:
        for name in CANDIDATES:
            measurers.append(Measurer(name, checkpoint))
        for turn in range(rounds):
            first = turn % len(measurers)
            for measurer in measurers[first:] + measurers[:first]:
                figures[measurer.name].append(measurer.measure(directory / f"{measurer.name}-{turn}"))
        for measurer in measurers:
            measurer.finish()
    finally:
        for measurer in measurers:
            measurer.kill()
    return figures


def print_table(figures: dict[str, list[Figures]], state_mib: float) -> None:
    def median(name: str, column: str) -> float:
        return statistics.median(getattr(row, column) for row in figures[name])

    def peak(name: str, column: str) -> float:
        return max(getattr(row, column) for row in figures[name])

    rounds = len(figures["ours"])
    print(f"\nOne process, {state_mib:.0f} MiB of state, median of {rounds} alternated rounds, cold loads.")
    print("Peak: growth of the resident set over the one that holds the state, the largest of all rounds.\n")
    header = ("", "blocking s", "durable s", "load s", "peak save MiB", "peak load MiB")
    print(f"{header[0]:<20}" + "".join(f"{title:>15}" for title in header[1:]))
    for name, label in CANDIDATES.items():
        times = (median(name, column) for column in ("blocking", "durable", "load"))
        peaks = (peak(name, column) for column in ("peak_save", "peak_load"))
        print(
            f"{label:<20}"
            + "".join(f"{seconds:>15.3f}" for seconds in times)
            + "".join(f"{mib:>15.0f}" for mib in peaks)
        )

    def speedup(column: str) -> float:
        best = min(median(name, column) for name in CANDIDATES if name != "ours")
        return best / median("ours", column)

    print(f"\nTo the better stock row: saves {speedup('durable'):.2f}x, loads {speedup('load'):.2f}x as fast.")
