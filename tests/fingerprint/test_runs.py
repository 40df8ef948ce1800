"""Managers that keep fingerprints and prove what they restore; runs, conversions and copies by their fingerprints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness.logs import logged
from harness.ranks import on_ranks, run_ranks
from harness.states import sharded_by

import vescale_ckpt
from vescale_ckpt import CheckpointManager, PerRank, RandomState, StateDiffersError, cli
from vescale_ckpt._convert.copy import copy
from vescale_ckpt._inspect.diff import diff
from vescale_ckpt.errors import CheckpointError

State = dict[str, Any]


def _state(step: int = 0, seed: int = 0) -> State:
    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "step": step, "random": PerRank(RandomState())}
    return _trained(state, 1)


def _trained(state: State, steps: int) -> State:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(5, 6)).square().sum().backward()
        state["optimizer"].step()
        state["step"] += 1
    return state


def _run(directory: Path, *steps: int, **options: Any) -> list[str]:
    """What a run logs that saves these steps."""
    state = _state()
    with logged() as texts, CheckpointManager(directory, async_checkpoint=False, fingerprint=True, **options) as saves:
        for step in steps:
            saves.save(step, _trained(state, 1))
    return [text for text in texts if "fingerprint" in text or "same tensors" in text]


# --- The manager


def test_a_manager_logs_one_fingerprint_a_save(tmp_path: Path) -> None:
    state = _state()
    with logged() as texts, CheckpointManager(tmp_path / "run", fingerprint=True, save_interval_steps=10) as manager:
        taken = vescale_ckpt.fingerprint(state)
        manager.save(10, state, extra_files={"a.json": b"1"})
        _trained(state, 1)  # while the save may be running
        manager.save(11, state)  # not due
        manager.save(20, state)
    lines = [text for text in texts if "fingerprint" in text]
    assert lines == [f"step 10: fingerprint {taken}", f"step 20: fingerprint {vescale_ckpt.fingerprint(state)}"]
    assert vescale_ckpt.inspect(tmp_path / "run" / "step-10").fingerprint == str(taken)
    assert not manager.prove and manager.fingerprint


class Picky:
    """Has a state of its own, which a hook may change at the load."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
        self.rows, self._hook = torch.arange(12.0).view(3, 4), hook

    def state_dict(self) -> State:
        return {"rows": self.rows}

    def load_state_dict(self, state: State) -> None:
        self.rows = self._hook(state["rows"])


def test_a_restore_is_proved(tmp_path: Path) -> None:
    saved = {**_state(3), "part": Picky()}
    with CheckpointManager(tmp_path, prove=True) as manager:
        manager.save(3, saved)
        manager.wait()
        assert manager.fingerprint
        with logged() as texts:
            files: dict[str, bytes] = {}
            assert manager.restore({**_state(seed=5), "part": Picky()}, extra_files=files) == 3 and files == {}
        (line,) = [text for text in texts if "what was restored" in text]
        assert f"what was restored is what was saved: {_count(saved)} keys are equal (fingerprint" in line
        wrong = {**_state(seed=5), "part": Picky(lambda rows: rows.flip(0))}
        with pytest.raises(StateDiffersError, match=r"1 different: part\.rows \(rank 0: 8 of 12 elements\)"):
            manager.restore(wrong)
        with logged() as texts:
            assert manager.restore(wrong, strict=False) == 3
        assert any("what was restored is not what was saved" in text and "part.rows" in text for text in texts)
        dropped = {**_state(seed=5), "part": Picky(lambda rows: [])}  # type: ignore[arg-type, return-value]
        with pytest.raises(StateDiffersError, match=r"part\.rows"):
            manager.restore(dropped)


def _count(state: State) -> int:
    return len(vescale_ckpt.fingerprint(state).keys())


def test_a_part_is_proved_as_a_part(tmp_path: Path) -> None:
    saved = _state(3)
    with CheckpointManager(tmp_path, prove=True, async_checkpoint=False) as manager:
        manager.save(3, saved)
        with logged() as texts:
            manager.restore({"model": torch.nn.Linear(6, 4)}, prepare=False)
            manager.restore({**_state(), "step": 0}, keys="model", prepare=False)
            manager.restore({"renamed": torch.nn.Linear(6, 4)}, rename={"renamed": "model"}, prepare=False)
    lines = [text for text in texts if "what was restored" in text or "not proved" in text]
    assert "2 keys are equal" in lines[0] and len(lines) == 3
    assert all("not proved: it was loaded in part, or under other names" in text for text in lines[1:])


def test_a_damaged_fingerprint_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    _run(tmp_path, 1)
    vescale_ckpt.save(tmp_path / "step-2", _state(), extra_files={"fingerprint.json": b'{"fingerprint":1,"tensors":7}'})
    with CheckpointManager(tmp_path, prove=True) as manager:
        assert manager.restore(_state()) == 1
    assert vescale_ckpt.inspect(tmp_path / "step-2").fingerprint is None


