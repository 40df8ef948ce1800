"""Our planners: what they plan, what they refuse, and that every hook of the stock planners still works."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness.saves import cause, dcp_load, dcp_save, load_blank, stock_load
from harness.states import MiB, assert_same, blank, mixed_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AbstractSavePlanner

from vescale_ckpt import (
    CheckpointError,
    IncompatibleStateError,
    LoadPlanner,
    MissingKeysError,
    SavePlanner,
    StorageReader,
    StorageWriter,
)


def save_with(path: Path, state: dict[str, Any], planner: AbstractSavePlanner) -> None:
    dcp.save(state, storage_writer=StorageWriter(path), planner=planner)


def load_with(path: Path, state: dict[str, Any], planner: DefaultLoadPlanner) -> dict[str, Any]:
    dcp.load(state, storage_reader=StorageReader(path), planner=planner)
    return state


def refusal(action: Callable[[], Any]) -> BaseException:
    with pytest.raises(CheckpointException) as raised:
        action()
    return cause(raised.value)


# --- What is planned


@pytest.mark.parametrize("flatten", [True, False])
def test_save_plan_equals_the_default_planners(flatten: bool) -> None:
    state = mixed_state() | {
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "conj": torch.ones(3, dtype=torch.cfloat).conj(),
        "meta": torch.ones(3, device="meta"),
        "empty": torch.empty(0, 4),
    }
    planners = [SavePlanner(flatten), DefaultSavePlanner(flatten)]
    plans = []
    for planner in planners:
        planner.set_up_planner(state, is_coordinator=True)
        local = planner.create_local_plan()
        global_plans, metadata = planner.create_global_plan([local])
        final = planner.finish_plan(global_plans[0])
        items = {item.index: item for item in final.items}
        assert len(items) == len(final.items)
        plans.append((items, final.planner_data, metadata))
    stock_items, _, stock_metadata = plans[1]
    # Newer versions of torch note the strides that a tensor had. Our records are contiguous, and have none to note.
    properties = [item.tensor_data.properties for item in stock_items.values() if item.tensor_data is not None]
    properties += [
        kept.properties for kept in stock_metadata.state_dict_metadata.values() if hasattr(kept, "properties")
    ]
    for of_tensor in properties:
        if hasattr(of_tensor, "strides"):
            of_tensor.strides = None
    assert plans[0] == plans[1]


def test_load_plan_equals_the_default_planners(checkpoint: Path) -> None:
    state = mixed_state()
    dcp_save(checkpoint, state)
    metadata = StorageReader(checkpoint).read_metadata()
    plans: list[LoadPlan] = []
    for planner in (LoadPlanner(), DefaultLoadPlanner()):
        planner.set_up_planner(blank(state), metadata, True)
        plans.append(planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0]))
    # Ours are in the order in which they lie in the file, and none reads nothing.
    ours, stock = (
        {item.dest_index: item for item in plan.items if item.type == LoadItemType.BYTE_IO or 0 not in item.lengths}
        for plan in plans
    )
    assert ours == stock and len(plans[0].items) == len(ours)


def test_missing_keys_are_all_named(checkpoint: Path) -> None:
    dcp_save(checkpoint, {"a": torch.ones(3), "nested": {"b": 1}})
    target = {"a": torch.zeros(3), "nested": {"b": 0, "c": 0}, "d": torch.zeros(1), "e": [torch.zeros(2)]}
    error = refusal(lambda: dcp_load(checkpoint, target))
    assert isinstance(error, MissingKeysError)
    assert sorted(error.missing) == ["d", "e.0", "nested.c"]
    assert error.unexpected == []
    assert not target["a"].any(), "nothing is loaded before all is known to fit"


def test_partial_load_leaves_what_is_missing(checkpoint: Path) -> None:
    dcp_save(checkpoint, {"a": torch.ones(3), "nested": {"b": 1}})
    target = {"a": torch.zeros(3), "nested": {"b": 0, "c": "kept"}, "d": torch.full((2,), 5.0)}
    load_with(checkpoint, target, LoadPlanner(allow_partial_load=True))
    assert_same(target, {"a": torch.ones(3), "nested": {"b": 1, "c": "kept"}, "d": torch.full((2,), 5.0)})


@pytest.mark.parametrize("shape", [(4,), (2,), (3, 1), (), (0,)])
def test_another_shape_is_refused_by_name(checkpoint: Path, shape: tuple[int, ...]) -> None:
    dcp_save(checkpoint, {"model": {"a": torch.ones(3)}})
    error = refusal(lambda: dcp_load(checkpoint, {"model": {"a": torch.zeros(shape)}}))
    assert isinstance(error, IncompatibleStateError)
    assert (error.key, error.expected, error.found) == ("model.a", f"shape {shape}", "shape (3,)")


@pytest.mark.parametrize("planner", [LoadPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.uint32, torch.complex64])
def test_another_dtype_is_refused_by_name(checkpoint: Path, planner: Any, dtype: torch.dtype) -> None:
    dcp_save(checkpoint, {"model": {"a": torch.ones(3)}, "b": torch.ones(2)})
    target = {"model": {"a": torch.zeros(3, dtype=dtype)}, "b": torch.zeros(2)}
    error = refusal(lambda: load_with(checkpoint, target, planner()))
    assert isinstance(error, IncompatibleStateError)
    assert error.key == "model.a"
    assert str(dtype) in error.expected
    assert "float32" in error.found


@pytest.mark.parametrize("size", [7, 3 * MiB])
def test_casting_where_allowed(checkpoint: Path, size: int) -> None:
    values = torch.randn(size)
    dcp_save(checkpoint, {"narrow": values, "wide": values, "strided": values, "same": values})
    target = {
        "narrow": torch.zeros(size, dtype=torch.bfloat16),
        "wide": torch.zeros(size, dtype=torch.float64),
        "strided": torch.zeros(size, 2, dtype=torch.float16)[:, 1],
        "same": torch.zeros(size),
    }
    load_with(checkpoint, target, LoadPlanner(allow_cast=True))
    for key, tensor in target.items():
        assert torch.equal(tensor, values.to(tensor.dtype)), key


@pytest.mark.parametrize("planner", [LoadPlanner, DefaultLoadPlanner])
def test_state_that_is_not_flattened(checkpoint: Path, planner: Any) -> None:
    state = {"tensor": torch.ones(3), "nested": {"x": torch.ones(2), "y": [1]}, "number": 3}
    save_with(checkpoint, state, SavePlanner(flatten_state_dict=False))
    assert set(StorageReader(checkpoint).read_metadata().state_dict_metadata) == set(state)
    # The stock planner loses the objects with flatten_sharded_tensors=True, its default.
    target = {"tensor": torch.zeros(3), "nested": None, "number": None}
    load_with(checkpoint, target, planner(flatten_state_dict=False, flatten_sharded_tensors=False))
    assert_same(target, state)


# --- Hooks for saving


class _Doubled(SavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = super().lookup_object(index)
        return value * 2 if isinstance(value, torch.Tensor) else value


class _Resolved(SavePlanner):
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = super().resolve_data(write_item)
        return value * 2 if isinstance(value, torch.Tensor) else value


class _DefaultTransformed(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return value * 2 if isinstance(value, torch.Tensor) else value


class _Transformed(_DefaultTransformed, SavePlanner):
    pass


@pytest.mark.parametrize("kind", [_Doubled, _Resolved, _Transformed, _DefaultTransformed])
def test_planner_that_makes_up_tensors(checkpoint: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # More of them than the memory for slots holds, so that some are gone before the last is made.
    monkeypatch.setenv("VESCALE_CKPT_MEMORY_BYTES", str(4 * MiB))
    state: dict[str, Any] = {f"{i}": torch.full((100_000 + i,), float(i)) for i in range(24)} | {"object": "x"}
    planner = kind()
    for _ in range(2):  # the second time perhaps with a plan that was kept
        save_with(checkpoint, state, planner)
        expected = {key: value * 2 if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        assert_same(load_blank(checkpoint, state), expected)


class _Objects(SavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            object = ("wrapped", object)
        return super().transform_object(write_item, object)


def test_planner_that_changes_objects(checkpoint: Path) -> None:
    save_with(checkpoint, {"a": 1, "t": torch.ones(3)}, _Objects())
    target = {"a": None, "t": torch.zeros(3)}
    dcp_load(checkpoint, target)
    assert_same(target, {"a": ("wrapped", 1), "t": torch.ones(3)})


class _Halved(SavePlanner):
    """Saves in bfloat16, and says so in the metadata."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[self._halved(item) for item in plan.items])

    @staticmethod
    def _halved(item: WriteItem) -> WriteItem:
        if item.tensor_data is None:
            return item
        properties = dataclasses.replace(item.tensor_data.properties, dtype=torch.bfloat16)
        return dataclasses.replace(item, tensor_data=dataclasses.replace(item.tensor_data, properties=properties))

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = super().transform_object(write_item, object)
        return value.bfloat16() if isinstance(value, torch.Tensor) else value


