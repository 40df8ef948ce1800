"""The commit of an export, call by call: killed, failed or cut off from power anywhere, readers get the old model or
the new one, whole, and the next export goes on from there."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as stock_torch
import torch
import torch.distributed as dist
from harness import faults, steps
from harness.ranks import run_ranks
from harness.states import assert_same

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError
from vescale_ckpt._checkpoint.safetensors import commit, model_names
from vescale_ckpt._engine import _C
from vescale_ckpt._load.source import Source
from vescale_ckpt._storage import locks
from vescale_ckpt._storage.pending import Pending, temporary_name
from vescale_ckpt.reports import LoadStats

State = dict[str, torch.Tensor]

INDEX, SINGLE = model_names.INDEX_NAME, model_names.SINGLE_NAME
SIZES = {"one": "5GB", "two": 16, "four": 8}
BEFORE = ["nothing", *SIZES, "others", "others without an index", "an index of one", "one beside an index"]
NAMES = ("rename_file", "link_file", "remove_file", "exchange_names", "sync_directory", "write_head")


def model(k: int) -> State:
    """Four tensors of eight bytes, of which one is no other model's."""
    return {name: torch.tensor([float(k), i]) for i, name in enumerate(["a", "b", f"c{k}", "d"])}


def export(directory: Path, k: int, size: str, **options: Any) -> None:
    vescale_ckpt.save(directory, model(k), format=vescale_ckpt.Safetensors(max_shard_size=SIZES[size]), **options)


def prepare(directory: Path, before: str) -> None:
    """A folder with model 0."""
    directory.mkdir()
    state = model(0)
    if before in SIZES:
        export(directory, 0, before)
    elif before == "an index of one":
        export(directory, 0, "one")
        (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, SINGLE)}))
    elif before == "one beside an index":  # of an export that was killed: the single file is the model
        export(directory, 5, "two")
        stock_torch.save_file(state, directory / SINGLE)
    elif before != "nothing":
        places = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(state)}
        for place in set(places.values()):
            part = {name: tensor for name, tensor in state.items() if places[name] == place}
            stock_torch.save_file(part, directory / place)
        if before == "others":
            (directory / INDEX).write_text(json.dumps({"weight_map": places}))
    (directory / "config.json").write_text("mine")


def as_transformers(directory: Path) -> State | None:
    """The single file first, then the index, as transformers looks for them."""
    if (directory / SINGLE).exists():
        return dict(stock_torch.load_file(directory / SINGLE))
    if not (directory / INDEX).exists():
        return None
    places = json.loads((directory / INDEX).read_text())["weight_map"]
    found: State = {}
    for name in sorted(set(places.values())):
        found.update(stock_torch.load_file(directory / name))
    assert found.keys() == places.keys()
    return found


def as_we(directory: Path) -> State | None:
    try:
        return dict(vescale_ckpt.load(directory))
    except CheckpointError as error:
        assert "did not finish" in str(error) or "has no .metadata" in str(error), error
        return None


def which(found: State | None) -> int | None:
    """The number of the model that was found; None for none. Raises for a mixture."""
    if found is None:
        return None
    (k,) = {int(tensor[0]) for tensor in found.values()}
    assert found.keys() == model(k).keys()
    return k


def check_old_or_new(directory: Path, before: str) -> set[int | None]:
    ours, theirs = which(as_we(directory)), which(as_transformers(directory))
    assert ours in ((None, 1) if before == "nothing" else (0, 1))
    assert theirs in ((None, 1) if before in ("nothing", "others without an index") else (0, 1))
    if ours is not None and theirs is not None:
        assert ours == theirs
    return {ours}


def check_next(directory: Path, size: str) -> None:
    export(directory, 2, size)
    assert which(as_we(directory)) == which(as_transformers(directory)) == 2
    names = {name for name in os.listdir(directory) if model_names.is_model_file(name) or ".tmp." in name}
    count = {"one": 1, "two": 2, "four": 4}[size]
    assert names == set(model_names.file_names(count))
    assert (directory / INDEX).exists() == (size != "one")
    assert (directory / "config.json").read_text() == "mine"


class Killed(BaseException):
    pass


def _write_file(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)


