"""Planning where it could go wrong: plans that look right and are not, failures in every phase, files that do not
belong together, states at the edges of what a state can be."""

from __future__ import annotations

import copy
import dataclasses
import errno
import gc
import os
import pickle
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import faults
from harness.cost import least_cpu_seconds
from harness.ranks import RankDiedError, run_ranks
from harness.states import assert_same
from test_planning import BOUND, WAYS, everything_in, load, load_by_stock, plans_made, replicated, save
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import vescale_ckpt
from vescale_ckpt import (
    CheckpointError,
    CheckpointTimeoutError,
    LoadPlanner,
    PerRank,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from vescale_ckpt._ranks.exchange import Exchange
from vescale_ckpt._write.native_save import NativeSave

ERRORS = (CheckpointError, CheckpointException)

# --- Plans that look right and are not


def _groups_with_one_coordinator(way: str, directory: str) -> None:
    """Rank 0 coordinates two groups with one planner. The plan of one group for a form of the state must not meet
    the parts that the other group was given for the same form."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    planner = SavePlanner()

    def step(k: int, group: int, forms: int) -> None:
        if dist.get_rank(groups[group]) >= 0:
            state: dict[str, Any] = {"table": torch.arange(1_500_000.0).view(1500, 1000) + k}
            if forms == 1 and dist.get_rank(groups[group]) == 1:
                state["more"] = torch.arange(3_000_000.0).view(3000, 1000) + k
            save(way, f"{directory}/{k}", state, planner, groups[group])
            assert_same(load(f"{directory}/{k}", state, groups[group]), state)
        dist.barrier()

    for k, (group, form) in enumerate([(0, 0), (1, 1), (1, 0), (0, 0), (1, 0), (0, 0)]):
        step(k, group, form)


@pytest.mark.parametrize("way", WAYS)
def test_two_groups_with_one_coordinator(tmp_path: Path, way: str) -> None:
    run_ranks(3, _groups_with_one_coordinator, way, str(tmp_path), timeout=BOUND)


def _nested_groups(way: str, directory: str) -> list[int]:
    """One planner for all ranks, and for groups of some of them: with another coordinator, and with the same."""
    groups = [dist.new_group(members) for members in ([0, 1, 2], [1, 2], [0, 1])]
    planner = SavePlanner()
    made = plans_made(planner)
    for k, group in enumerate(groups * 2):
        if dist.get_rank(group) >= 0:
            state = {**{f"object {number}": number + k for number in range(6)}, "weight": torch.full((7,), float(k))}
            save(way, f"{directory}/{k}", state, planner, group)
            assert_same(load(f"{directory}/{k}", state, group), state)
        dist.barrier()
    return made


@pytest.mark.parametrize("way", WAYS)
def test_one_planner_for_groups_within_groups(tmp_path: Path, way: str) -> None:
    made = run_ranks(3, _nested_groups, way, str(tmp_path), timeout=BOUND)
    assert made == [[3, 2], [2], []]  # each group's second save uses its first plan


def _many_forms(way: str, directory: str) -> None:
    """More plans than are kept, of fewer forms on each rank: ranks must not name plans that the coordinator forgot."""
    planner = SavePlanner()
    rank = dist.get_rank()
    forms = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 0), (0, 0)]
    for k, form in enumerate(forms):
        state = {"shared": torch.full((7,), float(k))}
        if rank:
            state[f"of {rank}"] = torch.full((3 + form[rank - 1],), float(k))
        save(way, f"{directory}/{k % 2}", state, planner)
        assert_same(load(f"{directory}/{k % 2}", state), state)


@pytest.mark.parametrize("way", WAYS)
def test_more_plans_than_are_kept(tmp_path: Path, way: str) -> None:
    run_ranks(3, _many_forms, way, str(tmp_path), timeout=BOUND)


def _alone_and_together(directory: str) -> None:
    planner = SavePlanner()
    rank = dist.get_rank()
    for k in range(6):
        state = replicated(k)
        options: dict[str, Any] = {}
        path = f"{directory}/{k}"
        if k % 3 == 1:
            options["use_collectives"] = False
        elif k % 3 == 2:
            options["no_dist"] = True
            path += f" of {rank}"
        dcp.save(state, storage_writer=StorageWriter(path), planner=planner, **options)
        if k % 3 != 1:
            assert_same(load(path, state), state)
        else:
            assert sorted(name for name in os.listdir(path) if name == f"__{rank}.metadata")
            target = load(path, state)
            assert_same(target, state)


def test_one_planner_with_and_without_collectives(tmp_path: Path) -> None:
    run_ranks(2, _alone_and_together, str(tmp_path), timeout=BOUND)


def _writers(directory: str) -> None:
    planner = SavePlanner()
    options: list[dict[str, Any]] = [
        {}, {"single_file_per_rank": False}, {}, {"checksums": False}, {"direct_io": False}, {"thread_count": 1},
    ]  # fmt: skip
    for k, option in enumerate(options):
        state = replicated(k)
        dcp.save(state, storage_writer=StorageWriter(f"{directory}/{k}", **option), planner=planner)
        assert_same(load(f"{directory}/{k}", state), state)
        assert_same(load_by_stock(f"{directory}/{k}", state), state)
    state = replicated(9)
    dcp.save(state, storage_writer=FileSystemWriter(f"{directory}/stock"), planner=planner)
    assert_same(load(f"{directory}/stock", state), state)
    assert_same(load_by_stock(f"{directory}/stock", state), state)
    dcp.save(state, storage_writer=StorageWriter(f"{directory}/ours"), planner=DefaultSavePlanner())
    for planner_of_load in (DefaultLoadPlanner(), LoadPlanner()):
        for reader in (StorageReader(f"{directory}/ours"), FileSystemReader(f"{directory}/ours")):
            target = replicated(0)
            dcp.load(target, storage_reader=reader, planner=planner_of_load)
            assert_same(target, state)


def test_one_planner_with_every_writer(tmp_path: Path) -> None:
    run_ranks(2, _writers, str(tmp_path), timeout=BOUND)


def _memory_changes(way: str, directory: str) -> None:
    """What a plan does not know: where and how tensors lie."""
    planner = SavePlanner()
    shape = (40, 30)
    values = torch.arange(1200.0).view(shape)
    complex_values = torch.complex(values, -values)
    forms: list[Callable[[], torch.Tensor]] = [
        lambda: complex_values.clone(),
        lambda: complex_values.t().contiguous().t(),
        lambda: complex_values.conj(),
        lambda: torch.zeros(shape, dtype=torch.complex64),
        lambda: complex_values[:1].expand(shape),
        lambda: torch.cat([complex_values, complex_values])[::2],
    ]
    tied = torch.ones(5)
    for k, form in enumerate(forms * 2):
        tensor = form()
        if k >= len(forms) and dist.get_rank() == 0:  # replicas that lie differently on each rank
            tensor = tensor.clone()
        tied += 1
        imaginary = complex_values.conj().imag if k % 2 else complex_values.imag
        state = {"a": tensor, "tied": tied, "tied too": tied, "imaginary": imaginary}
        save(way, f"{directory}/{k % 2}", state, planner)
        target = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
        dcp.load(target, storage_reader=StorageReader(f"{directory}/{k % 2}"), planner=LoadPlanner())
        for key, value in state.items():
            assert torch.equal(target[key], value), (k, key)


@pytest.mark.parametrize("way", WAYS)
def test_tensors_that_lie_elsewhere_at_each_save(tmp_path: Path, way: str) -> None:
    run_ranks(2, _memory_changes, way, str(tmp_path), timeout=BOUND)


def _resized(directory: str) -> None:
    planner = SavePlanner()
    tensor = torch.arange(1000.0)
    for k, length in enumerate((1000, 900, 1000, 0, 1000)):
        tensor.resize_(length)
        tensor.copy_(torch.arange(float(length)) + k)
        state = {"a": tensor}
        save("ours", f"{directory}/{k}", state, planner)
        assert_same(load(f"{directory}/{k}", state), state)


def test_a_tensor_that_is_resized_in_place(tmp_path: Path) -> None:
    run_ranks(2, _resized, str(tmp_path), timeout=BOUND)


class _ItemsOnly(SavePlanner):
    """Asks for DCP's items, on the ranks that use it."""

    def create_local_plan(self) -> Any:
        return super().create_local_plan()


def _mixed(way: str, directory: str, asks: int) -> None:
    planner = _ItemsOnly() if dist.get_rank() == asks else SavePlanner()
    for k in range(3):
        state = replicated(k)
        state[f"of {dist.get_rank()}"] = torch.full((4,), float(k))
        save(way, f"{directory}/{k}", state, planner)
        assert_same(load(f"{directory}/{k}", state), state)
        assert_same(load_by_stock(f"{directory}/{k}", state), state)


@pytest.mark.parametrize(("way", "asks"), [("dcp", 0), ("ours", 1)])
def test_a_subclass_on_one_rank(tmp_path: Path, way: str, asks: int) -> None:
    run_ranks(2, _mixed, way, str(tmp_path), asks, timeout=BOUND)


class _AsksForObjects(SavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object)


def _subgroup(directory: str) -> None:
    group = dist.new_group([1, 2])
    planner = _AsksForObjects() if dist.get_rank() == 1 else SavePlanner()
    for k in range(3 if dist.get_rank() else 0):
        for way in WAYS:
            state = {**replicated(k), "rng": PerRank(dist.get_rank())}
            save(way, f"{directory}/{way} {k}", state, planner, group)
            target = {**replicated(7), "rng": PerRank(-1)}
            if way == "ours":  # which counts the ranks of the group
                vescale_ckpt.load(f"{directory}/{way} {k}", target, process_group=group)
            else:
                reader = StorageReader(f"{directory}/{way} {k}")
                dcp.load(target, storage_reader=reader, planner=LoadPlanner(), process_group=group)
            assert target.pop("rng").obj == dist.get_rank()
            assert_same(target, replicated(k))
    dist.barrier()


def test_a_group_of_some_ranks_with_planners_of_two_kinds(tmp_path: Path) -> None:
    run_ranks(3, _subgroup, str(tmp_path), timeout=BOUND)


# --- placement="local"


def _nodes(directory: str, first_node: int) -> None:
    """Each rank is on a node of its own with a disk of its own."""
    rank = dist.get_rank()
    os.environ["VESCALE_CKPT_NODE"] = str(abs(first_node - rank))
    home = os.getcwd()
    os.makedirs(f"{directory}/{rank}")
    os.chdir(f"{directory}/{rank}")
    try:
        planner = SavePlanner(placement="local")
        for k in range(3):
            state = replicated(k)
            state[f"of {rank}"] = torch.full((3,), float(k))
            vescale_ckpt.save("c", state, planner=planner)
            assert_same(load("c", state), state)
            assert_same(load_by_stock("c", state), state)
    finally:
        os.chdir(home)


@pytest.mark.parametrize("first_node", [0, 7])
def test_every_node_has_all_of_its_own_on_its_own_disk(tmp_path: Path, first_node: int) -> None:
    run_ranks(2, _nodes, str(tmp_path), first_node, timeout=BOUND)


# --- Failures in every phase, then saves that work


class _Bomb:
    """Explodes when it is pickled."""

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("a bomb")


class _BadState:
    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("no state")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _broken(state: dict[str, Any], phase: str) -> None:
    if phase == "flatten":
        state["nested.text"] = 1  # a key twice
    elif phase == "pickle":
        state[f"of rank {dist.get_rank()}"] = _Bomb()
    elif phase == "describe":
        state["scalar"] = torch.empty(3, dtype=torch.float32).to_sparse()
    elif phase == "freed":
        state["table"].untyped_storage().resize_(0)
    elif phase == "per rank":
        state["rng"] = PerRank(_BadState())
    elif phase == "write":
        faults.inject("write", errno.EIO, times=1000)
    elif phase == "rename":
        faults.inject("rename", errno.EIO, times=1000)


PHASES = ["flatten", "pickle", "describe", "freed", "per rank", "write"]


def _fail(way: str, directory: str, phase: str, broken: int) -> None:
    planner = SavePlanner()
    path = f"{directory}/c"

    def state_of(k: int) -> dict[str, Any]:
        return {**replicated(k), f"of rank {dist.get_rank()}": {1, k}}

    for k in range(2):
        save(way, path, state_of(k), planner)
    state = state_of(2)
    if dist.get_rank() == broken:
        _broken(state, phase)
    with pytest.raises(ERRORS) as caught:
        save(way, path, state, planner)
    faults.clear()
    assert f"rank {broken}" in str(caught.value) or list(caught.value.failures) == [broken]  # type: ignore[union-attr]
    del caught  # its traceback holds the writer, which holds its lock
    old = state_of(1)
    assert_same(load(path, old), old)
    for k in (3, 4):
        state = state_of(k)
        save(way, path, state, planner)
        assert_same(load(path, state), state)
    left = {name for name in os.listdir(path) if name.endswith(".distcp")}
    assert len(left) == 2, left


@pytest.mark.parametrize(("way", "broken"), [("dcp", 1), ("ours", 0)])
@pytest.mark.parametrize("phase", PHASES)
def test_after_a_failure_on_one_rank_saves_go_on(tmp_path: Path, way: str, phase: str, broken: int) -> None:
    run_ranks(2, _fail, way, str(tmp_path), phase, broken, timeout=BOUND)


@pytest.mark.parametrize("way", WAYS)
def test_after_a_failed_commit_saves_go_on(tmp_path: Path, way: str) -> None:
    run_ranks(2, _fail, way, str(tmp_path), "rename", 0, timeout=BOUND)


def _bad_state_dict(directory: str) -> None:
    state = {"a": torch.ones(3), "bad": _BadState() if dist.get_rank() == 1 else {"x": 1}}
    with pytest.raises(CheckpointError, match="no state"):
        vescale_ckpt.save(f"{directory}/c", state)
    vescale_ckpt.save(f"{directory}/c", {"a": torch.ones(3)})


def test_a_state_dict_that_raises_on_one_rank(tmp_path: Path) -> None:
    run_ranks(2, _bad_state_dict, str(tmp_path), timeout=BOUND)


def _die(directory: str, phase: str, who: int) -> None:
    path = f"{directory}/c"
    planner = SavePlanner()
    old = replicated(1)
    vescale_ckpt.save(path, old, planner=planner)
    if dist.get_rank() == who:

        def die(*args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), 9)

        if phase == "agree":
            Exchange.agree = die  # type: ignore[method-assign]
        elif phase == "write":
            NativeSave.open = die  # type: ignore[method-assign]
        elif phase == "written":
            original = NativeSave.finish

            def write_and_die(*args: Any) -> Any:
                original(*args)
                die()

            NativeSave.finish = write_and_die  # type: ignore[method-assign]
        elif phase == "commit":
            NativeSave.commit = die  # type: ignore[method-assign]
    with pytest.raises(CheckpointTimeoutError) as caught:
        vescale_ckpt.save(path, replicated(2), planner=planner, timeout=10 * BOUND)
    assert caught.value.late_ranks == [who], caught.value
    assert_same(_load_alone(path, old), old)


