"""`state_of` gives all that `accelerator.prepare` made as one state, for users of Hugging Face's Accelerate.

Accelerate's own `save_state` writes several folders and files, one after the other. With FSDP and SHARDED_STATE_DICT
those of model and optimizer go through DCP: inside `vescale_ckpt.integrations.dcp_defaults()` through this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import PerRank, RandomState
from ..errors import CheckpointError
from ._versions import check_version, hook

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["state_of"]

#: What Accelerate keeps of what it prepared, by the names under which `state_of` has it.
_PREPARED = {
    "model": "_models",
    "optimizer": "_optimizers",
    "scheduler": "_schedulers",
    "dataloader": "_dataloaders",
    "object": "_custom_objects",
}
_WITH_OWN_CHECKPOINTS = ("DEEPSPEED", "MEGATRON_LM", "XLA")


def state_of(accelerator: Accelerator) -> dict[str, Any]:
    """The state of a training with Accelerate, for `vescale_ckpt.save`, `load` and `CheckpointManager`.

    Call it after `accelerator.prepare`, on all ranks. The result is a dict that holds the objects themselves, so that
    one call serves all saves of the job and the restore. Its keys are `model`, `optimizer`, `scheduler` and `object`
    (what `register_for_checkpointing` was given), `dataloader`, `scaler` with float16, `accelerator` (its count of
    gradient accumulation) and `random`. The second model is `model_1`, and so on. Entries may be added and removed.

    Of a data loader the number of the epoch is saved. With `use_stateful_dataloader=True` it is each rank's position as
    well: training goes on in the middle of the epoch, on the same number of ranks. On another number a restore raises
    `IncompatibleStateError`, unless `dataloader` is removed from the state.

    Works with and without FSDP. Raises `CheckpointError` if nothing has been prepared, and for what DeepSpeed,
    Megatron-LM or XLA have prepared.
    """
    check_version("accelerate", ("1.14", "1.16"))
    kind = hook("accelerate", "Accelerator")
    if not isinstance(accelerator, kind):
        raise TypeError(f"accelerator: expected an accelerate.Accelerator, got {type(accelerator).__name__}")
    if (name := accelerator.distributed_type.name) in _WITH_OWN_CHECKPOINTS:
        raise CheckpointError(f"state_of: what Accelerate prepares with {name} has checkpoints of its own kind")
    prepared = {name: getattr(accelerator, attribute) for name, attribute in _PREPARED.items()}
    if not prepared["model"]:
        raise CheckpointError("state_of: this accelerator has prepared no model. Call accelerator.prepare before")
    # The optimizer inside: the one around it leaves out steps while gradients accumulate.
    prepared["optimizer"] = [getattr(optimizer, "optimizer", optimizer) for optimizer in prepared["optimizer"]]
    prepared["dataloader"] = [
        PerRank(_Position(loader)) if getattr(loader, "use_stateful_dataloader", False) else _Epoch(loader)
        for loader in prepared["dataloader"]
        if hasattr(loader, "iteration")
    ]
    state = {
        f"{name}_{number}" if number else name: value
        for name, values in prepared.items()
        for number, value in enumerate(values)
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return {**state, "accelerator": _Counter(accelerator), "random": PerRank(RandomState())}


class _Counter:
    """An accelerator's count of the batches whose gradients it has accumulated."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


class _Epoch:
    """The epoch in which a data loader of Accelerate is. Accelerate's own checkpoints lack it, and resume in the order
    of the first epoch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        in_its_loop = any(loader is other for other in loader.gradient_state.dataloader_references)
        return {"epoch": loader.iteration + (in_its_loop and loader.end_of_dataloader)}  # at the last batch: the next

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.set_epoch(state["epoch"])


class _Position(_Epoch):
    """The same, and the position in the epoch."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._loader.load_state_dict(state["loader"])
