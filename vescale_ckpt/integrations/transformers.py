"""`OneCommit` saves all of a transformers' Trainer as one checkpoint, written by all ranks.

Beside it `last_sound_checkpoint` finds where a Trainer as it is may resume, and `save_pretrained` writes a model for
`from_pretrained`.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from .. import CheckpointManager, PerRank, RandomState, Safetensors, SaveHandle, api, verify
from .._ranks.exchange import Exchange
from ..errors import CheckpointError
from ._versions import check_version, hook, unwrapped

__all__ = ["OneCommit", "last_sound_checkpoint", "save_pretrained"]

_LAST_WRITTEN = "trainer_state.json"  # the Trainer's rank 0 writes it last


class OneCommit:
    """A base for Trainers whose checkpoints are those of a `CheckpointManager`: `class MyTrainer(OneCommit, Trainer)`.

    A save is one commit of model, optimizer, scheduler, random states and `trainer_state.json`, written by all ranks
    while training goes on. It works on one process, with DDP and with FSDP. `train(resume_from_checkpoint=True)` goes
    on from the newest sound checkpoint, and begins anew if there is none. An error of a save is raised by the next
    one, or at the end of `train`. Of the Trainer's arguments, `save_strategy`, `save_steps`, `save_total_limit`,
    `metric_for_best_model` and `load_best_model_at_end` keep their meaning: the best checkpoint stays, too.

    Args:
        checkpoints: a folder or URL (`s3://...`), in which there will be `step-N`; None: the Trainer's `output_dir`.
        manager_options: arguments of `CheckpointManager`, such as `async_checkpoint` and `tier`.

    All other arguments are those of the Trainer.
    """

    def __init__(
        self: Any,
        *args: Any,
        checkpoints: str | os.PathLike[str] | None = None,
        manager_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_version("transformers", ("5.22", "5.24"))
        for name in ("_save_checkpoint", "_init_training_state", "_load_from_checkpoint", "_load_scaler",
                     "_load_optimizer_and_scheduler", "_load_rng_state", "_load_best_model", "_get_output_dir",
                     "_inner_training_loop", "_determine_best_metric"):  # fmt: skip
            hook("transformers", f"Trainer.{name}")
        super().__init__(*args, **options)
        for name in ("save_only_model", "push_to_hub", "auto_find_batch_size", "deepspeed"):
            if getattr(self.args, name, None):
                raise ValueError(f"OneCommit: its checkpoints know no {name}: leave it out, or use the Trainer without")
        self._checkpoints = self.args.output_dir if checkpoints is None else checkpoints
        limit = self.args.save_total_limit
        self._manager_options = {**(manager_options or {})}
        if limit and limit > 0 and "retention" not in self._manager_options:
            self._manager_options.setdefault("max_to_keep", limit)
        self._manager: CheckpointManager | None = None
        self._folder = ""  # where the Trainer looks for what it writes itself
        self._resumed: int | None = None  # the step
        self._random = _LaterRandomState()
        self._measured: tuple[int, dict[str, float]] = (-1, {})  # a step, and the metrics of its evaluation
        self._best = _BestStep([])

    def train(self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **options: Any) -> Any:
        if trial is not None:
            raise CheckpointError("OneCommit: checkpoints of a hyperparameter search stay with the Trainer")
        if not (resume_from_checkpoint is None or isinstance(resume_from_checkpoint, bool)):
            raise TypeError(
                f"resume_from_checkpoint: OneCommit takes True or False, got {resume_from_checkpoint!r}: it goes on "
                f"from the newest sound checkpoint of {self._checkpoints}"
            )
        with CheckpointManager(self._checkpoints, **self._manager_options) as manager, \
                tempfile.TemporaryDirectory() as folder:  # fmt: skip
            self._manager, self._folder, self._measured = manager, folder, (-1, {})
            self._best = _BestStep(manager.retention.pinned)
            try:
                if resume_from_checkpoint and (step := manager.latest()) is not None:
                    self._take_state_of(step)
                return super().train(None if self._resumed is None else folder, trial, *args, **options)
            finally:
                self._manager = self._resumed = None

    def _take_state_of(self: Any, step: int) -> None:
        files: dict[str, bytes] = {}
        self._manager.restore({}, step, strict=False, prepare=False, extra_files=files)
        if _LAST_WRITTEN not in files:
            raise CheckpointError(f"step {step} of {self._checkpoints} was not saved by OneCommit")
        state = json.loads(files[_LAST_WRITTEN])
        # A Trainer would look for a folder of that name, which may be a URL or have moved.
        best = re.fullmatch(r".*step-(\d+)", state.pop("best_model_checkpoint", None) or "")
        self._best = _BestStep(self._manager.retention.pinned)
        self._manager.retention.pinned[:] = [] if best is None else [int(best[1])]
        Path(self._folder, _LAST_WRITTEN).write_text(json.dumps(state))
        self._resumed = step

    def _inner_training_loop(self: Any, *args: Any, **options: Any) -> Any:
        while True:
            try:
                return super()._inner_training_loop(*args, **options)
            except _OlderStepError as older:  # all ranks found damage in the data of the step
                self._take_state_of(older.step)

    def _get_output_dir(self: Any, trial: Any) -> str:
        return str(super()._get_output_dir(trial)) if self._manager is None else str(self._folder)

    def _whole_state(self: Any) -> dict[str, Any]:
        state = {
            "model": self.model,
            "optimizer": getattr(self.optimizer, "optimizer", self.optimizer),
            "scheduler": self.lr_scheduler,
            "random": PerRank(self._random),
        }
        return state if self.accelerator.scaler is None else {**state, "scaler": self.accelerator.scaler}

    def _save_checkpoint(self: Any, model: nn.Module, trial: Any) -> None:
        if self._manager is None:
            raise CheckpointError("OneCommit saves checkpoints within train() alone")
        self.store_flos()
        exportable = hook("transformers.trainer_callback", "ExportableState")
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, exportable):
                name, state = type(callback).__name__, callback.state()
                if isinstance(self.state.stateful_callbacks[name], list):
                    self.state.stateful_callbacks[name].append(state)
                else:
                    self.state.stateful_callbacks[name] = state
        step = self.state.global_step
        if self.state.best_global_step in (step, self._best.saved_last):
            self._best.is_now(self.state.best_global_step)
        self._name_best()
        with tempfile.TemporaryDirectory() as folder:
            self.state.save_to_json(os.path.join(folder, _LAST_WRITTEN))
            content = Path(folder, _LAST_WRITTEN).read_bytes()
        handle = self._manager.save(
            step,
            self._whole_state(),
            metrics=self._metrics_of_this_step(),
            extra_files={_LAST_WRITTEN: content} if self.is_world_process_zero() else None,
        )
        self._best.is_being_saved(step, handle)
        self._name_best()
        if self._manager.preempted:
            self.control.should_training_stop = True

    def _metrics_of_this_step(self: Any) -> dict[str, float]:
        step, metrics = self._measured
        found = dict(metrics) if step == self.state.global_step else {}
        if (best := self._manager.retention.best) is not None:
            found.setdefault(best, math.nan)  # a step without an evaluation ranks below all others
        return found

    def _name_best(self: Any) -> None:
        place, step = os.fspath(self._checkpoints).rstrip("/"), self._best.step
        self.state.best_model_checkpoint = None if step is None else f"{place}/step-{step}"

    def _determine_best_metric(self: Any, metrics: Any, trial: Any) -> bool:
        name = self.args.metric_for_best_model or "loss"
        name = name if name.startswith("eval_") else f"eval_{name}"
        self._measured = self.state.global_step, {name: metrics[name]} if name in metrics else {}
        return bool(super()._determine_best_metric(metrics=metrics, trial=trial))

    def _load_best_model(self: Any) -> None:
        self._manager.wait()
        self._name_best()
        if self._best.step is not None:
            self._manager.restore({"model": self.model}, self._best.step, prepare=False)

    # A Trainer reads a checkpoint in pieces. Here `_load_optimizer_and_scheduler`, when all is made, reads it at once.

    def _init_training_state(self: Any, *args: Any, **options: Any) -> Any:
        found = super()._init_training_state(*args, **options)
        self._name_best()
        return found

    def _load_from_checkpoint(self: Any, *args: Any, **options: Any) -> None:
        pass

    def _load_scaler(self: Any, checkpoint: Any) -> None:
        pass

    def _load_optimizer_and_scheduler(self: Any, checkpoint: Any) -> None:
        if self._resumed is None:
            return
        if (found := self._manager.restore(self._whole_state())) != self._resumed:
            raise _OlderStepError(found)

    def _load_rng_state(self: Any, checkpoint: Any) -> None:
        if self._resumed is not None:
            self._random.set_now()


class _OlderStepError(Exception):
    """A restore has passed over the step with which the Trainer began."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class _BestStep:
    """The step that a Trainer takes for the best: the last one of those that were, whose save has not failed."""

    def __init__(self, pinned: list[int]) -> None:
        self._pinned = pinned  # of a `Retention`
        self._handles: dict[int, SaveHandle] = {}  # of saves that may fail
        self.saved_last: int | None = None

    @property
    def step(self) -> int | None:
        return next((step for step in reversed(self._pinned) if not self._has_failed(step)), None)

    def _has_failed(self, step: int) -> bool:
        handle = self._handles.get(step)
        return handle is not None and handle.done() and handle.stats is None

    def is_now(self, step: int) -> None:
        if self.step != step:
            self._pinned.append(step)

    def is_being_saved(self, step: int, handle: SaveHandle | None) -> None:
        """`handle`: None if the manager does not save it."""
        if handle is None:
            self._pinned[:] = [other for other in self._pinned if other != step]
            return
        self.saved_last = step
        self._handles = {other: running for other, running in self._handles.items() if running.stats is None}
        self._handles[step] = handle