def _load_alone(path: str, state: dict[str, Any]) -> dict[str, Any]:
    from harness.states import blank

    target: dict[str, Any] = blank(state)
    dcp.load(target, storage_reader=StorageReader(path), planner=LoadPlanner(), no_dist=True)
    return target


@pytest.mark.parametrize(("phase", "who"), [("agree", 1), ("write", 2), ("written", 1), ("commit", 0)])
def test_a_killed_rank_is_named_in_bounded_time(tmp_path: Path, phase: str, who: int) -> None:
    answers = run_ranks(3, _die, str(tmp_path), phase, who, timeout=BOUND, check=False)
    assert isinstance(answers.pop(who), RankDiedError)
    assert answers == [None, None]


# --- The index beside another .metadata


def _saved(path: Path, k: int, **options: Any) -> dict[str, Any]:
    state = replicated(k)
    dcp.save(state, storage_writer=StorageWriter(path, **options), planner=SavePlanner())
    return state


def test_stock_overwrites_our_directory(tmp_path: Path) -> None:
    _saved(tmp_path / "c", 1)
    state = replicated(2)
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "c"))
    assert os.path.exists(tmp_path / "c" / ".metadata.index")
    assert_same(load(str(tmp_path / "c"), state), state)
    state = _saved(tmp_path / "c", 3)
    assert_same(load(str(tmp_path / "c"), state), state)