def test_planner_that_saves_in_another_dtype(checkpoint: Path) -> None:
    state = {"a": torch.randn(1000), "large": torch.randn(3 * MiB), "object": 1}
    planner = _Halved()
    for _ in range(2):
        save_with(checkpoint, state, planner)
        expected = {key: value.bfloat16() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        assert_same(load_blank(checkpoint, expected), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_planner_that_casts_behind_the_back_of_the_metadata(checkpoint: Path, dtype: torch.dtype) -> None:
    # As users of stock DCP do: the metadata says float32, the record is something else.
    class Cast(SavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            value = super().transform_object(write_item, object)
            return value.to(dtype) if isinstance(value, torch.Tensor) else value

    state = {"a": torch.randn(1000), "large": torch.randn(2 * MiB)}
    save_with(checkpoint, state, Cast())
    expected = {key: value.to(dtype).float() for key, value in state.items()}
    assert_same(stock_load(checkpoint, state), expected)
    assert_same(load_with(checkpoint, blank(state), LoadPlanner(allow_cast=True)), expected)
    error = refusal(lambda: dcp_load(checkpoint, blank(state)))
    assert isinstance(error, IncompatibleStateError)


class _Minimal(AbstractSavePlanner):
    """A planner that owes nothing to the default one."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state = state_dict
        self.stock = DefaultSavePlanner()
        self.stock.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return self.stock.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Any]:
        return self.stock.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(self.state[write_item.index.fqn], buffer)
            buffer.seek(0)
            return buffer
        return torch.as_tensor(self.state[write_item.index.fqn]).clone()


def test_planner_of_its_own(checkpoint: Path) -> None:
    state = {"a": torch.randn(3 * MiB), "b": 1, "c": torch.ones(3)}
    save_with(checkpoint, state, _Minimal())
    assert_same(load_blank(checkpoint, state), state)


@pytest.mark.parametrize(
    ("value", "resolved"), [(torch.ones(3), "neither"), (1, "neither"), (torch.ones(3), torch.ones(5))]
)
def test_planner_that_resolves_to_something_else_is_an_error(checkpoint: Path, value: Any, resolved: Any) -> None:
    class Wrong(SavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return resolved

    error = refusal(lambda: save_with(checkpoint, {"a": value}, Wrong()))
    assert isinstance(error, CheckpointError)
    assert "a" in str(error)
    assert not list(checkpoint.glob("*.distcp"))


# --- Hooks for loading


def _recording(base: Any) -> Any:
    class Recording(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, str]] = []
            self.committed: dict[str, torch.Tensor] = {}

        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            assert value.tell() == 0
            self.calls.append(("load_bytes", read_item.storage_index.fqn))
            super().load_bytes(read_item, value)

        def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
            self.calls.append(("lookup_tensor", index.fqn))
            return super().lookup_tensor(index)

        def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> Any:
            self.calls.append(("transform_tensor", read_item.dest_index.fqn))
            return super().transform_tensor(read_item, tensor)

        def resolve_tensor(self, read_item: ReadItem) -> Any:
            self.calls.append(("resolve_tensor", read_item.dest_index.fqn))
            return super().resolve_tensor(read_item)

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            self.calls.append(("commit_tensor", read_item.dest_index.fqn))
            self.committed[read_item.dest_index.fqn] = tensor.clone()
            super().commit_tensor(read_item, tensor)

    return Recording()


@pytest.mark.parametrize("base", [LoadPlanner, DefaultLoadPlanner])
def test_every_hook_of_a_load_planner_is_called(checkpoint: Path, base: Any) -> None:
    state = {"a": torch.randn(10), "large": torch.randn(MiB), "t": torch.randn(30, 20).t(), "n": 1, "o": {"x": "y"}}
    dcp_save(checkpoint, state)
    planner = _recording(base)
    assert_same(load_with(checkpoint, blank(state), planner), state)
    tensors = ("a", "large", "t")
    expected = {
        (name, key)
        for key in tensors
        for name in ("lookup_tensor", "transform_tensor", "resolve_tensor", "commit_tensor")
    }
    assert set(planner.calls) == expected | {("load_bytes", "n"), ("load_bytes", "o.x")}
    assert_same(planner.committed, {key: state[key] for key in tensors})
    for key in tensors:
        assert planner.calls.index(("resolve_tensor", key)) < planner.calls.index(("commit_tensor", key))


@pytest.mark.parametrize("base", [LoadPlanner, DefaultLoadPlanner])
def test_load_planner_may_fill_tensors_of_its_own(checkpoint: Path, base: Any) -> None:
    class Scratch(base):  # type: ignore[misc]
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return torch.empty(read_item.lengths, dtype=torch.float32)

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            self.lookup_tensor(read_item.dest_index).copy_(tensor * 2)

    state = {f"{i}": torch.full((100_000,), float(i)) for i in range(50)}
    dcp_save(checkpoint, state)
    target = load_with(checkpoint, blank(state), Scratch())
    assert_same(target, {key: value * 2 for key, value in state.items()})


def test_a_state_with_other_keys_does_not_get_the_plan_of_the_load_before(checkpoint: Path) -> None:
    dcp_save(checkpoint, {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
    planner = LoadPlanner(allow_partial_load=True)
    load_with(checkpoint, {"a": torch.zeros(4), "b": torch.zeros(4)}, planner)
    for _ in range(2):
        state = load_with(checkpoint, {"b": torch.zeros(4), "missing": torch.full((4,), 6.0)}, planner)
        assert_same(state, {"b": torch.full((4,), 2.0), "missing": torch.full((4,), 6.0)})


@pytest.mark.parametrize("base", [DefaultLoadPlanner, LoadPlanner])
def test_a_hook_may_be_put_on_a_planner_itself(checkpoint: Path, base: Any) -> None:
    dcp_save(checkpoint, {"w": torch.arange(5), "object": "kept"})
    planner = base()
    filled: dict[str, torch.Tensor] = {}
    decoded = []
    planner.resolve_tensor = lambda item: filled.setdefault(item.dest_index.fqn, torch.zeros(5, dtype=torch.int64))
    planner.load_bytes = lambda item, value: decoded.append(item.dest_index.fqn)
    state = load_with(checkpoint, {"w": torch.zeros(5, dtype=torch.int64), "object": "old"}, planner)
    assert_same(filled, {"w": torch.arange(5)})
    assert_same(state, {"w": torch.zeros(5, dtype=torch.int64), "object": "old"})
    assert decoded == ["object"]


def test_a_hook_may_be_put_on_a_save_planner_itself(checkpoint: Path) -> None:
    planner = SavePlanner()
    stock = planner.resolve_data

    def doubled(item: WriteItem) -> Any:
        found = stock(item)
        return found * 2 if isinstance(found, torch.Tensor) else found

    assert planner.packs()
    planner.resolve_data = doubled  # type: ignore[method-assign]
    assert not planner.packs()
    dcp.save({"w": torch.arange(5)}, storage_writer=StorageWriter(checkpoint), planner=planner)
    assert_same(
        load_with(checkpoint, {"w": torch.zeros(5, dtype=torch.int64)}, LoadPlanner()), {"w": 2 * torch.arange(5)}
    )


def test_load_planner_may_decode_objects_itself(checkpoint: Path) -> None:
    class Text(LoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            self.put_object(read_item.dest_index.fqn, f"loaded {torch.load(value, weights_only=True)}")

    dcp_save(checkpoint, {"a": 1, "nested": {"b": "x"}})
    target = load_with(checkpoint, {"a": 0, "nested": {"b": ""}}, Text())
    assert target == {"a": "loaded 1", "nested": {"b": "loaded x"}}


def test_load_planner_that_resolves_to_another_shape_is_an_error(checkpoint: Path) -> None:
    class Wrong(LoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return torch.empty(7)

    dcp_save(checkpoint, {"a": torch.ones(3)})
    assert isinstance(refusal(lambda: load_with(checkpoint, {"a": torch.zeros(3)}, Wrong())), IncompatibleStateError)


def test_error_in_a_hook_is_what_the_caller_sees(checkpoint: Path) -> None:
    class Failing(LoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            raise KeyError("my own")

    class FailingSave(SavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            raise KeyError("my own")

    dcp_save(checkpoint, {"a": torch.ones(3)})
    assert isinstance(refusal(lambda: load_with(checkpoint, {"a": torch.zeros(3)}, Failing())), KeyError)
    assert isinstance(refusal(lambda: save_with(checkpoint, {"a": torch.zeros(3)}, FailingSave())), KeyError)
    assert_same(load_blank(checkpoint, {"a": torch.zeros(3)}), {"a": torch.ones(3)})


# --- Plans kept from save to save


def test_stock_plan_caching_with_our_writer(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path)
    for step in range(3):
        state = {"a": torch.full((10,), step), "n": {"o": step}}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=writer, planner=planner, checkpoint_id=tmp_path / f"{step}")
    for step in range(3):
        state = {"a": torch.full((10,), step), "n": {"o": step}}
        assert_same(load_blank(tmp_path / f"{step}", state), state)


@pytest.mark.parametrize("reader", ["ours", "stock's"])
def test_a_planner_of_ours_casts_under_no_reader_unless_told(tmp_path: Path, reader: str) -> None:
    dcp_save(tmp_path, {"a": torch.ones(2)})
    how: dict[str, Any] = (
        {"checkpoint_id": tmp_path} if reader == "stock's" else {"storage_reader": StorageReader(tmp_path)}
    )
    state = {"a": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(BaseException, match="allow_cast") as raised:
        dcp.load(state, planner=LoadPlanner(), no_dist=True, **how)
    assert isinstance(raised.value.failures[0][0], IncompatibleStateError)  # type: ignore[attr-defined]
    assert not state["a"].any()
    dcp.load(state, planner=LoadPlanner(allow_cast=True), no_dist=True, **how)
    assert state["a"].all()
