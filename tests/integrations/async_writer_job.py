"""One rank that saves a small state by the asynchronous writer of NVRx or Megatron-core, or with OLMo-core's class."""

import pickle
import sys
import time
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


class Planner(DefaultSavePlanner):
    """Keeps the plans of all ranks in the metadata, as Megatron-core's planner does."""

    can_run_decentralized_global_plan = True

    def create_decentralized_global_plan(self, local_plan):
        return local_plan


def save_by(package, state, directory):
    torch.cuda.synchronize = lambda *_: None  # these writers take a GPU for granted
    torch.cuda.current_device = lambda: "cpu"
    saver = import_module(f"{package}.state_dict_saver")
    writer = import_module(f"{package}.filesystem_async").FileSystemWriterAsync(directory, thread_count=1)
    planned = saver.save_state_dict_async_plan(state, writer, planner=Planner())
    planned = planned[0] if isinstance(planned[0], tuple) else planned  # Megatron adds the plans that it keeps
    function, preload, arguments = writer.get_save_function_and_args()
    arguments = list(arguments)
    if preload is not None:
        arguments[1] = preload()
    function(*arguments)
    saver.save_state_dict_async_finalize(*planned)


def save_as_olmo(state, directory):
    # Only its class is used: what its module needs besides stays away.
    sys.modules.update(
        {name: MagicMock() for name in ("bettermap", "cached_path", "cached_path.schemes", "dataclass_extensions")}
    )
    _StorageInfo = import_module("olmo_core.distributed.checkpoint.filesystem")._StorageInfo
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory))
    if dist.get_rank() == 0:
        path = Path(directory) / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        for index, of in metadata.storage_data.items():
            metadata.storage_data[index] = _StorageInfo(of.relative_path, of.offset, of.length)
        path.write_bytes(pickle.dumps(metadata))


if __name__ == "__main__":  # these writers spawn processes
    which, directory, rank, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{directory}.group", rank=rank, world_size=ranks)
    rows = distribute_tensor(torch.arange(64.0).reshape(16, 4), init_device_mesh("cpu", (ranks,)), [Shard(0)])
    state = {"rows": rows, "all": torch.arange(5), "object": {"n": 7, "values": [1, 2]}}
    Path(directory).mkdir(exist_ok=True)
    dist.barrier()
    if which == "olmo_core":
        save_as_olmo(state, directory)
    else:
        save_by(which, state, directory)
    dist.barrier()
    time.sleep(0.3)  # else gloo may abort when the process ends
    dist.destroy_process_group()
