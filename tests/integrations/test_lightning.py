"""Tests `vescale_ckpt.integrations.lightning` with Lightning's own Trainer and Fabric."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import steps

pytest.importorskip("lightning")
pytest.importorskip("torchdata")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from harness import jobs, stores
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as StockFabricModelParallel
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning_job import fsdp1_on_the_cpu
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torchdata.stateful_dataloader import StatefulDataLoader

import vescale_ckpt
from vescale_ckpt import CheckpointError, MissingKeysError, SaveFailedError, UntrustedCheckpointError
from vescale_ckpt.integrations import lightning as ours

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "integrations" / "train_lightning.py"
JOB = Path(__file__).with_name("lightning_job.py")


@pytest.fixture(autouse=True)
def own_process_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # a Trainer leaves folders there
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    fsdp1_on_the_cpu(monkeypatch.setattr)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Model(pl.LightningModule):
    def __init__(self, optimizers: int = 1, shard: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.automatic_optimization = optimizers == 1
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.hparams["shard"]:
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), lr=0.05)
        return torch.optim.AdamW(self.first.parameters(), lr=0.05), torch.optim.SGD(
            self.second.parameters(), lr=0.01, momentum=0.9
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(batch)))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = F.mse_loss(self(batch), batch.sum(1, keepdim=True))
        self.losses.append(loss.item())
        self.log("loss", loss)
        self.log("zigzag", torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0, 0.0][self.trainer.global_step % 6]))
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("seen", self(batch).sum())


def data() -> StatefulDataLoader[torch.Tensor]:
    return StatefulDataLoader(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), batch_size=4)


def trainer(strategy: Any, *callbacks: Callback, steps: int = 4, **options: Any) -> pl.Trainer:
    torch.manual_seed(0)
    return pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, callbacks=list(callbacks), logger=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def every(folder: Path, steps: int = 1, **options: Any) -> ModelCheckpoint:
    options.setdefault("save_on_train_epoch_end", False)
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=steps, **options)


def trained(strategy: Any, *callbacks: Callback, steps: int = 4, resume: Any = None, **model: Any) -> Model:
    """A model after `steps` steps."""
    made = trainer(strategy, *callbacks, steps=steps)
    result = Model(**model)
    made.fit(result, data(), ckpt_path=resume)
    return result


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def sharded(kind: Any, **options: Any) -> Any:
    return kind(data_parallel_size=1, tensor_parallel_size=1, **options)


# --- Killed jobs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return jobs.run(EXAMPLE, str(tmp_path_factory.mktemp("undisturbed")))


def test_a_killed_job_with_asynchronous_saves_goes_on_bit_for_bit(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    jobs.run_and_kill(EXAMPLE, str(tmp_path), at=7)
    resumed = jobs.run(EXAMPLE, str(tmp_path))
    assert min(resumed) in (5, 7)  # the save of step 6 may have been running
    jobs.assert_same(resumed, undisturbed, first=min(resumed))
    last = ours.newest(tmp_path)
    assert last is not None and last.endswith("step=8.ckpt")
    info = vescale_ckpt.inspect(last)
    assert info.writer == "vescale_ckpt" and info.extra_files == ["meta.pt"]


def test_a_killed_job_goes_on_on_another_number_of_ranks(tmp_path: Path, undisturbed: dict[int, str]) -> None:
    jobs.run_and_kill(EXAMPLE, str(tmp_path), at=6)
    resumed = jobs.run(EXAMPLE, str(tmp_path), ranks=1)
    assert min(resumed) in (3, 5)
    jobs.assert_close(resumed, undisturbed, first=min(resumed))


@pytest.mark.parametrize("strategy", ["DDP", "FSDP"])
def test_strategies_go_on_after_a_kill(tmp_path: Path, strategy: str) -> None:
    expected = jobs.run(JOB, str(tmp_path / "a"), strategy)
    jobs.run_and_kill(JOB, str(tmp_path / "b"), strategy, at=6)
    resumed = jobs.run(JOB, str(tmp_path / "b"), strategy)
    assert min(resumed) == 5
    jobs.assert_same(resumed, expected, first=5)


def test_a_killed_job_goes_on_from_an_object_store(tmp_path: Path, bucket_url: str) -> None:
    expected = jobs.run(JOB, str(tmp_path), "DDP", "async")
    jobs.run_and_kill(JOB, bucket_url, "DDP", "async", at=7)
    resumed = jobs.run(JOB, bucket_url, "DDP", "async")
    assert min(resumed) in (3, 5, 7)
    jobs.assert_same(resumed, expected, first=min(resumed))
    last = ours.newest(bucket_url)
    assert last is not None and last.endswith("step=8.ckpt") and vescale_ckpt.verify(last).ok


def test_a_kill_within_an_asynchronous_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    jobs.run_and_kill(JOB, str(tmp_path), "DDP", at=3, ranks=1)
    before = ours.newest(tmp_path)
    assert before is not None and before.endswith("step=2.ckpt")
    with jobs.started(JOB, str(tmp_path), "DDP", "async", "slow", ranks=1) as job:  # a save lasts until the kill
        job.wait_for_step(5)
        time.sleep(0.5)
        job.kill()
        job.wait()
    assert ours.newest(tmp_path) == before and "epoch=1-step=4.ckpt" in names(tmp_path)
    assert min(jobs.run(JOB, str(tmp_path), "DDP", ranks=1)) == 3


# --- Asynchronous saves and removals


class Held:
    """Lets asynchronous saves write only when the test says so, or fails them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.go.set()
        self.fails_at = 0
        self.count = 0

        def held(save: Any) -> None:
            assert self.go.wait(60)
            self.count += 1
            if self.count == self.fails_at:
                save.steps.error = OSError("no disk")

        steps.before("write and commit", held).start()


