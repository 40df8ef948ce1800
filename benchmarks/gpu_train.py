"""FSDP2 on one device: train, save while training goes on, be killed, resume; losses are the same bit for bit.

`python -m benchmarks.gpu_train`. Three processes: one that trains through, one that kills itself some steps after a
save, and one that resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from vescale_ckpt import CheckpointManager

from .figures import record

LIMIT = 120.0  # seconds for each process


def train(device: str, directory: str, steps: int, every: int, die_at: int) -> None:
    """Prints the step that it began at and the loss of each step, as text that holds all bits."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        mesh = init_device_mesh(device, (1,))
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))).to(device)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
        with CheckpointManager(directory, async_checkpoint=True, max_to_keep=2) as manager:
            state = {"model": model, "optimizer": optimizer}
            begun = 0 if manager.latest() is None else manager.restore(state)
            print("begun", begun, flush=True)
            for step in range(begun + 1, steps + 1):
                rows = torch.randn(32, 128, generator=torch.Generator("cpu").manual_seed(step)).to(device)
                loss = (model(rows) - rows.roll(1, 1)).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                print("step", step, float(loss.detach()).hex(), flush=True)
                if step == die_at:
                    manager.wait()
                    manager.save(step, state)  # which the kill tears, or does not
                    os.kill(os.getpid(), signal.SIGKILL)
                if step % every == 0:
                    manager.save(step, state)
        dist.destroy_process_group()


def run(device: str, directory: Path, *options: str) -> tuple[int, dict[int, str], int]:
    """The step that a process began at, losses by step, and its exit status."""
    words = ["-m", "benchmarks.gpu_train", "--device", device, "--directory", str(directory), *options]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=LIMIT, env=environment)
    lines = [line.split() for line in result.stdout.splitlines()]
    losses = {int(words[1]): words[2] for words in lines if words[0] == "step"}
    begun = [int(words[1]) for words in lines if words[0] == "begun"]
    if not begun:
        raise SystemExit(f"training did not begin: {result.stderr[-2000:]}")
    return begun[0], losses, result.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--directory", help="train here, in this process")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--die-at", type=int, default=0)
    options = parser.parse_args()
    if options.directory:
        train(options.device, options.directory, options.steps, options.every, options.die_at)
        return
    with tempfile.TemporaryDirectory() as folder:
        _, through, _ = run(options.device, Path(folder, "through"))
        _, before, status = run(options.device, Path(folder, "killed"), "--die-at=25")
        begun, after, _ = run(options.device, Path(folder, "killed"))
    record(train_losses=json.dumps([through[1], through[40]]), train_resumed_from=begun)
    if status != -signal.SIGKILL or begun not in (20, 25):
        raise SystemExit(f"the killed run ended with {status}, the next one began at {begun}: 20 or 25 is wanted")
    if before | after != {step: through[step] for step in (before | after)} or max(after) != 40:
        raise SystemExit(f"other losses than without a kill: {through} / {before} / {after}")


if __name__ == "__main__":
    main()
