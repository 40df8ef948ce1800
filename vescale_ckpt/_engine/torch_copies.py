"""`TorchCopies` copies tensors from and to devices that the engine has no functions for, by torch's own copies."""

from __future__ import annotations

import functools
import logging
from contextlib import ExitStack
from types import TracebackType

import torch

from . import _C

logger = logging.getLogger(__name__)

# The engine copies from and to CUDA devices. What is left to torch there has no memory on the device, or is converted
# there. On MPS a copy that is not waited for maps the pages of its target for the device.
_WAITED_FOR = ("cuda", "mps")

_notes: list[str] = []  # what slows copies down and the engine does not note itself
_noted_kinds: set[str] = set()  # of devices
_logged: set[str] = set()


class TorchCopies:
    """A batch of copies between devices and host memory, for a thread.

    They are queued on the devices' streams that are current on this thread. `wait`, or the end of the context, returns
    when all are done, by one call a stream. Until then both sides of each copy must live and must not change.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def __enter__(self) -> TorchCopies:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies the values of `source`. A copy that also converts or scatters is waited for at once: what a backend
        needs memory of its own for is not always kept by it until such a copy is done."""
        device = source.device if target.is_cpu else target.device
        if device.type in ("cpu", "meta") or target.device == source.device:
            target.copy_(source)
            return
        note_device(device.type)
        is_queued = can_queue(device.type) and target.dtype == source.dtype and _have_one_layout(target, source)
        if is_queued and device not in self._streams:
            self._streams[device] = torch.accelerator.current_stream(device)
        if target.is_cpu and not can_queue(device.type):
            source = source.to("cpu")  # functional tensors, as XLA's, can be copied no other way
        target.copy_(source, non_blocking=is_queued)

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in host memory that gets the values, and the strides if they leave no gap."""
        if not can_queue(source.device.type):
            note_device(source.device.type)
            return source.to("cpu")  # what is made like a functional tensor is functional, too, and has no address
        target = torch.empty_like(source, device="cpu")
        self.copy(target, source)
        return target

    def to_device(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a tensor on the device that gets the values of one in host memory."""
        target = torch.empty_like(source, device=device)
        self.copy(target, source)
        return target

    def wait(self) -> None:
        with ExitStack() as waits:  # for each, also if another one raises: memory must not be used again before
            while self._streams:
                # torch.accelerator.synchronize of torch 2.11 waits for no device of some backends.
                waits.callback(self._streams.popitem()[1].synchronize)


def has_streams(kind: str) -> bool:
    """Whether torch knows the current streams of a kind of device, and what it copies there may be queued."""
    accelerator = torch.accelerator.current_accelerator()
    return kind not in _WAITED_FOR and accelerator is not None and accelerator.type == kind


def can_queue(kind: str) -> bool:
    """Whether copies from and to a kind of device may be many before the host waits for them."""
    return has_streams(kind) and _can_wait(kind)


@functools.cache
def _can_wait(kind: str) -> bool:
    """Whether the host can wait for a stream: not all private backends have implemented that."""
    try:
        torch.accelerator.current_stream(torch.device(kind, torch.accelerator.current_device_index())).synchronize()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _have_one_layout(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (target.is_contiguous() and source.is_contiguous()) or target.stride() == source.stride()


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
    how = "many at a time" if can_queue(kind) else "one after the other"
    _notes.append(
        f"{which} on {kind} devices are copied by torch, {how}, while the training waits, also with a gate ({why})"
    )


def device_notes() -> tuple[str, ...]:
    """What the devices of this process refused, so that copies were slower. New notes are logged."""
    notes = (*_C.device_notes(), *_notes)
    for text in notes:
        if text not in _logged:
            _logged.add(text)
            logger.warning("%s", text)
    return notes
