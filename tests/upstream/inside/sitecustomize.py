"""Prepares each process of PyTorch's tests: without GPUs, and with this package in the place of DCP.

Python imports this module when it starts, in the processes that tests spawn as well. `tests/upstream/run.py` sets the
variables.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def _run_on_the_cpu() -> None:
    """Lets tests run that ask for GPUs and NCCL and need neither: the CPU and gloo serve them. Those that need them
    fail with stock DCP, too."""
    import torch
    from torch.distributed.fsdp import _init_utils
    from torch.testing._internal import common_distributed

    def at_all(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        return lambda test: test

    def unchanged(on_the_host: Any, *args: Any, **kwargs: Any) -> Any:
        return on_the_host

    for name in ("skip_if_lt_x_gpu", "requires_nccl", "requires_accelerator_dist_backend"):
        setattr(common_distributed, name, at_all)
    # These import the names that were just replaced.
    from torch.testing._internal.distributed._shard import sharded_tensor
    from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase

    torch.nn.Module.cuda = torch.Tensor.cuda = unchanged
    torch.cuda.set_device = torch.cuda.synchronize = lambda *args: None
    with_comms, init_pg, init_device = (
        sharded_tensor.with_comms,
        DTensorTestBase.init_pg,
        _init_utils._init_device_handle,
    )
    sharded_tensor.with_comms = lambda test=None, init_rpc=True, backend=None: with_comms(test, init_rpc, "gloo")
    DTensorTestBase.init_pg = lambda test, eager_init=False, backend=None: init_pg(test, eager_init, "gloo")
    cpu = torch.device("cpu")
    _init_utils._init_device_handle = lambda state, module, ignored, device: init_device(state, module, ignored, cpu)
    fully_sharded = sys.modules["torch.distributed.fsdp.fully_sharded_data_parallel"]
    fully_sharded._init_device_handle = _init_utils._init_device_handle  # type: ignore[attr-defined]


def _fork() -> None:
    """Has the processes of a test forked, which is many times faster than starting them."""
    import torch
    from torch.testing._internal import common_distributed

    forks = torch.multiprocessing.get_context("fork").Process
    common_distributed.MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(forks)


def _replace_dcp(reached: str) -> None:
    """Makes DCP's defaults this package's, and notes the tests that come to them in the file `reached`."""
    from vescale_ckpt import LoadPlanner
    from vescale_ckpt.integrations import enable
    from vescale_ckpt.integrations.dcp import DefaultPlanner, DefaultReader, DefaultWriter

    enable()

    def note(kind: type, name: str) -> None:
        method = getattr(kind, name)

        @functools.wraps(method)
        def noted(*args: Any, **kwargs: Any) -> Any:
            with open(reached, "a") as file:
                file.write(os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0] + "\n")
            return method(*args, **kwargs)

        setattr(kind, name, noted)

    note(DefaultWriter, "prepare_local_plan")
    note(DefaultReader, "set_up_storage_reader")
    note(DefaultPlanner, "create_local_plan")
    note(LoadPlanner, "create_local_plan")


# multiprocessing's own helper processes run no tests.
if not any("resource_tracker" in word for word in sys.orig_argv):
    try:
        import torch

        if not torch.cuda.is_available():
            _run_on_the_cpu()
            _fork()
        if reached := os.environ.get("VESCALE_CKPT_UPSTREAM_REACHED"):
            _replace_dcp(reached)
    except BaseException:  # Python would go on without what this module does
        traceback.print_exc()
        os._exit(70)
