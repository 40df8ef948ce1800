"""Strategies for Lightning's Trainer and Fabric whose ranks all write, and read, the checkpoints of this package.

`Trainer(strategy=ModelParallel(async_checkpoint=True))`, `DDP`, `FSDP`; `Fabric(strategy=FabricModelParallel())`,
`FabricDDP`, `FabricFSDP`; for other strategies `Trainer(plugins=[CheckpointIO()])`. A checkpoint is a folder as
Lightning's `ModelParallelStrategy` writes it: model and optimizers by the names of parameters, and the rest in
`meta.pt`, which is committed with them. Folders and single files that Lightning has written can be loaded, too.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from .. import inspect, settings, verify
from .._checkpoint.recognize import committed_at
from .._state.application import saved_form
from .._state.optimizers import OptimizerState
from .._storage.open_storage import checkpoint_path, is_folder, storage_at
from ..api import load
from ..errors import CheckpointError, MissingKeysError, UntrustedCheckpointError
from ..settings import Broadcast
from ._saves import Saves
from ._versions import check_version, hook

__all__ = [
    "DDP",
    "FSDP",
    "CheckpointIO",
    "FabricDDP",
    "FabricFSDP",
    "FabricModelParallel",
    "ModelParallel",
    "newest",
]

logger = logging.getLogger(__name__)

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:  # the same code in other distributions
    _PACKAGE, _TRAINER, _FABRIC = "pytorch-lightning", "pytorch_lightning", "lightning_fabric"
else:
    _PACKAGE, _TRAINER, _FABRIC = "lightning", "lightning.pytorch", "lightning.fabric"
check_version(_PACKAGE, ("2.5", "2.7"))

_FITTING = hook(f"{_TRAINER}.trainer.states", "TrainerFn").FITTING
_LightningOptimizer = hook(f"{_TRAINER}.core.optimizer", "LightningOptimizer")
_Plugin = hook(f"{_TRAINER}.plugins", "CheckpointIO")
_FilePlugin = hook(f"{_TRAINER}.plugins", "TorchCheckpointIO")
_ModelParallel = hook(f"{_TRAINER}.strategies", "ModelParallelStrategy")
_DDP = hook(f"{_TRAINER}.strategies", "DDPStrategy")
_FSDP = hook(f"{_TRAINER}.strategies", "FSDPStrategy")
_FabricModelParallel = hook(f"{_FABRIC}.strategies", "ModelParallelStrategy")
_FabricDDP = hook(f"{_FABRIC}.strategies", "DDPStrategy")
_FabricFSDP = hook(f"{_FABRIC}.strategies", "FSDPStrategy")
_Host: Any = object  # a class of Lightning's, in the classes that derive from both

_META = "meta.pt"  # what Lightning keeps beside model and optimizers
_SUFFIX = ".ckpt"  # ends the names that ModelCheckpoint gives
_LAST = "last"  # begins the name of what `ckpt_path="last"` finds


def newest(folder: str | os.PathLike[str]) -> str | None:
    """The path of the newest sound checkpoint `*.ckpt` in a folder, for `fit(ckpt_path=...)`. None if there is none.

    `folder`: a path or URL. What a killed save has left is no checkpoint. A damaged checkpoint is passed over with a
    warning. Object stores tell whole seconds: of two of the same time, the one with the greater numbers in its name
    counts as newer.
    """
    folder = os.fspath(folder)
    try:
        listed = storage_at(checkpoint_path(folder)).names()
    except FileNotFoundError:
        return None
    names = [name for name in listed if name.endswith(_SUFFIX)]
    written: dict[str, int] = {}
    for name in names:
        path = os.path.join(folder, name)
        if os.path.islink(path):  # to another one of them
            continue
        if os.path.isfile(path):
            written[path] = os.stat(path).st_mtime_ns
        elif (committed := committed_at(path)) is not None:
            written[path] = committed
    in_order = sorted(written, key=lambda path: (written[path], _numbers(path)), reverse=True)
    return next((path for path in in_order if os.path.isfile(path) or _sound(path)), None)


def _numbers(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", os.path.basename(path))]


def _sound(path: str) -> bool:
    report = verify(path, quick=True)
    if not report.ok:
        logger.warning("%s is passed over: %s", path, report.reason)
    return report.ok and (storage_at(path).has(_META) or _META in inspect(path).extra_files)


def _found(path: str) -> tuple[str, bool]:
    """The path to load, and whether it is a folder. A kill may leave "last" unfinished: then the newest is loaded."""
    if is_folder(checkpoint_path(path)) and committed_at(path) is None:
        folder, name = os.path.split(path)
        if name.startswith(_LAST) and (other := newest(folder)) is not None:
            logger.warning("the save of %s did not finish: %s, the newest checkpoint beside it, is loaded", path, other)
            path = other
    return path, is_folder(checkpoint_path(path))


class _Meta(Mapping[str, bytes]):
    """`meta.pt`, pickled when the save asks for it: what goes wrong then is an error of the save, on all ranks."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    def __getitem__(self, name: str) -> bytes:
        if name != _META:
            raise KeyError(name)
        buffer = io.BytesIO()
        torch.save(dict(self._content), buffer)
        return buffer.getvalue()

    def __iter__(self) -> Iterator[str]:
        return iter([_META])

    def __len__(self) -> int:
        return 1


