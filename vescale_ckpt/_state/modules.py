"""Takes the state of a module under names without those of wrappers, and gives it back, also on the meta device."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from .._engine.torch_types import local_of
from .._engine.wrapper_tensors import is_wrapper
from ..errors import IncompatibleStateError
from .load_targets import allocate_targets
from .optimizers import is_wrapped, plain

logger = logging.getLogger(__name__)

_UNFILLED = 0xA5  # each byte of new memory, so that what hooks copy from itself does not count as filled


def form_of(module: nn.Module) -> dict[str, Any]:
    """Returns the module's `state_dict()` under names without wrappers."""
    if not is_wrapped(module):
        return module.state_dict()
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return {plain(name): value for name, value in get_model_state_dict(module).items()}


def give_form(module: nn.Module, form: Mapping[str, Any], loaded: Collection[str], key: str) -> None:
    """Gives a module the form that was loaded for it. `loaded`: the names of what was loaded. `key`: the module's.

    Parameters and buffers on the meta device become real, and stay the same objects, because optimizers and tied layers
    refer to them. If all was loaded, a warning names those that stay on the meta device. Raises
    `IncompatibleStateError` if a part was loaded and hooks of the module hide which tensor it belongs to.
    """
    tensors = chain(module.named_parameters(), module.named_buffers())
    meta = {id(tensor): (name, tensor) for name, tensor in tensors if tensor.is_meta}
    if meta:
        _give_own(module, form, loaded, meta, key)
    # `load_state_dict` copies nothing into tensors on the meta device: what its hooks may fill gets memory.
    whole = not any(isinstance(value, torch.Tensor) and value.is_meta for value in form.values())
    left = dict(meta.values()) if whole else {}
    given = [(name, left[name], _give_memory(left[name], new)) for name, new in allocate_targets(left).items()]
    for _, tensor, _ in given:
        _bytes(tensor).fill_(_UNFILLED)
    if is_wrapped(module):
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

        names = {plain(name): name for name in get_model_state_dict(module)}
        set_model_state_dict(module, {names.get(name, name): value for name, value in form.items()})
    else:
        module.load_state_dict(form)
    empty = [(name, tensor, was) for name, tensor, was in given if tensor.numel() and _is_unfilled(tensor)]
    for _, tensor, was in empty:
        torch.utils.swap_tensors(tensor, was)  # type: ignore[no-untyped-call]
    if empty:
        names_of = ", ".join(f"{key}.{name}" for name, *_ in empty)
        logger.warning("still on the meta device, because the module's state_dict() does not have them: %s", names_of)


def _give_own(
    module: nn.Module,
    form: Mapping[str, Any],
    loaded: Collection[str],
    meta: dict[int, tuple[str, torch.Tensor]],
    key: str,
) -> None:
    """Gives tensors the memory of the entries that were loaded for them, and removes them from `meta`."""
    with torch.no_grad():  # else entries that hooks made would refer to the tensors, which forbids to swap them
        own = module.state_dict(keep_vars=True)
    for stored, tensor in own.items():
        value = form.get(name := plain(stored))
        if name not in loaded or not (isinstance(value, torch.Tensor) and getattr(tensor, "is_meta", False)):
            continue
        if id(tensor) in meta:
            if not value.is_meta:
                _give_memory(tensor, value)
                del meta[id(tensor)]
        elif any(isinstance(other, torch.Tensor) and other.is_meta for other in form.values()):
            hidden = "a tensor on the meta device that its hooks make from others"
            raise IncompatibleStateError(f"{key}.{name}", hidden, "a tensor (load the whole module)")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor; none for a wrapper subclass."""
    local = local_of(tensor)
    memory = torch.empty(0, dtype=torch.uint8, device=local.device)
    return memory if is_wrapper(local) else memory.set_(local.detach().untyped_storage())


def _is_unfilled(tensor: torch.Tensor) -> bool:
    memory = _bytes(tensor)
    return memory.numel() > 0 and bool((memory == _UNFILLED).all())


def _give_memory(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Gives a tensor on the meta device the memory of `value`. Returns what has no memory now."""
    # `value` itself must not be swapped: after a swap it would be on the meta device.
    requires_grad = tensor.requires_grad
    real = nn.Parameter(value, requires_grad) if isinstance(tensor, nn.Parameter) else value.detach()
    torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
    return real