class Calls:
    """Stands between the commit and the file system: kills it at its `kill_at`-th call, and tells what it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kill_at: int = -1) -> None:
        self.kill_at = kill_at
        self.dead = False
        self.made: list[tuple[str, tuple[Any, ...]]] = []
        self.before: Callable[[str, tuple[Any, ...]], None] = lambda name, arguments: None
        for name in NAMES:
            monkeypatch.setattr(_C, name, self._stand_in(name, getattr(_C, name)))
        self._write_file = self._stand_in("write_file", _write_file)
        monkeypatch.setattr(_C, "commit_file", self._commit_file)

    def _commit_file(self, directory: str, name: str, content: bytes, replace: bool = True) -> None:
        """What `_C.commit_file` does, in calls that a test can come between."""
        path = os.path.join(directory, name)
        temporary = temporary_name(path)
        self._write_file(temporary, content)
        _C.rename_file(temporary, path)
        _C.sync_directory(directory)

    def _stand_in(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*arguments: Any) -> Any:
            if 0 <= self.kill_at <= len(self.made):
                if not self.dead and name == "write_file":
                    Path(arguments[0]).write_bytes(arguments[1][:10])
                self.dead = True
                raise Killed
            self.before(name, arguments)
            self.made.append((name, arguments))
            return call(*arguments)

        return stand_in


#: Each size before with each after; each other folder with one of them.
CHANGES = [(before, after) for before in SIZES for after in SIZES]
CHANGES += list(zip([before for before in BEFORE if before not in SIZES], itertools.cycle(SIZES)))


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_kill_at_any_call_leaves_the_old_model_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    with monkeypatch.context() as patched:
        prepare(tmp_path / "whole", before)
        calls = Calls(patched)
        export(tmp_path / "whole", 1, after)
    assert len(calls.made) >= 3 and which(as_we(tmp_path / "whole")) == which(as_transformers(tmp_path / "whole")) == 1
    seen: set[int | None] = set()
    for kill_at in range(len(calls.made)):
        directory = tmp_path / str(kill_at)
        prepare(directory, before)
        with monkeypatch.context() as patched:
            Calls(patched, kill_at)
            with pytest.raises(Killed):
                export(directory, 1, after)
        seen |= check_old_or_new(directory, before)
        if kill_at % 3 == 0:
            check_next(directory, ["one", "two", "four"][kill_at // 3 % 3])
        shutil.rmtree(directory)
    assert seen == {None if before == "nothing" else 0, 1}


CALLS = ["rename", "link", "unlink", "sync_directory", "open", "write", "sync"]
SIZE_NAMES = list(SIZES)


@pytest.mark.parametrize(
    ("call", "before", "after"),  # each call with each size before and after, each size before with each after
    [(call, SIZE_NAMES[b], SIZE_NAMES[(b + c) % 3]) for c, call in enumerate(CALLS) for b in range(3)],
)
def test_a_call_that_fails_leaves_the_old_model_or_the_new_one(
    tmp_path: Path, call: str, before: str, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for skip in itertools.count():
        directory = tmp_path / str(skip)
        prepare(directory, before)
        faults.inject(call, errno.EIO, skip, 1000)
        raised = False
        try:
            export(directory, 1, after)
        except CheckpointError as error:
            raised = True
            assert call.replace("_", " ") in str(error) or call in ("open", "unlink")
        seen = faults.calls_seen(call)
        faults.clear()
        (found,) = check_old_or_new(directory, before)
        assert raised or found == 1
        if skip % 2 == 0 or not raised:
            check_next(directory, after)
        if seen <= skip:
            break
        shutil.rmtree(directory)


@pytest.mark.parametrize(("before", "after"), [change for change in CHANGES if change[0] != "nothing"])
def test_a_power_cut_leaves_the_old_model_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    """Of the changes of names since the last sync, any may be lost, and any may have come to the disk."""
    directory, vault = tmp_path / "made", tmp_path / "vault"
    prepare(directory, before)
    vault.mkdir()
    first: dict[str, str] = {}
    now: dict[str, str] = {}  # what the names of the directory stand for: files in the vault
    steps: list[dict[str, str | None] | None] = []  # changes of names; None: they are durable

    def keep(name: str) -> str:
        kept = f"{len(os.listdir(vault))}"
        os.link(directory / name, vault / kept)
        now[name] = kept
        return kept

    def note(call: str, arguments: tuple[Any, ...]) -> None:
        names = [os.path.basename(argument) for argument in arguments if isinstance(argument, str)]
        if call == "sync_directory":
            steps.append(None)
        elif call == "rename_file":
            if names[0] not in now:
                keep(names[0])
            steps.append({names[0]: None, names[1]: now[names[0]]})
        elif call == "link_file":
            steps.append({names[1]: now[names[0]]})
        elif call == "remove_file" and names[0] in now:
            steps.append({names[0]: None})
        if steps and steps[-1]:
            for name, kept in steps[-1].items():
                now.pop(name, None)
                if kept is not None:
                    now[name] = kept

    for name in os.listdir(directory):
        first[name] = keep(name)
    with monkeypatch.context() as patched:
        Calls(patched).before = note
        export(directory, 1, after)
    assert sorted(now) == sorted(os.listdir(directory)) and None in steps
    tried: set[frozenset[tuple[str, str]]] = set()
    seen: set[int | None] = set()
    for state in _after_cuts(first, steps):
        if (known := frozenset(state.items())) in tried:
            continue
        tried.add(known)
        found = tmp_path / "found"
        found.mkdir()
        for name, kept in state.items():
            os.link(vault / kept, found / name)
        seen |= check_old_or_new(found, before)
        shutil.rmtree(found)
    assert seen == {0, 1}
    last = _after(first, [change for change in steps[: len(steps) - steps[::-1].index(None)] if change])
    assert last.get(SINGLE) == now.get(SINGLE) and last.get(INDEX) == now.get(
        INDEX
    )  # nothing decisive is left to chance


def _after(state: dict[str, str], changes: list[dict[str, str | None]]) -> dict[str, str]:
    result: dict[str, str | None] = {**state}
    for change in changes:
        result.update(change)
    return {name: kept for name, kept in result.items() if kept is not None}


def _after_cuts(first: dict[str, str], steps: list[dict[str, str | None] | None]) -> Iterator[dict[str, str]]:
    durable, pending = first, []
    for step in [*steps, None]:
        if step is not None:
            pending.append(step)
            continue
        for count in range(len(pending) + 1):
            for chosen in itertools.combinations(pending, count):
                yield _after(durable, list(chosen))
        durable, pending = _after(durable, pending), []


def test_without_second_names_a_model_keeps_its_spare_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for k in (0, 1, 2):
        faults.inject("link", errno.EPERM, 0, 1000)
        export(tmp_path, k, "two")
        faults.clear()
        assert which(as_we(tmp_path)) == which(as_transformers(tmp_path)) == k
        assert len(list(tmp_path.glob("*.safetensors"))) == 2
        assert any("is complete" in message for message in caplog.messages) == (k >= 1)


def test_an_index_that_counts_the_single_file_among_others_is_not_replaced(tmp_path: Path) -> None:
    stock_torch.save_file({"a": torch.ones(1)}, tmp_path / SINGLE)
    stock_torch.save_file({"b": torch.ones(1)}, tmp_path / "more.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": SINGLE, "b": "more.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names model\.safetensors beside other files"):
        export(tmp_path, 1, "one")
    assert vescale_ckpt.load(tmp_path).keys() == {"a", "b"}


def test_exports_that_finish_at_once_do_so_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the same number of files: the one in its commit is held there, the other one waits for it."""
    export(tmp_path, 0, "two")
    polled, rename = threading.Event(), _C.rename_file

    def slow(old: str, new: str) -> None:
        rename(old, new)
        if threading.current_thread() is thread:
            assert polled.wait(60)

    try_alone = locks.try_lock_alone

    def asked(descriptor: int) -> bool | None:
        answer = try_alone(descriptor)
        if answer is False and threading.current_thread() is not thread:
            polled.set()
        return answer

    folders = [_complete(tmp_path, k) for k in (1, 2)]
    thread = threading.Thread(target=lambda: folders[0](), daemon=True)
    monkeypatch.setattr(_C, "rename_file", slow)
    monkeypatch.setattr(locks, "try_lock_alone", asked)
    started = threading.Event()
    monkeypatch.setattr(commit, "_look", _tell(started, commit._look))
    thread.start()
    assert started.wait(60)
    folders[1]()
    thread.join(60)
    assert not thread.is_alive() and polled.is_set()
    assert which(as_we(tmp_path)) == which(as_transformers(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == model_names.file_names(2)


def _tell(started: threading.Event, call: Callable[[str], Any]) -> Callable[[str], Any]:
    def told(directory: str) -> Any:
        started.set()
        return call(directory)

    return told


def _complete(directory: Path, k: int) -> Callable[[], None]:
    """An export that has written all, and now commits."""
    parts = [dict(list(model(k).items())[at : at + 2]) for at in (0, 2)]
    files = [str(directory / f"{name}.tmp.0000000{k}") for name in model_names.file_names(2)]
    for path, part in zip(files, parts, strict=True):
        stock_torch.save_file(part, path)

    def index(names: list[str]) -> bytes:
        places = {key: name for part, name in zip(parts, names, strict=True) for key in part}
        return json.dumps({"weight_map": places}).encode()

    pending = Pending(str(directory))
    pending.paths = files
    return lambda: commit.commit_files(pending, index, overwrite=True)


def test_orphans_do_not_hide_a_model_of_files_without_an_index(tmp_path: Path) -> None:
    stock_torch.save_file(model(0), tmp_path / "weights.safetensors")
    for name in model_names.file_names(2, 6):
        stock_torch.save_file({"a": torch.zeros(1)}, tmp_path / name)
    (tmp_path / "model.safetensors.tmp.0123abcd").write_bytes(b"")
    assert which(as_we(tmp_path)) == 0 and vescale_ckpt.verify(tmp_path).ok


# --- Loads while exports replace the model: they read again, and call nothing damaged


def numbered(k: int, files: int = 2) -> State:
    return {f"w{number}": torch.full((4096,), float(k)) for number in range(files)}


def exporting(monkeypatch: pytest.MonkeyPatch, export: Callable[[int], None], times: int) -> None:
    """Calls `export` with 1, 2, … before each of the first reads of data, when headers were read already."""
    read, done = Source.read, itertools.count(1)

    def disturbed(*args: Any) -> LoadStats:
        if (number := next(done)) <= times:
            export(number)
        return read(*args)

    monkeypatch.setattr(Source, "read", disturbed)


@pytest.mark.parametrize("files", [1, 2, 3])
def test_a_model_that_an_export_replaces_is_read_again(
    tmp_path: Path, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(k: int) -> None:
        model = {**numbered(k), "more": torch.full((4096,), float(k))}
        size = {1: "5GB", 2: 32 << 10, 3: 16 << 10}[files]
        vescale_ckpt.save(tmp_path, model, format=vescale_ckpt.Safetensors(max_shard_size=size))

    vescale_ckpt.save(tmp_path, numbered(0), format=vescale_ckpt.Safetensors(max_shard_size=16 << 10))
    exporting(monkeypatch, export, 2)
    filled = numbered(7)
    vescale_ckpt.load(tmp_path, filled, strict=False)
    assert_same(filled, numbered(2))
    exporting(monkeypatch, export, 1)
    assert vescale_ckpt.load(tmp_path)["w1"][0] == 1


def test_exports_without_end_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(k: int) -> None:
        vescale_ckpt.save(tmp_path, numbered(k), format=vescale_ckpt.Safetensors(max_shard_size=16 << 10))

    export(0)
    exporting(monkeypatch, export, 1000)
    with pytest.raises(CheckpointError, match="load it again") as raised:
        vescale_ckpt.load(tmp_path, numbered(7))
    assert not isinstance(raised.value, CorruptCheckpointError)
    steps.instead("read the index of a model", lambda path: export(9) or {"w0": "gone.safetensors"}).start()
    with pytest.raises(CheckpointError, match="follow each other") as raised:
        vescale_ckpt.load(tmp_path, numbered(7))
    assert not isinstance(raised.value, CorruptCheckpointError)


def _loaded_while_replaced(directory: Path) -> float:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:

            def export(_: int) -> None:
                for path in (directory / "1").iterdir():
                    path.replace(directory / "0" / path.name)

            exporting(patch, export, 1)
        filled = numbered(7)
        vescale_ckpt.load(directory / "0", filled, broadcast_checkpoint=False, timeout=60.0)
    return float(torch.stack([*filled.values()]).unique())


def test_ranks_read_again_together(tmp_path: Path) -> None:
    for k in range(2):
        vescale_ckpt.save(tmp_path / str(k), numbered(k), format=vescale_ckpt.Safetensors(max_shard_size=16 << 10))
    assert run_ranks(2, _loaded_while_replaced, tmp_path) == [1.0, 1.0]
