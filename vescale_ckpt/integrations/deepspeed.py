"""`engine_state` makes a state to save and load out of a DeepSpeed engine, for trainings with ZeRO stages 0 to 3."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import PerRank
from ..errors import CheckpointError
from ._versions import check_version, hook

check_version("deepspeed", ("0.19", "0.20"))

_ZeRO: Any = hook("deepspeed.runtime.base_optimizer", "ZeROOptimizer")

#: Parts of a ZeRO optimizer's state that the engine makes: objects of DeepSpeed's classes.
_MADE_BY_ENGINE = {"loss_scaler", "param_slice_mappings"}
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def engine_state(engine: Any) -> dict[str, Any]:
    """The state of an engine, for `vescale_ckpt.save` and `load` and for `CheckpointManager`.

    It holds the weights, the optimizer, the learning rate scheduler and the engine's counters. With ZeRO each rank's
    part of the optimizer is an object of its own: it can be loaded by the same number of ranks only. With stage 3
    these parts hold the weights as well, else the weights can be loaded by any number of ranks.

    Raises `CheckpointError` for an optimizer that is neither torch's nor ZeRO's (`fp16`, or `bf16` with stage 0).
    """
    stage = engine.zero_optimization_stage()
    state: dict[str, Any] = {"counters": _Counters(engine)}
    state["module"] = dict(engine.module.named_buffers()) if stage == 3 else engine.module
    if isinstance(engine.optimizer, _ZeRO):
        # As an object: a new engine has no moments yet into which tensors could be loaded.
        state["optimizer"] = PerRank(_Shard(engine.optimizer))
    elif isinstance(engine.optimizer, torch.optim.Optimizer):
        state["optimizer"] = engine.optimizer
    else:
        raise CheckpointError(
            f"{type(engine.optimizer).__name__}, ZeRO stage {stage}: engine_state knows torch's optimizers and ZeRO's"
        )
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


class _Shard:
    """What one rank holds of a ZeRO optimizer. Objects of DeepSpeed's classes are made by the engine, not loaded."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        kept = {key: value for key, value in state.items() if key not in _MADE_BY_ENGINE}
        if unknown := [key for key, value in kept.items() if not _is_plain(value)]:
            raise CheckpointError(f"{type(self.optimizer).__name__} has objects of unknown classes in {unknown}")
        kept = {key: _plain(value) for key, value in kept.items()}
        kept["scaler"] = {key: value for key, value in vars(state["loss_scaler"]).items() if _is_plain(value)}
        return kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.optimizer.state_dict()
        if state["zero_stage"] != own["zero_stage"]:
            stages = f"stage {state['zero_stage']} of ZeRO, the engine has stage {int(own['zero_stage'])}"
            raise CheckpointError(f"the optimizer was saved with {stages}")
        scaler = self.optimizer.loss_scaler
        vars(scaler).update(state["scaler"])
        ours: list[dict[str, Any] | None] = [None] * dist.get_world_size(self.optimizer.dp_process_group)
        ours[dist.get_rank(self.optimizer.dp_process_group)] = {**own, **state, "loss_scaler": scaler}
        self.optimizer.load_state_dict(ours, load_optimizer_states=True, load_from_fp32_weights=True)


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold the value without trusting a class."""
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


def _plain(value: Any) -> Any:
    """The value with enumerations as numbers, and parameters as tensors."""
    if isinstance(value, dict):
        return {key: _plain(of_key) for key, of_key in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, torch.nn.Parameter):
        return value.data
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value
