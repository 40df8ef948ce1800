"""`dcp_defaults` makes DCP's default storage and planners this package's, for hosts that choose no others."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Literal
from weakref import ref

import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from .. import LoadPlanner, SavePlanner, Stager, StorageReader, StorageWriter
from .._engine import torch_private
from ..errors import CheckpointError
from ..settings import Broadcast, checked_count, checked_flag

__all__ = ["Defaults", "dcp_defaults", "enable"]

logger = logging.getLogger(__name__)


class DefaultWriter(StorageWriter):
    """A `StorageWriter` with the arguments of torch's `FileSystemWriter`, also by position.

    Four of them have no effect: how far copies from a device run ahead is bounded by the engine, memory
    of snapshots is always reused, the serialization is torch.save's, and there are no extensions.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int | None = None,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank=single_file_per_rank,
            sync_files=sync_files,
            thread_count=None if thread_count == 1 else thread_count,  # 1 is what torch's writer has by default
            overwrite=overwrite,
        )
        checked_count("per_thread_copy_ahead", per_thread_copy_ahead)
        checked_flag("cache_staged_state_dict", cache_staged_state_dict)
        serialization = str(getattr(serialization_format, "value", serialization_format)).lower()
        if serialization_format is not None and serialization != "torch_save":
            raise ValueError(
                f"serialization_format={serialization_format!r}: data files hold tensors as torch.save writes them. "
                "For safetensors take format='safetensors', which writes files that every reader of safetensors knows"
            )
        if _extensions:
            raise ValueError(
                "_extensions: stream extensions (compression, encryption) work on each item as a Python stream, and "
                "are run by torch's FileSystemWriter and FileSystemReader only"
            )


class DefaultReader(StorageReader):
    """A `StorageReader` with the arguments of torch's `FileSystemReader`."""

    broadcast: ClassVar[Broadcast] = False  #: as the `dcp_defaults` in force say

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None) -> None:
        if _extension_registry is not None:
            raise ValueError("_extension_registry: stream extensions are undone by torch's FileSystemReader only")
        super().__init__(path, broadcast_checkpoint=self.broadcast)


class DefaultPlanner(SavePlanner):
    """A `SavePlanner` with the arguments of torch's `DefaultSavePlanner`, also by position.

    Hosts make a planner for each save. Those with the same options therefore keep their plans together: one set of
    plans for each save that runs at the same time.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
    ) -> None:
        to_lowest = checked_flag("dedup_save_to_lowest_rank", dedup_save_to_lowest_rank)
        placement: Literal["balanced", "lowest_rank"] = "lowest_rank" if to_lowest else "balanced"
        super().__init__(flatten_state_dict, flatten_sharded_tensors, placement=placement)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        kind = type(self), self.flatten_state_dict, self.flatten_sharded_tensors, self.placement
        with _lending:
            loan = next((loan for loan in _loans if loan.kind == kind and loan.is_free), None)
            if loan is None:
                loan = _Loan(kind)
                _loans.append(loan)
            loan.borrower, loan.thread = ref(self), threading.current_thread()
        self.share_plans(loan.keeper)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def forget_state(self) -> None:
        super().forget_state()
        with _lending:
            for loan in _loans:
                if loan.borrower is not None and loan.borrower() is self:
                    loan.borrower = loan.thread = None


@dataclass
class _Loan:
    """Plans that are lent to one planner at a time."""

    kind: tuple[Any, ...]
    keeper: SavePlanner = field(default_factory=SavePlanner)
    borrower: ref[DefaultPlanner] | None = None
    thread: threading.Thread | None = None

    @property
    def is_free(self) -> bool:
        """Whether no save uses the plans. A thread that begins another save has ended the one before, if in an error;
        all ranks then find the same plans again."""
        if self.borrower is None or self.borrower() is None or self.thread is None:
            return True
        return self.thread is threading.current_thread() or not self.thread.is_alive()


_loans: list[_Loan] = []  # of the planners of this process
_lending = threading.Lock()


class DefaultStager(Stager):
    """A `Stager` with the arguments of torch's `DefaultStager`. The copy is complete when `stage` returns."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()


class ProcessExecutor(torch_private.AsyncProcessExecutor):
    """torch's executor of `AsyncCheckpointerType.PROCESS`. Its process imports torch anew, and would take torch's own
    defaults: it gets the writer and the planner as objects."""

    def execute_save(
        self,
        staging_future_or_state_dict: Any,
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: Any = None,
        planner: Any = None,
        **others: Any,
    ) -> Any:
        if storage_writer is None and checkpoint_id is not None and DefaultWriter.validate_checkpoint_id(checkpoint_id):
            storage_writer = DefaultWriter(checkpoint_id)
        if planner is None:
            planner = DefaultPlanner()
        return super().execute_save(
            staging_future_or_state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            **others,
        )


