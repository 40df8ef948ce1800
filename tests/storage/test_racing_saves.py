"""Of jobs that save with `overwrite=False` and commit at the same time, one succeeds, and the others leave nothing."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import children, faults
from harness.files import only_named_files
from harness.ranks import on_ranks
from harness.saves import loads

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._engine import _C
from vescale_ckpt._storage.file_system import FileSystem

SAVERS = 3


def model(k: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((2000,), float(k)) for name in "ab"}


def race(saves: Sequence[Callable[[], Any]], seam: tuple[Any, str], outcomes: Path) -> int:
    """Runs saves in processes, which wait for each other when they first come to the call `seam`. Returns the number of
    the only one that did not raise."""
    together = multiprocessing.get_context("fork").Barrier(len(saves))

    def run(number: int) -> None:
        owner, name = seam
        original = getattr(owner, name)

        def wait(*arguments: Any, **options: Any) -> Any:
            setattr(owner, name, original)
            together.wait(30)
            return original(*arguments, **options)

        setattr(owner, name, wait)
        text = ""
        try:
            saves[number]()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        Path(outcomes, str(number)).write_text(text)

    outcomes.mkdir()
    for pid in [children.fork(partial(run, number)) for number in range(len(saves))]:
        os.waitpid(pid, 0)
    texts = [Path(outcomes, str(number)).read_text() for number in range(len(saves))]
    (won,) = [number for number, text in enumerate(texts) if not text]
    for text in texts[:won] + texts[won + 1 :]:
        assert text.startswith("CheckpointError: ") and "already and overwrite=False: another job" in text, text
    return won


def saving(path: Path, k: int, **options: Any) -> Callable[[], Any]:
    return partial(vescale_ckpt.save, path, model(k), overwrite=False, **options)


def test_of_native_saves_one_commits(tmp_path: Path) -> None:
    path = tmp_path / "made"
    saves = [saving(path, k, extra_files={"note": b"%d" % k}) for k in range(SAVERS)]
    k = race(saves, (FileSystem, "commit"), tmp_path / "outcomes")
    assert loads(path, model(k)) and (path / "note").read_bytes() == b"%d" % k
    report = vescale_ckpt.verify(path)
    assert report.ok and report.indexed
    (path / "note").unlink()
    assert only_named_files(path)


@pytest.mark.parametrize("has_locks", [True, False])
@pytest.mark.parametrize("sizes", [["5GB"] * 2, [8000] * 2, ["5GB", 8000]], ids=["single", "several", "one of each"])
def test_of_exports_one_commits(tmp_path: Path, sizes: list[Any], has_locks: bool) -> None:
    if not has_locks:
        if len(set(sizes)) > 1:
            pytest.skip("one of each commits under another name: only locks keep them apart")
        faults.no_locks().start()
    path = tmp_path / "made"
    formats = [vescale_ckpt.Safetensors(max_shard_size=size) for size in sizes]
    # Without locks all have found that there is no model when the first of them names its files.
    seam = _C, "write_head" if has_locks else "rename_if_free"
    saves = [saving(path, k, format=format) for k, format in enumerate(formats)]
    k = race(saves, seam, tmp_path / "outcomes")
    assert loads(path, model(k))
    assert len(os.listdir(path)) == (1 if sizes[k] == "5GB" else 3)


def test_without_hard_links_a_commit_looks_first(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look of one save and its rename another may commit; nothing but that remains of the race."""
    commit = FileSystem.commit

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(FileSystem, "commit", commit)
        saving(checkpoint, 1)()
        with faults.fault("link", errno.EPERM):
            commit(*arguments)

    monkeypatch.setattr(FileSystem, "commit", late)
    with pytest.raises(CheckpointError, match="overwrite=False"):
        saving(checkpoint, 2)()
    assert loads(checkpoint, model(1)) and only_named_files(checkpoint)


@on_ranks(2)
def test_the_files_of_all_ranks_of_the_loser_are_removed(checkpoint: Path) -> None:
    before = FileSystem.commit

    def late(*arguments: Any) -> None:
        FileSystem.commit = before  # type: ignore[method-assign]
        (checkpoint / ".metadata").write_bytes(b"another job's")
        before(*arguments)

    FileSystem.commit = late  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        vescale_ckpt.save(checkpoint, {**model(1), "mine": vescale_ckpt.PerRank(dist.get_rank())}, overwrite=False)
    FileSystem.commit = before  # type: ignore[method-assign]  # the process goes on to other tests
    dist.barrier()
    assert "and overwrite=False: another job committed it meanwhile" in str(caught.value)
    assert os.listdir(checkpoint) == [".metadata"]
    assert (checkpoint / ".metadata").read_bytes() == b"another job's"
