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
    seconds: dict[str, float] = field(default_factory=dict)  #: {phase: seconds}, without those of inner phases

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
            events.append(_event(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if number != len(lines) - 1:
                raise CheckpointError(f"{path} is no trace: line {number + 1} is no event", path=str(path)) from None
    return events


def _event(event: dict[str, Any]) -> dict[str, Any]:
    """Checks an event. Raises the errors of what is missing or of another type."""
    if not isinstance(event["pid"], int) or not isinstance(event["name"], str):
        raise TypeError
    if event["ph"] == "X":
        event["ts"], event["dur"] = float(event["ts"]), float(event["dur"])
        event["cat"], args = str(event["cat"]), event["args"]
        args["id"] = str(args["id"])
        if "seconds" in args:
            args["seconds"] = {str(name): float(seconds) for name, seconds in args["seconds"].items()}
    return event


def operations(events: list[dict[str, Any]]) -> list[Operation]:
    """The saves and loads of a trace, in the order of their beginnings. The n-th of one name on one rank belongs to the
    n-th on the others."""
    found: dict[tuple[str, int], Operation] = {}
    counts: defaultdict[tuple[int, str], int] = defaultdict(int)
    spans = sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])
    phases: defaultdict[tuple[int, str], list[tuple[str, float, float]]] = defaultdict(list)
    for event in spans:
        if event["name"] in PHASES:
            phases[event["pid"], event["args"]["id"]].append((event["name"], *_seconds(event)))
    for event in spans:
        if "seconds" in event["args"]:
            rank, doing = event["pid"], event["name"]
            counts[rank, doing] += 1
            operation = found.setdefault((doing, counts[rank, doing]), Operation(doing, event["cat"]))
            inside, seconds = phases[rank, event["args"]["id"]], event["args"]["seconds"]
            operation.ranks[rank] = RankTimes(*_seconds(event), inside, seconds)
    return sorted(found.values(), key=lambda operation: operation.begin)


def _seconds(event: dict[str, Any]) -> tuple[float, float]:
    """When an event begins and ends."""
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def write_merged(events: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """Writes one file for viewers of Chrome's format (chrome://tracing, Perfetto), where each rank is a process."""
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
