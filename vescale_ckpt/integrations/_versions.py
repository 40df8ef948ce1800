"""`check_version` and `hook` tell users of an integration which versions of its framework it was tested with.

`unwrapped` finds a framework's model inside of other modules.
"""

from __future__ import annotations

import importlib
import warnings
from importlib import metadata
from typing import Any

from torch import nn
from torch.torch_version import TorchVersion

from ..errors import CheckpointError


def check_version(package: str, tested: tuple[str, str]) -> None:
    """Warns if the installed version of the distribution `package` is not in `tested`.

    Args:
        package: a distribution's name, as pip knows it.
        tested: the first version that was tested, and the first one after it that was not.
    """
    first, end = tested
    installed = _installed(package)
    if installed is not None and not TorchVersion(first) <= installed < TorchVersion(end):
        warnings.warn(
            f"vescale_ckpt was tested with {package} {first} up to, but not including, {end}: "
            f"{package} {installed} is installed",
            stacklevel=3,
        )


def hook(module: str, name: str) -> Any:
    """Imports `name` (which may have dots) of a framework's module.

    Raises `CheckpointError` with the framework's version if there is no such name.
    """
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise CheckpointError(f"{package} is not installed, which vescale_ckpt.integrations needs here") from error
        raise CheckpointError(
            f"{package} {_installed(package) or '(of unknown version)'} has no {module}.{name}, "
            f"which vescale_ckpt.integrations needs: {error}"
        ) from error
    return found


def unwrapped(model: Any, module: str, name: str) -> Any:
    """The model of a framework's class that is inside DDP or torch.compile. Raises TypeError if there is none."""
    kind = hook(module, name)
    while not isinstance(model, kind):
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module):
            raise TypeError(f"model: expected a {module}.{name}, got {type(model).__name__}")
        model = inner
    return model


def _installed(package: str) -> TorchVersion | None:
    try:
        return TorchVersion(metadata.version(package))
    except metadata.PackageNotFoundError:  # imported from a source tree, say
        return None
