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
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integrations"))
import torch.distributed as dist
import torchtitan_job
from rank_turns import print_turns, seconds
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.config import ConfigManager

from benchmarks.harness.by_turns import Steps


def main() -> None:
    folder, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    torchtitan_job.prepare(folder, layers=6)
    manager = ConfigManager().parse_args().build().checkpointer
    kinds = {"stock": CheckpointManager, "ours": type(manager)}

    def turn(name: str) -> Steps:
        path, state, kind = os.path.join(folder, name), manager._flattened_model_states_sd(), kinds[name]
        save = seconds(lambda: kind.dcp_save(manager, state, path, AsyncMode.DISABLED))
        load = seconds(lambda: kind.dcp_load(manager, state, path, False, False))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        return {"save": save, "load": load}

    print_turns("Llama 3's debug model with AdamW", {name: partial(turn, name) for name in kinds}, rounds, "stock")
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    manager.close()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
