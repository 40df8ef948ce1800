"""Copies of tensors from and to devices that the engine has no functions for, by torch. Each is waited for."""

from __future__ import annotations

import logging

import torch

from . import _C

logger = logging.getLogger(__name__)

_notes: list[str] = []  # what slows copies down and the engine does not note itself
_noted_kinds: set[str] = set()  # of devices
_logged: set[str] = set()


def to_host(source: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in host memory of the same values, and of the same strides if they leave no gap."""
    note_device(source.device.type)
    return source.to("cpu")


def to_device(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor on a device of the same values as one in host memory."""
    if device.type != "meta":
        note_device(device.type)
    return source.to(device)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies the values of `source`, in host memory or on the device of `target`."""
    if source.is_cpu and target.device.type not in ("cpu", "meta"):
        note_device(target.device.type)
    target.copy_(source)


def note_device(kind: str) -> None:
    """Notes once in a process that torch copies tensors of a kind of device, because the engine cannot."""
    if kind in _noted_kinds:
        return
    _noted_kinds.add(kind)
    which, why = "tensors", "the engine has functions of CUDA alone"
    if kind == "cuda":
        why = str(_C.device_info()["reason"])
        if not why:
            which, why = "some tensors", "the engine copies none that are lazily conjugate, or converted on the way"
    _notes.append(
        f"{which} on {kind} devices are copied by torch, one after the other, while the training waits, also with a "
        f"gate ({why})"
    )


def device_notes() -> tuple[str, ...]:
    """What the devices of this process refused, so that copies were slower. New notes are logged."""
    notes = (*_C.device_notes(), *_notes)
    for text in notes:
        if text not in _logged:
            _logged.add(text)
            logger.warning("%s", text)
    return notes
