"""Tests `vescale_ckpt.integrations.peft`, and adapters that TRL trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft")
pytest.importorskip("transformers")

from harness import jobs
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import vescale_ckpt
from vescale_ckpt.integrations.peft import Adapter, save_adapter

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
LORA = Path(__file__).resolve().parents[2] / "examples" / "integrations" / "peft_lora.py"
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_a_killed_job_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with jobs.started(LORA, str(whole), VESCALE_CKPT_LOG="info") as job:
        assert job.wait() == [0, 0], job.text
        expected = job.losses
        assert job.text.count("plan reused") >= 2
    jobs.run_and_kill(LORA, str(killed), at=7)
    resumed = jobs.run(LORA, str(killed))
    assert min(resumed) in (5, 7)
    jobs.assert_same(resumed, expected, min(resumed))
    _assert_equal_adapters(whole, killed)

    info = vescale_ckpt.inspect(killed / "step-8")
    assert info.writer == "vescale_ckpt"
    of_model = [key for key in info.tensors if key.startswith("model.")]
    assert len(of_model) == 8  # A and B of two projections in two layers
    assert all("lora" in key for key in of_model)

    # On another number of ranks: nothing is left to train, and the adapter is the same.
    shutil.rmtree(whole / "adapter")
    with jobs.started(LORA, str(whole), ranks=1) as job:
        assert job.wait() == [0], job.text
    _assert_equal_adapters(whole, killed)


def test_an_adapter_that_trl_trains_with_fsdp_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    script = str(HERE / "sft_fsdp.py")
    expected = jobs.run(HERE / "without_gpu.py", script, str(tmp_path))
    newest = tmp_path / "checkpoint-8"
    info = vescale_ckpt.inspect(newest / "pytorch_model_fsdp_0")
    assert info.writer == "vescale_ckpt"
    assert all("lora" in key for key in info.tensors)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (newest / "trainer_state.json").unlink()  # as if killed in that save
    shutil.rmtree(tmp_path / "checkpoint-6")
    jobs.assert_same(jobs.run(HERE / "without_gpu.py", script, str(tmp_path)), expected, 5)
    again = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(adapter[key], again[key]) for key in adapter.keys() | again.keys())


def _assert_equal_adapters(expected: Path, found: Path) -> None:
    left, right = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (expected, found))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)


# --- In this process


def _model(seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES))
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options))


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}], ids=str)
def test_peft_reads_the_folder_of_an_adapter(options: dict[str, Any], tmp_path: Path) -> None:
    model, words = _model(1, **options).eval(), torch.arange(8)[None]
    save_adapter(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    names = [(tmp_path / name / "adapter_config.json").read_text() for name in ("ours", "theirs")]
    assert names[0] == names[1]
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, **SIZES))
    loaded = PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    with torch.no_grad():
        assert torch.equal(model(input_ids=words).logits, loaded(input_ids=words).logits)
    assert vescale_ckpt.verify(tmp_path / "ours").ok


def test_one_of_several_adapters_is_restored_into_another_model(tmp_path: Path) -> None:
    model, other = _model(1), _model(2)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    other.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    vescale_ckpt.save(tmp_path, {"model": Adapter(model, "second")})
    vescale_ckpt.load(tmp_path, {"model": Adapter(other, "second")})
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name] if "second" in name else before[name]), name


def test_bad_input_is_one_clear_error() -> None:
    with pytest.raises(TypeError, match=r"expected a peft\.PeftModel, got Linear"):
        Adapter(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="adapter_name='other': the model has 'default'"):
        Adapter(_model(), "other")
