"""Saves and loads in an object store through a proxy that does harm: nothing half committed, nothing wrong loaded.

Each test saves state 1, does harm to what follows, and looks at what is there when the harm is over.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.fault_proxy import Action, FaultProxy, Kind, Rule
from harness.object_server import ObjectServer, unfinished_uploads
from harness.ranks import run_ranks
from harness.saves import error_of

import vescale_ckpt
from vescale_ckpt import CheckpointError, CheckpointManager, CorruptCheckpointError
from vescale_ckpt._storage import object_store
from vescale_ckpt._storage.object_store import Client
from vescale_ckpt._storage.open_storage import storage_at

pytest.importorskip("obstore", reason="object stores need obstore")

KiB, MiB = 1 << 10, 1 << 20
FOR_GOOD = 10**6
SLOW = pytest.mark.slow
BOUND = 120.0  # seconds after which a call counts as hung
#: What a client may outlive, and what it may not.
PASSING: tuple[Action, ...] = ("error", "slow_down", "reset", "reset_middle", "lost_answer", "late_error", "delay")
LASTING: tuple[Action, ...] = ("error", "slow_down", "reset", "expired", "denied", "skewed", "no_bucket", "stall")


IMPATIENCE = ("VESCALE_CKPT_OBJECT_STORE_TIMEOUT", "2")


@pytest.fixture
def impatient() -> Iterator[pytest.MonkeyPatch]:
    """For harm that lasts: `setenv(*IMPATIENCE)` gives requests up after 2 seconds, until this is undone."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def state(k: int) -> dict[str, Any]:
    """Two parts of an upload."""
    return {
        "large": torch.arange(3 * MiB, dtype=torch.float32) + k,
        "small": torch.full((3, 5), k),
        "object": {"step": k},
    }


def content(path: str) -> int:
    """Which state the checkpoint holds; raises if it is none of them."""
    values = state(-1)
    vescale_ckpt.load(path, values)
    k = values["object"]["step"]
    wanted = state(k)
    assert all(torch.equal(values[name], wanted[name]) for name in ("large", "small")), "a mixture"
    return int(k)


def outcome(call: Callable[[], object]) -> CheckpointError | None:
    """The error of a save or load, which must be one of ours and in bounded time."""
    begun = time.monotonic()
    error = error_of(call)
    assert time.monotonic() - begun < BOUND
    return error


def check_afterwards(
    url: str, server: ObjectServer, failed: bool, new: int, doubtful: bool = False, uploads: Sequence[str] = ()
) -> None:
    """The harm is over: the old state or the new one is there, whole, and the next save works. `uploads`: those that
    were left."""
    found = content(url)
    assert found in ((1, new) if doubtful else (1,) if failed else (new,))
    report = vescale_ckpt.verify(url)
    assert report.ok, report
    vescale_ckpt.save(url, state(9))
    assert content(url) == 9 and unfinished_uploads(server, url) == [*uploads]


def saves(url: str, way: str, k: int) -> Callable[[], object]:
    if way == "async":
        return lambda: vescale_ckpt.save(url, state(k), async_checkpoint=True).result()
    return lambda: vescale_ckpt.save(url, state(k))


SAVE_KINDS: tuple[Kind, ...] = ("create_upload", "upload_part", "complete_upload", "put", "head", "list", "get")
_few = [("sync", "upload_part", "reset_middle"), ("async", "put", "late_error"), ("sync", "complete_upload", "error")]
_all = [(way, kind, action) for way in ("sync", "async") for kind in SAVE_KINDS for action in PASSING]


@pytest.mark.parametrize(
    ("way", "kind", "action"),
    [*_few, *(pytest.param(*case, marks=SLOW) for case in _all if case not in _few)],
)
def test_a_save_outlives_what_passes(
    fault_proxy: FaultProxy, bucket_url: str, object_server: ObjectServer, way: str, kind: Kind, action: Action
) -> None:
    uploads: list[str] = []
    vescale_ckpt.save(bucket_url, state(1))
    for skip in range(2 if (way, kind, action) in _few else 4):
        fault_proxy.add(Rule(action, kind=kind, skip=skip, value=0.3 if action == "delay" else None))
        error = outcome(saves(bucket_url, way, 2))
        fault_proxy.clear()
        # A conditional put is not sent again where the connection broke, and an upload is not asked for again where the
        # answer breaks off in its middle.
        broken = kind == "put" and action in ("reset", "reset_middle", "lost_answer")
        assert error is None or broken or (kind, action) == ("create_upload", "reset_middle"), error
        if kind == "create_upload" and action in ("reset_middle", "lost_answer", "late_error"):
            # The store has begun an upload whose number nobody was told.
            uploads = unfinished_uploads(object_server, bucket_url)
            assert len(uploads) <= 1 + skip
        check_afterwards(bucket_url, object_server, error is not None, 2, uploads=uploads)
        vescale_ckpt.save(bucket_url, state(1))


