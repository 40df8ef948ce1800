"""Looks beside other threads, processes and tools that change the same objects, and beside requests that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import stores

import vescale_ckpt
from vescale_ckpt._checkpoint.record_reader import RecordReader
from vescale_ckpt._storage import object_store
from vescale_ckpt._storage.open_storage import storage_at

obstore = pytest.importorskip("obstore", reason="object stores need obstore")


def _elsewhere(call: Callable[[], Any]) -> None:
    """Calls it in a thread, which has looks of its own, as another process has."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def _lora(step: int) -> dict[str, Any]:
    return {"frozen": torch.arange(40_000), "adapter": torch.full((3000,), float(step)), "step": step}


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(step)), "step": step}


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


def test_verify_reads_nothing_that_a_failed_load_has_read_ahead(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vescale_ckpt.save(url, _state(1))
    (name,) = stores.data_files(url)
    bad = bytearray(stores.read(url, name))

    def fail(reader: RecordReader) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RecordReader, "finish", fail)
        with pytest.raises(KeyboardInterrupt):
            vescale_ckpt.load(url, _state(0))
    bad[100] ^= 1
    stores.write(url, name, bytes(bad))
    assert vescale_ckpt.verify(url).damaged


def test_the_ends_of_open_files_have_a_bound(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of one rank may have the files of a thousand open."""
    monkeypatch.setattr(object_store, "_MOST_OPEN_TAILS", 4)
    contents = {f"__{rank}_01234567.distcp": bytes([rank]) * 1000 for rank in range(10)}
    for name, content in contents.items():
        stores.write(url, name, content)

    def open_all() -> int:
        opened = {name: object_store._OpenObject(f"{url}/{name}") for name in contents}
        for name, content in contents.items():
            assert opened[name].size == 1000 and bytes(opened[name].read(10, 900)) == content[10:910]
        return sum(bool(one._tail) for one in opened.values())

    assert open_all() == 4
    storage_at(url).drop_caches()
    assert open_all() == 4, "room for others after these were closed"


# --- Looks


# --- Ends


def test_an_end_is_that_of_one_version_where_it_takes_two_requests(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    get, head = obstore.get, obstore.head
    storage = storage_at(url)
    storage.write("a", b"1" * 100)

    class NotSupportedError(Exception):
        pass

    def refuse(store: Any, key: str, *, options: Any = None) -> Any:
        if "suffix" in str(options):
            raise NotSupportedError("Azure does not support suffix range requests")
        return get(store, key, options=options)

    def replaced_behind(store: Any, key: str) -> Any:
        found = head(store, key)
        if found["size"] == 100:
            obstore.put(store, key, b"2" * 100 + b"3" * 100)
        return found

    monkeypatch.setattr(obstore, "get", refuse)
    monkeypatch.setattr(obstore, "head", replaced_behind)
    found, end = storage.read_range("a", -10, 10)
    assert (found.size, end) == (200, b"3" * 10)


# --- Decisions
