"""SIGKILL at each file-system call of trainings with `OneCommit`, and with Accelerate's `state_of`: the checkpoints are
whole, and training goes on from the newest with the losses of a run that was not killed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from harness import faults, jobs, steps
from harness.children import ChildError, in_child, killed_before
from harness.states import same
from transformers import Trainer, TrainerCallback, TrainingArguments

import vescale_ckpt
from vescale_ckpt import CheckpointManager
from vescale_ckpt.integrations.accelerate import state_of
from vescale_ckpt.integrations.transformers import OneCommit

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
EVERY = int(os.environ.get("VESCALE_CKPT_TEST_KILL_EVERY", "4"))  # 1: at each call
STEPS, KEPT = 4, 2  # of saves, and of checkpoints that stay
#: System calls of the engine in saves and clean-ups, those that read included.
CALLS = ["open", "allocate", "write", "sync", "sync_directory", "rename", "exchange", "link", "unlink", "close"]
CHANGES_IN_PYTHON: list[tuple[object, str]] = [*steps.CHANGES_OF_FOLDERS, (os, "unlink"), (os, "rmdir")]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


class _OneCommitTrainer(OneCommit, Trainer):  # type: ignore[misc]
    pass


class _NoteLoss(TrainerCallback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            _note(self.file, state.global_step, logs["loss"])


def _note(file: Path, step: int, loss: float) -> None:
    with file.open("a") as opened:
        opened.write(f"{step} {float(loss).hex()}\n")


def _losses(file: Path) -> dict[int, str]:
    return {int(step): loss for step, loss in (line.split() for line in file.read_text().splitlines())}


def _train(root: Path, kept: int | None, at: Callable[[], Any] = nullcontext) -> dict[str, int]:
    """Trains or goes on with `root/run`, and notes the losses. Returns how many calls of each kind it made."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(root / "own"), use_cpu=True, report_to=[], max_steps=STEPS, save_steps=1, logging_steps=1,
        save_total_limit=kept, per_device_train_batch_size=4, learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    data = [{"x": torch.randn(16)} for _ in range(8)]  # two steps an epoch: a Trainer that ended in one would train on
    trainer = _OneCommitTrainer(
        _Model(), arguments, train_dataset=data, callbacks=[_NoteLoss(root / "losses")], checkpoints=str(root / "run")
    )
    with _counted() as calls, at():
        trainer.train(resume_from_checkpoint=True)
    return calls


