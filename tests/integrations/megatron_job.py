"""One rank that saves or loads a small sharded state by `megatron.core.dist_checkpointing`."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, load, save

from vescale_ckpt.integrations.megatron import SaveStrategy

what, directory, rank, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
WHOLE, REPLICATED = torch.arange(64.0).reshape(16, 4), torch.arange(5.0)


def state(fill: float) -> dict:
    """A tensor in shards, one that all ranks hold, two objects, and a number."""
    rows = (WHOLE * fill).chunk(ranks)[rank].clone()
    made = {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, ranks), replica_id=0),
        "all": ShardedTensor.from_rank_offsets("all", REPLICATED * fill, replica_id=rank),
        "iteration": 7,
    }
    for number in range(rank, 2, ranks):  # two objects, whatever the number of ranks
        made[f"object{number}"] = ShardedObject("object", {"number": number}, (2,), (number,), replica_id=0)
    return made


dist.init_process_group("gloo", init_method=f"file://{directory}.{what}{ranks}", rank=rank, world_size=ranks)
found = {}
if what == "save":
    Path(directory).mkdir(exist_ok=True)
    dist.barrier()
    save(state(1), directory, sharded_strategy=SaveStrategy())
else:
    loaded = load(state(0), directory)
    mine = WHOLE.chunk(ranks)[rank]
    found = {"equal": torch.equal(loaded["rows"], mine) and torch.equal(loaded["all"], REPLICATED)}
    found["iteration"] = loaded["iteration"]
    found["objects"] = [value["number"] for key, value in loaded.items() if key.startswith("object")]
    try:
        SaveStrategy().async_save({}, directory)
    except Exception as error:
        found["async"] = type(error).__name__
print("\n" + json.dumps(found), flush=True)
time.sleep(0.3)  # gloo's threads may abort a program that ends right after its last message
dist.destroy_process_group()
