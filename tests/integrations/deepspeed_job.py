"""Runs `examples/integrations/train_deepspeed.py` without the all-reduce for CPUs that DeepSpeed would compile."""

import os
import runpy
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "train_deepspeed.py"
runpy.run_path(str(EXAMPLE), run_name="__main__")