def _unpickled(path: str, files: Mapping[str, bytes], weights_only: bool | None) -> dict[str, Any]:
    """The content of `meta.pt`: of the checkpoint, or of the file beside it if Lightning has written that."""
    try:
        pickled = files[_META] if _META in files else storage_at(checkpoint_path(path)).read(_META)
        content: dict[str, Any] = torch.load(io.BytesIO(pickled), map_location="cpu", weights_only=weights_only)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint of Lightning: it has no {_META}", path=path) from None
    except pickle.UnpicklingError as error:
        raise UntrustedCheckpointError(
            f"{path}: {_META}: {error}\nIf you trust the checkpoint as you trust code, give the strategy "
            "weights_only=False: Lightning 2.6 does not pass on what its Trainer is given",
            key=_META,
        ) from error
    return content


def _loaded(path: str, state: Any, weights_only: bool | None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Loads a folder. Returns what `vescale_ckpt.load` returns, and what is in `meta.pt`."""
    files: dict[str, bytes] = {}
    only_weights = weights_only is not False  # None is torch's default: True
    found: Any = load(path, state, weights_only=only_weights, extra_files=files, **options)
    return found, _unpickled(path, files, weights_only)


def _given(weights_only: bool | None) -> dict[str, bool]:
    """For a call of Lightning's own, which before 2.6 does not take it."""
    return {} if weights_only is None else {"weights_only": weights_only}


class _Strategy(_Host):
    """What the strategies for Trainer and Fabric have in common.

    Args:
        async_checkpoint: whether training goes on while a checkpoint is written. An error is then raised by the next
            save or the end of training, on all ranks.
        broadcast_checkpoint: as `vescale_ckpt.load` takes it.
        weights_only: as `torch.load` takes it, where Lightning gives None. (The Trainer of Lightning 2.6 gives None to
            strategies that load after their setup, whatever its own argument is.)
        fingerprint: as `vescale_ckpt.save` takes it.

    All other arguments are those of Lightning's strategy.
    """

    def __init__(
        self,
        *args: Any,
        async_checkpoint: bool = False,
        broadcast_checkpoint: Broadcast = "auto",
        weights_only: bool | None = None,
        fingerprint: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        of_host = vars(self)  # where Lightning's strategies keep what asks for one file, given by name or by position
        if not of_host.get("_save_distributed_checkpoint", True) or of_host.get("_state_dict_type") == "full":
            raise ValueError(f"{type(self).__name__} saves folders: Lightning's own strategy saves one file")
        self._saves = Saves(async_checkpoint, fingerprint)
        self._broadcast_checkpoint = settings.broadcast(broadcast_checkpoint)
        self._weights_only = weights_only
        self._loaded_folder = False

    def wait_for_save(self) -> None:
        """Waits until the last checkpoint is durable. Raises the error of its save. All ranks call it together."""
        self._saves.wait()

    def _save(self, path: Any, state: Mapping[str, Any], rest: Mapping[str, Any], storage_options: object) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options: all ranks write into one local folder")
        self._saves.save(
            self.broadcast(os.fspath(path)),  # ModelCheckpoint may have put the time into it
            state,
            _Meta(rest) if self.is_global_zero else None,
        )

    def _find(self, path: Any) -> tuple[str, bool]:
        """The path to load, the same on all ranks, and whether it is a folder."""
        self._saves.wait()
        found: tuple[str, bool] = self.broadcast(_found(os.fspath(path)) if self.is_global_zero else None)
        self._loaded_folder = found[1]
        return found

    def _load(
        self, path: str, state: dict[str, Any], strict: bool, weights_only: bool | None
    ) -> tuple[dict[str, Any], list[str]]:
        """Loads a folder into `state`. Returns what is in its `meta.pt`, and the keys that it lacks."""
        report, rest = _loaded(
            path, state, weights_only, strict=strict, broadcast_checkpoint=self._broadcast_checkpoint
        )
        return rest, report.missing


class _OfFSDP(_Host):
    def __init__(self, *args: Any, state_dict_type: str = "sharded", **options: Any) -> None:
        super().__init__(*args, state_dict_type=state_dict_type, **options)


# --- Trainer


class _TrainerStrategy(_Strategy):
    _model_key = "state_dict"  # under which Lightning's strategy keeps the model in a folder

    @property
    def _module(self) -> nn.Module:
        """What is saved and loaded."""
        module: nn.Module = self.model
        return module

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # into the model and the optimizers themselves

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._loaded_folder and bool(super().lightning_restore_optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = saved_form({"": self._module})[""]
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if isinstance(optimizer, _LightningOptimizer):
            optimizer = optimizer.optimizer
        if hasattr(optimizer, "consolidate_state_dict"):
            raise CheckpointError(
                f"{type(optimizer).__name__} gathers its state on one rank: shard the model with FSDP2 "
                "(ModelParallel) instead, or let Lightning's own strategy save it"
            )
        return OptimizerState(optimizer, {self._model_key: self._module}).form()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        state = {self._model_key: checkpoint["state_dict"]}
        state.update({f"optimizer_{i}": form for i, form in enumerate(checkpoint.get("optimizer_states", ()))})
        rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        self._save(filepath, state, rest, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path, is_folder = self._find(checkpoint_path)
        weights_only = self._weights_only if weights_only is None else weights_only
        if not is_folder:
            return super().load_checkpoint(path, **_given(weights_only))  # type: ignore[no-any-return]
        state: dict[str, Any] = {self._model_key: self._module}
        if self.lightning_module.trainer.state.fn == _FITTING:
            state.update({f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)})
        try:
            rest, missing = self._load(path, state, self.lightning_module.strict_loading, weights_only)
        except MissingKeysError as error:
            self._check_optimizers(path, error.missing)
            raise
        self._check_optimizers(path, missing)
        return rest

    def _check_optimizers(self, path: str, missing: list[str]) -> None:
        if any(key.startswith("optimizer_") and ".param_groups." in key for key in missing):
            raise CheckpointError(
                f"{path} holds no state of an optimizer that is to be trained with: was it saved with "
                "ModelCheckpoint(save_weights_only=True), or with fewer optimizers?",
                path=path,
            )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._loaded_folder:
            super().load_model_state_dict(checkpoint, strict=strict)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._saves.remove(os.fspath(filepath), super().remove_checkpoint)

    def teardown(self) -> None:
        failing = sys.exc_info()[0] is not None
        try:
            self._saves.wait()
        except Exception:
            if not failing:
                raise
            logger.exception("the last checkpoint is lost, too")
        finally:
            super().teardown()


class ModelParallel(_TrainerStrategy, _ModelParallel):
    """Lightning's `ModelParallelStrategy` (FSDP2, tensor parallelism), saving and loading through this package."""


class FSDP(_OfFSDP, _TrainerStrategy, _FSDP):
    """Lightning's `FSDPStrategy`, saving and loading through this package."""

    _model_key = "model"


class DDP(_TrainerStrategy, _DDP):
    """Lightning's `DDPStrategy`, with checkpoints that all ranks write together, in folders."""

    @property
    def _module(self) -> nn.Module:
        module: nn.Module = self.lightning_module  # DDP's wrapper is not there in all stages
        return module


# --- Fabric


class _FabricStrategy(_Strategy):
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        parts = {key: value for key, value in state.items() if isinstance(value, (nn.Module, Optimizer))}
        rest = {key: _form(value) for key, value in state.items() if key not in parts}
        if filter:
            parts = {key: _filtered(value, filter.get(key)) for key, value in saved_form(parts).items()}
            rest = {key: _filtered(value, filter.get(key)) for key, value in rest.items()}
        self._save(path, parts, rest, storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path, is_folder = self._find(path)
        weights_only = self._weights_only if weights_only is None else weights_only
        if not is_folder or isinstance(state, (nn.Module, Optimizer)):
            return super().load_checkpoint(path, state, strict, **_given(weights_only))  # type: ignore[no-any-return]
        if not state:
            return _whole(path, weights_only, broadcast_checkpoint=self._broadcast_checkpoint)
        parts = {key: value for key, value in state.items() if isinstance(value, (nn.Module, Optimizer))}
        rest, _ = self._load(path, parts, strict, weights_only)
        wanted = state.keys() - parts.keys()
        if strict and (lacking := sorted(wanted - rest.keys())):
            raise KeyError(f"{path} has no {', '.join(lacking)}. With strict=False that is no error")
        for key in wanted & rest.keys():
            if isinstance(state[key], Stateful):
                state[key].load_state_dict(rest.pop(key))
            else:
                state[key] = rest.pop(key)
        return rest


def _form(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _filtered(value: Any, keeps: Callable[[str, Any], bool] | None) -> Any:
    if keeps is None or not isinstance(value, Mapping):
        return value
    return {name: part for name, part in value.items() if keeps(name, part)}


class FabricModelParallel(_FabricStrategy, _FabricModelParallel):
    """Fabric's `ModelParallelStrategy` (FSDP2, tensor parallelism), saving and loading through this package."""


class FabricFSDP(_OfFSDP, _FabricStrategy, _FabricFSDP):
    """Fabric's `FSDPStrategy`, saving and loading through this package."""


class FabricDDP(_FabricStrategy, _FabricDDP):
    """Fabric's `DDPStrategy`, with checkpoints that all ranks write together, in folders."""


# --- Plain strategies


class CheckpointIO(_Plugin):
    """A plugin for strategies that give one process the whole state: `Trainer(plugins=[CheckpointIO()])`.

    Under DDP one rank writes everything then; with the strategy `DDP` all ranks write. Loads return tensors on the CPU.
    """

    def __init__(self, *, async_checkpoint: bool = False) -> None:
        self._saves = Saves(async_checkpoint)
        self._alone: tuple[Any, dist.ProcessGroup] | None = None
        self._files = _FilePlugin()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options: it writes into a local folder")
        optimizers = {f"optimizer_{i}": form for i, form in enumerate(checkpoint.get("optimizer_states", ()))}
        state = {name: value for name, value in checkpoint.items() if _is_state(value)}
        rest = {name: value for name, value in checkpoint.items() if name not in {*state, "optimizer_states"}}
        self._saves.save(os.fspath(path), {**state, **optimizers}, _Meta(rest), self._group())

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        self._saves.wait()
        path, is_folder = _found(os.fspath(path))
        if not is_folder:
            return self._files.load_checkpoint(path, **_given(weights_only))  # type: ignore[no-any-return]
        checkpoint = _whole(path, weights_only, broadcast_checkpoint=False, process_group=self._group())
        if "lr_schedulers" in checkpoint:  # of the Trainer, with optimizers
            states = checkpoint["optimizer_states"] = []
            while (name := f"optimizer_{len(states)}") in checkpoint:
                states.append(checkpoint.pop(name))
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        self._saves.remove(os.fspath(path), self._files.remove_checkpoint)

    def teardown(self) -> None:
        self._saves.wait()

    def _group(self) -> dist.ProcessGroup | None:
        """A group of this rank alone: other ranks do not take part."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if self._alone is None or self._alone[0] is not dist.group.WORLD:
            group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            self._alone = dist.group.WORLD, group
        return self._alone[1]


def _is_state(value: object) -> bool:
    """Whether an entry of a checkpoint is the state of a module or an optimizer."""
    if not isinstance(value, Mapping):
        return False
    return {"state", "param_groups"} <= value.keys() or any(isinstance(v, torch.Tensor) for v in value.values())


def _whole(path: str, weights_only: bool | None, **options: Any) -> dict[str, Any]:
    """All of a folder: its tensors, on the CPU, and what is in `meta.pt`."""
    state, rest = _loaded(path, None, weights_only, **options)
    return {**state, **rest}
