"""Train MiniLM with FSDP2 and AdamW, save with vescale_ckpt, resume on any number of ranks.

    cd examples
    torchrun --nproc-per-node=2 train_fsdp.py --steps 20 --checkpoint ckpt --save-at 10 --losses a.jsonl
    torchrun --nproc-per-node=1 train_fsdp.py --steps 20 --checkpoint ckpt --resume --losses b.jsonl

The checkpoint part is `save` and `resume` below: stock `dcp.save` and `dcp.load`, given our plug points.
Everything that a step depends on is in the checkpoint (weights, optimizer, step, the generator behind the
data), so a resumed run repeats the interrupted one: to the bit on the same number of ranks, else up to the
rounding of sums taken in another order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from minilm import MiniLM, load_pretrained, random_tiny
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from whole_state import raw_bytes

import vescale_ckpt

BATCH = 8  # triplets a step over all ranks
LENGTH = 12  # tokens a sequence
SHARPNESS = 10.0  # scale of the cosines in the loss


class TripletStream:
    """Endless (anchor, positive, negative) token sequences from one seeded generator.

    Every rank draws the same global batch and trains on its own rows, so the data do not depend on the number
    of ranks, and the generator's state is the whole data position.
    """

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self.vocabulary = vocabulary
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self) -> Tensor:
        """Tokens `[3, BATCH, LENGTH]` int64; positives keep half of the anchor's tokens, negatives less."""
        drawn = torch.randint(self.vocabulary, (3, BATCH, LENGTH), generator=self.generator)
        chance = torch.rand(3, BATCH, LENGTH, generator=self.generator)
        kept = chance < torch.tensor([1.0, 0.5, 0.25]).view(3, 1, 1)
        return torch.where(kept, drawn[0], drawn)


class TrainState(Stateful):
    """All that the next step depends on, in the form that DCP saves and fills."""

    def __init__(self, model: MiniLM, optimizer: torch.optim.Optimizer, stream: TripletStream) -> None:
        self.model = model
        self.optimizer = optimizer
        self.stream = stream
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "stream": self.stream.generator.get_state(),
            "step": self.step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.stream.generator.set_state(state_dict["stream"])
        self.step = state_dict["step"]

    def digest(self) -> str:
        """SHA-256 over the bytes of this rank's part of the state; equal digests mean equal bits."""
        state = self.state_dict()
        parts = [*state["model"].values(), state["stream"]]
        parts += [value for moments in state["optimizer"]["state"].values() for value in moments.values()]
        sha = hashlib.sha256()
        for tensor in parts:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            sha.update(raw_bytes(local).numpy().data)
        return sha.hexdigest()


def save(path: Path, state: TrainState) -> None:
    dcp.save(
        {"train": state},
        storage_writer=vescale_ckpt.StorageWriter(path),
        planner=vescale_ckpt.SavePlanner(),
    )


def resume(path: Path, state: TrainState) -> None:
    dcp.load(
        {"train": state},
        storage_reader=vescale_ckpt.StorageReader(path),
        planner=vescale_ckpt.LoadPlanner(),
    )


def save_stock(path: Path, state: TrainState) -> None:
    """The same state by PyTorch's own writer: what the demo compares ours with."""
    dcp.save({"train": state}, storage_writer=dcp.FileSystemWriter(path))


def train_step(state: TrainState) -> float:
    """One optimizer step on the next batch; the mean loss over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = state.stream.next_batch().chunk(world, dim=1)[rank]
    anchor, positive, negative = state.model(mine.flatten(0, 1)).chunk(3)
    margin = (anchor * positive).sum(-1) - (anchor * negative).sum(-1)
    # A mean over samples: the ranks' means average to the loss of the global batch for any number of ranks.
    loss = F.softplus(-SHARPNESS * margin).mean()
    loss.backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / world


def build(tiny: bool) -> TrainState:
    """Model with its first weights, sharded over all ranks; optimizer and data at their start."""
    model = random_tiny() if tiny else load_pretrained()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return TrainState(model, torch.optim.AdamW(trained, lr=1e-4), TripletStream(model.shape.vocabulary))


def write_line(log: TextIO | None, **entry: object) -> None:
    """One JSON line, in the file at once: the demo's parent process follows it, and a kill loses none."""
    if log is not None:
        log.write(json.dumps(entry) + "\n")
        log.flush()


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        # Of two-rank gloo programs of torch 2.13 every tenth or so aborts at exit ("terminate called without
        # an active exception") with no checkpoint code in them; a short rest before the group goes ends that.
        time.sleep(0.5)
        dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True, help="train until this step")
    parser.add_argument("--checkpoint", type=Path, help="directory to save to or to resume from")
    parser.add_argument("--save-at", type=int, default=0, help="save after this step")
    parser.add_argument("--resume", action="store_true", help="start from the checkpoint")
    parser.add_argument("--stock-copy", type=Path, help="with --save-at: save here too, by PyTorch's writer")
    parser.add_argument("--losses", type=Path, required=True, help="log of JSON lines, losses as hex floats")
    parser.add_argument("--tiny", action="store_true", help="a tiny network with random weights, for tests")
    args = parser.parse_args()
    if (args.save_at or args.resume) and args.checkpoint is None:
        parser.error("--save-at and --resume need --checkpoint")
    return args


def train(args: argparse.Namespace, log: TextIO | None) -> None:
    state = build(args.tiny)
    if args.resume:
        resume(args.checkpoint, state)
        write_line(log, event="resumed", step=state.step, ranks=dist.get_world_size())
    while state.step < args.steps:
        loss = train_step(state)
        write_line(log, event="step", step=state.step, loss=loss.hex())
        if state.step == args.save_at:
            save(args.checkpoint, state)
            if args.stock_copy:
                save_stock(args.stock_copy, state)
            write_line(log, event="saved", step=state.step)
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, state.digest())
    write_line(log, event="finished", step=state.step, digests=digests)


def main() -> None:
    args = arguments()
    # One thread a rank: sums are then taken in one order, and losses can be compared to the bit.
    torch.set_num_threads(1)
    with process_group():
        if dist.get_rank() == 0:
            with args.losses.open("w") as log:
                train(args, log)
        else:
            train(args, None)


if __name__ == "__main__":
    main()
