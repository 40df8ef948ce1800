"""What looks answer again, and what they never do: state of others that a decision needs afresh."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import stores
from harness.saves import loaded
from harness.states import assert_same

import vescale_ckpt
from vescale_ckpt import CheckpointManager
from vescale_ckpt._storage import object_clients, object_looks, object_store
from vescale_ckpt._storage.open_storage import storage_at

obstore = pytest.importorskip("obstore", reason="object stores need obstore")
from obstore.store import MemoryStore  # noqa: E402


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(object_clients, "_registered", {})
    monkeypatch.setattr(object_clients, "_opened", {})
    return f"memory://{uuid.uuid4().hex}/run"


def _elsewhere(call: Callable[[], Any]) -> None:
    """Calls it in a thread, which has looks of its own, as another process has."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("lists", [False, True])
def test_a_look_keeps_its_answers_and_a_fresh_one_has_none(url: str, lists: bool) -> None:
    storage = storage_at(url)
    storage.write("old", b"1")
    with storage.look(lists=lists):
        assert storage.has("old") and storage.read("old") == b"1" and not storage.has("new")
        _elsewhere(lambda: (storage.write("new", b"2"), storage.write("old", b"three"), storage.write("x/y", b"4")))
        assert not storage.has("new") and storage.stat("old").size == 1 and storage.read("old") == b"1"
        assert sorted(storage.names()) == (["old"] if lists else ["new", "old", "x"])
        with storage.look(fresh=True, lists=lists):
            assert storage.has("new") and storage.read("old") == b"three"
            assert sorted(storage.names()) == ["new", "old", "x"]
        assert storage.read_range("old", -1, 1)[1] == b"e", "the look around it knows it, too"
        assert storage.has("new") and sorted(storage.names()) == ["new", "old", "x"]
        _elsewhere(lambda: storage.write("old", b"fourth"))
        assert storage.read("old") == b"three"
    assert storage.has("new") and storage.read("old") == b"fourth"


@pytest.mark.parametrize("lists", [False, True])
def test_a_look_sees_what_its_thread_does(url: str, lists: bool) -> None:
    storage = storage_at(url)
    with storage.look(lists=lists):
        assert not storage.has("a") and not storage.has("b/c")
        storage.write("a", b"1")
        storage_at(f"{url}/b").write("c", b"23")
        assert storage.has("a") and storage.read("a") == b"1" and storage_at(f"{url}/b").stat("c").size == 2
        assert sorted(storage.names()) == ["a", "b"] and storage.folders() == ["b"]
        storage.remove("a")
        assert not storage.has("a") and storage.names() == ["b"]
        storage.set_aside("b", "c")
        with pytest.raises(FileNotFoundError):
            storage.names()


def test_after_a_failed_request_a_look_asks_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, put = storage_at(url), obstore.put

    def put_and_lose_the_answer(*arguments: Any, **options: Any) -> None:
        put(*arguments, **options)
        raise OSError("the answer was lost")

    with storage.look(lists=True):
        assert not storage.has("a")
        monkeypatch.setattr(obstore, "put", put_and_lose_the_answer)
        with pytest.raises(OSError, match="lost"):
            storage.write("a", b"1")
        assert storage.has("a") and storage.read("a") == b"1"


def test_a_second_look_forgets_nothing_that_damage_needs_afresh(url: str) -> None:
    storage = storage_at(url)
    storage.write("a", b"bad")
    with storage.look(lists=True):
        assert storage.read("a") == b"bad"
        _elsewhere(lambda: storage.write("a", b"good"))
        storage.drop_caches()  # as reads do that find damage
        assert storage.read("a") == b"good"


def test_contents_of_another_store_under_the_same_name_are_others(url: str) -> None:
    for content in (b"one", b"two"):  # both have the first ETag of their store
        vescale_ckpt.register_store("s3://bucket", MemoryStore())
        storage = storage_at("s3://bucket/x")
        storage.write("a", content)
        with storage.look(lists=True):
            assert storage.read("a") == content


