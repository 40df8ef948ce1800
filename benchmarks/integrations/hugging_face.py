"""Measures saves and loads of Accelerate with FSDP2: its own way, the same inside `dcp_defaults`, and `state_of`.

    accelerate launch benchmarks/integrations/hugging_face.py DIRECTORY
    torchrun --nproc_per_node 2 tests/integrations/without_gpu.py benchmarks/integrations/hugging_face.py DIRECTORY fsdp

The ways take turns in one run; the page cache is warm in loads. Prints medians of each, and of the ratios of a round.
"""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

import vescale_ckpt
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
    seconds: dict[tuple[str, str], list[float]] = {}
    for _round in range(ROUNDS + 1):
        for way, calls in ways.items():
            for what, call in zip(("save", "load"), calls, strict=True):
                accelerator.wait_for_everyone()
                began = time.perf_counter()
                call()
                accelerator.wait_for_everyone()
                if _round:  # the first one warms up
                    seconds.setdefault((what, way), []).append(time.perf_counter() - began)
    if accelerator.is_main_process:
        for (what, way), times in seconds.items():
            ratios = [stock / own for stock, own in zip(seconds[what, "save_state"], times, strict=True)]
            print(
                f"{what} {way:20} {median(times):.3f} s, {median(ratios):.2f} x as fast as save_state's own "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
        shutil.rmtree(directory)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
