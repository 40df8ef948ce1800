"""What looks answer again, what they never do (state of others that a decision needs afresh), and looks beside requests
that fail."""

from __future__ import annotations

import contextvars
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import torch
from harness import stores
from harness.fault_proxy import Rule
from harness.saves import loaded
from harness.states import assert_same

import vescale_ckpt
from vescale_ckpt import CheckpointManager
from vescale_ckpt._storage import object_clients, object_looks, object_store
from vescale_ckpt._storage.open_storage import storage_at
from vescale_ckpt.manager import step_directories

obstore = pytest.importorskip("obstore", reason="object stores need obstore")


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(object_clients, "_registered", {})
    monkeypatch.setattr(object_clients, "_opened", {})
    return f"memory://{uuid.uuid4().hex}/run"


def _elsewhere(call: Callable[[], Any]) -> None:
    """Calls it in a thread, which has looks of its own, as another process has."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result(120)


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(step)), "step": step}


class _CutOff:
    """An answer whose last byte did not come."""

    def __init__(self, answer: Any) -> None:
        self.meta, self._answer = answer.meta, answer

    def bytes(self) -> bytes:
        return bytes(self._answer.bytes())[:-1]


class NotSupportedError(Exception):
    """Of obstore, named so."""


@pytest.fixture
def no_ranges_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Azure."""
    get = obstore.get

    def refuse(store: Any, key: str, *, options: dict[str, Any] | None = None) -> Any:
        if "suffix" in str(options):
            raise NotSupportedError("Azure does not support suffix range requests")
        return get(store, key, options=options)

    monkeypatch.setattr(obstore, "get", refuse)


# --- Contents


def test_verify_sees_what_became_of_files_after_it_read_them(url: str) -> None:
    vescale_ckpt.save(url, _state(1))
    (name,) = stores.data_files(url)
    sound = stores.read(url, name)
    assert vescale_ckpt.verify(url).ok and vescale_ckpt.verify(url).ok
    bad = bytearray(sound)
    bad[100] ^= 1
    stores.write(url, name, bytes(bad))
    assert vescale_ckpt.verify(url).damaged, "another tool has damaged it since"
    stores.write(url, name, sound)
    assert vescale_ckpt.verify(url).ok, "another tool has repaired it since"
    stores.remove(url, name)
    assert not vescale_ckpt.verify(url).ok


# --- Looks


@pytest.mark.parametrize("lists", [False, True])
def test_a_look_keeps_its_answers_and_a_fresh_one_has_none(url: str, lists: bool) -> None:
    storage = storage_at(url)
    storage.write("old", b"1")
    with storage.look(lists=lists):
        assert storage.stat("old").size == 1 and storage.has("new") is False
        _elsewhere(lambda: (storage.write("new", b"2"), storage.write("old", b"three"), storage.write("x/y", b"4")))
        assert storage.has("new") is not lists and storage.stat("old").size == 1
        assert sorted(storage.names()) == (["old"] if lists else ["new", "old", "x"])
        with storage.look(fresh=True, lists=lists):
            assert storage.has("new") and storage.stat("old").size == 5
            assert sorted(storage.names()) == ["new", "old", "x"]
        assert storage.stat("old").size == 5, "the look around it knows it, too"
        assert storage.has("new") and sorted(storage.names()) == ["new", "old", "x"]
        _elsewhere(lambda: storage.write("old", b"fourth"))
        assert storage.stat("old").size == 5
    assert storage.has("new") and storage.stat("old").size == 6


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
        assert storage.stat("a").size == 3
        _elsewhere(lambda: storage.write("a", b"good"))
        storage.drop_caches()  # as reads do that find damage
        assert storage.stat("a").size == 4


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


@pytest.mark.usefixtures("no_ranges_from_the_end")
def test_the_end_of_an_object_where_stores_cannot_give_it(url: str) -> None:
    """Azure knows no ranges that count from the end; other stores refuse those of empty objects."""
    state = {"w": torch.arange(1 << 20), "step": 3}
    vescale_ckpt.save(url, state)
    vescale_ckpt.save(url, state)
    assert_same(loaded(url, state), state)
    storage = storage_at(url)
    storage.write("empty", b"")
    with storage.look():
        assert storage.stat("empty").size == 0 and storage.read("empty") == b""