def test_a_save_whose_state_has_no_fingerprint_leaves_nothing_behind(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, fingerprint=True, on_error="warn", async_checkpoint=False) as manager:
        assert manager.save(1, {"lock": (i for i in range(2))}) is None and manager.failed_saves == 1
        assert manager.save(2, {"w": torch.ones(2)}) is not None
    assert manager.steps() == [2] and [path.name for path in tmp_path.iterdir()] == ["step-2"]


@on_ranks(2)
def test_a_restore_is_proved_on_all_ranks(checkpoint: Path) -> None:
    """Each rank has a name of its own besides, as stages of a pipeline do, and one of them has a hook that is wrong."""
    rank = dist.get_rank()

    def state(fill: float, is_wrong: bool = False) -> State:
        part = Picky((lambda rows: rows + 1) if is_wrong else torch.clone)
        return {"w": sharded_by(torch.full((7, 3), fill), 0), f"stage{rank}": part, "random": PerRank(RandomState())}

    with CheckpointManager(checkpoint, prove=True, async_checkpoint=False) as manager:
        manager.save(1, state(2.0))
        with logged() as texts:
            manager.restore(state(0.0))
        assert len([text for text in texts if "5 keys are equal" in text]) == (rank == 0)
        with pytest.raises(StateDiffersError, match=r"1 different: stage1\.rows") as caught:
            manager.restore(state(0.0, is_wrong=rank == 1))
        assert [*caught.value.different] == ["stage1.rows"]


# --- The trail


def test_a_stale_copy_is_found_at_the_second_save(tmp_path: Path) -> None:
    """A snapshot of a framework that is not updated any more, while counters and random states go on."""
    state = _state()
    moments = state["optimizer"].state_dict()["state"].values()
    stale = {
        "model": {key: of.clone() for key, of in state["model"].state_dict().items()},
        "moments": [{name: of.clone() for name, of in each.items() if name != "step"} for each in moments],
    }
    with logged() as texts, CheckpointManager(tmp_path, fingerprint=True) as manager:
        for step in (90, 110, 120):
            counter = torch.tensor(float(step))
            manager.save(step, {**stale, "step": step, "counter": counter, "random": torch.get_rng_state()})
            _trained(state, 3)
    warned = [text for text in texts if "same tensors" in text]
    assert [text.partition(" has ")[0] for text in warned] == ["step 110", "step 120"]
    assert "same tensors as step 110, bit for bit: all 6 parameters" in warned[1] and "model.bias" in warned[1]


def test_what_goes_on_is_no_stale_copy(tmp_path: Path) -> None:
    assert not [text for text in _run(tmp_path / "a", 1, 2, 3) if "same tensors" in text]
    state = _state()
    with logged() as texts, CheckpointManager(tmp_path / "b", fingerprint=True, async_checkpoint=False) as manager:
        manager.save(5, state)
        manager.save(5, state)  # the same step again
        manager.save(4, state)  # a step back
        state["model"].bias.data.view(torch.int32)[2] ^= 1
        manager.save(6, state)
        manager.save(7, {"model": state["model"]})  # other keys
        manager.save(8, {"step": 8})  # nothing that is trained
        manager.save(9, {"step": 9})
    assert not [text for text in texts if "same tensors" in text]


# --- Two runs


def _diff(capsys: Any, *arguments: object) -> tuple[int, str]:
    status = cli.main(["diff", "--fingerprints", *map(str, arguments)])
    return status, "".join(capsys.readouterr())


def test_two_runs_part_at_a_step_and_a_key(tmp_path: Path, capsys: Any) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    _run(one, 10, 20, 30, 40)
    _run(same, 10, 20, 30, 40)
    assert _diff(capsys, one, same) == (0, "equal; 4 steps are equal\n")
    state = _state()
    with CheckpointManager(other, fingerprint=True) as manager:
        for step in (10, 20, 30, 40, 50):
            _trained(state, 1)
            if step == 30:
                state["model"].bias.data[1] += 1e-6
            manager.save(step, state)
    status, out = _diff(capsys, one, other)
    assert status == 1 and "only in B: steps 50\n" in out
    assert "differs: model.bias: other values\ndifferent from step 30 on; 2 steps are equal\n" in out
    status, out = _diff(capsys, one, other, "--json")
    found = json.loads(out)
    assert status == 1 and found["schema"] == "vescale_ckpt/diff-fingerprints/1"
    assert (found["step"], found["equal_steps"], found["only_b"]) == (30, [10, 20], [50])
    assert [*found["different"]] == ["model.bias"] and not found["equal"]


