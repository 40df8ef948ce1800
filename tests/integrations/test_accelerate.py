"""Tests `vescale_ckpt.integrations.accelerate` and saves of Accelerate inside `dcp_defaults`."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

pytest.importorskip("accelerate")

from accelerate import Accelerator
from harness import jobs

import vescale_ckpt
from vescale_ckpt.integrations import accelerate

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
WITHOUT_GPU = Path(__file__).with_name("without_gpu.py")
TRAIN = str(ROOT / "examples" / "integrations" / "accelerate_train.py")
OWN = str(ROOT / "examples" / "integrations" / "accelerate_fsdp.py")

#: Restores a checkpoint of the example and saves it again as step 1 of another directory.
_SAVE_AGAIN = f"""
import runpy, sys, time
import torch.distributed as dist
from vescale_ckpt import CheckpointManager, IncompatibleStateError
train = runpy.run_path({TRAIN!r})
class Again(CheckpointManager):
    def restore(self, state):
        if state.get("dataloader") is not None:
            try:
                super().restore(state)
            except IncompatibleStateError as error:
                assert "dataloader" in str(error)
                print("step 0 loss 0x0p+0", flush=True)
            del state["dataloader"]
        step = super().restore(state)
        with CheckpointManager(sys.argv[3]) as other:
            other.save(1, state)
        return step
train["main"].__globals__["CheckpointManager"] = Again
train["main"](sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_killed_job_goes_on_with_the_same_losses(way: str, tmp_path: Path) -> None:
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    with jobs.started(WITHOUT_GPU, TRAIN, whole, way, VESCALE_CKPT_LOG="info") as job:
        assert job.wait() == [0, 0], job.text
        expected, text = job.losses, job.text
    assert text.count("plan reused") >= 2
    jobs.run_and_kill(WITHOUT_GPU, TRAIN, killed, way, at=7)
    resumed = jobs.run(WITHOUT_GPU, TRAIN, killed, way)
    assert min(resumed) in (5, 7)  # the save of step 6 may have been running
    jobs.assert_same(resumed, expected, min(resumed))

    newest = f"{whole}/step-8"
    info = vescale_ckpt.inspect(newest)
    assert info.writer == "vescale_ckpt"
    assert len(info.tensors["model.0.weight"].chunks) == (2 if way == "fsdp" else 1)
    loaded = _load_state_dict_from_keys("model", checkpoint_id=newest)
    assert torch.equal(loaded["model"]["0.weight"], vescale_ckpt.load(newest)["model"]["0.weight"])
    if way == "ddp":
        return

    # At the end of an epoch the next begins in an order of its own.
    shutil.rmtree(f"{whole}/step-8")
    jobs.assert_same(jobs.run(WITHOUT_GPU, TRAIN, whole, way), expected, 7)

    # On another number of ranks all but positions in the data and random states is the same.
    again = tmp_path / "again.py"
    again.write_text(_SAVE_AGAIN)
    jobs.run(WITHOUT_GPU, str(again), whole, way, str(tmp_path / "other"), ranks=1)
    _assert_equal(vescale_ckpt.load(newest), vescale_ckpt.load(tmp_path / "other" / "step-1"))


def test_a_killed_job_goes_on_from_an_object_store(tmp_path: Path, bucket_url: str) -> None:
    expected = jobs.run(WITHOUT_GPU, TRAIN, str(tmp_path / "whole"), "fsdp")
    jobs.run_and_kill(WITHOUT_GPU, TRAIN, bucket_url, "fsdp", at=7)
    resumed = jobs.run(WITHOUT_GPU, TRAIN, bucket_url, "fsdp")
    assert min(resumed) in (3, 5, 7)
    jobs.assert_same(resumed, expected, min(resumed))
    with vescale_ckpt.CheckpointManager(bucket_url) as manager:
        assert manager.steps() == [4, 6, 8]  # of which it keeps three
        assert all(vescale_ckpt.verify(f"{bucket_url}/step-{step}").ok for step in manager.steps())


def test_accelerates_own_saves_of_fsdp_go_through_this_package(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = jobs.run(WITHOUT_GPU, OWN, str(whole))
    jobs.run_and_kill(WITHOUT_GPU, OWN, str(killed), at=7)
    resumed = jobs.run(WITHOUT_GPU, OWN, str(killed))
    assert min(resumed) == 7
    jobs.assert_same(resumed, expected, 7)
    assert len(list((killed / "checkpoints").iterdir())) == 4
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        saved = killed / "checkpoints" / "checkpoint_3" / folder
        assert vescale_ckpt.inspect(saved).writer == "vescale_ckpt"
        expected_state = vescale_ckpt.load(whole / "checkpoints" / "checkpoint_3" / folder)
        _assert_equal(expected_state, vescale_ckpt.load(saved))
    weight = {"model": {"0.weight": torch.zeros(64, 32)}}
    dcp.load(weight, checkpoint_id=killed / "checkpoints" / "checkpoint_3" / "pytorch_model_fsdp_0")
    assert weight["model"]["0.weight"].abs().sum() > 0


def _assert_equal(expected: object, found: object) -> None:
    """The same tensors and values, but for those of data loaders and random states."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        for key in expected.keys() - {"dataloader", "random"}:
            _assert_equal(expected[key], found[key])
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(expected, found)  # type: ignore[arg-type]
    else:
        assert expected == found


def _prepared() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator


def test_what_is_prepared_and_registered_is_in_the_state(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (one, two)]
    average = torch.optim.swa_utils.AveragedModel(one)
    accelerator.prepare(one, two, *optimizers, torch.utils.data.DataLoader([1, 2, 3]))
    accelerator.register_for_checkpointing(average)
    state = accelerate.state_of(accelerator)
    wanted = {"model", "model_1", "optimizer", "optimizer_1", "dataloader", "object", "accelerator", "random"}
    assert state.keys() == wanted
    accelerator.step = 3
    accelerator._dataloaders[0].set_epoch(5)
    with torch.no_grad():
        average.module.weight.fill_(2.0)
    vescale_ckpt.save(tmp_path, state)
    accelerator.step = 0
    accelerator._dataloaders[0].set_epoch(0)
    with torch.no_grad():
        average.module.weight.fill_(0.0)
    vescale_ckpt.load(tmp_path, state)
    assert accelerator.step == 3
    assert accelerator._dataloaders[0].iteration == 5
    assert average.module.weight.unique().tolist() == [2.0]


def test_bad_input_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"expected an accelerate\.Accelerator, got dict"):
        accelerate.state_of({})  # type: ignore[arg-type]
    with pytest.raises(vescale_ckpt.CheckpointError, match=r"Call accelerator\.prepare before"):
        accelerate.state_of(Accelerator(cpu=True))
    accelerator = _prepared()
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "distributed_type", SimpleNamespace(name="DEEPSPEED"))
        with pytest.raises(vescale_ckpt.CheckpointError, match="DEEPSPEED"):
            accelerate.state_of(accelerator)
