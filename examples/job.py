"""A training job under torchrun, followed through its log, and killed without mercy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRAINING = Path(__file__).resolve().parent / "train_fsdp.py"
TIMEOUT = 180.0  # seconds for a job, start to end


@dataclass
class Progress:
    """What a job has logged so far."""

    losses: dict[int, str] = field(default_factory=dict)
    """Step to loss as an exact hex float."""
    saved: bool = False
    resumed_at: int | None = None
    digests: list[str] | None = None
    """Of each rank's final state; None until the job has finished."""

    @staticmethod
    def read(log: Path) -> Progress:
        progress = Progress()
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        for line in lines:
            if not line.endswith("\n"):
                break  # being written just now
            entry: dict[str, Any] = json.loads(line)
            match entry["event"]:
                case "step":
                    progress.losses[entry["step"]] = entry["loss"]
                case "saved":
                    progress.saved = True
                case "resumed":
                    progress.resumed_at = entry["step"]
                case "finished":
                    progress.digests = entry["digests"]
        return progress


class Job:
    """One `torchrun examples/train_fsdp.py`, its log and its output in files under `directory`."""

    def __init__(self, name: str, directory: Path, ranks: int, *arguments: str) -> None:
        self.name = name
        self.log = directory / f"{name}.jsonl"
        self.output = directory / f"{name}.out"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(TRAINING), f"--losses={self.log}", *arguments]
        # torchrun keeps its own files in TMPDIR and leaves them there when killed.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
        self._shown = 0  # the last step that was printed
        print(f"   {name}: torchrun starts {ranks} rank{'s' * (ranks > 1)}", flush=True)
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def fail(self, reason: str) -> SystemExit:
        # torchrun says a great deal after the traceback that matters.
        tail = "\n".join(self.output.read_text().splitlines()[-80:])
        return SystemExit(f"FAILED: the job '{self.name}' {reason}; the end of its output:\n{tail}")

    def wait_for(self, reached: Callable[[Progress], bool]) -> Progress:
        """Follow the log of the running job until it shows what is waited for."""
        deadline = time.monotonic() + TIMEOUT
        while not reached(progress := self._read()):
            if self.process.poll() is not None:
                raise self.fail(f"ended with status {self.process.returncode}")
            if time.monotonic() > deadline:
                raise self.fail(f"is at step {max(progress.losses, default=0)} after {TIMEOUT:.0f} s")
            time.sleep(0.02)
        return progress

    def _read(self) -> Progress:
        """Read the log, and print a line for each new step."""
        progress = Progress.read(self.log)
        for step in sorted(step for step in progress.losses if step > self._shown):
            print(f"   {self.name}: step {step}, loss {float.fromhex(progress.losses[step]):.4f}", flush=True)
            self._shown = step
        return progress

    def wait(self) -> Progress:
        """Until the job has ended well."""
        deadline = time.monotonic() + TIMEOUT
        while (status := self.process.poll()) is None:
            if time.monotonic() > deadline:
                raise self.fail(f"has not ended after {TIMEOUT:.0f} s")
            self._read()
            time.sleep(0.1)
        progress = self._read()
        if status != 0 or progress.digests is None:
            raise self.fail(f"ended with status {status}")
        return progress

    def kill(self) -> int:
        """SIGKILL to torchrun and all its ranks; how many processes that were. Returns when none runs.

        torchrun puts every rank into a session of its own, so the signal must go to each: the ranks of a
        killed torchrun would train on.
        """
        family = [self.process.pid, *descendants(self.process.pid)]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        while any(is_running(pid) for pid in family):
            time.sleep(0.01)
        return len(family)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def process_stat(pid: int) -> list[str] | None:
    """State, parent and so on: `man proc_pid_stat` from its third field; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def is_running(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat[0] not in "ZX"


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs, parents first."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        if stat := process_stat(int(entry.name)):
            children[int(stat[1])].append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        born = children[pending.pop()]
        found += born
        pending += born
    return found
