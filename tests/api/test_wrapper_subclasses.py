"""Wrapper subclasses (quantized weights and optimizer states): saved as stock DCP saves them, loaded bit for bit."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.files import data_files, flip
from harness.ranks import on_ranks, run_ranks
from harness.saves import cause, load_by, save_by
from harness.snapshots import late_copies
from harness.wrapper_tensors import Copying, OneScale, Quantized, Uncut, Unknown
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import vescale_ckpt
from vescale_ckpt import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleStateError,
    SavePlanner,
    StorageWriter,
    UntrustedCheckpointError,
)
from vescale_ckpt.cli import main
from vescale_ckpt.integrations.dcp import dcp_defaults

ROWS = 24


def state(of: Any, **options: Any) -> dict[str, Any]:
    """The key of the wrapper lies between others."""
    return {"a": torch.arange(5.0), "q": of(ROWS, **options), "z": torch.ones(3), "step": 7}


@pytest.mark.parametrize("reader", ["ours", "our reader", "dcp.load", "stock"])
@pytest.mark.parametrize("writer", ["ours", "async", "our writer", "our planner", "stock"])
def test_all_read_what_each_writes(checkpoint: Path, writer: str, reader: str) -> None:
    given = state(Quantized.random)
    save_by(writer, checkpoint, given)
    load_by(reader, checkpoint, found := state(Quantized.zeros))
    assert found["q"].bits() == given["q"].bits()
    assert torch.equal(found["a"], given["a"])
    assert torch.equal(found["z"], given["z"])
    assert found["step"] == 7


def test_the_values_are_not_copied() -> None:
    """The stand-in does what the test is about: a copy of its values changes the codes."""
    given, target = Quantized.random(ROWS), Quantized.zeros(ROWS)
    target.copy_(given.values())
    assert target.bits() != given.bits()


@pytest.mark.parametrize(
    "kind", ["parameter", "another dtype", "view of a larger storage", "nested", "on the meta device"]
)
def test_forms(checkpoint: Path, kind: str) -> None:
    given, target = Quantized.random(ROWS, dtype=torch.bfloat16), Quantized.zeros(ROWS, dtype=torch.bfloat16)
    if kind == "parameter":
        given, target = torch.nn.Parameter(given), torch.nn.Parameter(target)
    elif kind == "view of a larger storage":
        large = Quantized.random(100 * ROWS, seed=1)
        given, target = large[ROWS : 2 * ROWS], Quantized.zeros(ROWS)
    elif kind == "nested":
        given = Quantized(Uncut.random(ROWS), torch.rand(ROWS, 1), torch.float32)
        target = Quantized(Uncut.zeros(ROWS), torch.zeros(ROWS, 1), torch.float32)
    elif kind == "on the meta device":
        target = Quantized(*(torch.empty_like(part, device="meta") for part in (given.codes, given.scale)), given.dtype)
    vescale_ckpt.save(checkpoint, {"q": given})
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 20_000
    loading = {"q": target}
    vescale_ckpt.load(checkpoint, loading)
    found = loading["q"]
    assert found is target or kind == "on the meta device"
    if kind == "nested":
        assert found.codes.bits() == given.codes.bits()
        assert torch.equal(found.scale, given.scale)
    else:
        assert found.bits() == given.bits()


def test_inner_tensors_are_copied_before_a_save_returns(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight, rows = torch.nn.Parameter(torch.ones(3)), 400_000
    given = Quantized.random(rows)
    monkeypatch.setenv("VESCALE_CKPT_SNAPSHOT_BYTES", str(4 << 20))  # for which the inner tensors do not count
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.state[weight]["average"] = given
    expected = given.bits()
    with late_copies() as copy_now:
        state = {"w": weight, "q": given}
        handle = vescale_ckpt.save(checkpoint, state, async_checkpoint=True, gate=optimizer)
        assert not handle.staged.done()
        given.codes.zero_()
        copy_now.set()
        handle.result(60)
    assert sum(map(len, expected)) > 4 << 20
    found = {"q": Quantized.zeros(rows)}
    vescale_ckpt.load(checkpoint, found)
    assert found["q"].bits() == expected and "before training went on" not in caplog.text


def test_a_plan_is_not_used_for_a_plain_tensor_of_the_same_shape(checkpoint: Path) -> None:
    plain = {"q": torch.rand(ROWS, 8)}
    vescale_ckpt.save(checkpoint, plain)
    given = {"q": Quantized.random(ROWS)}
    vescale_ckpt.save(checkpoint, given)
    found = {"q": Quantized.zeros(ROWS)}
    vescale_ckpt.load(checkpoint, found)
    assert found["q"].bits() == given["q"].bits()
    vescale_ckpt.save(checkpoint, plain)
    assert torch.equal(vescale_ckpt.load(checkpoint)["q"], plain["q"])


# --- Other targets than a tensor of the same class


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_values_of_it(checkpoint: Path, writer: str, caplog: pytest.LogCaptureFixture) -> None:
    """As stock DCP: a plain tensor gets the values, and a wrapper quantizes those of a plain tensor."""
    given = Quantized.random(ROWS)
    save_by(writer, checkpoint, {"q": given})
    plain = {"q": torch.zeros(ROWS, 8)}
    vescale_ckpt.load(checkpoint, plain)
    assert torch.equal(plain["q"], given.values())
    assert "q (harness.wrapper_tensors.Quantized): stored as inner tensors, loaded as the values" in caplog.text
    assert torch.equal(vescale_ckpt.load(checkpoint)["q"], given.values())
    part = {"q": torch.zeros(ROWS, 8)}
    vescale_ckpt.load(checkpoint, part, broadcast_checkpoint=True)
    assert torch.equal(part["q"], given.values())

    save_by(writer, checkpoint, {"q": given.values()})
    expected, target = Quantized.zeros(ROWS), Quantized.zeros(ROWS)
    expected.copy_(given.values())
    vescale_ckpt.load(checkpoint, {"q": target})
    assert target.bits() == expected.bits()


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_values_that_take_more_bytes_than_are_stored(checkpoint: Path, writer: str) -> None:
    """A tensor that claims more bytes than its records have is refused otherwise."""
    given = Quantized.random(2000)
    save_by(writer, checkpoint, {"q": given})
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < given.values().nbytes
    assert torch.equal(vescale_ckpt.load(checkpoint)["q"], given.values())


def test_another_class_or_other_settings_are_refused(checkpoint: Path) -> None:
    vescale_ckpt.save(checkpoint, {"q": Quantized.random(ROWS)})
    with pytest.raises(IncompatibleStateError, match=r"^q: .* a \S+\.OneScale, .* a \S+\.Quantized$"):
        vescale_ckpt.load(checkpoint, {"q": OneScale.zeros(ROWS)})
    with pytest.raises(
        CheckpointError, match=r"^q: .* bit for bit \(its class converts codes.*same settings$"
    ) as raised:
        vescale_ckpt.load(checkpoint, {"q": Quantized.zeros(ROWS, sign=-1)})
    assert raised.value.key == "q"
    other = Quantized(torch.zeros(ROWS, 8, dtype=torch.uint8), torch.zeros(1, 8), torch.float32)
    with pytest.raises(CheckpointError, match=r"^q: .*scale: expected torch.float32 \(1, 8\)"):
        vescale_ckpt.load(checkpoint, {"q": other})


def test_a_class_without_values(checkpoint: Path) -> None:
    given = Uncut.random(ROWS)
    vescale_ckpt.save(checkpoint, {"q": given})
    target = Uncut.zeros(ROWS)
    vescale_ckpt.load(checkpoint, {"q": target})
    assert target.bits() == given.bits()
    for attempt in (
        lambda: vescale_ckpt.load(checkpoint),
        lambda: vescale_ckpt.load(checkpoint, {"q": torch.zeros(ROWS, 8)}),
        lambda: vescale_ckpt.convert(checkpoint, checkpoint / "out.safetensors", format="safetensors"),
    ):
        with pytest.raises(IncompatibleStateError, match=r"^q: .* a \S+\.Uncut, which has no values"):
            attempt()
    vescale_ckpt.save(checkpoint, {"q": torch.zeros(ROWS, 8)})
    with pytest.raises(IncompatibleStateError, match=r"^q: .* a plain tensor, which it cannot take"):
        vescale_ckpt.load(checkpoint, {"q": target})


def test_a_class_that_torch_does_not_trust(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = Unknown.random(ROWS)
    vescale_ckpt.save(checkpoint, {"q": given})
    assert "q holds objects that take code to load (harness.wrapper_tensors.Unknown)" in caplog.text
    target = {"q": Unknown.zeros(ROWS)}
    with pytest.raises(UntrustedCheckpointError, match=r"^q: .* takes \S+\.Unknown to load") as raised:
        vescale_ckpt.load(checkpoint, target)
    assert raised.value.key == "q"
    vescale_ckpt.load(checkpoint, target, weights_only=False)
    assert target["q"].bits() == given.bits()


def test_safetensors_files_cannot_hold_it(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^q: safetensors files cannot hold a \S+\.Quantized"):
        vescale_ckpt.save(checkpoint, state(Quantized.random), format="safetensors")
    with pytest.raises(CheckpointError, match=r"^q: a Quantized cannot be stored as one tensor"):
        vescale_ckpt.safetensors.save_file({"q": Quantized.random(ROWS)}, checkpoint.parent / "x.safetensors")


@on_ranks(2)
def test_dcp_save_into_safetensors_files_refuses_it_on_all_ranks(checkpoint: Path) -> None:
    """Another planner's plan does not show what it is."""
    errors = []
    for planner in (SavePlanner(), None):
        with pytest.raises(CheckpointException) as caught:
            values = {"q": Quantized.random(ROWS), "x": torch.ones(4)}
            dcp.save(values, storage_writer=StorageWriter(checkpoint, format="safetensors"), planner=planner)
        errors.append(str(cause(caught.value)))
        dist.barrier()
    assert re.match(r"q: safetensors files cannot hold a \S+\.Quantized, which consists of inner", errors[0])
    assert re.match("q: safetensors files cannot hold a wrapper subclass, which consists of inner", errors[1])
    assert os.listdir(checkpoint) == []


