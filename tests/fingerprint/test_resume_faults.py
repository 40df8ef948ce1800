"""Faults of the field that `prove` names by key; the stale asynchronous snapshot is in test_runs.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.ranks import run_ranks
from harness.states import sharded_by
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import vescale_ckpt
from vescale_ckpt import PerRank, RandomState, StateDiffersError
from vescale_ckpt.integrations import dcp_defaults

State = dict[str, Any]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))  # type: ignore[no-any-return]


def _trained(model: torch.nn.Module, inputs: torch.Tensor) -> State:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model(inputs).square().sum().backward()
    optimizer.step()
    schedule.step()
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "random": PerRank(RandomState())}


def _resumed(path: Path, make: Callable[[], torch.nn.Module], inputs: torch.Tensor) -> State:
    """The state of another training, into which that of the first one was loaded and proved."""
    vescale_ckpt.save(path, _trained(make(), inputs), fingerprint=True)
    state = _trained(make(), inputs)
    vescale_ckpt.load(path, state)
    assert vescale_ckpt.prove(path, state)
    return state


def _different(path: Path, state: State) -> list[str]:
    with pytest.raises(StateDiffersError) as caught:
        vescale_ckpt.prove(path, state)
    assert not caught.value.missing and not caught.value.unexpected
    return [*caught.value.different]


def _layers() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 6, bias=False))


def test_a_resumed_state_is_proved(tmp_path: Path) -> None:
    saved, resumed = (_trained(_layers(), torch.randn(5, 6)) for _ in range(2))
    vescale_ckpt.save(tmp_path / "a", saved, fingerprint=True, extra_files={"config.json": b"{}"})
    assert json.loads((tmp_path / "a" / "fingerprint.json").read_bytes())["fingerprint"] == 1
    taken = vescale_ckpt.fingerprint(saved)
    files: dict[str, bytes] = {}
    vescale_ckpt.load(tmp_path / "a", resumed, extra_files=files)
    assert files == {"config.json": b"{}"}
    proof = vescale_ckpt.prove(tmp_path / "a", resumed)
    assert proof and proof.equal > 10 and proof.fingerprint == taken and str(taken) in str(proof)


def _transpose_moments(state: State) -> None:
    moments = state["optimizer"].state[state["model"][2].weight]["exp_avg"]
    moments.copy_(moments.reshape(4, 6).t().clone())


FAULTS: dict[str, tuple[Callable[[State], object], str]] = {
    "an optimizer whose layout is transposed": (_transpose_moments, r"1 different: optimizer\..*exp_avg "),
    "moments that are dropped": (
        lambda state: state["optimizer"].state.pop(state["model"][0].bias),
        r"not in the state: optimizer\.",
    ),
    "one bit": (
        lambda state: state["model"][0].weight.data.view(torch.int32)[1, 2].bitwise_xor_(1),
        r"1 different: model\.0\.weight \(rank 0: 1 of 24 elements\)",
    ),
    "a stale copy of an offloaded optimizer": (
        lambda state: state["optimizer"].state[state["model"][0].weight]["exp_avg_sq"].mul_(0.5),
        r"1 different: optimizer\..*exp_avg_sq \(rank 0: 24 of 24 elements\)",
    ),
    "a schedule that restores its own step": (
        lambda state: vars(state["schedule"]).update(last_epoch=7),
        r"1 different: schedule\.last_epoch",
    ),
    "a rate that the schedule sets again after the load": (
        lambda state: state["optimizer"].param_groups[0].update(lr=state["schedule"].base_lrs[0]),
        r"1 different: optimizer\..*lr",
    ),
    "random states that are not restored": (  # a framework seeds all when training begins
        lambda state: torch.manual_seed(0),
        r"1 different: random\.rank_0_of_1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_a_resume_is_named_by_its_key(tmp_path: Path, name: str) -> None:
    state = _resumed(tmp_path / "a", _layers, torch.randn(5, 6))
    fault, text = FAULTS[name]
    fault(state)
    with pytest.raises(StateDiffersError, match=text):
        vescale_ckpt.prove(tmp_path / "a", state)
    assert not vescale_ckpt.prove(tmp_path / "a", state, strict=False)


def test_a_tied_weight_that_is_untied(tmp_path: Path) -> None:
    state = _resumed(tmp_path / "a", Tied, torch.arange(8))
    # As code that finds it missing, and initialises it.
    state["model"].head.weight = torch.nn.Parameter(torch.zeros(8, 4))
    assert _different(tmp_path / "a", state) == ["model.head.weight"]


def _experts(directory: Path) -> None:
    rank, path = dist.get_rank(), directory / "a"

    def state() -> State:
        experts = {"up": sharded_by(torch.arange(24.0).view(4, 3, 2), 0), "down": sharded_by(torch.ones(4, 2), 0)}
        return {"experts": experts, "own": PerRank({"w": torch.full((3,), float(rank))}), "norm": torch.ones(3)}

    vescale_ckpt.save(path, state(), fingerprint=True)
    live = state()
    assert vescale_ckpt.prove(path, live)
    live["experts"]["up"].to_local().copy_(torch.arange(24.0).view(4, 3, 2)[2 - 2 * rank : 4 - 2 * rank])
    with pytest.raises(StateDiffersError) as caught:
        vescale_ckpt.prove(path, live)
    both = "rank 0: 12 of 12 elements, rank 1: 12 of 12 elements"
    assert caught.value.different == {"experts.up": both}
    live = state()
    live["own"].obj = {"w": torch.full((3,), float(1 - rank))}
    with pytest.raises(StateDiffersError) as caught:
        vescale_ckpt.prove(path, live)
    assert [*caught.value.different] == ["own.rank_0_of_2", "own.rank_1_of_2"]


def test_experts_of_another_rank(tmp_path: Path) -> None:
    run_ranks(2, _experts, tmp_path)


# --- Plain DCP: the line after dcp.load


def _dcp_state(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    state = _trained(model, torch.ones(2, 3))
    return model, state["optimizer"]


@pytest.mark.parametrize("is_ours", [False, True])
def test_what_dcp_loads_is_proved(tmp_path: Path, is_ours: bool) -> None:
    model, optimizer = _dcp_state(0)
    vescale_ckpt.save(tmp_path / "a", {"model": model, "optimizer": optimizer}, fingerprint=True)
    model, optimizer = _dcp_state(1)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if is_ours:
        with dcp_defaults():
            dcp.load(loaded, checkpoint_id=tmp_path / "a")
    else:
        dcp.load(loaded, checkpoint_id=tmp_path / "a")
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert vescale_ckpt.prove(tmp_path / "a", {"model": model, "optimizer": optimizer})
    optimizer.state[model[1].weight]["exp_avg"].zero_()  # type: ignore[index]
    assert _different(tmp_path / "a", {"model": model, "optimizer": optimizer}) == ["optimizer.state.1.weight.exp_avg"]
