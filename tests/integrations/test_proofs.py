"""What docs/howto/prove.md says of frameworks: the line that proves a resume in each. Plain DCP: tests/fingerprint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import jobs
from harness.logs import logged

import vescale_ckpt
from vescale_ckpt import CheckpointManager, StateDiffersError

pytestmark = pytest.mark.slow
TORCHTITAN = Path(__file__).with_name("torchtitan_job.py")
PROVED = "what was restored is what was saved"


def test_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from vescale_ckpt.integrations.accelerate import state_of

    def state(seed: int) -> dict[str, Any]:
        accelerator = accelerate.Accelerator(cpu=True)
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        return state_of(accelerator)

    with CheckpointManager(tmp_path, prove=True, async_checkpoint=False) as manager, logged() as texts:
        manager.save(1, state(0))
        manager.restore(state(1))
        assert any(PROVED in text for text in texts)
        broken = state(1)
        broken["optimizer"].register_load_state_dict_post_hook(lambda optimizer: optimizer.state.clear())
        with pytest.raises(StateDiffersError, match=r"not in the state: optimizer\.state\."):
            manager.restore(broken)


def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from vescale_ckpt.integrations.transformers import OneCommit

    class MyTrainer(OneCommit, transformers.Trainer):  # type: ignore[misc, name-defined]
        pass

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.dropout = torch.nn.Parameter(torch.ones(2)), torch.nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.dropout(self.weight * x).sum()}

    def train(steps: int) -> None:
        arguments = transformers.TrainingArguments(
            str(tmp_path / "own"), use_cpu=True, report_to=[], max_steps=steps, save_strategy="steps", save_steps=1
        )
        trainer = MyTrainer(
            Model(), arguments, train_dataset=[{"x": torch.ones(2)}] * 64, checkpoints=str(tmp_path / "run"),
            manager_options={"prove": True},
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=True)

    train(2)
    with logged() as texts:
        train(4)
    lines = [text for text in texts if PROVED in text]
    assert any(int(text.partition(PROVED)[2].split()[1]) > 5 for text in lines), texts
    fingerprints = [vescale_ckpt.inspect(tmp_path / "run" / f"step-{step}").fingerprint for step in (1, 2, 3, 4)]
    assert None not in fingerprints and len({*fingerprints}) == 4


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from vescale_ckpt.integrations.lightning import DDP, newest

    monkeypatch.chdir(tmp_path)
    proofs: list[Any] = []

    class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    class Break(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.layer.bias.data.add_(1)

    class Prove(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.ckpt_path:
                state = {"state_dict": pl_module, "optimizer_0": trainer.optimizers[0]}
                proofs.append(vescale_ckpt.prove(trainer.ckpt_path, state))

    def train(steps: int, *before: Any) -> None:
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=DDP(fingerprint=True), max_steps=steps, logger=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*before, Prove(), pl.callbacks.ModelCheckpoint(tmp_path / "run", every_n_train_steps=1)],
        )  # fmt: skip
        data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
        trainer.fit(Model(), data, ckpt_path=newest(tmp_path / "run"))

    try:
        train(2)
        assert not proofs
        train(3)
        assert proofs and proofs[0].equal > 5
        with pytest.raises(StateDiffersError, match=r"1 different: state_dict\.layer\.bias"):
            train(4, Break())
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_torchtitan(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("torchtitan")
    options = {"OPTIONS": '={"prove": true}', "VESCALE_CKPT_LOG": "info"}
    jobs.run(TORCHTITAN, str(tmp_path), "--training.steps", "4", ranks=ranks, **options)
    with jobs.started(TORCHTITAN, str(tmp_path), "--training.steps", "6", ranks=ranks, **options) as job:
        assert job.wait() == [0] * ranks, job.text
        assert job.text.count(PROVED) == 1, job.text
