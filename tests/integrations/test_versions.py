"""Tests what integrations say about versions of frameworks that they were not tested with."""

from __future__ import annotations

import warnings

import pytest
import torch

from vescale_ckpt import CheckpointError
from vescale_ckpt.integrations._versions import check_version, hook


def test_an_untested_version_is_named_together_with_the_tested_range() -> None:
    with pytest.warns(UserWarning, match=r"pytest 0\.1 up to, but not including, 0\.2: pytest .* is installed"):
        check_version("pytest", ("0.1", "0.2"))
    with pytest.warns(UserWarning, match=r"torch 99"):
        check_version("torch", ("99", "100"))


def test_a_tested_version_and_one_that_is_not_known_pass() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version("pytest", ("1.9", "1000"))  # numbers are compared, not texts
        check_version("no_such_distribution", ("1", "2"))


def test_a_hook_is_imported() -> None:
    assert hook("torch.optim", "Adam") is torch.optim.Adam
    assert hook("torch.nn", "Module.state_dict") is torch.nn.Module.state_dict


@pytest.mark.parametrize("module, name", [("torch.optim", "Adam.fly"), ("torch.optim_gone", "Adam")])
def test_a_hook_that_is_gone_is_one_clear_error(module: str, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"torch \d.* has no {module}\.{name}, which vescale_ckpt"):
        hook(module, name)