# --- Commands


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_commands(checkpoint: Path, writer: str) -> None:
    given = Quantized.random(ROWS)
    save_by(writer, checkpoint, {"q": given, "x": torch.ones(4)})
    report = vescale_ckpt.verify(checkpoint)
    assert report.ok
    assert not report.harmless
    assert vescale_ckpt.inspect(checkpoint).tensors["q"].shape == (ROWS, 8)
    assert main(["diff", str(checkpoint), str(checkpoint), "--values"]) == 0
    target = checkpoint.parent / "out"
    vescale_ckpt.convert(checkpoint, target, format="safetensors")
    assert torch.equal(vescale_ckpt.load(target)["q"], given.values())


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_verify_needs_no_class(checkpoint: Path, writer: str) -> None:
    save_by(writer, checkpoint, {"q": Unknown.random(ROWS), "x": torch.ones(4)})
    report = vescale_ckpt.verify(checkpoint)
    assert (report.damaged, report.harmless) == ([], [])


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_damage_is_found(checkpoint: Path, writer: str) -> None:
    given = Quantized.random(ROWS)
    save_by(writer, checkpoint, {"q": given})
    (file,) = data_files(checkpoint)
    flip(file, file.read_bytes().index(given.codes.numpy().tobytes()) + 5)
    assert [damage.key for damage in vescale_ckpt.verify(checkpoint).damaged] == ["q"]
    with pytest.raises(CorruptCheckpointError, match=r"^q: "):
        vescale_ckpt.load(checkpoint, {"q": Quantized.zeros(ROWS)})


