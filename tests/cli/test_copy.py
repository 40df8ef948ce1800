"""The command `copy`: every format, a kill and what the next run takes over, faults, and damage of the source."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import faults, steps
from harness.children import fork, killed_before
from harness.files import flip

import vescale_ckpt
from vescale_ckpt import cli
from vescale_ckpt._convert import batches
from vescale_ckpt._convert.transfer import Transfer
from vescale_ckpt._engine import _C

STATE = {"model": {str(number): torch.arange(600_000.0) + number for number in range(4)}, "step": 7}
SMALLEST = 3 << 20


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    vescale_ckpt.save(root / "ours", STATE)
    (root / "ours" / "notes.txt").write_text("of the user")
    (root / "ours" / "__3_0123abcd.distcp").write_text("of a save that died")
    dcp.save({"model": dict(STATE["model"])}, checkpoint_id=root / "stock")  # type: ignore[call-overload]
    vescale_ckpt.convert(root / "ours", root / "m.pt", format="torch")
    vescale_ckpt.convert(root / "ours", root / "hf", format="safetensors", on_objects="drop", max_shard_size="3MB")
    (root / "hf" / "config.json").write_text("{}")
    return root


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(*steps.buffers_within(SMALLEST))
    yield
    faults.clear()


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    status = cli.main(["copy", *map(str, arguments), "--json"])
    text = capsys.readouterr()
    assert "Traceback" not in text.err
    return status, json.loads(text.out) if text.out else {}, text.err


def equal(source: Path, made: Path, but: tuple[str, ...] = ()) -> bool:
    names = sorted(path.name for path in source.iterdir() if path.name not in but)
    found = filecmp.cmpfiles(source, made, names, shallow=False)
    return sorted(path.name for path in made.iterdir()) == names and found[1:] == ([], [])


@pytest.mark.parametrize("name", ["ours", "stock", "hf"])
def test_a_copy_is_the_checkpoint(sources: Path, tmp_path: Path, capsys: Any, name: str) -> None:
    dst = tmp_path / "deep" / name
    status, found, _ = run(capsys, sources / name, dst)
    left = ["__3_0123abcd.distcp"] if name == "ours" else []
    assert status == 0 and found["schema"] == "vescale_ckpt/copy/1" and found["left_out"] == left
    assert equal(sources / name, dst, tuple(left))
    assert found["bytes"] == sum(f.stat().st_size for f in dst.iterdir())
    before = sorted(tmp_path.rglob("*"))
    status, _, err = run(capsys, sources / name, dst)
    assert status == 2 and "exists" in err
    assert run(capsys, sources / name, dst, "--overwrite")[0] == 0 and sorted(tmp_path.rglob("*")) == before


def test_what_is_no_checkpoint_is_not_replaced(sources: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("dear")
    for dst in (tmp_path / "photos", sources / "hf", sources / "ours", sources / "m.pt"):
        status, _, err = run(capsys, sources / "ours", dst, "--overwrite")
        assert status == 2 and len(err.splitlines()) == 1
    assert "m.pt is one file: copy it with cp" in run(capsys, sources / "m.pt", tmp_path / "copy")[2]
    assert (tmp_path / "photos" / "a.jpg").read_text() == "dear" and vescale_ckpt.verify(sources / "hf").ok


@pytest.mark.parametrize("name", ["ours", "hf"])
def test_a_killed_copy_leaves_no_destination_and_the_next_goes_on(
    sources: Path, tmp_path: Path, capsys: Any, name: str
) -> None:
    dst = tmp_path / "copy"
    before = fork(lambda: _copy_killed_at(8, sources / name, dst))
    _, status = os.waitpid(before, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert not dst.exists() and len(list(tmp_path.iterdir())) == 1
    status, found, _ = run(capsys, sources / name, dst)
    assert status == 0 and equal(sources / name, dst, ("__3_0123abcd.distcp",))
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    if name == "hf":
        assert found["resumed_files"] == 3  # config.json and two shards


def test_repair_removes_what_a_killed_copy_left(sources: Path, tmp_path: Path, capsys: Any) -> None:
    os.waitpid(fork(lambda: _copy_killed_at(12, sources / "ours", tmp_path / "copy")), 0)
    (left,) = tmp_path.iterdir()
    (left / "notes.txt").write_text("of the user")
    assert cli.main(["repair", str(tmp_path)]) == 0 and left.name in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def _copy_killed_at(take: int, source: Path, dst: Path) -> None:
    with killed_before(take - 1, [(batches.Buffers, "take")]):
        cli.main(["copy", str(source), str(dst)])


def test_ctrl_c_leaves_what_is_complete(sources: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    transfers = Transfer.copy

    def copied(self: Any, path: str, name: str, *more: Any) -> Any:
        made = transfers(self, path, name, *more)
        if name.startswith("model-00002"):
            raise KeyboardInterrupt
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "copy", copied)
        status, _, err = run(capsys, sources / "hf", tmp_path / "copy")
    assert status == 130 and "goes on" in err and not (tmp_path / "copy").exists()
    status, found, _ = run(capsys, sources / "hf", tmp_path / "copy")
    assert status == 0 and found["resumed_files"] == 3 and equal(sources / "hf", tmp_path / "copy")


def test_a_directory_of_checkpoints_is_explained(tmp_path: Path, capsys: Any) -> None:
    vescale_ckpt.save(tmp_path / "step-3", {"x": torch.ones(1)})
    status, _, err = run(capsys, tmp_path, tmp_path / "copy")
    assert status == 2 and "step-3 was saved last: give the path of one" in err


def test_what_was_damaged_since_the_kill_is_copied_again(sources: Path, tmp_path: Path, capsys: Any) -> None:
    dst = tmp_path / "copy"
    os.waitpid(fork(lambda: _copy_killed_at(8, sources / "hf", dst)), 0)
    (left,) = tmp_path.iterdir()
    (shard,) = left.glob("model-00001*")
    flip(shard, 8 * (shard.stat().st_size - 1))
    status, found, _ = run(capsys, sources / "hf", dst)
    assert status == 0 and found["resumed_files"] == 2 and equal(sources / "hf", dst)


@pytest.mark.parametrize("name", ["ours", "stock", "hf"])
def test_a_flipped_bit_is_named_and_nothing_is_left(sources: Path, tmp_path: Path, capsys: Any, name: str) -> None:
    source = tmp_path / name
    assert run(capsys, sources / name, source)[0] == 0
    file = max(source.iterdir(), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size * 3 // 8 * 8)  # in the second of four tensors: padding is between them, not copied
    status, _, err = run(capsys, source, tmp_path / "copy")
    assert status == 1 and str(file) in err and len(err.splitlines()) == 1
    assert "model." in err
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("call", ["write", "allocate", "sync", "read", "rename"])
def test_a_call_that_fails_leaves_nothing(sources: Path, tmp_path: Path, capsys: Any, call: str) -> None:
    number = errno.EIO if call == "read" else errno.ENOSPC
    faults.inject(call, number, skip=2 if call == "read" else 0, times=1000)
    status, _, err = run(capsys, sources / "ours", tmp_path / "copy")
    faults.clear()
    assert status == 2 and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_wrong_is_noticed(sources: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    crc = _C.crc32_of_memory
    monkeypatch.setattr(_C, "crc32_of_memory", lambda address, count: crc(address, count) ^ (count == 11))
    status, _, err = run(capsys, sources / "ours", tmp_path / "copy")  # only notes.txt has 11 bytes, no checksums
    assert status == 0  # wrong twice alike
    seen = [0]

    def once(address: int, count: int) -> int:
        seen[0] += count == 11
        return crc(address, count) ^ (count == 11 and seen[0] == 1)

    monkeypatch.setattr(_C, "crc32_of_memory", once)
    status, _, err = run(capsys, sources / "ours", tmp_path / "other")
    assert status == 1 and "notes.txt cannot be read back" in err and not (tmp_path / "other").exists()


def test_a_save_into_the_source_is_noticed(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    source, transfers = tmp_path / "source", Transfer.copy
    vescale_ckpt.save(source, {"x": torch.ones(3)})

    def copied(self: Any, path: str, *more: Any) -> Any:
        result = transfers(self, path, *more)
        if path.endswith(".distcp"):
            vescale_ckpt.save(source, {"x": torch.zeros(3)})
        return result

    monkeypatch.setattr(Transfer, "copy", copied)
    status, _, err = run(capsys, source, tmp_path / "copy")
    assert status == 2 and "was saved to while it was copied" in err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
