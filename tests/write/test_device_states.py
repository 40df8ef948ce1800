"""States on CUDA devices, without one: host memory that claims to be there, which snapshots copy all the same. What a
device itself does is tested in tests/cpp/stage, and in test_gpu.py."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import steps
from harness.python_forks import run_python
from harness.saves import load
from harness.snapshots import late_copies, no_snapshot_is_left, snapshot_memory
from harness.states import change_all, same
from torch import nn

import vescale_ckpt
from vescale_ckpt import CheckpointError, Stager, StorageWriter
from vescale_ckpt._engine import _C, device_streams
from vescale_ckpt._state import tensor_table
from vescale_ckpt._state.tensor_table import HOST_DEVICE, NOT_READY, ON_HOST, read_tensors, tensor_row

MiB = 1 << 20
BOUND = 60.0


@dataclass
class Pretended:
    """What was asked of CUDA."""

    snapshots: list[tuple[list[int], list[tuple[int, int]], int]] = field(
        default_factory=list
    )  # devices, streams, bytes
    most_in_use: int = 0


def device_of(tensor: torch.Tensor) -> int:
    """The CUDA device that a tensor of more than 100 elements counts as being on."""
    return tensor.numel() // 100 % 2


def row_on_device(tensor: torch.Tensor) -> list[int]:
    row = tensor_row(tensor)
    if row[2] == HOST_DEVICE and tensor.numel() > 100:
        row[2] = 2 + (device_of(tensor) << 32)
    return row


def _on_host(function: Any, arguments: int) -> Any:
    return lambda *given: function(*given[:arguments])


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    asked = Pretended()

    class Snapshot(_C.Snapshot):
        def __init__(self, table: Any, budget: int, threads: int, devices: Any = b"", producers: Any = ()) -> None:
            super().__init__(table, budget, threads)
            asked.snapshots.append((list(memoryview(devices).cast("B").cast("q")), list(producers), self.bytes))
            asked.most_in_use = max(asked.most_in_use, snapshot_memory()["in_use_bytes"])

    monkeypatch.setattr(tensor_table, "PLAIN_TYPES", ())  # so all are read in Python
    monkeypatch.setattr(tensor_table, "tensor_row", row_on_device)
    monkeypatch.setattr(_C, "copies_from_cuda", lambda batches: True)
    monkeypatch.setattr(_C, "Snapshot", Snapshot)
    for name, arguments in (("read_tensors", 4), ("copy_boxes", 2)):  # loads fill that memory as the host's
        monkeypatch.setattr(_C, name, _on_host(getattr(_C, name), arguments))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=100 + device))
    monkeypatch.setattr(device_streams, "current_streams", lambda: {i: torch.cuda.current_stream(i) for i in (0, 1)})
    yield asked
    assert no_snapshot_is_left()


def state(k: int) -> dict[str, Any]:
    base = torch.arange(700_000, dtype=torch.float32).add_(k)
    return {
        "base": base,
        "view": base[5000:],
        "transposed": torch.arange(60_000).add_(k).view(200, 300).t(),
        **{f"weight.{i}": torch.full((300, 500 + i), k + i / 7) for i in range(12)},
        "bf16": torch.full((70_001,), k, dtype=torch.bfloat16),
        "host": torch.full((100,), k),
        "empty": torch.zeros(0, 3),
        "conjugate": torch.complex(torch.arange(90.0), torch.full((90,), float(k))).conj(),
        "large conjugate": torch.complex(torch.arange(900.0), torch.full((900,), float(k))).conj(),
        "step": k,
    }


def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_CKPT_MEMORY_BYTES", str(4 * MiB))
    monkeypatch.setattr(*steps.LIMITS["bytes of a slot"], 4 * MiB)


def test_without_cuda_of_our_own_nothing_is_ready_there(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    monkeypatch.setattr(_C, "copies_from_cuda", lambda batches: False)
    values = [torch.ones(500), torch.ones(3)]
    assert list(read_tensors(values).ready) == [NOT_READY, ON_HOST]
    vescale_ckpt.save(checkpoint, state(1))  # by copies that torch makes
    assert same(load(checkpoint, state(0)), state(1))
    assert not any(producers for _, producers, _ in pretended.snapshots)


@pytest.mark.parametrize("through_dcp", [False, True])
def test_synchronous_saves_copy_in_waves(
    checkpoint: Path, pretended: Pretended, monkeypatch: pytest.MonkeyPatch, through_dcp: bool
) -> None:
    small_memory(monkeypatch)
    if through_dcp:
        dcp.save(state(1), storage_writer=StorageWriter(checkpoint), planner=vescale_ckpt.SavePlanner())
    else:
        vescale_ckpt.save(checkpoint, state(1))
    assert same(load(checkpoint, state(0)), state(1))
    waves = pretended.snapshots
    assert len(waves) > 3
    for devices, producers, nbytes in waves:
        assert -1 not in devices
        assert producers == [(device, 100 + device) for device in sorted(set(devices))]
        assert nbytes <= 2 * MiB or len(devices) == 1
    most = max(nbytes for _, _, nbytes in waves)
    assert pretended.most_in_use <= 2 * (most + 4 * MiB)  # two at a time, in whole huge pages


@pytest.mark.parametrize("budget_mib", [1, 4])
def test_what_exceeds_the_budget_is_written_in_waves(
    checkpoint: Path, pretended: Pretended, monkeypatch: pytest.MonkeyPatch, budget_mib: int
) -> None:
    small_memory(monkeypatch)
    monkeypatch.setenv("VESCALE_CKPT_SNAPSHOT_BYTES", str(budget_mib * MiB))
    values = state(1)
    handle = vescale_ckpt.save(checkpoint, values, async_checkpoint=True)
    change_all(values)
    handle.result(BOUND)
    assert same(load(checkpoint, state(0)), state(1))
    assert len(pretended.snapshots) > 3


def _free(weight: nn.Parameter) -> torch.Tensor:
    weight.untyped_storage().resize_(0)
    return torch.full((20_000,), 9.0)  # gets the block that was freed, as on a device, whose allocator keeps it mapped


def _give_other_memory(weight: nn.Parameter) -> torch.Tensor:
    with torch.no_grad():
        weight.set_(torch.full((20_000,), 9.0))  # type: ignore[call-overload]
    return torch.full((20_000,), 9.0)


def _change(weight: nn.Parameter) -> torch.Tensor:
    with torch.no_grad():
        return weight.fill_(9.0)


@pytest.mark.parametrize("change", [_free, _give_other_memory, _change])
def test_a_block_that_goes_to_the_next_tensor_is_not_saved(
    checkpoint: Path, pretended: Pretended, change: Callable[[nn.Parameter], torch.Tensor]
) -> None:
    weight = nn.Parameter(torch.ones(20_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    vescale_ckpt.save(checkpoint, {"weight": weight})
    with late_copies() as copy_now:
        handle = vescale_ckpt.save(checkpoint, {"weight": weight}, async_checkpoint=True, gate=optimizer)
        assert pretended.snapshots[-1][0] == [0], "it lies on a device"
        other = change(weight)
        copy_now.set()
        with pytest.raises(CheckpointError, match=r"weight.*(changed|given back)"):
            handle.result(BOUND)
    assert other.eq(9).all()
    assert load(checkpoint, {"weight": torch.zeros(20_000)})["weight"].eq(1).all(), "the old checkpoint is whole"


def test_a_parameter_that_was_given_other_memory_is_saved_as_it_was(checkpoint: Path, pretended: Pretended) -> None:
    weight = nn.Parameter(torch.ones(20_000))
    with late_copies() as copy_now:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        handle = vescale_ckpt.save(checkpoint, {"weight": weight}, async_checkpoint=True, gate=optimizer)
        weight.data = torch.full((20_000,), 9.0)
        others = [torch.full((20_000,), 9.0) for _ in range(20)]  # none of them gets the old block, which is kept
        copy_now.set()
        handle.result(BOUND)
    assert load(checkpoint, {"weight": torch.zeros(20_000)})["weight"].eq(1).all() and len(others) == 20


def test_staging_for_dcp(pretended: Pretended) -> None:
    values = state(1)
    del values["empty"]
    staged = Stager().stage(values)
    change_all(values)
    wanted = state(1)
    del wanted["empty"]
    assert same(staged, wanted)
    ((devices, producers, _),) = pretended.snapshots
    assert set(devices) == {-1, 0, 1}
    assert producers == [(0, 100), (1, 101)]
    del staged


def test_a_state_on_the_host_leaves_cuda_alone(checkpoint: Path) -> None:
    """A process that has started CUDA cannot fork: data loaders would break."""
    program = """
        import sys, torch, vescale_ckpt
        from pathlib import Path
        from vescale_ckpt._engine import _C
        values = {"a": torch.ones(70_000), "b": torch.ones(900, dtype=torch.cfloat).conj(), "step": 1}
        vescale_ckpt.prepare(values)
        vescale_ckpt.save(sys.argv[1], values)
        vescale_ckpt.save(sys.argv[1], values, async_checkpoint=True).result(60)
        staged = vescale_ckpt.Stager().stage(values)
        vescale_ckpt.load(sys.argv[1], values)
        assert not _C.cuda_was_started()
        assert torch.version.cuda or "libcudart" not in Path("/proc/self/maps").read_text()
        _C.device_info()
        assert _C.cuda_was_started()
    """
    done = run_python([sys.executable, "-c", textwrap.dedent(program), str(checkpoint)])
    assert done.returncode == 0, done.stderr


def test_what_a_device_refused_is_logged_once_and_in_the_stats(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_C, "device_notes", lambda: ["device 0 takes no batches"])
    for _ in range(2):
        stats = vescale_ckpt.save(checkpoint, {"a": torch.ones(3)}).stats
        assert stats is not None and stats.device_notes == ("device 0 takes no batches",)
    assert [record.message for record in caplog.records].count("device 0 takes no batches") == 1