def test_an_index_of_another_save(tmp_path: Path) -> None:
    first, second = _saved(tmp_path / "1", 1), _saved(tmp_path / "2", 2)
    shutil.copy(tmp_path / "1" / ".metadata.index", tmp_path / "2" / ".metadata.index")
    assert_same(load(str(tmp_path / "2"), second), second)
    shutil.copytree(tmp_path / "1", tmp_path / "2", dirs_exist_ok=True)
    assert_same(load(str(tmp_path / "2"), first), first)


# --- Metadata that is built when somebody looks


def _returned(path: str) -> None:
    state = replicated(1)
    metadata = dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner())
    again = pickle.loads(pickle.dumps(metadata))
    deep = copy.deepcopy(metadata)
    replaced = dataclasses.replace(metadata, planner_data={"x": 1})
    stock = FileSystemReader(path).read_metadata()
    for one in (metadata, again, deep, copy.copy(metadata)):
        assert one.state_dict_metadata == stock.state_dict_metadata
        assert one.storage_data == stock.storage_data and one.planner_data == stock.planner_data
        assert one.version == stock.version
    assert replaced.planner_data == {"x": 1} and replaced.storage_data == stock.storage_data
    assert pickle.loads(pickle.dumps(replaced)).planner_data == {"x": 1}
    metadata.planner_data = {"y": 2}
    assert pickle.loads(pickle.dumps(metadata)).planner_data == {"y": 2}
    assert copy.deepcopy(metadata).planner_data == {"y": 2}
    unseen = dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner())
    dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner())
    dist.barrier()
    with pytest.raises(CheckpointError, match="replaced by a later save"):
        len(unseen.state_dict_metadata)
    dist.barrier()
    unseen = dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    with pytest.raises(CheckpointError, match="is no directory"):
        len(unseen.state_dict_metadata)


