"""Fast, verified, never torn checkpoints for PyTorch: a C++ engine behind torch.distributed.checkpoint.

Public names are imported from their modules when they are first used: torch takes seconds to import, and the command
line answers `--help` without it. `__init__.pyi` tells the names to type checkers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from . import errors

_NAMES = {
    "_collective.handle": ("SaveHandle",),
    "_dcp.load_planner": ("LoadPlanner",),
    "_dcp.save_planner": ("SavePlanner",),
    "_dcp.stager": ("Stager",),
    "_dcp.storage_reader": ("StorageReader",),
    "_dcp.storage_writer": ("StorageWriter",),
    "_fingerprint.collect": ("fingerprint",),
    "_fingerprint.fingerprint": ("Fingerprint",),
    "_fingerprint.prove": ("Proof", "prove"),
    "_inspect.info": ("inspect",),
    "_checkpoint.verify": ("verify",),
    "_state.per_rank": ("PerRank",),
    "_state.random_state": ("RandomState",),
    "_storage.object_clients": ("register_store",),
    "_write.optimizer_gate": ("Gate",),
    "_write.safetensors_layout": ("Safetensors",),
    "api": ("load", "prepare", "save"),
    "_convert.convert": ("ConvertReport", "convert"),
    "_convert.copy": ("copy",),
    "_convert.transfer": ("CopyReport",),
    "errors": tuple(errors.__all__),
    "manager.manager": ("CheckpointManager",),
    "manager.retention": ("Retention",),
    "manager.schedule": ("Schedule",),
    "manager.tier": ("Tier",),
    "reports": ("CheckpointInfo", "JobStats", "LoadReport", "LoadStats", "SaveStats", "VerifyReport"),
    "metrics": ("metrics",),  # the module itself
    "safetensors": ("safetensors",),  # the module itself
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

_MODULES = ("errors", "integrations", "reports")  # public, but seldom asked for by their names

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ._version import VERSION

        return VERSION
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_MODULE_OF[name]}", __name__)
    value = globals()[name] = module if _MODULE_OF[name] == name else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__doc__", "__file__", "__name__", "__path__", "__version__"})
