"""How many requests to an object store saves, loads and managers make: each takes some 40 ms, and costs money."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import CheckpointManager
from vescale_ckpt._storage import object_clients

obstore = pytest.importorskip("obstore", reason="object stores need obstore")

_REQUESTS = ("get", "put", "head", "delete", "list", "list_with_delimiter")


class Requests:
    """Counts what is asked of obstore."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: Counter[str] = Counter()
        for name in _REQUESTS:
            monkeypatch.setattr(obstore, name, self._counted(name, getattr(obstore, name)))

    def _counted(self, name: str, request: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._made[name] += 1
            return request(*arguments, **options)

        return counted

    def taken(self) -> int:
        """Returns how many were made since the last call."""
        made = self._made.total()
        self._made.clear()
        return made


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    monkeypatch.setattr(object_clients, "_opened", {})
    return Requests(monkeypatch)


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}"


def _state() -> dict[str, Any]:
    return {"weight": torch.ones(1000), "step": 1}


def test_saves_and_loads(requests: Requests, root: str) -> None:
    vescale_ckpt.save(root + "/x", _state())
    assert requests.taken() <= 5
    vescale_ckpt.save(root + "/x", _state())
    assert requests.taken() <= 21
    vescale_ckpt.load(root + "/x", _state())
    assert requests.taken() <= 11


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager(requests: Requests, root: str, asynchronous: bool) -> None:
    counts = []
    with CheckpointManager(root + "/run", max_to_keep=2, async_checkpoint=asynchronous) as manager:
        requests.taken()
        for step in range(1, 6):
            manager.save(step, _state())
            manager.wait()
            counts.append(requests.taken())
        manager.restore(_state())
        assert requests.taken() <= 27
        assert sorted(manager.steps()) == [4, 5]
    assert counts[0] <= 13 and max(counts) <= 39
    assert counts[-1] == counts[-2]  # no more for each step that there was