def test_a_look_stays_in_its_thread(url: str) -> None:
    """Threads may take over the context of the thread that started them, as asyncio.to_thread does."""
    storage = storage_at(url)
    storage.write("a", b"1")
    with storage.look(lists=True):
        assert storage.has("a") and not storage.has("b")
        context = contextvars.copy_context()
        found = []
        _elsewhere(lambda: storage.write("b", b"2"))
        _elsewhere(lambda: context.run(lambda: found.append(storage.has("b"))))
        assert found == [True] and not storage.has("b")


def test_an_empty_object_in_place_of_a_folder_is_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tools put an object `folder/` for each folder that they show. A list gives its key without the slash."""
    vescale_ckpt.save(f"{url}/step-1", _state(1))
    storage, listed = storage_at(url), obstore.list

    def with_folder(store: Any, prefix: str | None = None, **options: Any) -> Any:
        pages = [page for page in listed(store, prefix, **options)]
        folder = {**pages[0][0], "path": storage._client.at("step-1").key, "size": 0}
        yield [folder, *pages[0]]
        yield from pages[1:]

    before = storage.names(), storage.stat("step-1").is_folder, storage.has("step-1")
    monkeypatch.setattr(obstore, "list", with_folder)
    with storage.look(lists=True):
        assert (storage.names(), storage.stat("step-1").is_folder, storage.has("step-1")) == before
        assert before == (["step-1"], True, False)


# --- Ends


def test_an_end_that_is_always_cut_off_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    get = obstore.get
    storage = storage_at(url)
    storage.write("a", bytes(100))

    monkeypatch.setattr(obstore, "get", lambda *one, **more: _CutOff(get(*one, **more)))
    with pytest.raises(OSError, match="came short"):
        storage.read_range("a", -10, 10)
    with storage.look(), pytest.raises(OSError, match="came short"):
        storage.read_range("a", -10, 10)


@pytest.mark.usefixtures("no_ranges_from_the_end")
def test_an_end_is_that_of_one_version_where_it_takes_two_requests(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = obstore.head
    storage = storage_at(url)
    storage.write("a", b"1" * 100)

    def replaced_behind(store: Any, key: str) -> Any:
        found = head(store, key)
        if found["size"] == 100:
            obstore.put(store, key, b"2" * 100 + b"3" * 100)
        return found

    monkeypatch.setattr(obstore, "head", replaced_behind)
    found, end = storage.read_range("a", -10, 10)
    assert (found.size, end) == (200, b"3" * 10)


# --- Decisions


def test_orphans_of_a_folder_into_which_another_process_saves_now_stay(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.write(f"{url}/step-7", "__0_01234567.distcp", b"half")
    list_below = object_store.Client.list_below

    def an_old_half(client: object_store.Client, most: int) -> Any:
        found = list_below(client, most)
        for one in found or ():
            if "01234567" in one["path"]:
                one["last_modified"] = datetime.now(timezone.utc) - timedelta(days=2)
        return found

    monkeypatch.setattr(object_store.Client, "list_below", an_old_half)
    with storage_at(url).look(lists=True, fresh=True):
        assert storage_at(url).folders() == ["step-7"]
        _elsewhere(lambda: stores.write(f"{url}/step-7", "__0_89abcdef.distcp", b"of a save under way"))
        assert step_directories.remove_orphans(url) == []
    assert stores.data_files(f"{url}/step-7") == {"__0_01234567.distcp", "__0_89abcdef.distcp"}
    stores.remove(f"{url}/step-7", "__0_89abcdef.distcp")
    with storage_at(url).look(lists=True, fresh=True):
        assert step_directories.remove_orphans(url) == [7]
    assert stores.names(f"{url}/step-7") == set()


@pytest.mark.parametrize("action", ["flip", "shorten"])
def test_metrics_that_change_on_the_way_keep_the_best_step(fault_proxy: Any, bucket_url: str, action: Any) -> None:
    options: dict[str, Any] = {"max_to_keep": 1, "best": "loss", "best_mode": "min", "async_checkpoint": False}
    manager = CheckpointManager(bucket_url, **options)
    manager.save(1, _state(1), metrics={"loss": 0.1})
    rule = Rule(action, kind="get", path=r"step-1/.*metrics")
    fault_proxy.add(rule)
    manager.save(2, _state(2), metrics={"loss": 0.5})
    assert rule.hits == 1 and 1 in manager.steps(), "it is the best"
    manager.save(3, _state(3), metrics={"loss": 0.4})
    assert 1 in manager.steps(), "what came is not kept"
