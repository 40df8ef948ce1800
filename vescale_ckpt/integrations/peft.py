"""`Adapter` saves and restores the adapters of a PEFT model (LoRA) without its base, and `save_adapter` writes them for
`PeftModel.from_pretrained`."""

from __future__ import annotations

import copy
import os
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .. import safetensors
from .._ranks.exchange import Exchange
from ._versions import check_version, hook, unwrapped

__all__ = ["Adapter", "save_adapter"]

_FILE = "adapter_model.safetensors"


class Adapter:
    """One adapter of a PEFT model, to stand in a state in place of the model:
    `{"model": Adapter(model), "optimizer": optimizer}`.

    Saved are the tensors that PEFT's own `save_pretrained` writes, whole or sharded (FSDP2) as they are. The base model
    is not: a job that resumes makes it from the same source, and adds the same adapter. Optimizer state exists for
    parameters that are trained only, and is saved under their numbers.

    Args:
        model: a `peft.PeftModel`, also inside DDP.
        adapter_name: which of its adapters.
        save_embedding_layers: that of `PeftModel.save_pretrained`. "auto" may look at the base model's config on the
            hub; True or False does not.
    """

    def __init__(
        self,
        model: nn.Module,
        adapter_name: str = "default",
        *,
        save_embedding_layers: bool | Literal["auto"] = "auto",
    ) -> None:
        check_version("peft", ("0.20", "0.22"))
        self.model = unwrapped(model, "peft", "PeftModel")
        if adapter_name not in self.model.peft_config:
            there = ", ".join(map(repr, self.model.peft_config))
            raise ValueError(f"adapter_name={adapter_name!r}: the model has {there}")
        self.adapter_name = adapter_name
        self.save_embedding_layers = save_embedding_layers

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = hook("peft", "get_peft_model_state_dict")(
            self.model, adapter_name=self.adapter_name, save_embedding_layers=self.save_embedding_layers
        )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        hook("peft", "set_peft_model_state_dict")(self.model, dict(state), adapter_name=self.adapter_name)


def save_adapter(
    model: nn.Module,
    directory: str | os.PathLike[str],
    adapter_name: str = "default",
    *,
    save_embedding_layers: bool | Literal["auto"] = "auto",
) -> None:
    """Writes an adapter as the folder that `PeftModel.from_pretrained(base, directory)` reads; all ranks call it.

    Only the adapter's tensors are gathered, one after the other, and rank 0 writes them. `adapter_config.json` names
    the base model, as PEFT writes it.
    """
    adapter = Adapter(model, adapter_name, save_embedding_layers=save_embedding_layers)
    exchange = Exchange.of(None, None, purpose="pretrained")
    tensors = {}
    for key, value in adapter.state_dict().items():
        value = value.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if exchange.is_coordinator:
            tensors[key] = whole.cpu().clone(memory_format=torch.contiguous_format)  # no two share memory

    def write() -> None:
        if exchange.is_coordinator:
            os.makedirs(directory, exist_ok=True)
            config, classes = _config_of(adapter)
            config.save_pretrained(directory, auto_mapping_dict=classes)
            safetensors.save_file(tensors, os.path.join(directory, _FILE), {"format": "pt"})

    exchange.together(write, f"writing an adapter to {os.fspath(directory)}")


def _config_of(adapter: Adapter) -> tuple[Any, dict[str, str] | None]:
    """The adapter's config for inference, and the classes of a base model without a task."""
    config = copy.deepcopy(adapter.model.peft_config[adapter.adapter_name])
    base = adapter.model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    if config.task_type is not None:
        return config, None
    return config, {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