def test_the_metadata_that_a_save_returns(checkpoint: Path) -> None:
    run_ranks(2, _returned, str(checkpoint), timeout=BOUND)


class _NotingWriter(StorageWriter):
    def finish(self, metadata: Any, results: Any) -> None:
        metadata.planner_data["note"] = ("note",)
        super().finish(metadata, results)


def _noted(path: str) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=_NotingWriter(path), planner=SavePlanner())
    assert FileSystemReader(path).read_metadata().planner_data == {"a": ("a",), "note": ("note",)}


def test_what_a_writer_adds_to_metadata_is_written(checkpoint: Path) -> None:
    run_ranks(2, _noted, str(checkpoint), timeout=BOUND)


# --- Load planners


def _load_planner_again(directory: str) -> None:
    planner = LoadPlanner()
    states = []
    for k in range(3):
        state = replicated(k)
        if k == 2:
            state["table"] = state["table"].int()
        states.append(state)
        save("ours", f"{directory}/{k}", state)
    for k in (0, 1, 0, 2, 0, 1):
        target = replicated(5)
        target["table"] = torch.zeros(states[k]["table"].shape, dtype=states[k]["table"].dtype)
        dcp.load(target, storage_reader=StorageReader(f"{directory}/{k}"), planner=planner)
        assert_same(target, states[k])
    with pytest.raises(CheckpointException) as caught:
        dcp.load(replicated(5), storage_reader=StorageReader(f"{directory}/2"), planner=planner)
    assert "dtype" in everything_in(caught.value)
    # Overwritten between loads, and other memory, other layout
    for k in (1, 2, 3):
        state = replicated(k)
        save("ours", f"{directory}/0", state)
        target = replicated(7)
        target["table"] = torch.zeros(1000, 1500).t() if k == 2 else torch.zeros(1500, 2000)[:, ::2]
        dcp.load(target, storage_reader=StorageReader(f"{directory}/0"), planner=planner)
        assert torch.equal(target["table"], state["table"])
        target["table"] = state["table"]
        assert_same(target, state)
    planner.allow_cast = True
    target = replicated(5)
    target["table"] = target["table"].double()
    dcp.load(target, storage_reader=StorageReader(f"{directory}/0"), planner=planner)
    assert torch.equal(target["table"], replicated(3)["table"].double())
    partial = LoadPlanner(allow_partial_load=True)
    for _ in range(2):
        target = {"step": 0, "new": torch.full((2,), 4.0), "missing": 3, "scalar": torch.zeros(())}
        dcp.load(target, storage_reader=StorageReader(f"{directory}/0"), planner=partial)
        assert target["step"] == 3 and target["missing"] == 3 and torch.equal(target["new"], torch.full((2,), 4.0))
        assert target["scalar"] == 3.0
    with pytest.raises(CheckpointException) as caught:
        mine = {"step": 0, **({"absent": 1} if dist.get_rank() else {})}
        dcp.load(mine, storage_reader=StorageReader(f"{directory}/0"), planner=planner)
    assert "1 key missing" in everything_in(caught.value)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"step": torch.ones(2)}, storage_reader=StorageReader(f"{directory}/0"), planner=planner)
    assert "an object" in everything_in(caught.value)
    meta = {"table": torch.empty(1500, 1000, device="meta")}
    dcp.load(meta, storage_reader=StorageReader(f"{directory}/0"), planner=planner)


