"""Tests `vescale_ckpt.integrations.transformers`, and transformers' own sharded saves."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from harness import faults, jobs, steps
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

import vescale_ckpt
from vescale_ckpt.integrations import dcp as ours
from vescale_ckpt.integrations.transformers import OneCommit, VescaleCallback, last_sound_checkpoint, save_pretrained

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
WITHOUT_GPU = HERE / "without_gpu.py"
TRAINER = str(ROOT / "examples" / "integrations" / "transformers_fsdp.py")
NATIVE = ROOT / "examples" / "integrations" / "transformers_native.py"
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}

#: The example, which also saves the model when training begins.
_SAVES_WHEN_RESUMED = f"""
import runpy, sys
example = runpy.run_path({TRAINER!r})
def on_train_begin(self, args, state, control, model=None, **_):
    example["save_pretrained"](model, sys.argv[1] + "/resumed")
example["PrintLoss"].on_train_begin = on_train_begin
example["main"](sys.argv[1])
"""


def test_a_killed_trainer_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = jobs.run(WITHOUT_GPU, TRAINER, str(whole))
    jobs.run_and_kill(WITHOUT_GPU, TRAINER, str(killed), at=7)
    (killed / "checkpoint-6" / "optimizer_0" / ".metadata").unlink()  # as if killed in that save
    resumed = jobs.run(WITHOUT_GPU, TRAINER, str(killed))
    assert min(resumed) == 5
    jobs.assert_same(resumed, expected, 5)

    newest = killed / "checkpoint-8"
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert vescale_ckpt.inspect(newest / folder).writer == "vescale_ckpt"
    weight = {"model": {"lm_head.weight": torch.zeros(64, 32)}}
    dcp.load(weight, checkpoint_id=newest / "pytorch_model_fsdp_0")
    final = LlamaForCausalLM.from_pretrained(killed / "final")
    assert torch.equal(final.lm_head.weight, weight["model"]["lm_head.weight"])

    # On another number of ranks training begins with the same model.
    resumes = tmp_path / "resumes.py"
    resumes.write_text(_SAVES_WHEN_RESUMED)
    jobs.run(WITHOUT_GPU, str(resumes), str(whole), "fsdp", ranks=1)
    _assert_equal_files(whole / "resumed", killed / "final")


def test_a_killed_job_with_transformers_own_sharding_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = jobs.run(NATIVE, str(whole))
    jobs.run_and_kill(NATIVE, str(killed), at=7)
    resumed = jobs.run(NATIVE, str(killed))
    assert min(resumed) in (5, 7)
    jobs.assert_same(resumed, expected, min(resumed))
    _assert_equal_files(whole / "final", killed / "final")
    assert vescale_ckpt.inspect(killed / "step-8").writer == "vescale_ckpt"
    shutil.rmtree(whole / "final")
    with jobs.started(NATIVE, str(whole), ranks=1) as job:
        assert job.wait() == [0], job.text
    _assert_equal_files(whole / "final", killed / "final")


def _assert_equal_files(expected: Path, found: Path) -> None:
    left, right = (
        {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()} for path in (expected, found)
    )
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


ONE_COMMIT = HERE / "trainer_job.py"


@pytest.mark.parametrize(("way", "ranks"), [("plain", 1), ("plain", 2), ("fsdp", 2)], ids=["alone", "ddp", "fsdp"])
def test_a_trainer_of_one_commit_goes_on_bit_for_bit(way: str, ranks: int, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = jobs.run(WITHOUT_GPU, str(ONE_COMMIT), str(whole), way, ranks=ranks)
    with vescale_ckpt.CheckpointManager(whole) as manager:
        assert manager.steps() == [6, 7, 8]
    assert "model.lm_head.weight" in vescale_ckpt.inspect(whole / "step-8").tensors
    jobs.run_and_kill(WITHOUT_GPU, str(ONE_COMMIT), str(killed), way, at=5, ranks=ranks)
    resumed = jobs.run(WITHOUT_GPU, str(ONE_COMMIT), str(killed), way, ranks=ranks)
    assert 2 <= min(resumed) <= 8
    jobs.assert_same(resumed, expected, min(resumed))
    left, right = (vescale_ckpt.load(path / "step-8") for path in (whole, killed))
    assert left["model"].keys() == right["model"].keys()
    assert all(torch.equal(left["model"][key], right["model"][key]) for key in left["model"])

    _damage(whole / "step-8")  # is found when all is made
    jobs.assert_same(jobs.run(WITHOUT_GPU, str(ONE_COMMIT), str(whole), way, ranks=ranks), expected, 8)


def test_a_trainer_of_one_commit_goes_on_from_an_object_store(bucket_url: str, tmp_path: Path) -> None:
    expected = jobs.run(WITHOUT_GPU, str(ONE_COMMIT), str(tmp_path), ranks=1)
    jobs.run_and_kill(WITHOUT_GPU, str(ONE_COMMIT), bucket_url, at=6, ranks=1)
    resumed = jobs.run(WITHOUT_GPU, str(ONE_COMMIT), bucket_url, ranks=1)
    jobs.assert_same(resumed, expected, min(resumed))
    with vescale_ckpt.CheckpointManager(bucket_url) as manager:
        assert manager.steps() == [6, 7, 8]


#: The job, one rank of which is killed at a system call of the save of step 3.
_KILLED_JOB = f"""
import os, runpy, signal, sys, time
sys.path.insert(0, {str(HERE.parent)!r})
from harness import faults
from vescale_ckpt._checkpoint.native.step_order import complete_steps
job = runpy.run_path({str(ONE_COMMIT)!r})
place, way, rank, call, number, error = sys.argv[1:]
def on_step_end(self, args, state, control, **_):
    if state.global_step == 3 and os.environ["RANK"] == rank:
        until = time.monotonic() + 120
        while 2 not in complete_steps(place):  # its save goes on beside step 3
            assert time.monotonic() < until, "the save of step 2 did not end"
            time.sleep(0.01)
        faults.inject(call, int(error), int(number))