def test_what_was_not_compared_is_not_called_equal(tmp_path: Path, capsys: Any) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    _run(one, 10, 20)
    _run(other, 10)
    assert _diff(capsys, one, other) == (3, "only in A: steps 20\nnot known; 1 steps are equal\n")
    vescale_ckpt.save(other / "step-20", _state())
    assert _diff(capsys, one, other) == (3, "without a fingerprint: steps 20\nnot known; 1 steps are equal\n")
    _run(tmp_path / "apart", 30)
    status, out = _diff(capsys, one, tmp_path / "apart")
    assert status == 3 and out.endswith("not known\n")
    status, out = _diff(capsys, one, one / "step-10")
    assert status == 2 and "has no steps of a CheckpointManager" in out
    status, out = _diff(capsys, one, other, "--values")
    assert status == 2 and "exclude each other" in out


def test_steps_that_a_run_has_abandoned_do_not_count(tmp_path: Path, capsys: Any) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    _run(one, 10, 20)
    _run(other, 10, 20, 30)
    state = _state()
    with CheckpointManager(other, fingerprint=True) as manager:
        manager.restore(state, 10)
        manager.save(20, _trained(state, 1))
    status, out = _diff(capsys, one, other)
    assert status == 0 and "only in" not in out


def _save_on_ranks(path: Path) -> None:
    vescale_ckpt.save(
        path, {"w": sharded_by(torch.ones(6, 2), 0), "random": PerRank(dist.get_rank())}, fingerprint=True
    )


def test_two_checkpoints_by_their_fingerprints(tmp_path: Path, capsys: Any) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    vescale_ckpt.save(one, {"w": torch.ones(6, 2), "random": PerRank(0)}, fingerprint=True)
    run_ranks(2, _save_on_ranks, two)
    status, out = _diff(capsys, one, two)
    assert status == 3 and "not compared: random.rank_0_of_1\n" in out and out.endswith("not known\n")
    vescale_ckpt.save(two, {"w": torch.ones(6, 2), "random": PerRank(0)}, fingerprint=True)
    for file in two.glob("*.distcp"):  # no data is read but the fingerprint's
        content = bytearray(file.read_bytes())
        at = content.find(torch.ones(2).numpy().tobytes())
        content[at] ^= 1
        file.write_bytes(content)
    assert _diff(capsys, one, two) == (0, "equal\n")
    vescale_ckpt.save(two, {"w": torch.zeros(6, 2), "random": PerRank(0)}, fingerprint=True)
    status, out = _diff(capsys, one, two)
    assert status == 1 and out == "differs: w: other values\ndifferent\n"
    vescale_ckpt.save(two, {"w": torch.zeros(6, 2)})
    status, out = _diff(capsys, one, two)
    assert status == 2 and "not both were saved with fingerprint=True" in out


def test_the_copy_that_stock_left_behind_does_not_count(tmp_path: Path, capsys: Any) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        vescale_ckpt.save(path, {"w": torch.ones(3)}, fingerprint=True)
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=two)
    assert (two / "fingerprint.json").exists() and vescale_ckpt.inspect(two).fingerprint is None
    assert _diff(capsys, one, two)[0] == 2


def test_a_damaged_record_is_damage(tmp_path: Path, capsys: Any) -> None:
    for name in ("one", "two"):
        vescale_ckpt.save(tmp_path / name, {"w": torch.ones(3)}, fingerprint=True)
    (file,) = (tmp_path / "two").glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"fingerprint":1', b'"fingerprint":2'))
    status, out = _diff(capsys, tmp_path / "one", tmp_path / "two")
    assert status == 1 and "the fingerprint is damaged" in out
    assert vescale_ckpt.inspect(tmp_path / "two").fingerprint is None


def test_inspect_shows_the_fingerprint(tmp_path: Path, capsys: Any) -> None:
    state = {"w": torch.ones(3), "π": 1}
    vescale_ckpt.save(tmp_path / "a", state, fingerprint=True)
    taken = str(vescale_ckpt.fingerprint(state))
    assert vescale_ckpt.inspect(tmp_path / "a", "w").fingerprint == taken
    assert cli.main(["inspect", str(tmp_path / "a")]) == 0
    assert f"fingerprint  {taken}\n" in capsys.readouterr().out
    assert cli.main(["inspect", "--json", str(tmp_path / "a")]) == 0
    assert json.loads(capsys.readouterr().out)["fingerprint"] == taken
    (tmp_path / "a" / ".metadata.index").unlink()
    assert vescale_ckpt.inspect(tmp_path / "a").fingerprint == taken


# --- Conversions and copies


def _is_proved(path: Path, state: State) -> bool:
    vescale_ckpt.load(path, state)
    return bool(vescale_ckpt.prove(path, state))