def test_a_load_planner_is_used_again(tmp_path: Path) -> None:
    run_ranks(2, _load_planner_again, str(tmp_path), timeout=BOUND)


# --- States at the edges


def _edges(way: str, directory: str, case: str) -> None:
    rank = dist.get_rank()
    planner = SavePlanner()
    states: dict[str, Callable[[int], dict[str, Any]]] = {
        "empty": lambda k: {},
        "empty on rank 0": lambda k: {} if rank == 0 else {"a": torch.full((5,), float(k)), "o": k},
        "empty on rank 1": lambda k: {} if rank == 1 else {"a": torch.full((5,), float(k)), "o": k},
        "objects only": lambda k: {"o": k, "t": (1, k), "n": None},
        "empty containers": lambda k: {"d": {}, "l": [], "e": {"f": {}}, "k": k},
        "empty tensors": lambda k: {"a": torch.empty(0), "b": torch.empty(3, 0, 2), f"r{rank}": torch.empty(0)},
        "keys": lambda k: {
            "": torch.full((2,), float(k)), "\n": k, "a\0b": torch.ones(2) * k, "é/..": k, "\ud800": torch.ones(1) * k,
            "x" * 5000: k, "__0_0.distcp": torch.ones(2) * k, "'\"\\": {"%s{}": torch.ones(3) * k, "n": {"7": k}},
            " ": k, "\u202e": torch.zeros(1) + k,
        },
        "many objects": lambda k: {f"o{i}": {"i": i + k} for i in range(600)},
    }  # fmt: skip
    for k in range(3):
        state = states[case](k)
        save(way, f"{directory}/{k % 2}", state, planner)
        for loaded in (load(f"{directory}/{k % 2}", state), load_by_stock(f"{directory}/{k % 2}", state)):
            assert_same(loaded, state)