def test_what_is_kept_of_contents_has_a_bound(url: str) -> None:
    storage = storage_at(url)
    for number in range(20):
        storage.write(f"{number}", bytes(1 << 20))
    storage.write("large", bytes((1 << 20) + 1))
    kept = [len(content) for _, content in object_looks._contents.values()]
    assert sum(kept) <= 16 << 20 and max(kept) <= 1 << 20


@pytest.mark.parametrize("cause", ["too many", "refused"])
def test_without_a_list_each_object_is_asked_for(url: str, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    with CheckpointManager(url, max_to_keep=2, async_checkpoint=False) as manager:
        if cause == "too many":
            monkeypatch.setattr(object_looks, "MOST_LISTED", 3)
        else:
            real = object_store.Client.list_below

            def refuse(client: object_store.Client, most: int) -> Any:
                raise PermissionError(f"{client.url}, {real}")

            monkeypatch.setattr(object_store.Client, "list_below", refuse)
        for step in range(1, 6):
            manager.save(step, {"w": torch.full((5,), float(step))})
        assert manager.steps() == [4, 5] and manager.latest() == 5
        state = {"w": torch.zeros(5)}
        assert manager.restore(state) == 5 and state["w"][0] == 5


def test_the_end_of_an_object_where_stores_cannot_give_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure knows no ranges that count from the end; other stores refuse those of empty objects."""
    get = obstore.get

    class NotSupportedError(Exception):
        pass

    def refuse(store: Any, key: str, *, options: dict[str, Any] | None = None) -> Any:
        if "suffix" in str(options):
            raise NotSupportedError("Azure does not support suffix range requests")
        return get(store, key, options=options)

    monkeypatch.setattr(obstore, "get", refuse)
    state = {"w": torch.arange(1 << 20), "step": 3}
    vescale_ckpt.save(url, state)
    vescale_ckpt.save(url, state)
    assert_same(loaded(url, state), state)
    storage = storage_at(url)
    storage.write("empty", b"")
    with storage.look():
        assert storage.stat("empty").size == 0 and storage.read("empty") == b""


def test_an_end_that_comes_cut_off_is_asked_for_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    get, left = obstore.get, 5
    state = {"w": torch.arange(1 << 18), "step": 3}
    vescale_ckpt.save(url, state)

    class CutOff:
        def __init__(self, answer: Any) -> None:
            self.meta, self._answer = answer.meta, answer

        def bytes(self) -> bytes:
            return bytes(self._answer.bytes())[:-1]

    def cut_off(store: Any, key: str, *, options: Any = None) -> Any:
        nonlocal left
        answer = get(store, key, options=options)
        if "distcp" in key and "suffix" in str(options) and left:
            left -= 1
            return CutOff(answer)
        return answer

    monkeypatch.setattr(obstore, "get", cut_off)
    assert_same(loaded(url, state), state)
    assert left == 2, "three answers, then the ranges"


def test_a_step_that_another_process_replaces_is_loaded_as_it_is_now(url: str) -> None:
    with CheckpointManager(url, async_checkpoint=False) as manager:
        manager.save(1, {"w": torch.zeros(5)})
        assert manager.latest() == 1
        _elsewhere(lambda: vescale_ckpt.save(f"{url}/step-1", {"w": torch.ones(5)}))
        state = {"w": torch.zeros(5)}
        assert manager.restore(state) == 1 and state["w"].sum() == 5


def test_a_step_that_lost_a_file_does_not_count(url: str, tmp_path: Path) -> None:
    with CheckpointManager(url, max_to_keep=2, async_checkpoint=False) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((5,), float(step))})
        (name,) = stores.data_files(f"{url}/step-2")
        stores.remove(f"{url}/step-2", name)
        assert manager.latest() == 1
        manager.save(3, {"w": torch.zeros(5)})
        assert 1 in manager.steps(), "it is one of two sound ones"