def test_copies_and_unchanged_conversions_keep_the_fingerprint(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "a", _state(), fingerprint=True)
    copy(tmp_path / "a", tmp_path / "copied")
    vescale_ckpt.convert(tmp_path / "a", tmp_path / "converted", format="dcp")
    for name in ("copied", "converted"):
        assert _is_proved(tmp_path / name, _state(seed=5)), name
        assert vescale_ckpt.inspect(tmp_path / name).fingerprint == vescale_ckpt.inspect(tmp_path / "a").fingerprint


CHANGES: dict[str, dict[str, Any]] = {
    "renamed": {"rename": {"model": "net"}},
    "a tensor dropped": {"keys": ["*", "!model.bias"]},
    "an object dropped": {"keys": ["*", "!step"]},
    "cast": {"dtype": "bfloat16"},
    "one cast": {"dtype": {"model.bias": "float64"}},
    "stacked": {"stack": {("model.bias", "extra"): "model.bias"}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_conversion_that_changes_something_drops_the_fingerprint(tmp_path: Path, name: str) -> None:
    vescale_ckpt.save(tmp_path / "a", {**_state(), "extra": torch.ones(4)}, fingerprint=True, extra_files={"b": b"1"})
    with logged() as texts:
        vescale_ckpt.convert(tmp_path / "a", tmp_path / "b", format="dcp", **CHANGES[name])
    info = vescale_ckpt.inspect(tmp_path / "b")
    assert info.fingerprint is None and info.extra_files == ["b"]
    assert any("the fingerprint is left out" in text for text in texts)
    with pytest.raises(CheckpointError, match="no fingerprint"):
        vescale_ckpt.prove(tmp_path / "b", {})


def test_a_file_of_that_name_that_is_the_user_s_own_is_none(tmp_path: Path, capsys: Any) -> None:
    own = {"fingerprint.json": b'{"fingerprint": "mine"}'}
    with CheckpointManager(tmp_path / "run", prove=True, async_checkpoint=False) as manager:
        manager.save(1, {"w": torch.ones(3)})
    path = tmp_path / "run" / "step-2"
    vescale_ckpt.save(path, {"w": torch.ones(3)}, extra_files=own)
    with logged() as texts, CheckpointManager(tmp_path / "run", prove=True) as manager:
        assert manager.restore({"w": torch.zeros(3)}) == 2
    assert any("not proved: it was saved without fingerprint=True" in text for text in texts)
    with pytest.raises(CheckpointError, match="has no fingerprint to compare with"):
        vescale_ckpt.prove(path, {"w": torch.ones(3)})
    assert _diff(capsys, path, path)[0] == 2
    vescale_ckpt.convert(path, tmp_path / "b", format="dcp", dtype="bfloat16")
    files: dict[str, bytes] = {}
    vescale_ckpt.load(tmp_path / "b", {"w": torch.ones(3).bfloat16()}, extra_files=files)
    assert files == own
    vescale_ckpt.save(tmp_path / "c", {"w": torch.ones(3)}, extra_files={"fingerprint.json": b"another"})
    assert not diff(path, tmp_path / "c").equal and diff(path, path).equal
    with pytest.raises(ValueError, match="fingerprint=True"):
        vescale_ckpt.save(path, {"w": torch.ones(3)}, extra_files=own, fingerprint=True)


def test_other_formats_have_no_place_for_it(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "a", {"w": torch.ones(3)}, fingerprint=True)
    report = vescale_ckpt.convert(tmp_path / "a", tmp_path / "b", format="safetensors", on_objects="error")
    assert not report.left_out
    vescale_ckpt.convert(tmp_path / "a", tmp_path / "c.pt", format="torch")
    assert [*torch.load(tmp_path / "c.pt")] == ["w"]


def test_diff_compares_the_values_and_not_what_tells_of_them(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "a", {"w": torch.zeros(3)}, fingerprint=True)
    vescale_ckpt.save(tmp_path / "b", {"w": -torch.zeros(3)}, fingerprint=True)
    vescale_ckpt.save(tmp_path / "c", {"w": torch.zeros(3)})
    assert diff(tmp_path / "a", tmp_path / "c").equal
    assert diff(tmp_path / "a", tmp_path / "b", with_values=True).equal
    assert not diff(tmp_path / "a", tmp_path / "b").equal


def test_extra_files_that_cannot_be_made_fail_the_save_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _fails_on_one, tmp_path)


class _Unreadable(dict[str, bytes]):
    def __getitem__(self, name: str) -> bytes:
        raise RuntimeError("not made")


def _fails_on_one(directory: Path) -> None:
    files = _Unreadable(a=b"") if dist.get_rank() == 0 else None
    with pytest.raises(CheckpointError, match="not made"):
        vescale_ckpt.save(directory / "a", {"w": torch.ones(3)}, fingerprint=True, extra_files=files)
