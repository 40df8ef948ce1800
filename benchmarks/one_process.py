"""Saves and loads of one state by one candidate after the other, each load compared bit for bit."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from benchmarks import cache, states
from benchmarks.candidates import Candidate, sync
from benchmarks.harness import Steps, WrongContentsError
from benchmarks.measure import Usage, measure, settle


class SavesAndLoads:
    """Holds a state and the tensors to load it into. ``operations`` are of "save" and "load"."""

    def __init__(
        self,
        shapes: states.Shapes,
        directory: Path,
        operations: list[str],
        *,
        warm: bool,
        seed: int,
        device: str = "cpu",
    ) -> None:
        self.state = states.build(shapes, seed, device)
        self._targets = states.targets_for(self.state)
        self._directory = directory
        self._operations = operations
        self._warm = warm
        self._turns = 0

    def turn(self, name: str, candidate: Candidate) -> Steps:
        """One save and, where asked for, one load, in a directory that is removed after."""
        self._turns += 1
        states.stamp(self.state, self._turns % 251)
        directory = self._directory / f"{self._turns}-{name}"
        directory.mkdir()
        steps: dict[str, Usage] = {}
        try:
            settle()
            steps["save"] = self._told(candidate, measure(lambda: self._save(candidate, directory)))
            if "load" in self._operations:
                states.poison(self._targets)
                settle()
                resident = cache.prepare(directory, warm=self._warm)
                into = dict(self._targets)  # a tensor that a candidate replaces here is not loaded in place
                usage = measure(lambda: candidate.load(into, directory))
                steps["load"] = dataclasses.replace(self._told(candidate, usage), resident=resident)
                if candidate.keeps_state:
                    self._compare(name, self._targets if candidate.in_place else into)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return {operation: steps[operation] for operation in self._operations}

    def _told(self, candidate: Candidate, usage: Usage) -> Usage:
        size = sum(tensor.nbytes for tensor in self.state.values())
        return dataclasses.replace(usage, state_bytes=size, path=candidate.path_taken(), stats=candidate.stats())

    def _save(self, candidate: Candidate, directory: Path) -> None:
        candidate.save(self.state, directory)
        for made in (directory, directory.parent):
            sync(made)

    def _compare(self, name: str, loaded: states.State) -> None:
        wrong = states.differences(self.state, loaded)
        if wrong:
            count = f"{len(wrong)} of {len(self.state)} tensors"
            raise WrongContentsError(f"{name} loaded wrong contents: {count}, first {wrong[0]!r}")
