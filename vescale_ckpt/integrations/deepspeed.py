"""`engine_state` makes a state to save and load out of a DeepSpeed engine that has an optimizer of torch (stage 0)."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CheckpointError
from ._versions import check_version

__all__ = ["engine_state"]

check_version("deepspeed", ("0.19", "0.20"))

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def engine_state(engine: Any) -> dict[str, Any]:
    """The state of an engine, for `vescale_ckpt.save` and `load` and for `CheckpointManager`.

    It holds the weights, the optimizer, the learning rate scheduler and the engine's counters. Any number of ranks can
    load it.

    Raises `CheckpointError` for an optimizer that is not torch's: one of ZeRO (stages 1 to 3), `fp16`, `bf16`.
    """
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        raise CheckpointError(
            f"{type(engine.optimizer).__name__}, ZeRO stage {engine.zero_optimization_stage()}: engine_state knows "
            "torch's optimizers. Save ZeRO's with engine.save_checkpoint"
        )
    state = {"counters": _Counters(engine), "module": engine.module, "optimizer": engine.optimizer}
    if engine.lr_scheduler is not None:
        state["lr_scheduler"] = engine.lr_scheduler
    return state


class _Counters:
    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self.engine, name) for name in _COUNTERS}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name in _COUNTERS:
            setattr(self.engine, name, state[name])