_few_lasting = [
    ("sync", "upload_part", "slow_down"),
    ("async", "put", "denied"),
    ("sync", "complete_upload", "expired"),
]
_all_lasting = [(way, kind, action) for way in ("sync", "async") for kind in SAVE_KINDS for action in LASTING]


@pytest.mark.parametrize(
    ("way", "kind", "action"),
    [
        *_few_lasting,
        *(pytest.param(*case, marks=SLOW) for case in _all_lasting if case not in _few_lasting),
    ],
)
def test_a_save_that_fails_leaves_the_old_checkpoint(
    impatient: pytest.MonkeyPatch,
    fault_proxy: FaultProxy,
    bucket_url: str,
    object_server: ObjectServer,
    way: str,
    kind: Kind,
    action: Action,
) -> None:
    vescale_ckpt.save(bucket_url, state(1))
    impatient.setenv(*IMPATIENCE)
    fault_proxy.add(Rule(action, kind=kind, times=FOR_GOOD))
    error = outcome(saves(bucket_url, way, 2))
    hit = any(request.action for request in fault_proxy.of())
    fault_proxy.clear()
    impatient.undo()
    # What only cleans up may fail, and whether a commit whose requests all failed was done can be asked.
    # Answers to HEAD have no text, so a refused one is followed by a GET, which is not refused here.
    unnoticed = kind in ("get", "list") or (kind == "head" and action in ("no_bucket", "denied", "expired", "skewed"))
    assert error is not None or not hit or unnoticed, "nothing was noticed"
    if error is not None:
        assert "s3://" in str(error), error
    check_afterwards(bucket_url, object_server, error is not None, 2, doubtful=kind == "get")


@pytest.mark.parametrize(("kind", "action"), [("upload_part", "denied"), ("complete_upload", "expired")])
def test_metadata_of_many_parts_appears_whole_or_not_at_all(
    impatient: pytest.MonkeyPatch,
    fault_proxy: FaultProxy,
    bucket_url: str,
    object_server: ObjectServer,
    kind: Kind,
    action: Action,
) -> None:
    impatient.setattr(object_store, "_MOST_SINGLE_PUT", MiB)
    long_names = {"k" * 120_000 + str(i): i for i in range(100)}  # three parts of 5 MiB
    vescale_ckpt.save(bucket_url, state(1))
    for skip in range(3 if kind == "upload_part" else 1):
        if action != "denied":  # which is final
            impatient.setenv(*IMPATIENCE)
        fault_proxy.add(Rule(action, kind=kind, path=r"/\.metadata\?", skip=skip, times=FOR_GOOD))
        error = outcome(lambda: vescale_ckpt.save(bucket_url, long_names))
        assert error is not None and f"{bucket_url}/.metadata" in str(error), error
        assert fault_proxy.count("create_upload", r"/\.metadata\?")
        fault_proxy.clear()
        impatient.setenv("VESCALE_CKPT_OBJECT_STORE_TIMEOUT", "60")
        check_afterwards(bucket_url, object_server, True, 2)
        vescale_ckpt.save(bucket_url, state(1))
    vescale_ckpt.save(bucket_url, long_names)
    assert fault_proxy.count("upload_part", r"/\.metadata\?") >= 3
    assert vescale_ckpt.load(bucket_url) == long_names


