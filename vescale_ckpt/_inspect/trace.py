"""Merges the traces of a job's ranks and finds the slow rank of each save and load."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

#: The phases in the order in which they come.
PHASES = ("previous save", "metadata", "plan", "snapshot", "read", "write", "sync", "commit", "hand over", "wait")
_WAIT = "wait"


@dataclass
class RankTimes:
    """One rank's part of a save or load. Seconds of the system's clock."""

    begin: float
    end: float
    spans: list[tuple[str, float, float]] = field(default_factory=list)  #: phase, begin, end; inner ones come later
    seconds: dict[str, float] = field(default_factory=dict)  #: by phase, without what inner phases took

    @property
    def busy(self) -> float:
        """Seconds in phases other than waiting for other ranks."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != _WAIT)


@dataclass
class Operation:
    """One save or load of all ranks that wrote traces."""

    doing: str
    kind: str  #: "save" or "load"
    ranks: dict[int, RankTimes] = field(default_factory=dict)

    @property
    def begin(self) -> float:
        return min(times.begin for times in self.ranks.values())

    @property
    def seconds(self) -> float:
        return max(times.end for times in self.ranks.values()) - self.begin

    @property
    def slowest(self) -> int:
        """The rank that was busy longest."""
        return max(self.ranks, key=lambda rank: self.ranks[rank].busy)

    @property
    def last(self) -> int:
        """The rank that began last."""
        return max(self.ranks, key=lambda rank: self.ranks[rank].begin)

    @property
    def late_seconds(self) -> float:
        """By which the last rank began later than the first, by the clocks of their machines."""
        return self.ranks[self.last].begin - self.begin

    @property
    def mean_busy(self) -> float:
        return sum(times.busy for times in self.ranks.values()) / len(self.ranks)


def read_events(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of all ranks' files. The last line of a file may be torn: its process was killed. Raises
    `CheckpointError` if there is no trace, or if a file is none."""
    try:
        paths = sorted(path for path in Path(directory).iterdir() if path.name.startswith("trace-rank"))
    except OSError as error:
        raise CheckpointError(f"{os.fspath(directory)} cannot be read: {error}", path=os.fspath(directory)) from None
    if not paths:
        raise CheckpointError(
            f"{os.fspath(directory)} holds no traces: they are written where VESCALE_CKPT_TRACE is set to it",
            path=os.fspath(directory),
        )
    return [event for path in paths for event in _events_of(path)]


def _events_of(path: Path) -> list[dict[str, Any]]:
    events = []
    lines = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        text = line.strip().rstrip(",")
        if text in ("[", "]", ""):
            continue
        try:
            event = json.loads(text)
            ok = isinstance(event, dict) and isinstance(event.get("pid"), int) and isinstance(event.get("name"), str)
            if ok and event.get("ph") == "X":
                event["ts"], event["dur"] = float(event["ts"]), float(event["dur"])
        except (ValueError, KeyError, TypeError, RecursionError):
            ok = False
        if ok:
            events.append(event)
        elif number != len(lines) - 1:
            raise CheckpointError(f"{path} is no trace: line {number + 1} is no event", path=str(path))
    return events


def operations(events: list[dict[str, Any]]) -> list[Operation]:
    """The saves and loads of a trace, in the order of their beginnings. The n-th of one name on one rank belongs to the
    n-th on the others."""
    found: dict[tuple[str, int], Operation] = {}
    counts: defaultdict[tuple[int, str], int] = defaultdict(int)
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") in ("save", "load")]
    wholes = [event for event in spans if event["name"] not in PHASES]
    phases: defaultdict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for event in spans:
        if event["name"] in PHASES:
            phases[event["pid"], event["cat"]].append(event)
    for event in sorted(wholes, key=lambda event: event["ts"]):
        rank, doing = event["pid"], event["name"]
        counts[rank, doing] += 1
        operation = found.setdefault((doing, counts[rank, doing]), Operation(doing, event["cat"]))
        begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        times = operation.ranks[rank] = RankTimes(begin, end)
        inside = [
            (phase["name"], phase["ts"] / 1e6, (phase["ts"] + phase["dur"]) / 1e6)
            for phase in phases[rank, event["cat"]]
            if event["ts"] <= phase["ts"] and phase["ts"] + phase["dur"] <= event["ts"] + event["dur"] + 1
        ]
        times.spans = sorted(inside, key=lambda span: (span[1], -span[2]))
        times.seconds = _exclusive(times.spans)
    return sorted(found.values(), key=lambda operation: operation.begin)


def _exclusive(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds by phase, where those of an inner phase do not count for the outer one. `spans`: by their beginnings."""
    seconds: defaultdict[str, float] = defaultdict(float)
    outer: list[tuple[str, float]] = []  # phases that are open, and their ends
    for name, begin, end in spans:
        while outer and outer[-1][1] <= begin:
            outer.pop()
        seconds[name] += end - begin
        if outer:
            seconds[outer[-1][0]] -= end - begin
        outer.append((name, end))
    return dict(seconds)


def write_merged(events: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """Writes one file for viewers of Chrome's format (chrome://tracing, Perfetto), where each rank is a process."""
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