_DCP = "torch.distributed.checkpoint"
_STORAGE: dict[str, type] = {"FileSystemWriter": DefaultWriter, "FileSystemReader": DefaultReader}
_PLANNERS: dict[str, type] = {"DefaultSavePlanner": DefaultPlanner, "DefaultLoadPlanner": LoadPlanner}
#: The names that DCP and its hosts look up when they save or load, by module.
_NAMES: dict[str, dict[str, type]] = {
    f"{_DCP}._storage_utils": _STORAGE,  # for `checkpoint_id=`
    _DCP: {**_STORAGE, **_PLANNERS},
    f"{_DCP}.default_planner": _PLANNERS,
    f"{_DCP}.state_dict_saver": {
        "DefaultSavePlanner": DefaultPlanner,
        "DefaultStager": DefaultStager,
        "_ProcessBasedAsyncCheckpointExecutor": ProcessExecutor,
    },
    f"{_DCP}.state_dict_loader": {"DefaultLoadPlanner": LoadPlanner},
}


class Defaults:
    """The names that `dcp_defaults` or `enable` has replaced, until `disable`."""

    def __init__(self) -> None:
        self.replaced: list[str] = []  #: qualified names that now refer to this package's classes
        self.not_reached: list[str] = []  #: names in other modules that still refer to torch's classes
        self._before: list[tuple[ModuleType, str, Any, Any]] = []  # module, name, torch's class, ours

    def __str__(self) -> str:
        text = f"replaced in this process: {', '.join(self.replaced) or 'nothing more'}"
        return f"{text}; not reached: {', '.join(self.not_reached)}" if self.not_reached else text

    def disable(self) -> None:
        """Restores torch's classes. Idempotent."""
        with _lock:
            for module, name, before, ours in reversed(self._before):
                if getattr(module, name, None) is ours:  # else another has replaced it since
                    setattr(module, name, before)
            self._before.clear()
            if _active and _active[-1] is self:
                DefaultReader.broadcast = False
            if self in _active:
                _active.remove(self)

    def _replace(self, module: ModuleType, name: str, ours: type) -> None:
        before = getattr(module, name)
        if before is not ours:
            setattr(module, name, ours)
            self._before.append((module, name, before, ours))
            self.replaced.append(f"{module.__name__}.{name}")


_lock = threading.RLock()
_active: list[Defaults] = []


def enable(*, broadcast_checkpoint: Broadcast = False) -> Defaults:
    """Like `dcp_defaults`, but lasts until `disable()` of the result is called, or the process ends."""
    with _lock:
        modules = {name: import_module(name) for name in _NAMES}
        originals = {name: getattr(modules[_DCP], name) for name in _NAMES[_DCP]}
        for module, names in _NAMES.items():
            for name in names:
                if not hasattr(modules[module], name):
                    raise CheckpointError(
                        f"torch {torch.__version__} has no {module}.{name}, which this version of vescale_ckpt "
                        "replaces: pass storage_writer=vescale_ckpt.StorageWriter(path) to dcp.save yourself"
                    )
        made = Defaults()
        for module, names in _NAMES.items():
            for name, ours in names.items():
                made._replace(modules[module], name, ours)
        _replace_copies(made, originals)
        DefaultReader.broadcast = broadcast_checkpoint
        _active.append(made)
    logger.info("DCP's defaults are those of vescale_ckpt: %s", made)
    return made


@contextmanager
def dcp_defaults(*, broadcast_checkpoint: Broadcast = False) -> Iterator[Defaults]:
    """A context manager that makes this package's storage and planners DCP's defaults, in the whole process.

    For frameworks that call `dcp.save(..., checkpoint_id=...)`, or construct `FileSystemWriter` and
    `DefaultSavePlanner` themselves: `with dcp_defaults(): accelerator.save_state()`. Plans are cached from save to
    save. Names that other modules imported earlier are replaced there, too. The process that `dcp.async_save` starts
    with `AsyncCheckpointerType.PROCESS` uses this package as well.

    Paths that only torch's fsspec storage supports (`s3://`) are left to torch, and so are modules that derive classes
    from torch's, which `not_reached` of the result names.

    Args:
        broadcast_checkpoint: as for `StorageReader`, in loads.

    Raises:
        CheckpointError: this torch lacks a name to replace; nothing is replaced.
    """
    made = enable(broadcast_checkpoint=broadcast_checkpoint)
    try:
        yield made
    finally:
        made.disable()


def _replace_copies(made: Defaults, originals: Mapping[str, Any]) -> None:
    """Replaces the names that modules outside of torch have imported. A module with classes derived from torch's is
    left alone: it calls methods of torch's class by that name."""
    ours = _NAMES[_DCP]
    by_class = {original: ours[name] for name, original in originals.items() if original is not ours[name]}
    kept, numbers = tuple(by_class), set(map(id, by_class))
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if not isinstance(module, ModuleType) or name.split(".")[0] in ("torch", "vescale_ckpt"):
            continue
        if numbers.isdisjoint(map(id, tuple(vars(module).values()))):  # cheap: a process has a million names
            continue
        values = dict(vars(module))
        found = {at: value for at, value in values.items() if isinstance(value, type) and value in by_class}
        classes = [value for value in values.values() if isinstance(value, type)]
        if any(not kind.__module__.startswith("torch.") and issubclass(kind, kept) for kind in classes):
            made.not_reached += [f"{name}.{at}" for at in found]
            continue
        for at, value in found.items():
            made._replace(module, at, by_class[value])