@pytest.mark.parametrize("way", ["sync", pytest.param("async", marks=SLOW)])
def test_a_commit_that_arrives_late_is_whole(
    impatient: pytest.MonkeyPatch, fault_proxy: FaultProxy, bucket_url: str, object_server: ObjectServer, way: str
) -> None:
    """The client gave the request up, and the store does it afterwards: the data must still be there."""
    vescale_ckpt.save(bucket_url, state(1))
    impatient.setenv(*IMPATIENCE)
    fault_proxy.add(Rule("late", kind="put", path=r"/\.metadata$", times=FOR_GOOD, value=3.0))
    error = outcome(saves(bucket_url, way, 2))
    assert error is not None
    deadline = time.monotonic() + 60
    while any(request.status == 0 for request in fault_proxy.of("put", r"/\.metadata$")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    fault_proxy.clear()
    impatient.undo()
    check_afterwards(bucket_url, object_server, True, 2, doubtful=True)


def test_a_store_without_conditional_requests_is_asked_first(
    fault_proxy: FaultProxy, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_exclusive", set())
    monkeypatch.setattr(object_store, "_PROBE_SECONDS", 1)
    fault_proxy.add(Rule("not_implemented", kind="put", conditional=True, times=FOR_GOOD))
    with pytest.raises(CheckpointError, match=r"does not know conditional requests.*overwrite=True"):
        vescale_ckpt.save(bucket_url, state(1), overwrite=False)
    assert not fault_proxy.count("create_upload")
    vescale_ckpt.save(bucket_url, state(1), overwrite=True)
    assert content(bucket_url) == 1
    # One that takes them and does not heed them.
    monkeypatch.setattr(Client, "put", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match="does not heed"):
        storage_at(bucket_url).check_exclusive_commits()


@pytest.mark.parametrize("kind", ["upload_part", pytest.param("put", marks=SLOW)])
def test_bytes_that_change_on_their_way_up_are_found(
    fault_proxy: FaultProxy, bucket_url: str, object_server: ObjectServer, kind: Kind
) -> None:
    vescale_ckpt.save(bucket_url, state(1))
    for skip in range(2):
        fault_proxy.add(Rule("flip_up", kind=kind, skip=skip))
        error = outcome(lambda: vescale_ckpt.save(bucket_url, state(2)))
        fault_proxy.clear()
        if error is None and not (report := vescale_ckpt.verify(bucket_url)).ok:
            assert report.damaged
            with contextlib.suppress(CorruptCheckpointError):
                assert content(bucket_url) == 2  # by the index, where .metadata itself is damaged
        else:
            assert content(bucket_url) == (1 if error else 2)
        vescale_ckpt.save(bucket_url, state(1))
        assert content(bucket_url) == 1


@pytest.mark.parametrize("call", ["load", *(pytest.param(call, marks=SLOW) for call in ("verify", "manager"))])
def test_reads_with_passing_harm_are_right_or_raise(
    monkeypatch: pytest.MonkeyPatch,
    fault_proxy: FaultProxy,
    bucket_url: str,
    call: str,
) -> None:
    manager = CheckpointManager(bucket_url)
    manager.save(1, state(1))
    manager.wait()
    monkeypatch.setenv("VESCALE_CKPT_OBJECT_STORE_TIMEOUT", "10")  # stalls cost half of it
    url = f"{bucket_url}/step-1"
    rng = random.Random(3)
    actions: tuple[Action, ...] = (*PASSING, "truncate", "flip", "shorten", "stall_middle")
    for action in actions:
        for kind in ("get", "head", "list"):
            skip = rng.randrange(3)
            fault_proxy.add(Rule(action, kind=kind, skip=skip, value=0.2 if action == "delay" else None))
            if call == "verify":
                assert vescale_ckpt.verify(url).ok or action in ("flip", "shorten"), (action, kind)
            elif call == "load":
                error = outcome(lambda: content(url))
                assert error is None or action in ("flip", "shorten", "stall_middle"), (action, kind, error)
            else:
                target = state(-1)
                restored = None

                def restore(target: dict[str, Any] = target) -> None:
                    nonlocal restored
                    restored = CheckpointManager(bucket_url).restore(target)

                error = outcome(restore)
                assert error is not None or restored in (1, None), (action, kind)
                if error is None and restored == 1:
                    assert torch.equal(target["large"], state(1)["large"])
                assert error is None or action in ("flip", "shorten", "stall_middle"), (action, kind, error)
                assert restored is not None or error is not None or action in ("flip", "shorten"), (action, kind)
            fault_proxy.clear()
    assert content(url) == 1
    manager.close()


def test_one_of_racing_jobs_commits_whatever_is_lost(
    fault_proxy: FaultProxy, bucket_url: str, object_server: ObjectServer
) -> None:
    rng = random.Random(1)
    harm: tuple[Action, ...] = ("lost_answer", "late_error", "error", "reset")
    for number, actions in enumerate(((), harm, harm)):
        url = f"{bucket_url}/{number}"
        for action in actions:
            fault_proxy.add(Rule(action, kind="put", probability=0.25, times=FOR_GOOD, seed=rng.randrange(1000)))
        ready = threading.Barrier(4)

        def job(k: int, url: str = url, ready: threading.Barrier = ready) -> None:
            ready.wait()
            writer = vescale_ckpt.StorageWriter(url, overwrite=False)
            dcp.save(state(k), storage_writer=writer, planner=vescale_ckpt.SavePlanner(), no_dist=True)

        with ThreadPoolExecutor(4) as pool:
            jobs = {k: pool.submit(job, k) for k in range(1, 5)}
            outcomes = {k: running.exception(BOUND) for k, running in jobs.items()}
        fault_proxy.clear()
        won = [k for k, error in outcomes.items() if error is None]
        assert len(won) <= 1, outcomes
        assert actions or (won and all("overwrite=False" in str(error) for error in outcomes.values() if error))
        there = storage_at(url).has(".metadata")
        if won:
            assert content(url) == won[0] and vescale_ckpt.verify(url).ok
        elif there:
            content(url)
        with pytest.raises(CheckpointError, match="overwrite=False") if there else contextlib.nullcontext():
            vescale_ckpt.save(url, state(7), overwrite=False)


def _on_two_ranks(environment: dict[str, str], url: str, k: int, asynchronous: bool) -> str:
    os.environ.update(environment)
    rank = torch.distributed.get_rank()
    values = {f"tensor of {rank}": torch.full((3 * MiB,), float(k)), "common": torch.full((100,), k)}
    try:
        vescale_ckpt.save(url, values, async_checkpoint=asynchronous, timeout=60).result()
        return ""
    except CheckpointError as error:
        return str(error)


def _load_on_two_ranks(environment: dict[str, str], url: str) -> list[float]:
    os.environ.update(environment)
    rank = torch.distributed.get_rank()
    values = {f"tensor of {rank}": torch.zeros(3 * MiB), "common": torch.zeros(100, dtype=torch.int64)}
    vescale_ckpt.load(url, values, timeout=60)
    found = {float(x) for value in values.values() for x in (value.min(), value.max())}
    return sorted(found)


@pytest.mark.parametrize(
    ("kind", "action", "times"),
    [
        ("upload_part", "denied", 1),
        pytest.param("put", "lost_answer", 1, marks=SLOW),
        pytest.param("upload_part", "stall", FOR_GOOD, marks=SLOW),
        pytest.param("complete_upload", "lost_answer", 1, marks=SLOW),
        pytest.param("complete_upload", "denied", FOR_GOOD, marks=SLOW),
    ],
)
def test_ranks_fail_together(
    fault_proxy: FaultProxy,
    bucket_url: str,
    object_server: ObjectServer,
    kind: Kind,
    action: Action,
    times: int,
) -> None:
    patient = {**object_server.environment(fault_proxy.endpoint), "VESCALE_CKPT_OBJECT_STORE_TIMEOUT": "60"}
    impatient = {**patient, "VESCALE_CKPT_OBJECT_STORE_TIMEOUT": "10"}
    assert run_ranks(2, _on_two_ranks, patient, bucket_url, 1, False) == ["", ""]
    for asynchronous in (False, True):
        fault_proxy.add(Rule(action, kind=kind, times=times))
        texts = run_ranks(2, _on_two_ranks, impatient, bucket_url, 2, asynchronous)
        fault_proxy.clear()
        assert bool(texts[0]) == bool(texts[1]), texts
        wanted = [[1.0] if texts[0] else [2.0]] * 2
        assert run_ranks(2, _load_on_two_ranks, patient, bucket_url) == wanted, texts
        assert not unfinished_uploads(object_server, bucket_url)
        assert run_ranks(2, _on_two_ranks, patient, bucket_url, 1, False) == ["", ""]
