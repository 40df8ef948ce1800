"""Measures saves and loads of Accelerate with FSDP2: its own way, the same inside `dcp_defaults`, and `state_of`.

    accelerate launch benchmarks/integrations/hugging_face.py DIRECTORY
    torchrun --nproc_per_node 2 tests/integrations/without_gpu.py benchmarks/integrations/hugging_face.py DIRECTORY fsdp

The ways take turns in one run; the page cache is warm in loads.
"""

import contextlib
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from rank_turns import print_turns, seconds
from torch import nn

import vescale_ckpt
from benchmarks.harness.by_turns import Steps
from vescale_ckpt.integrations import dcp_defaults
from vescale_ckpt.integrations.accelerate import state_of

ROUNDS, LAYERS, WIDTH = 5, 8, 1250  # 150 MB of parameters and AdamW's state


def main(directory: str, *_: str) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.backward(model(torch.randn(2, WIDTH, device=accelerator.device)).sum())
    optimizer.step()
    state, one_commit = state_of(accelerator), f"{directory}/state_of"

    def in_own_way(path: str, ours: bool) -> tuple[Callable[[], None], Callable[[], None]]:
        def run(call: Callable[[str], object]) -> None:
            with dcp_defaults() if ours else contextlib.nullcontext():
                call(path)

        return lambda: run(accelerator.save_state), lambda: run(accelerator.load_state)

    def save() -> None:
        vescale_ckpt.save(one_commit, state)

    def load() -> None:
        vescale_ckpt.load(one_commit, state)

    ways = {
        "save_state": in_own_way(f"{directory}/stock", ours=False),
        "inside dcp_defaults": in_own_way(f"{directory}/ours", ours=True),
        "state_of": (save, load),
    }

    def turn(way: str) -> Steps:
        return dict(zip(("save", "load"), map(seconds, ways[way]), strict=True))

    print_turns("Accelerate with FSDP2", {way: partial(turn, way) for way in ways}, ROUNDS, "save_state")
    if accelerator.is_main_process:
        shutil.rmtree(directory)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
