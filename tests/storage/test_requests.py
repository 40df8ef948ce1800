"""How many requests to an object store saves, loads and managers make: each takes some 40 ms, and costs money."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks

import vescale_ckpt
from vescale_ckpt import CheckpointManager
from vescale_ckpt._storage import object_clients
from vescale_ckpt._storage.open_storage import storage_at

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
        return self.taken_by_name().total()

    def taken_by_name(self) -> Counter[str]:
        made, self._made = self._made, Counter()
        return made


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    monkeypatch.setattr(object_clients, "_opened", {})
    return Requests(monkeypatch)


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}"


def _state() -> dict[str, Any]:
    return {"weight": torch.ones(1 << 18), "step": 1}  # 1 MiB


def test_saves_and_loads(requests: Requests, root: str) -> None:
    vescale_ckpt.save(root + "/x", _state())
    assert requests.taken() <= 5
    vescale_ckpt.save(root + "/x", _state())
    assert requests.taken() <= 8
    vescale_ckpt.load(root + "/x", _state())
    assert requests.taken() <= 3
    vescale_ckpt.load(root + "/x", _state())  # nothing was kept of the data
    assert 3 <= requests.taken() <= 4


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("delta", "most", "first"), [(False, 12, 8), (True, 22, 11)])
def test_a_manager(requests: Requests, root: str, asynchronous: bool, delta: bool, most: int, first: int) -> None:
    counts = []
    with CheckpointManager(root + "/run", max_to_keep=2, async_checkpoint=asynchronous, delta=delta) as manager:
        requests.taken()
        for step in range(1, 7):
            manager.save(step, _state())
            manager.wait()
            counts.append(requests.taken())
        manager.restore(_state())
        assert requests.taken() <= 6
        storage_at(root).drop_caches()  # a new process knows nothing
        manager.restore(_state())
        assert requests.taken() <= 8
        assert sorted(manager.steps()) == [5, 6]
    assert counts[0] <= first and max(counts) <= most
    assert counts[-1] == counts[-2]  # no more for each step that there was


def test_many_steps_cost_no_more(requests: Requests, root: str) -> None:
    counts = []
    with CheckpointManager(root + "/run", async_checkpoint=False) as manager:
        requests.taken()
        for step in range(1, 8):
            manager.save(step, _state())
            counts.append(requests.taken())
    assert max(counts) <= 8


def _requests_of_rank(folder: str) -> tuple[Counter[str], Counter[str]]:
    """The requests of this rank for a save and a load, not the first ones, of 1 MiB a rank."""
    import torch.distributed as dist
    from obstore.store import LocalStore
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    ranks = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(ranks)))

    def state() -> dict[str, Any]:
        return {"weight": distribute_tensor(torch.ones(ranks << 18), mesh, [Shard(0)]), "step": 1}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_clients, "_registered", {"s3://folder": LocalStore(folder, mkdir=True)})
        vescale_ckpt.save("s3://folder/first", state())
        requests = Requests(patch)
        vescale_ckpt.save("s3://folder/x", state())
        dist.barrier()
        saved = requests.taken_by_name()
        vescale_ckpt.load("s3://folder/x", state())
        return saved, requests.taken_by_name()


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_further_rank_puts_once_and_gets_once(tmp_path: Path, ranks: int) -> None:
    (saved, loaded), *others = run_ranks(ranks, _requests_of_rank, str(tmp_path / "store"))
    assert saved.total() <= 5 and loaded.total() <= 3
    assert others == [(Counter(put=1), Counter(get=1))] * (ranks - 1)
