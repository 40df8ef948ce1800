"""Tests `vescale_ckpt.integrations.transformers`, and transformers' own sharded saves."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from harness import jobs, steps
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

import vescale_ckpt
from vescale_ckpt.integrations import dcp as ours
from vescale_ckpt.integrations.transformers import VescaleCallback, last_sound_checkpoint, save_pretrained

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


@pytest.mark.parametrize("way", ["fsdp", "tp"])
def test_transformers_own_distributed_save_goes_through_this_package(way: str, tmp_path: Path) -> None:
    jobs.run(HERE / "save_distributed.py", str(tmp_path), way)
    _assert_equal_files(tmp_path / "saved", tmp_path / "consolidated")
    assert vescale_ckpt.verify(tmp_path / "saved").ok
    assert not vescale_ckpt.verify(tmp_path / "saved").unchecked


def _assert_equal_files(expected: Path, found: Path) -> None:
    left, right = (
        {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()} for path in (expected, found)
    )
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


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
    with steps.installed_version("6.0"), pytest.warns(UserWarning, match=r"transformers 5\.23 .*6\.0 is installed"):
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
