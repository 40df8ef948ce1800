"""Times saves and loads of torchtitan's own checkpoint manager and of this package's, in turn, in one job on CPUs.

    torchrun --nproc-per-node=2 benchmarks/integrations/time_torchtitan.py FOLDER [ROUNDS]

The state is that of Llama 3's debug model with AdamW. What torchtitan lacks on CPUs comes from the tests.
Loads find the files in the page cache.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integrations"))
import torch.distributed as dist
import torchtitan_job
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.config import ConfigManager


def seconds(action: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def main() -> None:
    folder, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    torchtitan_job.prepare(folder, layers=6)
    manager = ConfigManager().parse_args().build().checkpointer
    kinds = {"stock": CheckpointManager, "ours": type(manager)}
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for name, kind in kinds.items():
            path = os.path.join(folder, f"{name}-{number}")
            state = manager._flattened_model_states_sd()
            save = seconds(lambda: kind.dcp_save(manager, state, path, AsyncMode.DISABLED))  # noqa: B023
            load = seconds(lambda: kind.dcp_load(manager, state, path, False, False))  # noqa: B023
            if number > 0:  # the first one warms up
                times.setdefault((name, "save"), []).append(save)
                times.setdefault((name, "load"), []).append(load)
    if dist.get_rank() == 0:
        for (name, what), took in times.items():
            ratio = median(s / t for s, t in zip(times["stock", what], took, strict=True))
            print(f"{name:6} {what} {median(took):8.3f} s   stock takes {ratio:.2f} times as long")
        shutil.rmtree(folder)
    dist.barrier()
    manager.close()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
