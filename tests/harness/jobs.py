"""Runs example scripts as jobs of several ranks, kills them, and compares the losses that they print.

A script prints a line `step 5 loss 0x1.9p+2` on rank 0 for each step (`float.hex`), and goes on from its newest
checkpoint by itself.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_LINE = re.compile(r"step (\d+) loss (\S+)")
_HALTING = str(Path(__file__).with_name("halting"))
_SECONDS = 240.0  # for a job; a few seconds are usual


class Job:
    """One run of a script by several ranks, each a process of its own, on this machine over gloo."""

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        ranks: int,
        environment: dict[str, str],
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "none",  # frameworks take this for the sign of torchrun
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            **environment,
        }
        self.losses: dict[int, str] = {}  #: by step
        self.output: list[str] = []
        self._own = tempfile.TemporaryDirectory()
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self._own.name,  # frameworks leave folders there
                start_new_session=True,  # with its own children it can be killed at once
            )
            for rank in range(ranks)
        ]
        self._seen = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(process,)) for process in self.processes]
        for reader in self._readers:
            reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found = _LINE.search(line)
            with self._seen:
                self.output.append(line)
                if found:
                    self.losses[int(found[1])] = found[2]
                self._seen.notify_all()

    def wait_for_step(self, step: int) -> None:
        with self._seen:
            there = self._seen.wait_for(lambda: step in self.losses or self._ended, _SECONDS)
        assert there and step in self.losses, f"step {step} was not reached:\n{self.text}"

    @property
    def _ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    @property
    def text(self) -> str:
        return "".join(self.output[-400:])

    def kill(self, ranks: Sequence[int] | None = None, number: signal.Signals = signal.SIGKILL) -> None:
        for rank in range(len(self.processes)) if ranks is None else ranks:
            with suppress(ProcessLookupError):
                os.killpg(self.processes[rank].pid, number)

    def wait(self) -> list[int]:
        """The exit status of each rank."""
        deadline = time.monotonic() + _SECONDS
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the job did not end:\n{self.text}") from None
        finally:
            for reader in self._readers:
                reader.join(10)
            self._own.cleanup()


@contextmanager
def started(script: Path, *arguments: str, ranks: int = 2, **environment: str) -> Iterator[Job]:
    """A job, which is killed at the end of the context if it still runs."""
    job = Job(script, arguments, ranks, environment)
    try:
        yield job
    finally:
        job.kill()
        job.wait()


def run(script: Path, *arguments: str, ranks: int = 2, **environment: str) -> dict[int, str]:
    """Runs a job to its end. Returns the losses by step, as `float.hex` writes them."""
    with started(script, *arguments, ranks=ranks, **environment) as job:
        assert job.wait() == [0] * ranks, job.text
        assert job.losses, f"no losses were printed:\n{job.text}"
        return job.losses


def run_and_kill(script: Path, *arguments: str, at: int, ranks: int = 2, **environment: str) -> dict[int, str]:
    """Runs a job until it halts behind the line of step `at`, and kills all ranks by SIGKILL. Returns its losses."""
    path = os.pathsep.join([_HALTING, os.environ.get("PYTHONPATH", "")])
    halting = {**environment, "PYTHONPATH": path, "HALT_AT_STEP": str(at)}
    with started(script, *arguments, ranks=ranks, **halting) as job:
        job.wait_for_step(at)
        job.kill()
        job.wait()
        return job.losses


def assert_same(found: dict[int, str], expected: dict[int, str], first: int) -> None:
    """Checks that the losses of all steps from `first` to the last are equal, bit for bit."""
    steps = range(first, max(expected) + 1)
    assert {step: found.get(step) for step in steps} == {step: expected[step] for step in steps}


def assert_close(found: dict[int, str], expected: dict[int, str], first: int, most: float = 1e-5) -> None:
    """The same up to rounding: another number of ranks adds in another order."""
    for step in range(first, max(expected) + 1):
        ours, theirs = float.fromhex(found[step]), float.fromhex(expected[step])
        assert abs(ours - theirs) <= most * max(1.0, abs(theirs)), (step, ours, theirs)
