"""The demo, with a tiny network and one round: train, kill, resume, exchange with stock DCP, measure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness.python_forks import BOUND, PythonProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Ranks:
    """A torchrun job without its torchrun: its ranks alone."""

    def __init__(self, command: list[str], *, env: dict[str, str], **more: Any) -> None:
        *launch, count, script, log = command[:7]
        assert launch == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        world_size = count.removeprefix("--nproc-per-node=")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "GLOO_SOCKET_IFNAME": "lo"}
        here |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": world_size}
        self.ranks = [
            PythonProcess(
                [sys.executable, script, log, *command[7:]],
                env={**env, **here, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                **more,
            )
            for rank in range(int(world_size))
        ]
        self.pid = self.ranks[0].pid

    def poll(self) -> int | None:
        statuses = [rank.poll() for rank in self.ranks]
        return next((status for status in statuses if status), None if None in statuses else 0)

    def wait(self, timeout: float = BOUND) -> int:
        return max(abs(rank.wait(timeout)) for rank in self.ranks)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()


def test_demo_passes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")  # the network's weights come in that format
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo
    import table

    processes = ExitStack()
    popen: Callable[..., Any] = subprocess.Popen

    def start(command: list[str], **more: Any) -> Any:
        """The job that is killed runs under torchrun, the others are forks."""
        torchrun = "torch.distributed.run" in command
        if torchrun and "--steps=1000" in command:
            return popen(command, **more)
        return processes.enter_context(Ranks(command, **more) if torchrun else PythonProcess(command, **more))

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--tiny", "--rounds=1", f"--dir={tmp_path}"])
    with processes:
        demo.main()
    printed = capsys.readouterr().out
    claims = [line for line in printed.splitlines() if line.startswith("ok: ")]
    for name in ("uninterrupted", "resumed"):
        steps = [line for line in printed.splitlines() if line.startswith(f"   {name}: step ")]
        assert len(steps) == (12 if name == "uninterrupted" else 8)
    assert any("killed 3 processes with SIGKILL" in claim for claim in claims)
    assert sum("bit for bit" in claim for claim in claims) == 6
    assert all(printed.rpartition("durable saves")[2].count(label) >= 2 for label in table.CANDIDATES)
    assert not list(tmp_path.iterdir())
