"""Tells the log and the statistics of a save what the devices of this process refused: copies were slower for it."""

from __future__ import annotations

import logging

from .._engine import _C

logger = logging.getLogger(__name__)

_own: dict[str, None] = {}  # notes that are not the engine's, in order
_logged: set[str] = set()


def note_device(kind: str) -> None:
    """Notes that torch copies the tensors of a kind of device, because the engine cannot."""
    _own.setdefault(
        f"tensors on {kind} devices are copied by torch, one after the other, while training waits: the engine copies "
        "from CUDA devices"
        + (", and has found no CUDA (vescale_ckpt._engine._C.device_info() says why)" if kind == "cuda" else "")
    )


def device_notes() -> tuple[str, ...]:
    """All notes of this process. Those that are new are logged."""
    notes = (*_C.device_notes(), *_own)
    for text in notes:
        if text not in _logged:
            _logged.add(text)
            logger.warning("%s", text)
    return notes
