"""`RandomState` saves and restores the states of the random number generators of one process."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch


class RandomState:
    """The default random number generators of torch (on the CPU and on this process's devices), of Python, and of numpy
    if it is imported. They differ from rank to rank: `{"random": PerRank(RandomState())}`.

    A restore sets the generators. Generators that the checkpoint lacks keep their states.
    """

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if (device := _device_module()) is not None:
            state["devices"] = device.get_rng_state_all()
        if (numpy := sys.modules.get("numpy")) is not None:
            state["numpy"] = _plain(numpy.random.get_state())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        if "devices" in state and (device := _device_module()) is not None:
            for index, of_device in enumerate(state["devices"][: device.device_count()]):
                device.set_rng_state(of_device, index)
        if "numpy" in state:
            import numpy

            keys, *rest = state["numpy"]
            numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), *rest))

    @staticmethod
    def reshard_state(states: list[dict[str, Any]], rank: int, size: int) -> dict[str, Any]:
        """Returns the state of a rank if the number of ranks has changed: that of the same rank. A rank that did not
        exist gets generators with its own seeds, equal in every run."""
        if rank < len(states):
            return states[rank]
        base = states[rank % len(states)]
        text = b"".join((bytes(base["torch"].tolist()), str(rank).encode()))
        seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
        state: dict[str, Any] = {
            "torch": torch.Generator().manual_seed(seed).get_state(),
            "python": random.Random(seed).getstate(),
        }
        if "devices" in base and (device := _device_module()) is not None:
            of_device = torch.Generator(torch.accelerator.current_accelerator()).manual_seed(seed).get_state()
            state["devices"] = [of_device] * min(len(base["devices"]), device.device_count())
        if "numpy" in base:
            import numpy

            state["numpy"] = _plain(numpy.random.RandomState(seed).get_state())
        return state


def _plain(of_numpy: Any) -> tuple[list[int], int, int, float]:
    """Returns a state of numpy's generator without arrays, so that loads need not trust numpy's classes."""
    _, keys, position, has_gauss, cached = of_numpy
    return keys.tolist(), int(position), int(has_gauss), float(cached)


def _device_module() -> Any:
    """Returns torch's module of the accelerator that this process uses (`torch.cuda`, say). None if it uses none."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    in_use = getattr(module, "is_initialized", None)
    if in_use is not None and not in_use():
        return None
    return module if hasattr(module, "get_rng_state_all") else None