class Watcher(Callback):
    """Calls a function after each step. Comes before ModelCheckpoint, which Lightning puts last."""

    def __init__(self, look: Callable[[int], None]) -> None:
        self.look = look

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.look(trainer.global_step)


def test_an_old_checkpoint_stays_until_the_new_one_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    seen = {}

    def look(step: int) -> None:
        seen[step] = ours.newest(tmp_path)
        if step == 3:  # the save of step 2 was held: now it ends
            held.go.set()

    class Hold(Callback):  # comes after ModelCheckpoint has begun the save of step 2
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                strategy.wait_for_save()
                held.go.clear()

    strategy = ours.DDP(async_checkpoint=True)
    trained(strategy, Hold(), Watcher(look), every(tmp_path, save_top_k=1))
    assert seen[3] == str(tmp_path / "step=1.ckpt")  # ModelCheckpoint had removed it at step 2
    assert names(tmp_path) == ["step=4.ckpt"]


@pytest.mark.parametrize("fails_at", [2, 4])
def test_the_error_of_an_asynchronous_save_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """At the next save, and for the last one at the end of training."""
    held = Held(monkeypatch)
    held.fails_at = fails_at
    with pytest.raises(CheckpointError, match="no disk"):
        trained(ours.DDP(async_checkpoint=True), every(tmp_path, save_top_k=1))
    assert ours.newest(tmp_path) == str(tmp_path / f"step={fails_at - 1}.ckpt")
    assert trained(ours.DDP(), steps=5, resume=ours.newest(tmp_path)).losses


def test_an_error_of_one_ranks_save_ends_training_on_all(tmp_path: Path) -> None:
    with jobs.started(JOB, str(tmp_path), "DDP", "async", "failing") as job:
        assert job.wait() == [1, 1], job.text
        assert len(re.findall("no disk on one rank", job.text)) >= 2
    assert max(job.losses) == 6  # the save after it raised
    last = ours.newest(tmp_path)
    assert last is not None and last.endswith("step=2.ckpt")