def _train_with_accelerate(root: Path, kept: int | None, at: Callable[[], Any] = nullcontext) -> dict[str, int]:
    set_seed(0)
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    module, data = _Model(), torch.randn(8, 16)
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator())  # type: ignore[arg-type]
    model, optimizer, scheduler, batches = accelerator.prepare(
        module, adam, torch.optim.lr_scheduler.CosineAnnealingLR(adam, 100), loader
    )
    state = state_of(accelerator)
    with _counted() as calls, at(), CheckpointManager(root / "run", max_to_keep=kept) as manager:
        step = manager.restore(state) if manager.latest() is not None else 0
        while step < STEPS:
            for batch in batches:
                loss = model(batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                _note(root / "losses", step, loss.item())
                manager.save(step, state)
                if step == STEPS:
                    break
    return calls


@dataclass(frozen=True)
class _Training:
    run: Callable[..., dict[str, int]]
    keys: set[str]
    files: set[str]


TRAININGS = {
    "OneCommit": _Training(_train, {"model", "optimizer", "scheduler", "random"}, {"trainer_state.json"}),
    "accelerate": _Training(
        _train_with_accelerate,
        {"model", "optimizer", "scheduler", "dataloader", "accelerator", "random"},
        set(),
    ),
}


@contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """Gives a dict that has at its end how many calls of each kind were made."""
    faults.clear()
    faults.inject("write", 0, skip=1 << 40)  # calls are counted while a fault waits
    calls: dict[str, int] = {}
    yield calls
    calls.update({call: faults.calls_seen(call) for call in CALLS})


@contextmanager
def _killed_at(call: str, number: int) -> Iterator[None]:
    faults.inject(call, -signal.SIGKILL, number)
    yield


@pytest.fixture(scope="module", params=list(TRAININGS))
def training(request: pytest.FixtureRequest) -> _Training:
    return TRAININGS[request.param]


@pytest.fixture(scope="module")
def whole(training: _Training, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not killed, with all its checkpoints."""
    root = tmp_path_factory.mktemp("whole")
    in_child(training.run, root, None)
    assert len(_losses(root / "losses")) == STEPS
    return root


def _goes_on_after_a_kill(training: _Training, root: Path, whole: Path, at: Callable[[], Any]) -> bool:
    """Returns whether the training was killed, and did not end before."""
    root.mkdir()
    try:
        in_child(training.run, root, KEPT, at)
        killed = False
    except ChildError as error:
        assert "died by signal 9" in str(error), error
        killed = True
    with CheckpointManager(root / "run") as manager:
        latest, found = manager.latest(full=True), manager.steps()
        for step in found:
            _assert_whole(training, f"{root}/run/step-{step}", f"{whole}/run/step-{step}")
    assert latest == max(found, default=None)
    expected, before = _losses(whole / "losses"), _losses(root / "losses") if latest else {}
    assert (latest or 0) >= max(before, default=0) - 2  # the save before the last one was durable
    (root / "losses").unlink(missing_ok=True)
    in_child(training.run, root, KEPT)
    resumed = _losses(root / "losses") if (root / "losses").exists() else {}
    assert resumed == {step: loss for step, loss in expected.items() if step > (latest or 0)}
    _assert_whole(training, f"{root}/run/step-{STEPS}", f"{whole}/run/step-{STEPS}")
    if latest != STEPS:  # else nothing was saved, and so nothing removed
        assert sorted(path.name for path in (root / "run").glob("step-*")) == ["step-3", "step-4"]
    shutil.rmtree(root)
    return killed


def _assert_whole(training: _Training, path: str, expected: str) -> None:
    """Model, optimizer, scheduler, random states and all else are those of this step of the other run."""
    files: tuple[dict[str, bytes], dict[str, bytes]] = ({}, {})
    found, wanted = (
        vescale_ckpt.load(place, extra_files=file) for place, file in zip((path, expected), files, strict=True)
    )
    assert found.keys() == wanted.keys() == training.keys
    assert [key for key in found if not same(found[key], wanted[key])] == [], path
    assert files[0] == files[1] and files[0].keys() == training.files, path


@pytest.mark.parametrize("call", CALLS)
def test_a_kill_at_any_system_call_leaves_a_whole_step(
    call: str, training: _Training, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "counted").mkdir()
    calls = in_child(training.run, tmp_path / "counted", KEPT).value[call]
    numbers: Sequence[int] = range(0, calls, EVERY)
    killed = sum(
        _goes_on_after_a_kill(training, tmp_path / str(number), whole, lambda number=number: _killed_at(call, number))
        for number in numbers
    )
    assert killed >= 0.8 * len(numbers)  # asynchronous saves do not always make the same calls


#: The job of test_transformers.py, one rank of which is killed at a system call of the save of step 3.
_KILLED_JOB = f"""
import os, runpy, signal, sys, time
sys.path.insert(0, {str(HERE.parent)!r})
from harness import faults
from vescale_ckpt._checkpoint.native.step_order import complete_steps
job = runpy.run_path({str(HERE / "trainer_job.py")!r})
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
    job, without_gpu, place = HERE / "trainer_job.py", HERE / "without_gpu.py", str(tmp_path / "killed")
    expected = jobs.run(without_gpu, str(job), str(tmp_path / "whole"), way)
    killed = tmp_path / "killed.py"
    killed.write_text(_KILLED_JOB)
    given = (place, way, str(rank), call, str(number), str(int(error)))
    # Rank 1's next save waits as long as this for the store of a rank 0 that was killed.
    with jobs.started(without_gpu, str(killed), *given, VESCALE_CKPT_TIMEOUT="90") as running:
        statuses = running.wait()
    assert statuses[rank] == (error if error < 0 else 1) and 0 not in statuses, running.text
    resumed = jobs.run(without_gpu, str(job), place, way)
    assert min(resumed) in (3, 4)  # the save of step 3 may have been committed
    jobs.assert_same(resumed, expected, min(resumed))


def test_a_kill_at_any_change_of_a_folder_leaves_a_whole_step(training: _Training, whole: Path, tmp_path: Path) -> None:
    number = 0
    while _goes_on_after_a_kill(
        training, tmp_path / str(number), whole, lambda number=number: killed_before(number, CHANGES_IN_PYTHON)
    ):
        number += EVERY
    assert number >= 8
