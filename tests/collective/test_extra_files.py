"""Files of a host that are committed with a checkpoint: whatever happens, they are those of the same save."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import faults, steps
from harness.children import fork, killed_before
from harness.ranks import on_ranks
from harness.steps import CHANGES_BY_THE_ENGINE, CHANGES_OF_FOLDERS

import vescale_ckpt
from vescale_ckpt import CheckpointError, UntrustedCheckpointError
from vescale_ckpt.cli import main


def state(k: int) -> dict[str, object]:
    return {"w": torch.full((3000, 100), float(k)), "k": k}


def files(k: int) -> dict[str, bytes]:
    return {"meta.pt": b"meta %d" % k, "config.json": b'{"k": %d}' % k}


def loaded(path: Path) -> tuple[int, dict[str, bytes]]:
    into, found = state(-1), {"left": b"over"}
    vescale_ckpt.load(path, into, extra_files=found)
    assert torch.equal(into["w"], state(into["k"])["w"])  # type: ignore[arg-type, call-overload]
    return into["k"], found  # type: ignore[return-value]


def test_they_come_back_with_the_state_and_lie_beside_it_for_others(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path, state(1), extra_files={**files(1), "view": memoryview(b"a view")})
    expected = {**files(1), "view": b"a view"}
    assert loaded(tmp_path) == (1, expected)
    assert {name: (tmp_path / name).read_bytes() for name in expected} == expected
    assert set(vescale_ckpt.load(tmp_path)) == {"w", "k"}
    found: dict[str, bytes] = {}
    vescale_ckpt.load(tmp_path, extra_files=found)
    assert found == expected
    assert vescale_ckpt.load(tmp_path, state(0)).unexpected == []
    assert sorted(vescale_ckpt.inspect(tmp_path).extra_files) == sorted(expected)
    stock = state(0)
    dcp.load(stock, checkpoint_id=tmp_path)
    assert stock["k"] == 1


def test_the_next_checkpoint_replaces_or_removes_the_copies(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path, state(1), extra_files=files(1))
    vescale_ckpt.save(tmp_path, state(2), extra_files={"meta.pt": b"other"})
    assert (tmp_path / "meta.pt").read_bytes() == b"other"
    assert not (tmp_path / "config.json").exists()
    (tmp_path / "mine.txt").write_text("not a copy")
    dcp.save(state(3), storage_writer=vescale_ckpt.StorageWriter(tmp_path))
    assert not (tmp_path / "meta.pt").exists()
    assert (tmp_path / "mine.txt").exists()
    assert loaded(tmp_path) == (3, {})


def test_a_manager_keeps_them_with_each_step(tmp_path: Path) -> None:
    with vescale_ckpt.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, state(step), extra_files=files(step))
    with vescale_ckpt.CheckpointManager(tmp_path) as manager:
        into, found = state(0), {}
        assert manager.restore(into, extra_files=found) == 2 and found == files(2)
        assert manager.restore(into, 1, extra_files=found) == 1 and found == files(1)


def test_an_asynchronous_save_has_those_of_its_call(tmp_path: Path) -> None:
    content = bytearray(b"before")
    handle = vescale_ckpt.save(tmp_path, state(1), extra_files={"f": content}, async_checkpoint=True)
    content[:] = b"after!"
    handle.future.result(60)
    assert loaded(tmp_path)[1] == {"f": b"before"}


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", ".metadata", "__3.metadata", ".metadata.index", "__0_0.distcp", ".lock",
             "metrics.json", ".order", "x.tmp.1.2", "model.safetensors", "a\nb", "x" * 300, 7]
)  # fmt: skip
def test_names_that_could_harm_the_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    vescale_ckpt.save(tmp_path, state(1))
    with pytest.raises(CheckpointError, match="extra_files"):
        vescale_ckpt.save(tmp_path, state(2), extra_files={name: b""})
    assert loaded(tmp_path) == (1, {})


@pytest.mark.parametrize("wrong", ["text", None, 3])
def test_contents_are_bytes(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(CheckpointError, match="expected bytes"):
        vescale_ckpt.save(tmp_path, state(1), extra_files={"f": wrong})  # type: ignore[dict-item]


def test_a_state_cannot_have_their_keys_and_models_have_no_place_for_them(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="extra_files"):
        vescale_ckpt.save(tmp_path, {"__extra_files__": {"f": b""}})
    with pytest.raises(ValueError, match="no place for files"):
        vescale_ckpt.save(tmp_path, {"w": torch.ones(1)}, format="safetensors", extra_files=files(1))


def test_an_object_in_their_place_is_not_trusted(tmp_path: Path) -> None:
    dcp.save({"__extra_files__.f": 3, "w": torch.ones(1)}, checkpoint_id=tmp_path)
    with pytest.raises(UntrustedCheckpointError, match="bytes"):
        vescale_ckpt.load(tmp_path, {"w": torch.ones(1)}, extra_files={})


def test_a_commit_that_fails_puts_the_copies_back(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path, state(1), extra_files=files(1))
    faults.inject("rename", errno.EIO)
    with pytest.raises(CheckpointError):
        vescale_ckpt.save(tmp_path, state(2), extra_files=files(2))
    faults.clear()
    assert loaded(tmp_path) == (1, files(1))
    assert (tmp_path / "meta.pt").read_bytes() == files(1)["meta.pt"]


def test_a_commit_that_was_done_and_reported_as_failed_has_no_copies_of_the_one_before(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path, state(1), extra_files=files(1))

    def lose_the_answer(*_: object) -> None:
        raise OSError(errno.EIO, "the answer was lost")

    with steps.behind("commit files", lose_the_answer), pytest.raises(CheckpointError):
        vescale_ckpt.save(tmp_path, state(2), extra_files=files(2))
    assert loaded(tmp_path) == (2, files(2))
    assert not (tmp_path / "meta.pt").exists() and not (tmp_path / "config.json").exists()
    assert main(["repair", str(tmp_path)]) == 0
    assert (tmp_path / "meta.pt").read_bytes() == files(2)["meta.pt"]


@pytest.mark.parametrize("before", range(4))
def test_copies_are_those_of_the_checkpoint_if_the_folder_cannot_be_synced(tmp_path: Path, before: int) -> None:
    """One of these syncs is that behind the rename of `.metadata`."""
    vescale_ckpt.save(tmp_path, state(1), extra_files=files(1))
    faults.inject("sync_directory", errno.EIO, before)
    with pytest.raises(CheckpointError):
        vescale_ckpt.save(tmp_path, state(2), extra_files=files(2))
    faults.clear()
    now, found = loaded(tmp_path)
    assert found == files(now)
    assert all((tmp_path / name).read_bytes() == found[name] for name in found if (tmp_path / name).exists())


def test_a_copy_that_cannot_be_written_is_only_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vescale_ckpt.save(tmp_path, state(1), extra_files=files(1))
    faults.inject("rename", errno.ENOSPC, 2, 1000)  # after the index and the metadata
    vescale_ckpt.save(tmp_path, state(2), extra_files=files(2))
    faults.clear()
    assert "repair" in caplog.text
    assert not (tmp_path / "meta.pt").exists()
    assert loaded(tmp_path) == (2, files(2))
    assert main(["repair", str(tmp_path), "--dry-run"]) == 0 and not (tmp_path / "meta.pt").exists()
    assert main(["repair", str(tmp_path)]) == 0
    assert (tmp_path / "meta.pt").read_bytes() == files(2)["meta.pt"]


@on_ranks(2)
def test_of_several_ranks_those_of_rank_0_count_and_all_get_them(tmp_path: Path) -> None:
    rank = dist.get_rank()
    given = files(rank) if rank == 0 else {"of_rank_1": b""}
    weights = torch.full((3000, 100), 1.0)
    vescale_ckpt.save(tmp_path, {"w": weights, "k": 1}, extra_files=given, timeout=60)
    found: dict[str, bytes] = {}
    vescale_ckpt.load(tmp_path, {"w": weights, "k": 0}, extra_files=found, broadcast_checkpoint=True, timeout=60)
    assert (found, sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(("_", ".")))) == (
        files(0),
        sorted(files(0)),
    )


@on_ranks(2)
def test_a_wrong_name_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    given = {"f": b""} if dist.get_rank() == 0 else {"a/b": b""}
    with pytest.raises(CheckpointError) as raised:
        vescale_ckpt.save(tmp_path, {"w": torch.ones(10)}, extra_files=given, timeout=60)
    assert "'a/b'" in str(raised.value)
    assert not (tmp_path / ".metadata").exists()


def test_a_kill_before_any_change_of_the_folder_never_mixes_them_with_another_checkpoint(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path, state(0), extra_files=files(0))
    last, ended = 0, False
    for number in range(100):

        def save(number: int = number, k: int = last + 1) -> None:
            with killed_before(number, CHANGES_BY_THE_ENGINE + CHANGES_OF_FOLDERS):
                vescale_ckpt.save(tmp_path, state(k), extra_files=files(k))

        _, status = os.waitpid(fork(save), 0)
        before, (last, found) = last, loaded(tmp_path)
        assert last in (before, before + 1) and found == files(last)
        for name, content in files(last).items():  # for other programs: of this checkpoint, or missing
            copy = tmp_path / name
            assert not copy.exists() or copy.read_bytes() == content
        if ended := status == 0:
            break
    assert ended and number >= 10
    vescale_ckpt.save(tmp_path, state(last + 1), extra_files=files(last + 1))
    assert not [path for path in tmp_path.iterdir() if ".tmp." in path.name]
