"""Faults of the field that `prove` names by key; those of one optimizer on one rank are in test_prove.py, and the stale
asynchronous snapshot in test_runs.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def test_a_tied_weight_that_is_untied(tmp_path: Path) -> None:
    state = _resumed(tmp_path / "a", Tied, torch.arange(8))
    # As code that finds it missing, and initialises it.
    state["model"].head.weight = torch.nn.Parameter(torch.zeros(8, 4))
    assert _different(tmp_path / "a", state) == ["model.head.weight"]


def test_a_rate_that_the_schedule_sets_again_after_the_load(tmp_path: Path) -> None:
    state = _resumed(tmp_path / "a", partial(torch.nn.Linear, 3, 2), torch.ones(2, 3))
    state["optimizer"].param_groups[0]["lr"] = state["schedule"].base_lrs[0]
    (key,) = _different(tmp_path / "a", state)
    assert key.startswith("optimizer.") and key.endswith("lr")


def test_random_states_that_are_not_restored(tmp_path: Path) -> None:
    state = _resumed(tmp_path / "a", partial(torch.nn.Linear, 3, 2), torch.ones(2, 3))
    torch.manual_seed(0)  # a framework seeds all when training begins
    assert _different(tmp_path / "a", state) == ["random.rank_0_of_1"]


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
