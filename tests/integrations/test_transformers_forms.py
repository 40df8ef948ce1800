"""Folders of transformers that store a model in another form: the error of a load proposes what makes them fit."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_ckpt
from vescale_ckpt import MissingKeysError

transformers = pytest.importorskip("transformers", minversion="5")

_TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "MixtralForCausalLM": ("MixtralConfig", {**_TEXT, "num_local_experts": 3}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**_TEXT, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", {**_TEXT, "num_experts": 3, "shared_expert_intermediate_size": 8}),
    "OlmoeForCausalLM": ("OlmoeConfig", {**_TEXT, "num_experts": 3, "pad_token_id": 0, "eos_token_id": 1}),
    "ViTModel": ("ViTConfig", _IMAGE),
    "ViTForImageClassification": ("ViTConfig", _IMAGE),
    "DeiTModel": ("DeiTConfig", _IMAGE),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_proposal_gives_what_from_pretrained_gives(tmp_path: Path, name: str) -> None:
    config, options = MODELS[name]
    kind = getattr(transformers, name)
    kind(getattr(transformers, config)(**options)).save_pretrained(tmp_path)
    expected = kind.from_pretrained(tmp_path).state_dict()
    state = {key: torch.zeros_like(value) for key, value in expected.items()}
    with pytest.raises(MissingKeysError, match="transformers stores this model in another form") as error:
        vescale_ckpt.load(tmp_path, state)
    text = re.search(r"form: (.*) makes it fit", str(error.value))
    assert text is not None
    call = ast.parse(f"f({text[1]})", mode="eval").body
    assert isinstance(call, ast.Call)
    vescale_ckpt.load(tmp_path, state, **{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
    assert all(state[key].equal(value) for key, value in expected.items())


def test_nothing_is_proposed_that_does_not_fit(tmp_path: Path) -> None:
    config, options = MODELS["ViTModel"]
    model = transformers.ViTModel(getattr(transformers, config)(**options))
    model.save_pretrained(tmp_path)
    state = {**model.state_dict(), "layers.0.attention.q_proj.weight": torch.zeros(3)}
    with pytest.raises(MissingKeysError) as error:
        vescale_ckpt.load(tmp_path, state)
    assert "another form" not in str(error.value)
