"""`examples/integrations/elastic.py` under torchrun: ranks die, come and go, or are preempted, and training goes on."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness import jobs

pytestmark = pytest.mark.slow  # several jobs under torchrun
EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "elastic.py"
SECONDS = 240.0
Losses = list[tuple[int, str]]


class Torchrun:
    """One `torchrun`: an agent and its ranks, whose output is appended to a file."""

    def __init__(self, log: Path, options: list[str], directory: Path, steps: int) -> None:
        self.log = log
        self.mark = f"ELASTIC_TEST={log}:{time.monotonic_ns()}"  # tells its processes from all others
        name, value = self.mark.split("=")
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(EXAMPLE), str(directory), str(steps)]
        environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # An agent that keeps rank 0 does not tell a new one the address of the store that they share (torch 2.13).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with log.open("ab") as output:
            self.agent = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    @property
    def losses(self) -> Losses:
        """Steps and losses in the order in which they were printed."""
        return [(int(step), loss) for step, loss in re.findall(r"step (\d+) loss (\S+)\n", self.log.read_text())]

    def wait_until(self, reached: Callable[[Losses], bool]) -> Losses:
        deadline = time.monotonic() + SECONDS
        while not reached(losses := self.losses):
            assert self.agent.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.005)
        return losses

    def wait(self) -> int:
        try:
            return self.agent.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun did not end:\n{self.log.read_text()}") from None

    def pids(self, *variables: str) -> list[int]:
        """Its processes in whose environment these variables stand."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if {self.mark, *variables} <= set(environment):
                    found.append(int(entry.name))
        return found

    def kill(self, *variables: str) -> None:
        for pid in self.pids(*variables):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def torchrun(log: Path, *options: str, directory: Path, steps: int = 8) -> Iterator[Torchrun]:
    job = Torchrun(log, list(options), directory, steps)
    try:
        yield job
    finally:
        job.kill()
        job.agent.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run that nothing interrupts."""
    return jobs.run(EXAMPLE, str(tmp_path_factory.mktemp("whole")))


def test_a_rank_that_dies_is_replaced(tmp_path: Path, whole: dict[int, str]) -> None:
    log = tmp_path / "log"
    with torchrun(log, "--standalone", "--nproc-per-node=2", "--max-restarts=1", directory=tmp_path / "run") as job:
        before = job.wait_until(lambda losses: (6, whole[6]) in losses)
        job.kill("RANK=1")
        assert job.wait() == 0, log.read_text()
        first, *again = job.losses[len(before) :]
    assert before == [(step, whole[step]) for step in range(1, 7)]
    if first[0] == 7 and again and again[0][0] != 8:  # printed before rank 0 had heard of it
        first, *again = again
    assert first[0] in (3, 5, 7), "it goes on from a checkpoint"
    jobs.assert_same(dict([first, *again]), whole, first=first[0])


def test_torchrun_is_preempted(tmp_path: Path, whole: dict[int, str]) -> None:
    log, directory = tmp_path / "log", tmp_path / "run"
    with torchrun(log, "--standalone", "--nproc-per-node=2", directory=directory) as job:
        job.wait_until(lambda losses: len(losses) >= 3)
        os.kill(job.agent.pid, signal.SIGTERM)
        job.wait()  # its status is that of a job that was stopped by a signal
        assert not job.pids()
        assert "Unable to shutdown" not in log.read_text(), "a rank had to be killed"
        last = job.losses[-1][0]
    assert last < 8, "the signal came too late for this test"
    resumed = jobs.run(EXAMPLE, str(directory))
    assert min(resumed) == last + 1, "it goes on from the very step"
    jobs.assert_same({**dict(job.losses), **resumed}, whole, first=1)


@pytest.mark.parametrize("ranks_then", [2, 1], ids=["same_ranks", "fewer_ranks"])
def test_one_rank_is_preempted(tmp_path: Path, whole: dict[int, str], ranks_then: int) -> None:
    with jobs.started(EXAMPLE, str(tmp_path)) as job:
        job.wait_for_step(3)
        os.kill(job.processes[1].pid, signal.SIGTERM)
        assert job.wait() == [0, 0], job.text
        last = max(job.losses)
    assert last < 8, "the signal came too late for this test"
    resumed = jobs.run(EXAMPLE, str(tmp_path), ranks=ranks_then)
    assert min(resumed) == last + 1, "it goes on from the very step"
    if ranks_then == 2:
        jobs.assert_same({**job.losses, **resumed}, whole, first=1)
    else:  # other dropout: a run that began anew would be at 5.7
        jobs.assert_close(resumed, whole, first=last + 1, most=0.05)


def test_the_number_of_ranks_changes(tmp_path: Path) -> None:
    """A second agent joins, and is lost."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic",
        f"--rdzv-endpoint=localhost:{port}", "--local-addr=127.0.0.1",
        "--rdzv-conf=last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=8",
    ]  # fmt: skip
    log, directory = tmp_path / "log", tmp_path / "run"
    with torchrun(log, *options, directory=directory, steps=100_000) as stays:
        stays.wait_until(lambda losses: len(losses) >= 4)
        with torchrun(log, *options, directory=directory, steps=100_000) as leaves:
            alone = stays.wait_until(lambda _: bool(leaves.pids("WORLD_SIZE=2")))
            together = stays.wait_until(lambda losses: len(losses) >= len(alone) + 3)
            leaves.kill()
        count = len(stays.losses)
        losses = stays.wait_until(lambda losses: len(losses) >= count + 3)
        os.kill(stays.agent.pid, signal.SIGTERM)
        stays.wait()
        losses = stays.losses
    assert together[: len(alone)] == alone
    steps = [step for step, _ in losses]
    back = [at for at in range(1, len(steps)) if steps[at] != steps[at - 1] + 1]
    assert len(back) <= 1, "steps are lost where a rank is lost, and not where one joins"
    assert all(steps[at - 1] - 4 <= steps[at] <= steps[at - 1] for at in back)
    values = [float.fromhex(loss) for _, loss in losses]
    assert all(after < before + 0.5 for before, after in itertools.pairwise(values)), values
    assert (directory / f"step-{steps[-1]}" / ".metadata").exists()
