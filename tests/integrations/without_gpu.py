"""Runs an example on the CPU whose framework shards with FSDP only where it sees an accelerator.

    python tests/integrations/without_gpu.py EXAMPLE [ARGUMENTS]

Accelerate makes plain data parallelism of FSDP on the CPU, without a word. Here it takes its ranks for ranks with GPUs,
if "fsdp" is among the words on the command line.
"""

import os
import runpy
import sys
import time

import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    original = Accelerator.__init__

    def on_cpu(self: Accelerator, *args: object, **options: object) -> None:
        if "fsdp" in " ".join(sys.argv):
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        original(self, *args, **{**options, "cpu": True})  # type: ignore[arg-type]

    Accelerator.__init__ = on_cpu  # type: ignore[method-assign]
    runpy.run_path(sys.argv[0], run_name="__main__")
    # A thread of the default group's gloo needs the interpreter to release the tensors of the last collective. If that
    # ends meanwhile, torch ends the process with SIGABRT.
    time.sleep(1)
    if dist.is_initialized():
        dist.destroy_process_group()
