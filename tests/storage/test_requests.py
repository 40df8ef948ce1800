"""How many requests to an object store saves, loads and managers make: each takes some 40 ms, and costs money."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import steps
from harness.ranks import run_ranks
from harness.saves import loaded
from harness.states import assert_same

import vescale_ckpt
from vescale_ckpt import CheckpointManager
from vescale_ckpt._storage import object_clients, object_store

obstore = pytest.importorskip("obstore", reason="object stores need obstore")

MiB = 1 << 20
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
    assert requests.taken() <= 12
    for _ in range(2):
        vescale_ckpt.load(root + "/x", _state())
        assert requests.taken() == 12  # nothing was kept of the data


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager(requests: Requests, root: str, asynchronous: bool) -> None:
    counts = []
    with CheckpointManager(root + "/run", max_to_keep=2, async_checkpoint=asynchronous) as manager:
        requests.taken()
        for step in range(1, 7):
            manager.save(step, _state())
            manager.wait()
            counts.append(requests.taken())
        manager.restore(_state())
        assert requests.taken() <= 27
        assert sorted(manager.steps()) == [5, 6]
    assert counts[0] <= 12 and max(counts) <= 29
    assert counts[-1] == counts[-2]  # no more for each step that there was


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
def test_each_further_rank_puts_once_and_asks_twice(tmp_path: Path, ranks: int) -> None:
    (saved, loaded), *others = run_ranks(ranks, _requests_of_rank, str(tmp_path / "store"))
    assert saved.total() <= 5 and loaded.total() <= 11
    assert others == [(Counter(put=1), Counter(head=1, get=1))] * (ranks - 1)


def _sent(monkeypatch: pytest.MonkeyPatch, url: str, state: dict[str, Any], writers: int) -> list[tuple[int, int]]:
    """Saves as one of so many ranks. Returns bytes and number of parts of each multipart upload."""
    found: list[tuple[int, int]] = []
    put_parts = object_store.Client.put_parts

    def counted(client: object_store.Client, parts: Iterator[Any], part_bytes: int) -> None:
        lengths: list[int] = []

        def all_of() -> Iterator[Any]:
            for part in parts:
                lengths.append(len(part))
                yield part
                del part

        put_parts(client, all_of(), part_bytes)
        found.append((part_bytes, len(lengths)))

    with monkeypatch.context() as patch:
        patch.setattr(object_store.Client, "put_parts", counted)
        patch.setattr(object_store, "_writers", lambda: writers)
        vescale_ckpt.save(url, state)
    return found


def test_parts_grow_with_the_file_where_many_ranks_write(
    requests: Requests, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*steps.LIMITS["bytes of a slot"], 4 * MiB)  # all sizes are half of the usual ones
    large, small = ({"w": torch.arange(mib << 18, dtype=torch.float32)} for mib in (80, 28))
    assert _sent(monkeypatch, root + "/a", large, 1) == [(8 * MiB, 11)]  # stores take none below 5 MiB
    assert _sent(monkeypatch, root + "/b", large, 1024) == [(32 * MiB, 3)]
    assert _sent(monkeypatch, root + "/c", small, 1024) == []  # one request
    for name, state in (("a", large), ("b", large), ("c", small)):
        assert_same(loaded(f"{root}/{name}", state), state)