job["PrintLoss"].on_step_end = on_step_end
job["main"](place, way)
"""


@pytest.mark.parametrize(
    ("way", "rank", "call", "number", "error"),
    [
        ("plain", 1, "write", 0, -signal.SIGKILL),
        ("fsdp", 1, "sync", 0, -signal.SIGKILL),
        ("fsdp", 0, "rename", 0, -signal.SIGKILL),
        ("fsdp", 0, "sync_directory", 3, -signal.SIGKILL),
        ("fsdp", 1, "write", 0, errno.EIO),
    ],
)
def test_a_kill_or_an_error_of_one_rank_ends_all_and_leaves_a_whole_step(
    way: str, rank: int, call: str, number: int, error: int, tmp_path: Path
) -> None:
    place = str(tmp_path / "killed")
    expected = jobs.run(WITHOUT_GPU, str(ONE_COMMIT), str(tmp_path / "whole"), way)
    killed = tmp_path / "killed.py"
    killed.write_text(_KILLED_JOB)
    given = (place, way, str(rank), call, str(number), str(int(error)))
    # Rank 1's next save waits as long as this for the store of a rank 0 that was killed.
    with jobs.started(WITHOUT_GPU, str(killed), *given, VESCALE_CKPT_TIMEOUT="90") as running:
        statuses = running.wait()
    assert statuses[rank] == (error if error < 0 else 1) and 0 not in statuses, running.text
    resumed = jobs.run(WITHOUT_GPU, str(ONE_COMMIT), place, way)
    assert min(resumed) in (3, 4)  # the save of step 3 may have been committed
    jobs.assert_same(resumed, expected, min(resumed))


# --- In this process


@pytest.mark.parametrize(
    "model",
    [
        lambda: LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **SIZES)),
        lambda: MixtralForCausalLM(MixtralConfig(vocab_size=64, num_local_experts=2, num_key_value_heads=4, **SIZES)),
        lambda: LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES)).to(torch.bfloat16),
    ],
    ids=["tied", "experts", "bfloat16"],
)
def test_from_pretrained_reads_what_save_pretrained_wrote(model: Any, tmp_path: Path) -> None:
    made = model()
    save_pretrained(torch.compile(made), tmp_path)  # type: ignore[arg-type]
    loaded = type(made).from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(made).__name__]
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), loaded.parameters(), strict=True))
    assert loaded.dtype == made.dtype
    with torch.no_grad():
        for value in loaded.parameters():
            value.zero_()
    vescale_ckpt.load(tmp_path, {"": loaded})  # the same way back
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), loaded.parameters(), strict=True))


def test_other_objects_are_no_models_of_transformers(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        save_pretrained(nn.Linear(2, 2), tmp_path)


class _Model(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.fails = fails

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.fails:
            raise KeyError("in training")
        return {"loss": (self.weight * x).sum()}


def _trainer(path: Path, callback: VescaleCallback, **options: Any) -> Trainer:
    arguments = TrainingArguments(str(path), use_cpu=True, report_to=[], max_steps=1, save_strategy="no")
    return Trainer(_Model(**options), arguments, train_dataset=[{"x": torch.ones(2)}] * 4, callbacks=[callback])


def _is_ours() -> bool:
    return dcp.FileSystemWriter is ours.DefaultWriter


class _OneCommitTrainer(OneCommit, Trainer):  # type: ignore[misc]
    pass


class _Evaluates(_OneCommitTrainer):
    """Its loss is least after step 2."""

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        return {"eval_loss": abs(self.state.global_step - 2.0)}


def _samples(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.tensor([float(number), 1.0])} for number in range(count)]


def _one_commit(
    kind: Any,
    place: str,
    path: Path,
    steps: int,
    manager_options: dict[str, Any] | None = None,
    samples: int = 512,
    **options: Any,
) -> Any:
    return kind(
        _Model(), _arguments(path, steps, **options), train_dataset=_samples(samples), eval_dataset=[],
        checkpoints=place, manager_options=manager_options,
    )  # fmt: skip


def _arguments(path: Path, steps: int, **options: Any) -> TrainingArguments:
    given = {"save_strategy": "steps", "save_steps": 1, **options}
    return TrainingArguments(str(path), use_cpu=True, report_to=[], max_steps=steps, **given)


def test_a_step_without_an_evaluation_is_not_taken_for_the_best(tmp_path: Path) -> None:
    trainer = _one_commit(
        _Evaluates, str(tmp_path / "run"), tmp_path, 5, eval_strategy="steps", eval_steps=2,
        manager_options={"best": "eval_loss", "best_mode": "min", "max_to_keep": 2},
    )  # fmt: skip
    trainer.train()
    with vescale_ckpt.CheckpointManager(tmp_path / "run", best="eval_loss", best_mode="min") as manager:
        assert manager.steps() == [2, 4, 5] and manager.best_step() == 2  # 3 and 5 were not evaluated


def test_the_best_steps_stay_in_an_object_store_and_the_best_is_loaded(url: str, tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2}
    trainer = _one_commit(_Evaluates, url, tmp_path, 4, **best)
    trainer.train(resume_from_checkpoint=True)  # there is none: training begins
    assert trainer.state.best_model_checkpoint == f"{url}/step-2"
    with vescale_ckpt.CheckpointManager(url) as manager:
        assert manager.steps()[-1] == 4 and 2 in manager.steps() and len(manager.steps()) <= 3
    saved = vescale_ckpt.load(f"{url}/step-2")["model"]["weight"]
    assert torch.equal(trainer.model.weight, saved)
    assert not torch.equal(saved, vescale_ckpt.load(f"{url}/step-4")["model"]["weight"])
    assert not list(tmp_path.glob("checkpoint-*"))

    again = _one_commit(_Evaluates, url, tmp_path, 6, **best)
    again.train(resume_from_checkpoint=True)
    assert again._initial_global_step == 4 and again.state.global_step == 6
    assert torch.equal(again.model.weight, saved)


class _Metrics(_Evaluates):
    """Its metric is one of a list, by the step."""

    values: tuple[float, ...] = ()

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        return {"eval_loss": self.values[self.state.global_step - 1]}


class _Stock(Trainer):
    values: tuple[float, ...] = ()
    evaluate = _Metrics.evaluate  # type: ignore[assignment]


_EACH = {"eval_strategy": "steps", "eval_steps": 1}
_BEST = {"load_best_model_at_end": True, **_EACH}


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ((3, 2, 2, 4, 2, 5), {"save_total_limit": 1, **_BEST}),  # of equal ones a Trainer takes the first
        ((3, 2, 2, 4, 2, 5), {"save_total_limit": 2, **_BEST}),
        ((3, 1, 5, 4, 2, 2), {"save_total_limit": 3, **_BEST}),
        ((3, 1, 5, 4, 2, 2), {"save_total_limit": 2, "metric_for_best_model": "loss", **_EACH}),
        ((1, 3, 3, 2, 1, 0), {"save_total_limit": 2, "greater_is_better": True, **_BEST}),
        ((math.nan, 3, math.nan, 4, 2, math.nan), {"save_total_limit": 2, **_BEST}),
        ((math.nan,) * 6, {"save_total_limit": 2, **_BEST}),
        ((3, 1, 5, 4, 2, 2), {"save_total_limit": 0, **_BEST}),
        ((5, 4, 3, 1, 2, 2), {"save_steps": 3, "save_total_limit": 1, **_BEST}),  # the best one is not saved
        ((5, 4, 3, 1, 2, 0), {"save_steps": 3, "save_total_limit": 1, **_BEST}),
        (
            (5, 6, 3, 4, 2, 7),
            {"save_strategy": "best", "metric_for_best_model": "loss", "save_total_limit": 2, **_EACH},
        ),
        ((9, 4, 9, 3, 9, 5), {"save_strategy": "epoch", **_BEST, "eval_strategy": "epoch", "save_total_limit": 1}),
    ],
)
def test_a_trainer_of_one_commit_keeps_and_loads_what_a_trainer_does(
    values: tuple[float, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    """Trained at once, and with a resume after the fourth step."""
    for name, all_steps in (("at once", (6,)), ("resumed", (4, 6))):
        place = tmp_path / name
        for steps_ in all_steps:
            ours = _one_commit(_Metrics, str(place / "run"), place, steps_, samples=16, **options)
            of_stock = _arguments(place / "stock", steps_, **options)
            stock = _Stock(_Model(), of_stock, train_dataset=_samples(16), eval_dataset=[])
            ours.values = stock.values = values
            found = [*(place / "stock").glob("checkpoint-*")]
            stock.train(resume_from_checkpoint=bool(found))
            ours.train(resume_from_checkpoint=True)
        kept = {int(path.name.removeprefix("checkpoint-")) for path in (place / "stock").glob("checkpoint-*")}
        with vescale_ckpt.CheckpointManager(place / "run") as manager:
            last = manager.latest()
            assert {*manager.steps()} == kept | {last}, name  # a Trainer with limit 1 ends with the best one alone
        assert ours.state.best_global_step == stock.state.best_global_step
        named = [trainer.state.best_model_checkpoint for trainer in (ours, stock)]
        assert named[0] == (named[1] and f"{place / 'run'}/step-{named[1].rpartition('-')[2]}")
        assert torch.equal(ours.model.weight, stock.model.weight), name


@pytest.mark.parametrize("accumulated", [1, 2])
def test_other_gradient_accumulation_after_a_resume_is_as_with_a_trainer(accumulated: int, tmp_path: Path) -> None:
    weights = []
    for kind in (_one_commit_noting, _stock_noting):
        for steps_, accumulation in ((3, 2), (6, accumulated)):
            trainer = kind(tmp_path, steps_, gradient_accumulation_steps=accumulation)
            trainer.train(resume_from_checkpoint=steps_ == 6)
        weights.append(trainer.model.weight)
        losses = [{k: entry[k] for k in ("step", "loss")} for entry in trainer.state.log_history if "loss" in entry]
        weights.append(losses)
    assert torch.equal(weights[0], weights[2]) and weights[1] == weights[3]


def _one_commit_noting(path: Path, steps: int, **options: Any) -> Any:
    return _one_commit(_OneCommitTrainer, str(path / "run"), path, steps, samples=64, logging_steps=1, **options)


def _stock_noting(path: Path, steps: int, **options: Any) -> Any:
    return Trainer(_Model(), _arguments(path / "stock", steps, logging_steps=1, **options), train_dataset=_samples(64))


@pytest.mark.parametrize(
    "manager_options",
    [
        {"max_to_keep": 1},
        {"best": "eval_loss", "best_mode": "max", "max_to_keep": 1},
        {"tier": "local", "max_to_keep": 1},
    ],
)
def test_the_best_step_stays_whatever_the_manager_is_told(manager_options: dict[str, Any], tmp_path: Path) -> None:
    if "tier" in manager_options:
        tier = vescale_ckpt.Tier(tmp_path / "local", durable_interval_steps=100)
        manager_options = {**manager_options, "tier": tier}
    trainer = _one_commit(_Evaluates, str(tmp_path / "run"), tmp_path, 5, manager_options=manager_options, **_BEST)
    trainer.train()
    saved = vescale_ckpt.load(tmp_path / ("local" if "tier" in manager_options else "run") / "step-2")
    assert torch.equal(trainer.model.weight, saved["model"]["weight"])
    assert trainer.state.best_model_checkpoint == f"{tmp_path}/run/step-2"


def test_a_best_step_whose_save_fails_is_not_taken_for_the_best(tmp_path: Path) -> None:
    class Fails(_Metrics):
        values = (3, 2, 1, 4, 5)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self._manager.wait()
            if self.state.global_step == 3:
                faults.inject("write", errno.EIO, times=100)
            super()._save_checkpoint(model, trial)
            self._manager.wait()
            faults.clear()

    options = {"max_to_keep": 1, "on_error": "warn"}
    trainer = _one_commit(Fails, str(tmp_path / "run"), tmp_path, 5, manager_options=options, **_BEST)
    trainer.train()
    with vescale_ckpt.CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [2, 5]
    assert trainer.state.best_model_checkpoint == f"{tmp_path}/run/step-2"
    assert torch.equal(trainer.model.weight, vescale_ckpt.load(tmp_path / "run" / "step-2")["model"]["weight"])


def test_old_checkpoints_of_a_trainer_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-9").mkdir()
    trainer = _one_commit(_Evaluates, str(tmp_path), tmp_path, 4, save_total_limit=1, **_BEST)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("*-*")) == ["checkpoint-9", "step-2", "step-4"]


def _damage(step: Path) -> None:
    for file in step.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def test_a_gradient_scaler_is_saved_and_restored(tmp_path: Path) -> None:
    scales = []

    class Scales(_OneCommitTrainer):
        def create_optimizer(self, *args: Any) -> Any:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            return super().create_optimizer(*args)

        def _load_rng_state(self, checkpoint: Any) -> None:
            super()._load_rng_state(checkpoint)
            scales.append(self.accelerator.scaler.state_dict())

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            self.accelerator.scaler.update(32.0)
            super()._save_checkpoint(model, trial)

    _one_commit(Scales, str(tmp_path / "run"), tmp_path, 2).train()
    _one_commit(Scales, str(tmp_path / "run"), tmp_path, 3).train(resume_from_checkpoint=True)
    assert scales[-1]["scale"] == 32.0


def test_a_model_of_several_devices_is_saved_by_its_own_names(tmp_path: Path) -> None:
    trainer = _one_commit(_OneCommitTrainer, str(tmp_path / "run"), tmp_path, 1)
    trainer.args._n_gpu = 2  # then a Trainer takes `nn.DataParallel`, which without devices calls the model
    trainer.train()
    assert isinstance(trainer.model_wrapped, nn.DataParallel)
    assert vescale_ckpt.inspect(tmp_path / "run" / "step-1").tensors.keys() >= {"model.weight"}


def test_an_error_in_training_is_the_one_that_is_raised_and_the_save_before_is_durable(tmp_path: Path) -> None:
    class Fails(_OneCommitTrainer):
        def training_step(self, *args: Any, **options: Any) -> Any:
            if self.state.global_step == 2 and not self._resumed:
                faults.inject("write", errno.EIO)
                raise KeyError("in training")
            return super().training_step(*args, **options)

    place = str(tmp_path / "run")
    with pytest.raises(KeyError, match="in training"):
        _one_commit(Fails, place, tmp_path, 4).train()
    faults.clear()
    with vescale_ckpt.CheckpointManager(place) as manager:
        assert manager.latest() in (1, 2)
    again = _one_commit(Fails, place, tmp_path, 4)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4


def test_a_signal_ends_the_training_with_a_durable_step(tmp_path: Path) -> None:
    class Signalled(_OneCommitTrainer):
        def training_step(self, *args: Any, **options: Any) -> Any:
            if self.state.global_step == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            return super().training_step(*args, **options)

    trainer = _one_commit(
        Signalled,
        str(tmp_path / "run"),
        tmp_path,
        6,
        manager_options={"schedule": vescale_ckpt.Schedule(signal=signal.SIGUSR1)},
    )
    trainer.train()
    with vescale_ckpt.CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest() == trainer.state.global_step == 2


def test_what_one_commit_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="know no save_only_model"):
        _one_commit(_OneCommitTrainer, str(tmp_path), tmp_path, 1, save_only_model=True)
    trainer = _one_commit(_OneCommitTrainer, str(tmp_path), tmp_path, 1)
    with pytest.raises(TypeError, match="OneCommit takes True or False, got 'checkpoint-1'"):
        trainer.train(resume_from_checkpoint="checkpoint-1")
    with pytest.raises(vescale_ckpt.CheckpointError, match=r"within train\(\) alone"):
        trainer._save_checkpoint(trainer.model, None)
    vescale_ckpt.save(tmp_path / "step-1", {"model": torch.ones(2)})
    with pytest.raises(vescale_ckpt.CheckpointError, match="was not saved by OneCommit"):
        trainer.train(resume_from_checkpoint=True)


@pytest.fixture
def sharded() -> None:
    steps.fsdp_of_trainer("SHARDED_STATE_DICT").start()


def test_without_fsdp_the_callback_warns_and_changes_nothing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="changes nothing: without FSDP .*SHARDED_STATE_DICT"):
        trainer = _trainer(tmp_path, VescaleCallback())
    assert not _is_ours()
    trainer.train()
    assert not _is_ours()


def test_with_a_full_state_dict_the_callback_warns(tmp_path: Path) -> None:
    steps.fsdp_of_trainer("FULL_STATE_DICT").start()
    with pytest.warns(UserWarning, match=r"with StateDictType\.FULL_STATE_DICT"):
        _trainer(tmp_path, VescaleCallback())
    assert not _is_ours()


@pytest.mark.usefixtures("sharded")
def test_the_callback_works_from_making_to_the_end_of_each_training(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looks(VescaleCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(_is_ours())

    trainer = _trainer(tmp_path, Looks())
    assert _is_ours()
    trainer.train()
    assert not _is_ours()
    trainer.train()
    assert not _is_ours()
    assert seen == [True, True]


@pytest.mark.usefixtures("sharded")
def test_after_an_error_the_callback_ends_with_the_trainer_or_its_context(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, VescaleCallback(), fails=True)
    with pytest.raises(KeyError):
        trainer.train()
    assert _is_ours()
    del trainer
    gc.collect()
    assert not _is_ours()
    with pytest.raises(KeyError), VescaleCallback() as callback:
        _trainer(tmp_path, callback, fails=True).train()
    assert not _is_ours()


def test_an_untested_version_is_warned_about_and_a_missing_hook_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with steps.installed_version("6.0"), pytest.warns(UserWarning, match=r"transformers 5\.22 .*6\.0 is installed"):
        VescaleCallback()
    monkeypatch.delattr("accelerate.state.AcceleratorState")
    with pytest.raises(vescale_ckpt.CheckpointError, match=r"accelerate .* has no accelerate\.state\.AcceleratorState"):
        VescaleCallback().on_train_begin(None, None, None)


def _checkpoint(path: Path, step: int) -> Path:
    folder = path / f"checkpoint-{step}"
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        vescale_ckpt.save(folder / name, {"value": torch.ones(8)})
    (folder / "trainer_state.json").write_text("{}")
    return folder


def test_the_last_sound_checkpoint_is_the_newest_complete_one(tmp_path: Path) -> None:
    assert last_sound_checkpoint(tmp_path / "nothing") is None
    sound, *damaged = (_checkpoint(tmp_path, step) for step in (2, 10, 12, 14))
    (tmp_path / "checkpoint-best").mkdir()
    (damaged[0] / "trainer_state.json").write_text('{"epoch": ')
    (damaged[1] / "trainer_state.json").unlink()
    next((damaged[2] / "optimizer_0").glob("*.distcp")).write_bytes(b"short")
    with pytest.warns(UserWarning, match=r"checkpoint-1\d is passed over") as warned:
        assert last_sound_checkpoint(tmp_path) == str(sound)
    assert len(warned) == 3
