"""Trains a small network, saves while training goes on, and resumes from the newest good checkpoint.

    python examples/train_async.py --directory /tmp/run
    torchrun --nproc-per-node=2 examples/train_async.py --directory /tmp/run

Run it again and it goes on where it was, on as many ranks as it is given; SIGTERM leads to one last save.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vescale_ckpt import CheckpointManager, Schedule


def say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of this rank, `[64, 16]`, and what the network is to make of them, `[64, 1]`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return rows, rows.square().mean(1, keepdim=True)


def train(directory: str, steps: int, gated: bool) -> int:
    """Trains until `steps`; returns the step that it started from."""
    torch.manual_seed(0)
    network: nn.Module = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))
    model = DistributedDataParallel(network) if dist.is_initialized() else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    schedule = Schedule(steps=20, signal=signal.SIGTERM)
    with CheckpointManager(directory, max_to_keep=2, schedule=schedule) as manager:
        if manager.latest() is not None:
            say(f"resumed from step {manager.restore(state)}")
        start = state["step"]
        for step in range(start + 1, steps + 1):
            rows, wanted = batch(step)
            loss = nn.functional.mse_loss(model(rows), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] = step
            # With the gate, copying overlaps the next forward and backward: only the next optimizer step waits for it.
            handle = manager.save(step, state, gate=optimizer if gated else None)
            if handle is not None:
                copied = "copied" if handle.staged.done() else "being copied"
                say(f"step {step}: loss {loss.item():.4f}, state {copied}, training goes on")
            if manager.preempted:
                break
    say(f"at step {state['step']}; checkpoints of steps {manager.steps()}")
    return int(start)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="where checkpoints are kept")
    parser.add_argument("--steps", type=int, default=100, help="train until this step")
    parser.add_argument("--gate", action="store_true", help="copy while forward and backward run")
    args = parser.parse_args(arguments)
    launched = dist.is_torchelastic_launched()
    if launched:
        dist.init_process_group("gloo")
    start = train(args.directory, args.steps, args.gate)
    if launched:
        dist.destroy_process_group()
    return start


if __name__ == "__main__":
    main()
