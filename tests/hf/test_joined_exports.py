"""Exports whose ranks put short runs of tensors together in memory that they share: the same files, or none."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import faults, steps
from harness.ranks import run_ranks
from harness.states import same, sharded
from test_safetensors_save import nothing_left, read, state_of_rank, whole
from torch.distributed.tensor import Shard

import vescale_ckpt
from vescale_ckpt import CheckpointError
from vescale_ckpt._engine import _C
from vescale_ckpt._routes import node_buffer, routed_write
from vescale_ckpt._write import safetensors_layout

NEVER = 1 << 60
GATHER = _C.gather_boxes


@contextlib.contextmanager
def joining(least_bytes: int = 1) -> Iterator[mock.Mock]:
    """Exports within it take many rounds. The mock sees each copy to ranks that write: table, threads."""
    gather = mock.Mock(side_effect=GATHER)
    with (
        mock.patch.object(safetensors_layout, "LEAST_BYTES", least_bytes),
        mock.patch.object(routed_write, "PIECE_BYTES", 128 << 10),
        mock.patch.object(_C, "gather_boxes", lambda *arguments: gather(*arguments)),
    ):
        yield gather


def save(directory: str, state: dict[str, Any], **options: Any) -> Any:
    return vescale_ckpt.save(
        directory, state, format=vescale_ckpt.Safetensors(max_shard_size="5MB"), timeout=60.0, **options
    )


def _export(directory: str, shape: tuple[int, ...]) -> list[int]:
    state = state_of_rank(shape)
    state["tied"] = state["columns"]
    written = []
    with joining(NEVER) as gather:
        save(f"{directory}/alone", state)
        assert not gather.called
    with joining() as gather, steps.no_plans_known():
        for way in ("together", "again"):
            written.append(save(f"{directory}/{way}", state).result().bytes)
            assert gather.call_count > 16, way  # rounds
            gather.reset_mock()
        save(f"{directory}/async", state, async_checkpoint=True).result(60)
        assert gather.called
        gather.reset_mock()
        with mock.patch.dict(
            os.environ, VESCALE_CKPT_SNAPSHOT_BYTES="1000000" if dist.get_rank() == 1 else "100000000"
        ):
            save(f"{directory}/early", state, async_checkpoint=True).result(60)
        assert not gather.called  # a rank that has written a part before cannot take part
    with joining() as gather, mock.patch.dict(os.environ, VESCALE_CKPT_NODE=str(dist.get_rank())):
        save(f"{directory}/nodes", state)
        assert not gather.called
    return written


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_the_files_are_those_of_ranks_that_write_alone(checkpoint: Path, shape: tuple[int, ...]) -> None:
    size = 2 if shape == (2,) else 4
    written = run_ranks(size, _export, str(checkpoint), shape)
    expected = whole()
    assert same(read(checkpoint / "together"), expected)
    for way in ("together", "again", "async", "early", "nodes"):
        assert nothing_left(checkpoint / way)
        for path in (checkpoint / "alone").iterdir():
            assert (checkpoint / way / path.name).read_bytes() == path.read_bytes(), (way, path.name)
    total = sum(tensor.nbytes for tensor in expected.values())
    for of_ranks in zip(*written, strict=True):
        assert sum(of_ranks) == total and max(of_ranks) < 1.3 * total / size


def columns(k: int) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(1_200_000.0).view(600, 2000) + k, "b": torch.arange(99_000.0).view(990, 100) * k}


def _sharded_columns(k: int) -> dict[str, torch.Tensor]:
    return {name: sharded(value, Shard(1)) for name, value in columns(k).items()}


def _save_columns(directory: str, who: int, what: str) -> str:
    state = _sharded_columns(1)
    mine = dist.get_rank() == who
    with contextlib.ExitStack() as stack:
        gather = stack.enter_context(joining())
        warned = stack.enter_context(mock.patch.object(safetensors_layout.logger, "warning"))
        if mine and what == "memory":
            stack.enter_context(mock.patch("os.memfd_create", side_effect=OSError(errno.ENOMEM, "no memory")))
        elif mine and what == "namespace":
            stack.enter_context(mock.patch.object(node_buffer, "_open", side_effect=FileNotFoundError("/proc/1/fd/3")))
        elif mine and what == "die":

            def gather_and_die(table: bytes, threads: int) -> None:
                if gather.call_count == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                GATHER(table, threads)

            gather.side_effect = gather_and_die
        elif mine and what == "late":

            def fail_late(table: bytes, threads: int) -> None:
                if gather.call_count == 4:
                    raise OSError(errno.EIO, "the disk is gone")

            gather.side_effect = fail_late
        elif mine and what:
            call, error = what.split()
            faults.inject(call, getattr(errno, error), 0, 1000)
        try:
            save(directory, state)
        except CheckpointError as raised:
            return f"{type(raised).__name__} {getattr(raised, 'rank', None)}: {raised}"
        finally:
            faults.clear()
        return f"saved, {'together' if gather.called else 'alone'}, {warned.call_count} warnings"


@pytest.mark.parametrize("what", ["memory", "namespace"])
def test_without_shared_memory_each_rank_writes_its_own(checkpoint: Path, what: str) -> None:
    answers = run_ranks(2, _save_columns, str(checkpoint), 1, what)
    assert answers == ["saved, alone, 0 warnings", "saved, alone, 1 warnings"]
    assert same(read(checkpoint), columns(1))


@pytest.mark.parametrize(
    ("what", "kind"),
    [("write ENOSPC", "StorageFullError 1"), ("open EIO", "CheckpointError 1"), ("late", "SaveFailedError 1")],
)
def test_the_error_of_one_rank_ends_the_rounds_of_all(checkpoint: Path, what: str, kind: str) -> None:
    vescale_ckpt.save(checkpoint, columns(0), format="safetensors")
    answers = run_ranks(2, _save_columns, str(checkpoint), 1, what)
    assert all(answer.startswith(kind) for answer in answers), answers
    assert same(read(checkpoint), columns(0)) and nothing_left(checkpoint)
    assert run_ranks(2, _save_columns, str(checkpoint), -1, "") == ["saved, together, 0 warnings"] * 2
    assert same(read(checkpoint), columns(1)) and nothing_left(checkpoint)


def test_a_rank_that_dies_between_rounds_is_named(checkpoint: Path) -> None:
    vescale_ckpt.save(checkpoint, columns(0), format="safetensors")
    answers = run_ranks(2, _save_columns, str(checkpoint), 1, "die", check=False)
    assert "CheckpointTimeoutError" in str(answers[0]) and "rank 1" in str(answers[0]), answers
    assert same(read(checkpoint), columns(0))
    vescale_ckpt.save(checkpoint, columns(2), format="safetensors")
    assert same(read(checkpoint), columns(2)) and nothing_left(checkpoint)
