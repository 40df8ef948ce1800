"""Tests `RandomState`: generators go on where they were, on the same and on other numbers of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks

import vescale_ckpt
from vescale_ckpt import PerRank, RandomState


def draw() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.normal()]


def test_all_generators_go_on_where_they_were(tmp_path: Path) -> None:
    draw()  # leaves half of a pair of Gaussian numbers in two of the generators
    vescale_ckpt.save(tmp_path, {"random": PerRank(RandomState())})
    expected = draw()
    torch.manual_seed(0)
    draw()
    vescale_ckpt.load(tmp_path, {"random": PerRank(RandomState())})
    assert draw() == expected


def test_a_checkpoint_without_numpy_leaves_numpys_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RandomState().state_dict()
    del state["numpy"]
    numpy.random.seed(5)
    before = numpy.random.get_state()[1].tolist()
    RandomState().load_state_dict(state)
    assert numpy.random.get_state()[1].tolist() == before


def _save(directory: Path) -> list[Any]:
    torch.manual_seed(100 + dist.get_rank())
    random.seed(dist.get_rank())
    vescale_ckpt.save(directory, {"random": PerRank(RandomState())}, timeout=60)
    return draw()[:3]


def _load(directory: Path) -> list[Any]:
    vescale_ckpt.load(directory, {"random": PerRank(RandomState())}, timeout=60)
    return draw()[:3]


def test_another_number_of_ranks_gets_states_of_its_own(tmp_path: Path) -> None:
    saved = run_ranks(2, _save, tmp_path)
    assert run_ranks(2, _load, tmp_path) == saved
    of_three = run_ranks(3, _load, tmp_path)
    assert of_three[:2] == saved
    assert of_three[2] not in saved
    assert run_ranks(3, _load, tmp_path) == of_three  # the new rank's seed is the same in every run
    assert run_ranks(1, _load, tmp_path) == saved[:1]