CASES = [
    "empty", "empty on rank 0", "empty on rank 1", "objects only", "empty containers", "empty tensors", "keys",
    "many objects",
]  # fmt: skip


@pytest.mark.parametrize(("case", "way"), [(case, WAYS[number % 2]) for number, case in enumerate(CASES)])
def test_edges(tmp_path: Path, way: str, case: str) -> None:
    run_ranks(2, _edges, way, str(tmp_path), case, timeout=BOUND)


def _odd_locals(directory: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    planner = SavePlanner()
    for k in range(4):
        whole = torch.arange(60.0).view(10, 6) + k
        local = whole.chunk(2)[rank]
        odd = local.t().contiguous().t() if (k + rank) % 2 else torch.cat([local, local], 1)[:, :6]
        complex_local = torch.complex(local, local).conj() if rank else torch.complex(local, -local)
        state = {
            "a": DTensor.from_local(odd, mesh, [Shard(0)], run_check=False),
            "r": DTensor.from_local(whole.t().contiguous().t(), mesh, [Replicate()], run_check=False),
            "c": DTensor.from_local(complex_local, mesh, [Shard(0)], run_check=False),
        }
        save("ours", f"{directory}/{k}", state, planner)
        loaded = load(f"{directory}/{k}", state)
        for key, value in state.items():
            assert torch.equal(loaded[key].to_local(), value.to_local()), key
        targets = {
            "a": DTensor.from_local(torch.zeros(6, 5).t(), mesh, [Shard(0)], run_check=False),
            "r": DTensor.from_local(torch.zeros(20, 6)[::2], mesh, [Replicate()], run_check=False),
        }
        dcp.load(targets, storage_reader=StorageReader(f"{directory}/{k}"), planner=LoadPlanner())
        assert torch.equal(targets["a"].to_local(), local) and torch.equal(targets["r"].to_local(), whole)


def test_local_tensors_that_are_not_contiguous(tmp_path: Path) -> None:
    run_ranks(2, _odd_locals, str(tmp_path), timeout=BOUND)


def test_per_rank_state_whose_name_is_taken(tmp_path: Path) -> None:
    for state in (
        {"a": PerRank(1), "a.rank_0_of_1": 2},
        {"a.rank_0_of_1": 2, "a": PerRank(1)},
        {"a": PerRank(1), "a.rank_0_of_1": torch.ones(2)},
    ):
        with pytest.raises((ValueError, *ERRORS)) as caught:
            vescale_ckpt.save(tmp_path / "c", state)
        assert "a.rank_0_of_1" in everything_in(caught.value)


class _MyPerRank(PerRank):
    pass


def test_a_subclass_of_per_rank_and_states_that_stay_nested(tmp_path: Path) -> None:
    vescale_ckpt.save(tmp_path / "c", {"a": _MyPerRank(1)})
    target = {"a": _MyPerRank(0)}
    dcp.load(target, storage_reader=StorageReader(tmp_path / "c"), planner=LoadPlanner())
    assert target["a"].obj == 1
    vescale_ckpt.save(tmp_path / "d", {"a": PerRank(1)}, planner=SavePlanner(flatten_state_dict=False))
    nested = {"a": PerRank(0)}
    dcp.load(nested, storage_reader=StorageReader(tmp_path / "d"), planner=LoadPlanner(flatten_state_dict=False))
    assert nested["a"].obj == 1


def _per_rank_beside_meta(path: str) -> None:
    save("ours", path, {"n": {"rng": PerRank(dist.get_rank() + 5)}, "w": torch.ones(3)})
    target: dict[str, Any] = {"n": {"rng": PerRank(0)}, "w": torch.empty(3, device="meta")}
    rng = target["n"]["rng"]
    dcp.load(target, storage_reader=StorageReader(path), planner=LoadPlanner())
    assert target["n"]["rng"] is rng and rng.obj == dist.get_rank() + 5 and torch.equal(target["w"], torch.ones(3))


def test_per_rank_state_beside_a_tensor_that_has_no_memory_yet(checkpoint: Path) -> None:
    run_ranks(2, _per_rank_beside_meta, str(checkpoint), timeout=BOUND)


def _per_rank_with_stock(path: str) -> None:
    save("ours", path, {"rng": PerRank(dist.get_rank()), "x": 1})
    reader = FileSystemReader(path)
    keys = reader.read_metadata().state_dict_metadata
    assert set(keys) == {"rng.rank_0_of_2", "rng.rank_1_of_2", "x"}


def test_per_rank_in_stock(checkpoint: Path) -> None:
    run_ranks(2, _per_rank_with_stock, str(checkpoint), timeout=BOUND)


# --- Leaks


def _leaks(way: str, directory: str) -> None:
    planner, load_planner = SavePlanner(), LoadPlanner()
    counts = []
    for k in range(10):
        state = replicated(k % 3)
        if k % 5 == 4:
            if dist.get_rank():
                state["bomb"] = _Bomb()
            with pytest.raises(ERRORS):
                save(way, f"{directory}/c", state, planner)
        else:
            save(way, f"{directory}/c", state, planner)
            dcp.load(replicated(0), storage_reader=StorageReader(f"{directory}/c"), planner=load_planner)
        del state
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert counts[-1][0] <= counts[3][0] + 1 and counts[-1][1] <= counts[3][1], counts


@pytest.mark.parametrize("way", WAYS)
def test_nothing_grows_from_save_to_save(tmp_path: Path, way: str) -> None:
    run_ranks(2, _leaks, way, str(tmp_path), timeout=BOUND)


def _another_memory_after_dcp(directory: str) -> None:
    """What `dcp.save` left in a planner must not be what `vescale_ckpt.save` writes with it."""
    planner = SavePlanner()
    for k in range(4):
        state = {"a": torch.complex(torch.ones(9), torch.ones(9) * k).conj(), "b": torch.ones(2) * k}
        save(WAYS[k % 2], f"{directory}/{k}", state, planner)
        loaded = load(f"{directory}/{k}", {key: value.resolve_conj() for key, value in state.items()})
        assert torch.equal(loaded["a"], state["a"]) and torch.equal(loaded["b"], state["b"])


def test_one_planner_in_both_ways(tmp_path: Path) -> None:
    run_ranks(2, _another_memory_after_dcp, str(tmp_path), timeout=BOUND)


def test_a_state_is_not_kept_after_its_save(tmp_path: Path) -> None:
    state = {"a": torch.ones(3)}
    gone = weakref.ref(state["a"])
    vescale_ckpt.save(tmp_path / "c", state)
    del state
    gc.collect()
    assert gone() is None


def test_tensors_that_have_to_be_copied_cost_as_much_each(tmp_path: Path) -> None:
    def save_and_load(count: int) -> None:
        state = {f"k{i}": torch.ones(2, dtype=torch.complex64).conj() for i in range(count)}
        vescale_ckpt.save(tmp_path / "c", state)
        target = {key: torch.zeros(2, dtype=torch.complex128) for key in state}
        dcp.load(target, storage_reader=StorageReader(tmp_path / "c"), planner=LoadPlanner(allow_cast=True))

    save_and_load(10)
    some, many = (least_cpu_seconds(lambda: save_and_load(count), 2) for count in (750, 3000))  # noqa: B023
    assert many < 12 * some