class _LaterRandomState(RandomState):
    """Random states that are set when the Trainer has passed over the batches of an epoch that it has trained with."""

    _loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._loaded is None else self._loaded

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def set_now(self) -> None:
        if self._loaded is not None:
            super().load_state_dict(self._loaded)
            self._loaded = None


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
) -> SaveHandle:
    """Saves a model of transformers for `from_pretrained`; all ranks call it together, each writes its shards.

    It does what the model's `save_pretrained` does for `config.json`, `generation_config.json` and weights, without
    gathering them: the model may be sharded (FSDP2, tensor parallel), replicated (DDP) or on one rank. Weights keep
    the names that they have in memory, as with `save_pretrained(save_original_format=False)`.
    """
    inner = unwrapped(model, "transformers", "PreTrainedModel")
    exchange = Exchange.of(None, None, purpose="pretrained")

    def write_config() -> None:
        if exchange.is_coordinator:
            os.makedirs(directory, exist_ok=True)
            config = copy.deepcopy(inner.config)
            config.architectures = [type(inner).__name__.removeprefix("FSDP")]
            config.dtype = str(inner.dtype).removeprefix("torch.")
            config.save_pretrained(directory)
            if getattr(inner, "generation_config", None) is not None and inner.can_generate():
                inner.generation_config.save_pretrained(directory)

    exchange.together(write_config, f"writing config.json to {os.fspath(directory)}")
    return api.save(directory, {"": inner}, format=Safetensors(max_shard_size=max_shard_size))