def test_an_error_of_training_is_not_hidden_by_one_of_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held(monkeypatch)
    held.fails_at = 2

    def look(step: int) -> None:
        if step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(ours.DDP(async_checkpoint=True), Watcher(look), every(tmp_path))
    assert "the last checkpoint is lost, too" in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_best_are_kept_and_the_last(tmp_path: Path, asynchronous: bool) -> None:
    best = every(tmp_path / "best", monitor="zigzag", save_top_k=2)
    last = every(tmp_path / "last", save_last=True, save_top_k=1)
    link = every(tmp_path / "link", 2, save_last="link", save_top_k=-1)
    trained(ours.DDP(async_checkpoint=asynchronous), best, last, link, steps=6)
    assert names(tmp_path / "best") == ["step=2.ckpt", "step=6.ckpt"]
    assert best.best_model_path == str(tmp_path / "best" / "step=6.ckpt")
    assert names(tmp_path / "last") == ["last.ckpt", "step=6.ckpt"]
    assert names(tmp_path / "link") == ["last.ckpt", "step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    for path in [*tmp_path.glob("*/*.ckpt")]:
        assert vescale_ckpt.verify(path).ok
    for callback in (last, link):
        again = trained(ours.DDP(), callback, steps=8, resume="last")
        assert len(again.losses) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_best_are_kept_in_an_object_store(url: str, asynchronous: bool) -> None:
    best = ModelCheckpoint(
        f"{url}/best", filename="{step}", every_n_train_steps=1, monitor="zigzag", save_top_k=2,
        save_on_train_epoch_end=False,
    )  # fmt: skip
    strategy = ours.DDP(async_checkpoint=asynchronous)
    trained(strategy, best, steps=6)
    kept = {name for name in stores.names(f"{url}/best") if stores.data_files(f"{url}/best/{name}")}
    assert kept == {"step=2.ckpt", "step=6.ckpt"}
    assert best.best_model_path == f"{url}/best/step=6.ckpt"
    assert ours.newest(f"{url}/best") == best.best_model_path and ours.newest(f"{url}/none") is None
    assert all(vescale_ckpt.verify(f"{url}/best/{name}").ok for name in kept)
    again = trained(ours.DDP(), steps=8, resume=best.best_model_path)
    assert len(again.losses) == 2
    plugin = ours.CheckpointIO()
    assert plugin.load_checkpoint(best.best_model_path)["global_step"] == 6


@pytest.mark.parametrize("kind", [True, "link"])
def test_last_is_the_newest_whole_one_if_its_save_was_killed(tmp_path: Path, kind: Any) -> None:
    trained(ours.DDP(), every(tmp_path, save_last=kind, save_top_k=-1))
    (tmp_path / "last.ckpt" / ".metadata").unlink()
    (tmp_path / "step=4.ckpt" / ".metadata").unlink(missing_ok=True)
    again = trained(ours.DDP(), every(tmp_path, save_last=kind, save_top_k=-1), steps=5, resume="last")
    assert len(again.losses) == 2  # from step 3


def test_newest_passes_over_what_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ours.newest(tmp_path) is None and ours.newest(tmp_path / "none") is None
    trained(ours.DDP(), every(tmp_path, save_top_k=-1))
    (tmp_path / "step=9.ckpt").mkdir()
    (data_file,) = (tmp_path / "step=4.ckpt").glob("*.distcp")
    data_file.write_bytes(data_file.read_bytes()[:1000])
    assert ours.newest(tmp_path) == str(tmp_path / "step=3.ckpt")
    assert "step=4.ckpt is passed over" in caplog.text


# --- What is saved and loaded


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("kind", ["DDP", "ModelParallel", "FSDP", "CheckpointIO"])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, kind: str, optimizers: int) -> None:
    if kind == "FSDP" and optimizers == 2:
        pytest.skip("FSDP1 allows no backward within its forward, where Lightning calls a training step")

    def make() -> Any:
        if kind == "CheckpointIO":
            return DDPStrategy(checkpoint_io=ours.CheckpointIO(async_checkpoint=True))
        return sharded(ours.ModelParallel) if kind == "ModelParallel" else getattr(ours, kind)()

    model = {"optimizers": optimizers, "shard": kind == "ModelParallel"}
    whole = trained(make(), steps=6 * optimizers, **model)
    made = 3 * optimizers  # Lightning counts steps of all optimizers
    trained(make(), every(tmp_path, made), steps=made, **model)
    path = ours.newest(tmp_path)
    assert path is not None
    rest = trained(make(), steps=6 * optimizers, resume=path, **model)
    assert len(whole.losses) == 6 and rest.losses == whole.losses[3:]
    assert vescale_ckpt.inspect(path).writer == "vescale_ckpt"


def test_stock_reads_ours_and_ours_reads_stock(tmp_path: Path) -> None:
    kinds = {"ours": ours.ModelParallel, "stock": ModelParallelStrategy}
    whole = trained(sharded(ours.ModelParallel), steps=6, shard=True)
    for writer, kind in kinds.items():
        folder = tmp_path / writer
        trained(sharded(kind), every(folder, 3), steps=3, shard=True)
        for reader in kinds.values():
            rest = trained(sharded(reader), steps=6, resume=str(folder / "step=3.ckpt"), shard=True)
            assert rest.losses == whole.losses[3:]
        replicated = trained(ours.DDP(), steps=6, resume=str(folder / "step=3.ckpt"))  # FSDP2 to DDP
        assert replicated.losses == pytest.approx(whole.losses[3:])
    trained(ours.DDP(), every(tmp_path / "ddp", 3), steps=3)
    for path in (tmp_path / "ours" / "step=3.ckpt", tmp_path / "ddp" / "step=3.ckpt"):
        consolidated = _load_distributed_checkpoint(path)  # Lightning's consolidate_checkpoint
        assert {"first.weight", "second.bias"} <= consolidated["state_dict"].keys()


def test_a_single_file_of_lightning_is_loaded_and_replaced(tmp_path: Path) -> None:
    whole = trained("ddp", steps=6)
    trained("ddp", every(tmp_path, 3, save_last=True), steps=3)
    assert (tmp_path / "last.ckpt").is_file()
    assert ours.newest(tmp_path) in (str(tmp_path / "last.ckpt"), str(tmp_path / "step=3.ckpt"))
    rest = trained(ours.DDP(async_checkpoint=True), every(tmp_path, 3, save_last=True), steps=6, resume="last")
    assert rest.losses == whole.losses[3:]
    assert (tmp_path / "last.ckpt").is_dir() and "last.ckpt.replaced" not in names(tmp_path)
    assert len(trained(ours.DDP(), steps=7, resume=str(tmp_path / "last.ckpt")).losses) == 1


def test_weights_alone_can_be_tested_but_not_trained_on(tmp_path: Path) -> None:
    trained(ours.DDP(), every(tmp_path, save_weights_only=True))
    path = str(tmp_path / "step=4.ckpt")
    assert not [key for key in vescale_ckpt.inspect(path).tensors if key.startswith("optimizer")]
    assert trainer(ours.DDP()).validate(Model(), data(), ckpt_path=path, verbose=False)
    with pytest.raises(CheckpointError, match="save_weights_only"):
        trained(ours.DDP(), resume=path)


def test_the_best_can_be_tested_after_training(tmp_path: Path) -> None:
    made = trainer(ours.DDP(async_checkpoint=True), every(tmp_path, monitor="loss"))
    model = Model()
    made.fit(model, data())
    assert made.validate(model, data(), ckpt_path="best", verbose=False)


def test_strict_loading_is_the_modules(tmp_path: Path) -> None:
    class Wider(Model):
        def __init__(self) -> None:
            super().__init__()
            self.third = torch.nn.Linear(1, 1)

    trained(ours.DDP(), every(tmp_path))
    with pytest.raises(MissingKeysError, match=r"third\.weight"):
        trainer(ours.DDP()).validate(Wider(), data(), ckpt_path=str(tmp_path / "step=4.ckpt"))
    lenient = Wider()
    lenient.strict_loading = False
    trainer(ours.DDP()).validate(lenient, data(), ckpt_path=str(tmp_path / "step=4.ckpt"), verbose=False)


class Setting:
    """What torch unpickles only with weights_only=False."""


def test_weights_only_decides_what_is_unpickled(tmp_path: Path) -> None:
    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"setting": Setting()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            loaded.append(state["setting"])

    loaded: list[Any] = []
    trained(ours.DDP(), Keeps(), every(tmp_path))
    path = str(tmp_path / "step=4.ckpt")
    with pytest.raises(UntrustedCheckpointError, match="give the strategy weights_only=False"):
        trained(ours.DDP(), Keeps(), steps=5, resume=path)
    trained(ours.DDP(weights_only=False), Keeps(), steps=5, resume=path)
    assert isinstance(loaded[-1], Setting)


def test_what_cannot_be_pickled_is_an_error_of_the_save(tmp_path: Path) -> None:
    class Bad(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"function": lambda: None}

    with pytest.raises(SaveFailedError, match="pickle"):
        trained(ours.DDP(), Bad(), every(tmp_path))
    assert ours.newest(tmp_path) is None


def test_storage_options_are_refused() -> None:
    made = trainer(ours.DDP(), enable_checkpointing=False)
    made.fit(Model(), data())
    with pytest.raises(TypeError, match="storage_options"):
        made.save_checkpoint("nowhere", storage_options={})


def test_one_file_is_left_to_lightning() -> None:
    for kind, positional, options in (
        (ours.ModelParallel, (), {"save_distributed_checkpoint": False}),
        (ours.ModelParallel, ("auto", "auto", False), {}),
        (ours.FSDP, (), {"state_dict_type": "full"}),
    ):
        with pytest.raises(ValueError, match=f"{kind.__name__} saves folders"):
            kind(*positional, **options)


# --- Fabric


@pytest.mark.parametrize("kind", ["FabricDDP", "FabricModelParallel", "FabricFSDP"])
def test_fabric_saves_and_loads(tmp_path: Path, kind: str) -> None:
    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    def make(strategy: Any) -> tuple[Fabric, dict[str, Any]]:
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        made = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(made.parameters()))
        return fabric, {"model": made, "optimizer": optimizer, "step": 0, "counter": Counter()}

    def step(fabric: Fabric, state: dict[str, Any]) -> float:
        loss = state["model"](torch.ones(1, 4)).square().sum()
        fabric.backward(loss)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        return float(loss.item())

    def strategy(kind: Any) -> Any:
        if "ModelParallel" not in kind.__name__:
            return kind(async_checkpoint=True)
        options = {} if kind is StockFabricModelParallel else {"async_checkpoint": True}
        return sharded(
            kind, parallelize_fn=lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]), **options
        )

    fabric, state = make(strategy(getattr(ours, kind)))
    step(fabric, state)
    state["step"], state["counter"].count = 1, 7
    fabric.save(tmp_path / "a", {**state, "more": "said"})
    fabric.strategy.wait_for_save()
    expected = step(fabric, state)
    kinds = [getattr(ours, kind), *([StockFabricModelParallel] if kind == "FabricModelParallel" else [])]
    for reader in kinds:
        fabric, state = make(strategy(reader))
        assert fabric.load(tmp_path / "a", state) == {"more": "said"}
        assert state["step"] == 1 and step(fabric, state) == expected
        if reader is not StockFabricModelParallel:
            assert state["counter"].count == 7
            with pytest.raises(KeyError, match="other"):
                fabric.load(tmp_path / "a", {**state, "other": 1})
            assert fabric.load(tmp_path / "a")["model"]["weight"].shape == (4, 4)
            fabric.save(tmp_path / "b", state, filter={"model": lambda name, _: name == "bias"})
            fabric.strategy.wait_for_save()
            assert [key for key in vescale_ckpt.inspect(tmp_path / "b").tensors if "model" in key] == ["model.bias"]


def test_the_other_distribution_of_lightning_is_served() -> None:
    pytest.importorskip("pytorch_lightning")
    code = (
        "import pytorch_lightning as pl; from vescale_ckpt.integrations.lightning import DDP, FabricDDP; "
        "import lightning_fabric; assert issubclass(DDP, pl.strategies.DDPStrategy); "
        "assert issubclass(FabricDDP, lightning_fabric.strategies.DDPStrategy)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
