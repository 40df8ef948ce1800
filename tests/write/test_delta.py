"""`save(base=...)`: what is not written again, that nothing stale is ever named, and what keeps the older files."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.children import fork, in_child, killed_before
from harness.files import data_files, flip, read_metadata, rewrite_metadata
from harness.ranks import run_ranks
from harness.saves import loaded
from harness.states import KiB, blank, random_tensor, same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vescale_ckpt
from vescale_ckpt import CheckpointError, CorruptCheckpointError, SaveStats, UntrustedCheckpointError
from vescale_ckpt._checkpoint.native import commit_metadata
from vescale_ckpt._checkpoint.native.file_names import DELTA_NAME, LEASE_MARKER, METADATA_NAME
from vescale_ckpt._engine import _C
from vescale_ckpt._storage.file_system import FileSystem
from vescale_ckpt._write import delta_base

State = dict[str, Any]
EVERY = int(os.environ.get("VESCALE_CKPT_TEST_KILL_EVERY", "2"))  # 1: before each change of a directory


def lora(step: int) -> State:
    """A large frozen part, and a small one that every step changes."""
    torch.manual_seed(7)
    frozen = {f"layer{number}": torch.randn(128, 256) for number in range(4)}
    return {
        "frozen": frozen,
        "strided": torch.arange(40_000, dtype=torch.int32).view(100, 400).t(),
        "adapter": torch.full((3000,), float(step)),
        "tiny": torch.tensor([1.0, 2.0]),
        "step": step,
    }


def saved(path: Path, state: State, base: Path, **options: Any) -> SaveStats:
    return vescale_ckpt.save(path, state, base=base, **options).result()


def chain(root: Path, count: int) -> list[Path]:
    paths = [root / f"step-{step}" for step in range(count)]
    for step, path in enumerate(paths):
        saved(path, lora(step), paths[max(0, step - 1)])
    return paths


def names_in(path: Path) -> set[str]:
    return {info.relative_path for info in read_metadata(path).storage_data.values()}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.WARNING)
    return lambda: caplog.text


# --- What is written, and who reads it


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unchanged_tensors_are_named_where_they_were_written_first(tmp_path: Path, asynchronous: bool) -> None:
    paths = [tmp_path / f"step-{step}" for step in range(4)]
    for step, path in enumerate(paths):
        stats = saved(path, lora(step), paths[max(0, step - 1)], async_checkpoint=asynchronous)
        assert stats.reused_tensors == (5 if step else 0)
        assert stats.reused_bytes == (4 * 128 * 256 * 4 + 160_000 if step else 0)
        assert step == 0 or stats.file_bytes < 32 * KiB
    first = f"../step-0/{data_files(paths[0])[0].name}"
    for path in paths[1:]:  # the first file by its own name, not through the checkpoints between
        assert names_in(path) == {first, data_files(path)[0].name}
    for step, path in enumerate(paths):
        assert same(loaded(path, lora(step)), lora(step))
        assert vescale_ckpt.verify(path).ok and not vescale_ckpt.verify(path).harmless
        assert vescale_ckpt.verify(path, quick=True).ok


def test_stock_dcp_reads_it(tmp_path: Path) -> None:
    path = chain(tmp_path, 3)[-1]
    values = blank(lora(2))
    dcp.load(values, checkpoint_id=path, no_dist=True)  # torch's FileSystemReader
    assert same(values, lora(2))


def test_loads_without_the_index_and_of_parts(tmp_path: Path) -> None:
    path = chain(tmp_path, 2)[-1]
    (path / ".metadata.index").unlink()
    assert same(loaded(path, lora(1)), lora(1))
    part = {"adapter": torch.zeros(3000)}
    vescale_ckpt.load(path, part)
    assert same(part["adapter"], lora(1)["adapter"])


def test_a_relative_path_and_a_link_to_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(tmp_path / "run", 2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "latest").symlink_to(tmp_path / "run" / "step-1")
    assert same(loaded(elsewhere / "latest", lora(1)), lora(1))
    monkeypatch.chdir(tmp_path / "run" / "step-1")
    assert same(loaded(Path("."), lora(1)), lora(1))
    saved(Path("../step-2"), lora(2), elsewhere / "latest")
    assert any(name.startswith("../step-0/") for name in names_in(tmp_path / "run" / "step-2"))


def test_equal_bytes_of_another_form_are_written(tmp_path: Path) -> None:
    bits = torch.arange(4096, dtype=torch.int32)
    saved(tmp_path / "a", {"x": bits}, tmp_path / "a")
    others = {"dtype": bits.view(torch.float32), "shape": bits.view(64, 64), "part": bits[:2048].clone()}
    assert saved(tmp_path / "b", others, tmp_path / "a").reused_tensors == 0
    assert saved(tmp_path / "c", {"other name": bits.clone()}, tmp_path / "a").reused_tensors == 1
    assert same(loaded(tmp_path / "c", {"other name": bits}), {"other name": bits})


def test_a_save_onto_itself_keeps_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "only"
    for step in range(3):
        stats = saved(path, lora(step), path)
        assert stats.reused_tensors == (5 if step else 0)
        assert same(loaded(path, lora(step)), lora(step))
        assert names_in(path) == {file.name for file in data_files(path)}, "a file that nobody names, or one too few"
        assert vescale_ckpt.verify(path).ok and not vescale_ckpt.verify(path).harmless
    assert len(data_files(path)) == 2


def test_nothing_but_older_files_is_named_if_nothing_changed(tmp_path: Path) -> None:
    state = {"x": torch.randn(4000), "y": torch.randn(50, 60)}
    saved(tmp_path / "a", state, tmp_path / "a")
    stats = saved(tmp_path / "b", state, tmp_path / "a")
    assert stats.bytes == stats.file_bytes == 0 and not data_files(tmp_path / "b")
    assert same(loaded(tmp_path / "b", state), state)
    assert saved(tmp_path / "c", state, tmp_path / "b").reused_tensors == 2


def test_plans_are_reused_and_options_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain(tmp_path, 2)
    stats = saved(tmp_path / "step-2", lora(2), tmp_path / "step-1", extra_files={"config.json": b"{}"})
    stats = saved(tmp_path / "step-3", lora(3), tmp_path / "step-2", extra_files={"config.json": b"{}"})
    assert stats.plan_reused and stats.reused_tensors == 5
    files: dict[str, bytes] = {}
    vescale_ckpt.load(tmp_path / "step-3", {}, extra_files=files)
    assert files == {"config.json": b"{}"}
    monkeypatch.setenv("VESCALE_CKPT_SNAPSHOT_BYTES", "100000")  # some are written before training goes on
    stats = saved(tmp_path / "step-4", lora(4), tmp_path / "step-3", async_checkpoint=True)
    assert stats.reused_tensors == 5
    assert same(loaded(tmp_path / "step-4", lora(4)), lora(4))


def test_tensors_that_the_engine_cannot_read_directly(tmp_path: Path) -> None:
    values = torch.randn(3000, dtype=torch.complex64)
    state = {"lazy": values.conj(), "plain": values.clone()}
    saved(tmp_path / "a", state, tmp_path / "a")
    stats = saved(tmp_path / "b", state, tmp_path / "a")
    assert stats.reused_tensors == 2
    found = vescale_ckpt.load(tmp_path / "b")
    assert torch.equal(found["lazy"], values.conj().resolve_conj()) and torch.equal(found["plain"], values)


def test_behind_a_gate(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 10))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    handles, wanted = [], []
    for step in range(3):
        model(torch.ones(2, 200)).sum().backward()
        optimizer.step()
        wanted.append({key: value.clone() for key, value in model.state_dict().items()})
        base = tmp_path / f"step-{max(0, step - 1)}"
        state = {"model": model, "optimizer": optimizer}
        handles.append(
            vescale_ckpt.save(tmp_path / f"step-{step}", state, base=base, async_checkpoint=True, gate=optimizer)
        )
    assert [handle.result().reused_bytes for handle in handles] == [0, 160_000, 160_000]
    for step in range(3):
        found = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 10))
        vescale_ckpt.load(tmp_path / f"step-{step}", {"model": found})
        assert same(dict(found.state_dict()), wanted[step])


class _OwnNames(vescale_ckpt.SavePlanner):
    def create_local_plan(self) -> Any:
        return super().create_local_plan()


def test_plans_of_dcp_write_all(tmp_path: Path, warnings: Callable[[], str]) -> None:
    base = chain(tmp_path, 1)[0]
    assert saved(tmp_path / "b", lora(0), base, planner=_OwnNames()).reused_tensors == 0
    assert "without the base: DCP planned the save" in warnings()
    assert same(loaded(tmp_path / "b", lora(0)), lora(0))


def test_the_log_says_what_was_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    base = chain(tmp_path, 1)[0]
    stats = saved(tmp_path / "b", lora(1), base)
    assert "668.25 KiB not written again" in caplog.text and stats.phases["compare"] > 0


def test_what_cannot_have_a_base_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="base: a model in format='safetensors'"):
        vescale_ckpt.save(tmp_path / "a", {"x": torch.ones(3)}, base=tmp_path / "b", format="safetensors")


# --- Every change is seen


def _changes(rng: random.Random, tensor: torch.Tensor) -> None:
    """Changes one bit, wherever it is."""
    flat = tensor.view(-1).view(torch.uint8) if tensor.is_contiguous() else tensor.t().view(-1).view(torch.uint8)
    at = rng.choice([0, len(flat) - 1, rng.randrange(len(flat))])
    flat[at] ^= 1 << rng.randrange(8)


@pytest.mark.parametrize("seed", range(3))
def test_every_change_is_seen(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_base, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(delta_base, "MOST_FOLDERS", 100)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [1, 1023, 2048, 2049, 8192, 70_000, 300_000]
    state = {f"{size}": random_tensor((size,), torch.float32) for size in sizes}
    state |= {"strided": random_tensor((200, 300), torch.float32).t(), "zeros": torch.zeros(5000)}
    state |= {"same zeros": torch.zeros(5000), "half": random_tensor((9001,), torch.bfloat16)}
    before = {key: value.clone() for key, value in state.items()}
    for step in range(14):
        path, base = tmp_path / f"step-{step}", tmp_path / f"step-{max(0, step - 1)}"
        stats = saved(path, state, base, async_checkpoint=bool(step % 3))
        if step:
            moved = [key for key in state if not same(state[key], before[key])]
            assert len(state) - len(moved) - stats.reused_tensors in (0, 1), "only the smallest one is always written"
        assert same(loaded(path, state), state)
        before = {key: value.clone() for key, value in state.items()}
        for key in rng.sample(sorted(state), rng.randrange(4)):
            _changes(rng, state[key])
        if step % 4 == 3:  # the bytes of an older step come back
            state["8192"].copy_(torch.zeros(8192) if step % 8 == 3 else torch.ones(8192))
    for path in tmp_path.iterdir():
        assert vescale_ckpt.verify(path).ok


def test_a_tensor_that_changes_unseen_between_hash_and_write_is_an_error(tmp_path: Path) -> None:
    state = lora(0)
    saved(tmp_path / "a", state, tmp_path / "a")
    state["adapter"] += 1
    hashed = _C.hash_tensors

    def then_changed(*arguments: Any) -> Any:
        result = hashed(*arguments)
        state["adapter"].data[5] = 17.0  # raises no version counter
        return result

    with (
        mock.patch.object(_C, "hash_tensors", then_changed),
        pytest.raises(CheckpointError, match="adapter was changed"),
    ):
        saved(tmp_path / "b", state, tmp_path / "a")
    assert not (tmp_path / "b" / METADATA_NAME).exists() and not data_files(tmp_path / "b")
    assert saved(tmp_path / "b", state, tmp_path / "a").reused_tensors == 5


# --- Bases that cannot be used


def _without_table(base: Path) -> None:
    (base / DELTA_NAME).unlink()


def _damaged_table(base: Path) -> None:
    flip(base / DELTA_NAME, 8 * 200 + 3)


def _cut_table(base: Path) -> None:
    os.truncate(base / DELTA_NAME, 30)


def _empty_table(base: Path) -> None:
    os.truncate(base / DELTA_NAME, 0)


def _table_of_another_save(base: Path) -> None:
    content = (base / DELTA_NAME).read_bytes()
    saved(base, lora(9), base)
    (base / DELTA_NAME).write_bytes(content)


def _without_metadata(base: Path) -> None:
    (base / METADATA_NAME).unlink()


def _missing(base: Path) -> None:
    shutil.rmtree(base)


def _of_stock_dcp(base: Path) -> None:
    shutil.rmtree(base)
    dcp.save({"x": torch.ones(4)}, checkpoint_id=base, no_dist=True)


def _a_file(base: Path) -> None:
    shutil.rmtree(base)
    base.write_bytes(b"")


BROKEN = [
    _without_table, _damaged_table, _cut_table, _empty_table, _table_of_another_save, _without_metadata, _missing,
    _of_stock_dcp, _a_file,
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_base_that_cannot_be_used_is_a_warning_and_a_full_save(
    tmp_path: Path, broken: Callable[[Path], None], warnings: Callable[[], str]
) -> None:
    base = tmp_path / "a"
    saved(base, lora(0), base)
    broken(base)
    assert saved(tmp_path / "b", lora(1), base).reused_tensors == 0
    assert "all tensors are written, because the base cannot be used" in warnings()
    assert same(loaded(tmp_path / "b", lora(1)), lora(1))
    assert saved(tmp_path / "c", lora(2), tmp_path / "b").reused_tensors == 5, "it can be a base itself"


def test_a_base_elsewhere_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    saved(tmp_path / "there" / "a", lora(0), tmp_path / "there" / "a")
    with pytest.raises(CheckpointError, match="must be folders of the same directory"):
        saved(tmp_path / "here" / "b", lora(1), tmp_path / "there" / "a")
    assert not data_files(tmp_path / "here" / "b")


def test_a_first_save_does_not_warn(tmp_path: Path, warnings: Callable[[], str]) -> None:
    saved(tmp_path / "a", lora(0), tmp_path / "a")
    assert not warnings()


def test_a_file_that_is_gone_is_written_again(tmp_path: Path, warnings: Callable[[], str]) -> None:
    paths = chain(tmp_path, 2)
    data_files(paths[0])[0].unlink()
    assert saved(tmp_path / "step-2", lora(2), paths[1]).reused_tensors == 0
    assert "is missing or too short" in warnings()
    assert same(loaded(tmp_path / "step-2", lora(2)), lora(2))


def test_a_file_that_goes_during_the_save_fails_it(tmp_path: Path) -> None:
    base = chain(tmp_path, 1)[0]
    new = tmp_path / "step-1"
    saved(new, lora(1), base)
    before = (new / METADATA_NAME).read_bytes()
    file = data_files(base)[0]
    hashed = _C.hash_tensors

    def then_removed(*arguments: Any) -> Any:
        file.unlink()
        return hashed(*arguments)

    with (
        mock.patch.object(_C, "hash_tensors", then_removed),
        pytest.raises(CheckpointError, match="was removed during"),
    ):
        saved(new, lora(5), base)
    assert (new / METADATA_NAME).read_bytes() == before


def test_a_save_without_base_leaves_no_table_that_counts(tmp_path: Path, warnings: Callable[[], str]) -> None:
    path = chain(tmp_path, 1)[0]
    vescale_ckpt.save(path, lora(1))
    assert saved(tmp_path / "step-1", lora(1), path).reused_tensors == 0
    assert "it belongs to another .metadata" in warnings()


# --- How far chains go


def test_a_checkpoint_names_files_of_few_older_ones(tmp_path: Path) -> None:
    state = {f"part{number}": torch.randn(5000) for number in range(14)}
    for step in range(14):
        state[f"part{step}"] = torch.randn(5000)
        saved(tmp_path / f"step-{step}", state, tmp_path / f"step-{max(0, step - 1)}")
        folders = {name.split("/")[1] for name in names_in(tmp_path / f"step-{step}") if name.startswith("..")}
        assert len(folders) <= delta_base.MOST_FOLDERS
        assert same(loaded(tmp_path / f"step-{step}", state), state)


def test_a_file_of_which_little_is_used_is_left(tmp_path: Path) -> None:
    state = {"kept": torch.randn(5000), "moving": torch.randn(100_000)}
    for step in range(4):
        stats = saved(tmp_path / f"step-{step}", state, tmp_path / f"step-{max(0, step - 1)}")
        assert stats.reused_tensors == (step in (1, 3))  # at step 2 a twentieth of the first file is in use
        state["moving"] += 1


# --- What keeps the older files


def test_clean_ups_keep_what_checkpoints_beside_name(tmp_path: Path) -> None:
    first, second = chain(tmp_path, 2)
    file = data_files(first)[0]
    vescale_ckpt.save(first, lora(7))  # a save that knows nothing of the other
    assert file.exists() and len(data_files(first)) == 2
    assert same(loaded(second, lora(1)), lora(1)) and same(loaded(first, lora(7)), lora(7))
    (first / METADATA_NAME).unlink()
    commit_metadata.remove_orphans(str(first))
    assert data_files(first) == [file]
    renamed = second.rename(tmp_path / "final")
    commit_metadata.remove_orphans(str(first))
    assert same(loaded(renamed, lora(1)), lora(1)), "a checkpoint that was renamed needs its files, too"
    shutil.rmtree(renamed)
    commit_metadata.remove_orphans(str(first))
    assert not data_files(first) and not (first / LEASE_MARKER).exists()


def test_files_are_kept_where_a_tool_dropped_the_mark(tmp_path: Path) -> None:
    chain(tmp_path / "run", 2)
    copied = tmp_path / "copied"
    shutil.copytree(tmp_path / "run", copied, ignore=shutil.ignore_patterns(LEASE_MARKER))
    first, second = copied / "step-0", copied / "step-1"
    file = data_files(first)[0]
    assert (
        commit_metadata.remove_orphans(str(first), {file.name}, dry_run=True) == []
        and not (first / LEASE_MARKER).exists()
    )
    vescale_ckpt.save(first, lora(7))
    assert file.exists() and same(loaded(second, lora(1)), lora(1)) and same(loaded(first, lora(7)), lora(7))
    assert (first / LEASE_MARKER).exists(), "the next clean-up is told"
    (second / METADATA_NAME).unlink()
    commit_metadata.remove_orphans(str(first))
    assert data_files(first) != [file] and not file.exists()


def test_metadata_that_cannot_be_read_keeps_all(tmp_path: Path) -> None:
    first, second = chain(tmp_path, 2)
    os.truncate(second / METADATA_NAME, 40)
    (first / METADATA_NAME).unlink()
    assert commit_metadata.remove_orphans(str(first)) == [] and data_files(first)


def test_a_running_save_keeps_its_base(tmp_path: Path) -> None:
    base = chain(tmp_path, 1)[0]
    new = tmp_path / "step-1"
    (name,) = (file.name for file in data_files(base))
    hashed = _C.hash_tensors

    def meanwhile(*arguments: Any) -> Any:
        removed = in_child(_overwrite, base).value
        assert name not in removed
        return hashed(*arguments)

    with mock.patch.object(_C, "hash_tensors", meanwhile):
        assert saved(new, lora(1), base).reused_tensors == 5
    assert same(loaded(new, lora(1)), lora(1)) and same(loaded(base, lora(8)), lora(8))


def _overwrite(base: Path) -> list[str]:
    before = {file.name for file in data_files(base)}
    vescale_ckpt.save(base, lora(8))
    return sorted(before - {file.name for file in data_files(base)})


#: what changes a directory in a save
CHANGES = [(FileSystem, name) for name in ("write", "remove", "keep_marker", "make_marker", "sync")]


def test_a_kill_before_any_step_leaves_every_checkpoint_whole(tmp_path: Path) -> None:
    killed = 0
    for number in range(0, 100, EVERY):
        root = tmp_path / str(number)
        first, second = chain(root, 2)

        def body(second: Path = second, number: int = number) -> None:
            with killed_before(number, CHANGES):
                saved(second, lora(5), second)  # replaces a checkpoint, whose base is the first one

        _, status = os.waitpid(fork(body), 0)
        assert same(loaded(first, lora(0)), lora(0)) and vescale_ckpt.verify(first).ok
        found = loaded(second, lora(1))
        assert same(found, lora(1)) or same(found, lora(5))
        assert vescale_ckpt.verify(second).ok
        saved(second, lora(6), first)
        assert same(loaded(second, lora(6)), lora(6)) and same(loaded(first, lora(0)), lora(0))
        if not os.WIFSIGNALED(status):
            break
        killed += 1
    else:
        pytest.fail("the save never ended")
    assert killed * EVERY >= 5


# --- What is trusted


@pytest.mark.parametrize(
    "name",
    [
        "../secret.distcp", "../../x/secret.distcp", "../a/../secret.distcp", ".././secret.distcp", "../../s.distcp",
        "../there/deeper/secret.distcp", "../there/secret.txt", "/there/secret.distcp", "..//secret.distcp",
        "x/../../there/secret.distcp", "../there/..", "../there/\0.distcp", "..\\there\\secret.distcp",
    ],
)  # fmt: skip
def test_names_of_other_forms_stay_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "here" / "a"
    saved(path, {"x": torch.ones(4)}, path)
    metadata = read_metadata(path)
    for info in metadata.storage_data.values():
        info.relative_path = name
    rewrite_metadata(path, metadata)
    with pytest.raises(UntrustedCheckpointError if "\\" not in name else CheckpointError):
        vescale_ckpt.load(path)
    assert not vescale_ckpt.verify(path).ok


def test_a_name_beside_must_be_a_file_with_the_very_record(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    saved(path, {"x": torch.ones(4000)}, path)
    saved(other, {"x": torch.zeros(5000)}, other)
    metadata = read_metadata(path)
    for info in metadata.storage_data.values():
        info.relative_path = f"../b/{data_files(other)[0].name}"
    rewrite_metadata(path, metadata)
    with pytest.raises(CorruptCheckpointError):
        vescale_ckpt.load(path)
    (tmp_path / "b" / "fifo.distcp").parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "b" / "fifo.distcp")
    for info in metadata.storage_data.values():
        info.relative_path = "../b/fifo.distcp"
    rewrite_metadata(path, metadata)
    with pytest.raises(CheckpointError):
        vescale_ckpt.load(path)


# --- Several ranks


def _sharded(step: int, ranks: int) -> State:
    mesh = init_device_mesh("cpu", (ranks,))
    whole = lora(step)
    whole["frozen"] = {key: distribute_tensor(value, mesh, [Shard(0)]) for key, value in whole["frozen"].items()}
    whole["strided"] = distribute_tensor(whole["strided"].contiguous(), mesh, [Replicate()])
    return whole


def _save_on_ranks(root: str, steps: int) -> list[tuple[int, int]]:
    ranks = dist.get_world_size()
    found = []
    for step in range(steps):
        base = Path(root) / f"step-{max(0, step - 1)}"
        stats = saved(Path(root) / f"step-{step}", _sharded(step, ranks), base, async_checkpoint=step % 2 == 0)
        found.append((stats.reused_tensors, stats.reused_bytes))
    return found


def _load_on_ranks(path: str, step: int, broadcast: bool) -> bool:
    values = _sharded(step + 5, dist.get_world_size())
    for value in values["frozen"].values():
        value.to_local().zero_()
    vescale_ckpt.load(path, values, broadcast_checkpoint=broadcast)
    wanted = _sharded(step, dist.get_world_size())
    local = {key: value.to_local() if isinstance(value, DTensor) else value for key, value in values["frozen"].items()}
    return same(local, {key: value.to_local() for key, value in wanted["frozen"].items()}) and same(
        values["adapter"], wanted["adapter"]
    )


def test_ranks_name_older_records_together(tmp_path: Path) -> None:
    found = run_ranks(2, _save_on_ranks, str(tmp_path), 3)
    assert [of_rank[0] for of_rank in found] == [(0, 0), (0, 0)]
    for step in (1, 2):
        assert sum(of_rank[step][1] for of_rank in found) == 4 * 128 * 256 * 4 + 160_000
        assert all(of_rank[step][0] >= 4 for of_rank in found)
    path = tmp_path / "step-2"
    index_files = vescale_ckpt.inspect(path).files
    assert sum(name.startswith("../step-0/") for name in index_files) == 2
    assert vescale_ckpt.verify(path).ok and vescale_ckpt.verify(path, quick=True).ok
    for broadcast in (True, False):
        assert run_ranks(2, _load_on_ranks, str(path), 2, broadcast) == [True, True]
    assert same(vescale_ckpt.load(path)["frozen"], lora(2)["frozen"])
    values = {"frozen": blank(lora(2)["frozen"]), "adapter": torch.zeros(3000)}
    dcp.load(values, checkpoint_id=path, no_dist=True)
    assert same(values["frozen"], lora(2)["frozen"]) and same(values["adapter"], lora(2)["adapter"])


def _save_with_broken_base(root: str) -> str:
    base, path = Path(root) / "a", Path(root) / "b"
    saved(base, _sharded(0, 2), base)
    if dist.get_rank() == 0:
        (base / DELTA_NAME).unlink()
    dist.barrier()
    assert saved(path, _sharded(1, 2), base).reused_tensors == 0
    try:
        saved(Path(root) / "deeper" / "c", _sharded(2, 2), path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_all_ranks_or_none_use_the_base(tmp_path: Path) -> None:
    errors = run_ranks(2, _save_with_broken_base, str(tmp_path))
    assert all("must be folders of the same directory" in error for error in errors)
    assert same(vescale_ckpt.load(tmp_path / "b")["frozen"], lora(1)["frozen"])


def _fail_on_one(root: str, killed: bool) -> str:
    base, path = Path(root) / "a", Path(root) / "b"
    saved(base, _sharded(0, 2), base)
    saved(path, _sharded(1, 2), base)
    hashed = _C.hash_tensors

    def broken(*arguments: Any) -> Any:
        if dist.get_rank() == 1 and killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1:
            raise OSError(5, "a tensor cannot be read")
        return hashed(*arguments)

    with mock.patch.object(_C, "hash_tensors", broken), pytest.raises(CheckpointError) as caught:
        saved(path, _sharded(2, 2), base, timeout=15)
    if not killed:
        assert sum(of_rank.reused_bytes for of_rank in [saved(Path(root) / "c", _sharded(3, 2), path)]) > 0
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("killed", [False, True])
def test_a_rank_that_fails_leaves_every_checkpoint_whole(tmp_path: Path, killed: bool) -> None:
    found = run_ranks(2, _fail_on_one, str(tmp_path), killed, check=False)
    if killed:
        assert found[0].startswith("CheckpointTimeoutError") and "1" in found[0]
    else:
        assert all("a tensor cannot be read" in error for error in found)
        assert same(vescale_ckpt.load(tmp_path / "c")["frozen"], lora(3)["frozen"])
    for name, step in (("a", 0), ("b", 1)):
        assert same(vescale_ckpt.load(tmp_path / name)["adapter"], lora(step)["adapter"])
        assert vescale_ckpt.verify(tmp_path / name).ok
    values = lora(4)
    assert saved(tmp_path / "d", values, tmp_path / "b").reused_bytes >= 160_000  # by one process, whose boxes differ
    assert same(loaded(tmp_path / "d", values), values)


# --- Tensors that are not even read


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 90))
    model[0].requires_grad_(False)
    return model


def _frozen(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value for value in model.parameters() if not value.requires_grad]


@contextlib.contextmanager
def counted_hashes() -> Iterator[list[int]]:
    """The bytes of tensors that are read for their ids, one entry a call."""
    counts: list[int] = []
    hashed = _C.hash_tensors

    def counting(table: Any, *arguments: Any) -> Any:
        counts.append(sum(memoryview(_C.body_bytes(table)).cast("q")))
        return hashed(table, *arguments)

    with mock.patch.object(_C, "hash_tensors", counting):
        yield counts


@pytest.mark.parametrize("asynchronous", [False, True])
def test_frozen_tensors_are_read_once(tmp_path: Path, asynchronous: bool) -> None:
    model = _model()
    weight, rest = 100 * 100 * 4, 100 * 4 + 90 * 100 * 4 + 90 * 4
    read = []
    for step in range(4):
        base = tmp_path / f"step-{max(0, step - 1)}"
        with counted_hashes() as counts:
            stats = saved(
                tmp_path / f"step-{step}", {"model": model}, base, frozen=_frozen(model), async_checkpoint=asynchronous
            )
        read.append(sum(counts))
        assert stats.reused_bytes == (weight if step else 0)
        fresh = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 90))
        vescale_ckpt.load(tmp_path / f"step-{step}", {"model": fresh})
        assert same(dict(fresh.state_dict()), dict(model.state_dict()))
        with torch.no_grad():
            model[1].weight += 1
    assert read == [weight + rest, rest, rest, rest]


def _in_place(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight[3, 5] += 1


def _loaded(weight: torch.Tensor) -> None:
    torch.nn.ParameterList([weight]).load_state_dict({"0": torch.full_like(weight, 2.0)})


def _other_memory(weight: torch.Tensor) -> None:
    weight.data = weight.data.clone().add_(1)


def _by_detach(weight: torch.Tensor) -> None:
    weight.detach().mul_(2)


@pytest.mark.parametrize("change", [_in_place, _loaded, _other_memory, _by_detach])
def test_changes_that_torch_counts_are_seen_in_frozen_tensors(
    tmp_path: Path, change: Callable[[torch.Tensor], None]
) -> None:
    model = _model()
    saved(tmp_path / "a", {"model": model}, tmp_path / "a", frozen=_frozen(model))
    change(model[0].weight)
    stats = saved(tmp_path / "b", {"model": model}, tmp_path / "a", frozen=_frozen(model))
    assert stats.reused_bytes == 90 * 100 * 4, "only the other layer's"
    fresh = _model()
    vescale_ckpt.load(tmp_path / "b", {"model": fresh})
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))


def test_frozen_tensors_of_another_model_are_read(tmp_path: Path) -> None:
    """Memory that is freed and taken again, at the same address perhaps."""
    for step in range(6):
        model = _model()
        with torch.no_grad():
            model[0].weight.fill_(step)
        base = tmp_path / f"step-{max(0, step - 1)}"
        saved(tmp_path / f"step-{step}", {"model": model}, base, frozen=_frozen(model))
        found = _model()
        vescale_ckpt.load(tmp_path / f"step-{step}", {"model": found})
        assert torch.equal(found[0].weight, model[0].weight)
        del model


def test_frozen_needs_a_base_and_tensors_that_do_not_train(tmp_path: Path) -> None:
    model = _model()
    with pytest.raises(ValueError, match="only a save with base="):
        vescale_ckpt.save(tmp_path / "a", {"model": model}, frozen=_frozen(model))
    with pytest.raises(ValueError, match="requires grad"):
        saved(tmp_path / "a", {"model": model}, tmp_path / "a", frozen=model.parameters())
    with pytest.raises(TypeError, match="expected tensors, got "):
        saved(tmp_path / "a", {"model": model}, tmp_path / "a", frozen=[model])


def _by_data(weight: torch.Tensor) -> None:
    weight.data[:] = 7


def _by_numpy_like(weight: torch.Tensor) -> None:
    torch.frombuffer((ctypes.c_float * weight.numel()).from_address(weight.data_ptr()), dtype=torch.float32).fill_(7)


@pytest.mark.parametrize("change", [_by_data, _by_numpy_like])
def test_changes_that_torch_does_not_count_are_refused_in_frozen_tensors(
    tmp_path: Path, change: Callable[[torch.Tensor], None]
) -> None:
    model = _model()
    saved(tmp_path / "a", {"model": model}, tmp_path / "a", frozen=_frozen(model))
    change(model[0].weight)
    with pytest.raises(CheckpointError, match=r"model\.0\.weight: frozen= names it, but its values have changed"):
        saved(tmp_path / "b", {"model": model}, tmp_path / "a", frozen=_frozen(model))


def _aliases(model: torch.nn.Module) -> list[torch.Tensor]:
    return list(model.state_dict().values())


def _data(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.data for value in model.parameters()]


@pytest.mark.parametrize("of_trained", [_aliases, _data])
@pytest.mark.parametrize("state_of", ["module", "optimizer", "tensors"])
def test_other_names_of_trained_tensors_are_no_frozen_ones(
    tmp_path: Path, of_trained: Callable[[torch.nn.Module], list[torch.Tensor]], state_of: str
) -> None:
    model = _model()
    state: dict[str, Any] = {
        "module": {"model": model},
        "optimizer": {"model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters())},
        "tensors": {"model": dict(model.named_parameters())},
    }[state_of]
    with pytest.raises(ValueError, match=r"frozen: a tensor among them is the memory of .*, which requires grad"):
        saved(tmp_path / "a", state, tmp_path / "a", frozen=of_trained(model))


def _frozen_shards(root: str) -> list[int]:
    state = _sharded(0, 2)
    frozen, read = list(state["frozen"].values()), []
    for step in range(3):
        base = Path(root) / f"step-{max(0, step - 1)}"
        with counted_hashes() as counts:
            saved(Path(root) / f"step-{step}", state, base, frozen=frozen, async_checkpoint=step == 1)
        read.append(sum(counts))
        state["adapter"] += 1
    state["frozen"]["layer2"].to_local().add_(1)
    with counted_hashes() as counts:
        saved(Path(root) / "step-3", state, Path(root) / "step-2", frozen=frozen)
    return [*read, sum(counts)]


def test_frozen_shards_are_read_once(tmp_path: Path) -> None:
    for first, second, third, changed in run_ranks(2, _frozen_shards, str(tmp_path)):
        assert second == third == first - 4 * 128 * 256 * 4 // 2 and changed == third + 128 * 256 * 4 // 2
    wanted = lora(0)["frozen"]
    wanted["layer2"] = wanted["layer2"] + 1
    assert same(vescale_ckpt.load(tmp_path / "step-3")["frozen"], wanted)
