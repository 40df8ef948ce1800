"""`VescaleCallback` sends the FSDP checkpoints of transformers' Trainer through this package.

Beside it `last_sound_checkpoint` finds where to resume, and `save_pretrained` writes a model for `from_pretrained`.
"""

from __future__ import annotations

import copy
import json
import os
import re
import warnings
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from .. import SaveHandle, api, verify
from .._ranks.exchange import Exchange
from ..settings import Broadcast
from ._versions import check_version, hook
from .dcp import Defaults, enable

TESTED = ("5.23", "5.24")
_LAST_WRITTEN = "trainer_state.json"  # the Trainer's rank 0 writes it last
_SHARDED = "SHARDED_STATE_DICT"


class VescaleCallback(hook("transformers", "TrainerCallback")):
    """A callback with which a Trainer's FSDP checkpoints are written and read by this package:
    `Trainer(..., callbacks=[VescaleCallback()])`.

    From the Trainer's making to the end of training it does what `dcp_defaults` does, because a Trainer calls no
    callback before it resumes. If training ends in an error, this lasts until the Trainer is gone, until `close`, or
    to the end of `with VescaleCallback() as callback:` around Trainer and training.

    Needs `fsdp=True, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"}`. Otherwise a Trainer writes with
    `torch.save` and safetensors on one rank; then the callback warns and changes nothing.

    Args:
        broadcast_checkpoint: for resuming: that of `StorageReader`.
    """

    def __init__(self, *, broadcast_checkpoint: Broadcast = False) -> None:
        check_version("transformers", TESTED)
        self.broadcast_checkpoint: Broadcast = broadcast_checkpoint
        self._defaults: Defaults | None = None
        self._finalizer: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._begin(warn=state.is_world_process_zero)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._begin(warn=False)  # a Trainer may train again

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def _begin(self, warn: bool) -> None:
        if self._defaults is not None:
            return
        plugin = _fsdp_plugin()
        if plugin is not None and _SHARDED in str(plugin.state_dict_type):
            self._defaults = enable(broadcast_checkpoint=self.broadcast_checkpoint)
            self._finalizer = weakref.finalize(self, self._defaults.disable)
        elif warn:
            kind = "without FSDP" if plugin is None else f"with {plugin.state_dict_type}"
            warnings.warn(
                f"VescaleCallback changes nothing: {kind} a Trainer writes whole models on one rank, with torch.save. "
                f"Give fsdp=True, fsdp_config={{'state_dict_type': '{_SHARDED}'}}",
                stacklevel=2,
            )

    def close(self) -> None:
        """Gives DCP's own storage back to the process. May be called again."""
        if self._finalizer is not None:
            self._finalizer()
        self._defaults = self._finalizer = None

    def __enter__(self) -> VescaleCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fsdp_plugin() -> Any:
    """The FSDP options of the Trainer that was made last; None without FSDP."""
    return getattr(hook("accelerate.state", "AcceleratorState")(), "fsdp_plugin", None)


def last_sound_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of a Trainer that is complete, for `train(resume_from_checkpoint=...)`; None if there is
    none. A Trainer itself takes the highest number, also if the job was killed while it wrote that checkpoint.

    Complete is a checkpoint with `trainer_state.json`, and with folders of model and optimizer that are sound, by
    `verify(quick=True)`. Others are named in a warning. It looks at files only; every rank may call it by itself before
    the Trainer is made.
    """
    found: list[tuple[int, Path]] = []
    for path in Path(output_dir).glob("checkpoint-*"):
        if (number := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir():
            found.append((int(number[1]), path))
    for _, path in sorted(found, reverse=True):
        if (reason := _lacks(path)) is None:
            return str(path)
        warnings.warn(f"{path} is passed over: {reason}", stacklevel=2)
    return None


def _lacks(path: Path) -> str | None:
    """What a Trainer's checkpoint lacks; None if it is complete."""
    try:
        json.loads((path / _LAST_WRITTEN).read_bytes())
    except (OSError, ValueError) as error:
        return f"{_LAST_WRITTEN}: {error}"
    folders = sorted(
        folder for folder in path.iterdir() if re.fullmatch(r"(pytorch_model_fsdp|optimizer)_\d+", folder.name)
    )
    for folder in folders:
        if not (report := verify(folder, quick=True)).ok:
            return report.reason
    return None


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Saves a model of transformers for `from_pretrained`; all ranks call it together, each writes its shards.

    It does what the model's `save_pretrained` does for `config.json`, `generation_config.json` and weights, without
    gathering them: the model may be sharded (FSDP2, tensor parallel), replicated (DDP) or on one rank. Weights keep
    the names that they have in memory, as with `save_pretrained(save_original_format=False)`.
    """
    kind = hook("transformers", "PreTrainedModel")
    while not isinstance(model, kind):  # what is inside DDP or torch.compile
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module):
            raise TypeError(f"model: expected a transformers.PreTrainedModel, got {type(model).__name__}")
        model = inner
    exchange = Exchange.of(process_group, None, purpose="pretrained")

    def write_config() -> None:
        if exchange.is_coordinator:
            os.makedirs(directory, exist_ok=True)
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.dtype = str(model.dtype).removeprefix("torch.")
            config.save_pretrained(directory)
            if getattr(model, "generation_config", None) is not None and model.can_generate():
                model.generation_config.save_pretrained(directory)

    exchange.together(write_config, f"writing config.json to {os.fspath(directory)}")
    return api.save(
        directory, {"": model}, format="safetensors", max_shard_size=max_shard_size, process_group=process_group
    )
