"""What asynchronous saves cost training: FSDP2 and fused AdamW in bfloat16, a save every few steps, against none and
against stock's `dcp.async_save`.

`python -m benchmarks.gpu_step_time`. `--device cpu` shows only that it runs.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import vescale_ckpt
from benchmarks.harness.by_turns import Row, Steps

from .background import stock_stager
from .figures import record
from .gpu_rounds import measured, synchronize

Save = Callable[[Path], Any]


class Block(nn.Module):
    """A layer with the matrices of a transformer's, without attention: its parameters are what counts here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Training:
    def __init__(self, device: str, width: int, layers: int, rows: int) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh(device, (1,))
        with torch.device(device):
            self.model = nn.Sequential(*(Block(width) for _ in range(layers))).bfloat16()
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self._rows = torch.randn(rows, width, device=device).bfloat16()
        self.step()  # the optimizer has its state from now on
        synchronize()

    def step(self) -> None:
        self.model(self._rows).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def seconds(self, steps: int, every: int, save: Save | None, folder: Path) -> float:
        """Seconds of so many steps, of which every so manieth is followed by a save. A save that is still being written
        when the next one is due is waited for, and the last one is written after the time was taken."""
        last: Any = None
        synchronize()
        began = time.perf_counter()
        for number in range(steps):
            self.step()
            if save is not None and number % every == every - 1:
                if last is not None:
                    last.result()
                    shutil.rmtree(folder / "last", ignore_errors=True)
                last = save(folder / "last")
        synchronize()
        seconds = time.perf_counter() - began
        if last is not None:
            last.result()
            shutil.rmtree(folder / "last", ignore_errors=True)
        return seconds


def saves(training: Training) -> dict[str, Save | None]:
    stager = stock_stager(StagingOptions(torch.cuda.is_available(), False, False, False))

    def ours(path: Path) -> Any:
        return vescale_ckpt.save(path, training.state(), async_checkpoint=True)

    def gated(path: Path) -> Any:
        return vescale_ckpt.save(path, training.state(), async_checkpoint=True, gate=training.optimizer)

    def stock(path: Path) -> Any:
        answer = async_save(training.state(), checkpoint_id=path, async_stager=stager())
        return answer if isinstance(answer, Future) else answer.upload_completion

    return {"none": None, "ours": ours, "ours_gate": gated, "stock": stock}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8, help="with 134 million parameters each at a width of 4096")
    parser.add_argument("--rows", type=int, default=16384, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        training = Training(options.device, options.width, options.layers, options.rows)
        record(step_time_parameters=sum(parameter.numel() for parameter in training.model.parameters()))

        def turn(name: str, save: Save | None) -> Steps:
            try:
                return {"steps": training.seconds(options.steps, options.every, save, Path(folder))}
            except Exception as error:  # the others go on
                record(**{f"step_time_{name}": f"failed: {type(error).__name__}: {error}"[:300]})
                return {}

        def figures(row: Row) -> dict[str, float]:
            found = {f"step_ms_{row.candidate}": row.seconds / options.steps * 1e3}
            if row.candidate != "none" and row.of_baseline is not None:
                found[f"step_time_{row.candidate}_slower_percent"] = (1 / row.of_baseline - 1) * 100
            return found

        turns = {name: partial(turn, name, save) for name, save in saves(training).items()}
        measured("training", turns, options.rounds, figures, "none")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