def test_a_record_of_another_save_is_found(tmp_path: Path) -> None:
    """Both are sound archives: only the checksum in the metadata tells."""
    for number in (1, 2):
        vescale_ckpt.save(tmp_path / str(number), {"q": Quantized.random(ROWS, seed=number)})
    (one,), (two,) = data_files(tmp_path / "1"), data_files(tmp_path / "2")
    shutil.copyfile(two, one)
    assert [damage.key for damage in vescale_ckpt.verify(tmp_path / "1").damaged] == ["q"]
    with pytest.raises(CorruptCheckpointError, match=r"^q: .* other values than were saved"):
        vescale_ckpt.load(tmp_path / "1", {"q": Quantized.zeros(ROWS)})


# --- Ranks


def _sharded(kind: Any, whole: Any, placement: Any) -> DTensor:
    """The part of `whole` of this rank, with inner tensors of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if isinstance(placement, Replicate):
        return DTensor.from_local(whole, mesh, [placement], run_check=False)
    codes, scale = (part.tensor_split(mesh.size())[mesh.get_local_rank()] for part in (whole.codes, whole.scale))
    local = kind(codes.clone(), scale.clone(), whole.dtype, whole.sign)
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def _save(path: str, writer: str, replicated: bool) -> None:
    given = Quantized.random(48)
    placement: Any = Replicate() if replicated else Shard(0)
    saved = {"q": _sharded(Quantized, given, placement), "x": torch.ones(3)}
    if writer == "async_save":
        with dcp_defaults():
            dcp.async_save(saved, checkpoint_id=path).result()
    else:
        save_by(writer, path, saved)


def _load(path: str, reader: str) -> bool:
    whole, zeros = Quantized.random(48), Quantized.zeros(48)
    target, expected = _sharded(Quantized, zeros, Shard(0)), _sharded(Quantized, whole, Shard(0))
    load_by(reader, path, {"q": target})
    return bool(target.to_local().bits() == expected.to_local().bits())


@pytest.mark.parametrize(
    ("writer", "reader"), [("ours", "ours"), ("ours", "stock"), ("stock", "ours"), ("async_save", "our reader")]
)
@pytest.mark.parametrize("replicated", [False, True])
def test_shards_on_other_numbers_of_ranks(checkpoint: Path, writer: str, reader: str, replicated: bool) -> None:
    run_ranks(2, _save, str(checkpoint), writer, replicated)
    assert vescale_ckpt.verify(checkpoint).ok
    for ranks in (1, 2, 4):
        assert run_ranks(ranks, _load, str(checkpoint), reader) == [True] * ranks
    whole = Quantized.zeros(48)
    vescale_ckpt.load(checkpoint, {"q": whole})
    assert whole.bits() == Quantized.random(48).bits()


@on_ranks(2)
def test_ranks_that_read_for_each_other(checkpoint: Path) -> None:
    _save(str(checkpoint), "ours", True)
    target, plain = Quantized.zeros(48), torch.zeros(3)
    vescale_ckpt.load(checkpoint, {"q": target, "x": plain}, broadcast_checkpoint=True)
    values = torch.zeros(48, 8)
    vescale_ckpt.load(checkpoint, {"q": values}, broadcast_checkpoint=True)
    given = Quantized.random(48)
    assert target.bits() == given.bits()
    assert torch.equal(plain, torch.ones(3)) and torch.equal(values, given.values())


@on_ranks(2)
def test_replicas_are_not_cut(checkpoint: Path) -> None:
    """A plain tensor of this size is written by both ranks, a part each."""
    given = Quantized.random(1024, 1024)
    vescale_ckpt.save(checkpoint, {"q": given})
    vescale_ckpt.save(checkpoint.parent / "plain", {"q": torch.ones(1024, 1024)})
    target = Quantized.zeros(1024, 1024)
    vescale_ckpt.load(checkpoint, {"q": target})
    assert target.bits() == given.bits()
    assert len(vescale_ckpt.inspect(checkpoint).tensors["q"].chunks) == 1
    assert len(vescale_ckpt.inspect(checkpoint.parent / "plain").tensors["q"].chunks) == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Copying, "cannot be filled part by part"),
        (OneScale, "cannot be filled part by part"),
        (Uncut, "cannot be cut to"),
    ],
)
@pytest.mark.parametrize("reader", ["ours", "our reader"])
def test_what_cannot_be_resharded_is_refused(checkpoint: Path, kind: Any, reason: str, reader: str) -> None:
    run_ranks(2, _save_and_load_parts, str(checkpoint), kind.__name__)
    with pytest.raises((CheckpointError, CheckpointException)) as raised:
        load_by(reader, checkpoint, {"q": kind.zeros(48)})
    found: Any = cause(raised.value) if reader != "ours" else raised.value
    assert found.key == "q"
    assert re.match(rf"^q: .*{reason}.*load it with the sharding that it was saved with$", str(found))


def _part(kind: Any, rank: int) -> Any:
    return kind.random(24, seed=rank)


def _save_and_load_parts(path: str, name: str) -> None:
    kind = globals()[name]
    mesh = init_device_mesh("cpu", (2,))
    vescale_ckpt.save(path, {"q": DTensor.from_local(_part(kind, dist.get_rank()), mesh, [Shard(0)], run_check=False)})
    target = DTensor.from_local(kind.zeros(24), mesh, [Shard(0)], run_check=False)
    vescale_ckpt.load(path, {"q": target})
    assert target.to_local().bits() == _part(kind, dist.get_rank()).bits()
