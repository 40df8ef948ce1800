"""Steps of saves and loads by name, before, behind or in place of which tests act; and limits that tests make small."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from benchmarks.harness import by_turns, usage
from vescale_ckpt import SavePlanner, api, settings
from vescale_ckpt._checkpoint.native import commit_metadata, step_order
from vescale_ckpt._checkpoint.safetensors import headers
from vescale_ckpt._collective import background, start_save
from vescale_ckpt._collective.background import BackgroundQueue
from vescale_ckpt._collective.handle import Notice
from vescale_ckpt._collective.node_files import NodeFiles
from vescale_ckpt._collective.save import Save
from vescale_ckpt._convert import batches
from vescale_ckpt._engine import _C, options
from vescale_ckpt._load.fill_plan import FillPlan
from vescale_ckpt._load.source import Source
from vescale_ckpt._plan import replicas
from vescale_ckpt._plan.global_plan import GlobalPlan
from vescale_ckpt._plan.planner import Planner, Planning
from vescale_ckpt._ranks import send_files, shared_directory
from vescale_ckpt._ranks.exchange import Exchange
from vescale_ckpt._ranks.groups import PerGroup
from vescale_ckpt._ranks.rendezvous import GRACE, FirstWord, Rendezvous
from vescale_ckpt._ranks.store_thread import StoreGoneError
from vescale_ckpt._routes import routes
from vescale_ckpt._routes.pipeline import Pipeline
from vescale_ckpt._routes.routed_read import RoutedRead
from vescale_ckpt._state import objects
from vescale_ckpt._state.application import saved_form
from vescale_ckpt._storage import locks, orphans
from vescale_ckpt._storage.file_system import FileSystem
from vescale_ckpt._storage.open_storage import checkpoint_path
from vescale_ckpt._write import native_layout
from vescale_ckpt._write.native_layout import NativeLayout
from vescale_ckpt._write.node_layout import NodeLayout
from vescale_ckpt._write.safetensors_layout import SafetensorsLayout
from vescale_ckpt._write.snapshot import StagedPlan
from vescale_ckpt.manager import node_folders, node_tier
from vescale_ckpt.manager.node_copies import NodeCopies
from vescale_ckpt.manager.node_tier import NodeTier
from vescale_ckpt.manager.node_uploads import NodeUploads

__all__ = [
    "CEILING",
    "STOCK",
    "EngineError",
    "Notice",
    "StoreGoneError",
    "background",
    "checkpoint_path",
    "objects",
    "saved_form",
]
CEILING, STOCK = by_turns.CEILING, by_turns.STOCK  #: candidates of every benchmark
EngineError = _C.EngineError
STEPS: dict[str, tuple[Any, str]] = {
    "agree": (Exchange, "agree"),
    "describe a state to prepare": (start_save, "saved_form"),
    "stage": (StagedPlan, "__init__"),
    "start to copy": (_C.Snapshot, "start"),
    "wait for the copy": (_C.Snapshot, "wait"),
    "copy": (_C.Snapshot, "copy"),
    "wait for the save before": (BackgroundQueue, "wait_until_done"),
    "write and commit": (Save, "_write_and_commit"),
    "write what was staged": (StagedPlan, "write"),
    "open files": (NativeLayout, "open"),
    "write tensors": (NativeLayout, "write_table"),
    "write tensors of an export": (SafetensorsLayout, "write_table"),
    "write a safetensors file": (_C.FileWriter, "write_bytes"),
    "finish files": (NativeLayout, "finish"),
    "may commit": (Exchange, "may_commit"),
    "ask the store whether to commit": (Rendezvous, "may_commit"),
    "ask the store for the failure": (Rendezvous, "failure"),
    "settle the failure": (Rendezvous, "settle"),
    "ask the store for the first word": (FirstWord, "say"),
    "decide to commit": (Save, "_commit"),
    "commit": (NativeLayout, "commit"),
    "commit an export": (SafetensorsLayout, "commit"),
    "commit the metadata": (commit_metadata, "commit"),
    "plan anew": (Planning, "full_request"),
    "make the metadata": (GlobalPlan, "files"),
    "commit files": (FileSystem, "commit"),
    "note the order of steps": (step_order, "write"),
    "share a lock": (locks, "share_made"),
    "sync a directory": (_C, "sync_directory"),
    "ask for free space": (_C, "free_bytes"),
    "remove a file": (_C, "remove_file"),
    "exchange names": (_C, "exchange_names"),
    "see what does not fit": (FillPlan, "misfits"),
    "plan the reading": (FillPlan, "reads"),
    "plan the routes": (routes._Coordinator, "plan"),
    "begin the rounds": (RoutedRead, "_take_buffer"),
    "read a round": (_C, "staging_table"),
    "pack a round": (_C, "pack_table"),
    "send a round": (Pipeline, "_swap"),
    "place a round": (_C.State, "place_table"),
    "read the metadata": (Source, "unpack"),
    "read objects": (_C, "read_objects"),
    "unpickle an object": (objects, "load"),
    "read the index of a model": (headers, "_weight_map"),
    "wait for what others write": (usage, "sync_file_system"),
    "commit on a machine": (NodeLayout, "commit"),
    "clean up on a machine": (node_folders, "clean_up_part"),
    "send copies": (NodeCopies, "_send"),
    "read a file to send": (send_files._OutgoingFile, "read"),
    "write a file that comes": (send_files._IncomingFile, "write"),
    "check a file that came": (send_files._IncomingFile, "finish"),
    "copy a file to the durable place": (NodeUploads, "_copy_file"),
    "commit in the durable place": (NodeUploads, "_commit"),
    "clean up the durable place": (NodeUploads, "_clean_up"),
    "tell the steps of a machine": (node_tier, "parts_in"),
    "install metadata": (NodeTier, "_install"),
    "bring files": (NodeFiles, "bring"),
    "read a checkpoint": (Source, "read"),
}
LIMITS: dict[str, tuple[Any, str]] = {
    "seconds until what a dead save left is removed from a store": (orphans, "SAVE_GRACE"),
    "seconds until a network file system shows a file to all machines": (shared_directory, "_VISIBLE_SECONDS"),
    "bytes gathered to plan one part of a load": (routes, "_MOST_GATHERED_BYTES"),
    "bytes of a range of a file that is in one part of a load": (routes, "_RANGE_BYTES"),
    "bytes of a slot": (options, "SLOT_BYTES"),
    "least bytes of one of several files": (native_layout, "LEAST_FILE_BYTES"),
}
CALLS_OF_A_REPLACEMENT = [(_C, name) for name in ("rename_file", "exchange_names", "sync_directory", "remove_file")]
CHANGES_BY_THE_ENGINE = [(_C, "commit_file"), (_C.PendingFile, "commit"), (_C, "sync_directory")]
#: What changes a directory in a save or a clean-up, for `children.killed_before`.
CHANGES_OF_FOLDERS = [
    (FileSystem, name) for name in ("write", "commit", "remove", "make_marker", "sync", "set_aside", "remove_folder")
]
#: Seconds by which ranks may learn of each other's failures after a timeout.
SECONDS_OF_GRACE = GRACE


def instead(step: str, action: Callable[..., Any]) -> Any:
    """A context, which `start()` makes last for the rest of the process: `action` gets the arguments of the step."""
    owner, name = STEPS[step]
    return mock.patch.object(owner, name, action)


def before(step: str, action: Callable[..., Any]) -> Any:
    original = getattr(*STEPS[step])

    def both(*arguments: Any, **options: Any) -> Any:
        action(*arguments, **options)
        return original(*arguments, **options)

    return instead(step, both)


def behind(step: str, action: Callable[..., Any]) -> Any:
    original = getattr(*STEPS[step])

    def both(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        action(*arguments, **options)
        return result

    return instead(step, both)


def around_metadata(context: Callable[[bytes, bytes], Any]) -> Any:
    """A context in which `.metadata` is made and written within what `context` makes of its content and the index."""
    original = GlobalPlan.files

    def within(*arguments: Any, target: _C.PendingFile | None = None) -> Any:
        made = original(*arguments)
        if target is None:
            return made
        with context(*made):
            return original(*arguments, target=target)

    return instead("make the metadata", within)


def failing(step: str, error: BaseException) -> Any:
    owner, name = STEPS[step]
    return mock.patch.object(owner, name, side_effect=error)


def limit(what: str, value: float) -> Any:
    """A context in which a limit is another."""
    owner, name = LIMITS[what]
    return mock.patch.object(owner, name, value)


def buffers_within(memory_bytes: int) -> tuple[Any, str, int]:
    """What to set (owner, name, value) so that the buffers of a conversion share so many bytes."""
    return batches, "_AT_ONCE", batches._AT_ONCE * int(settings.SETTINGS["memory_bytes"].default) // memory_bytes


def slow_background_writes(bytes_per_second: int = 1) -> Any:
    """A context in which asynchronous saves write no more bytes in a second."""
    make = _C.Options

    def slow(**given: Any) -> _C.Options:
        return make(**(given | {"bytes_per_second": bytes_per_second} if given["niceness"] else given))

    return mock.patch.object(_C, "Options", slow)


@contextlib.contextmanager
def endless_writes() -> Iterator[None]:
    """A context in which asynchronous saves that have more than a slot to write do not end."""
    with slow_background_writes(), limit("bytes of a slot", 4 << 20):
        yield


def hash_in_python() -> Any:
    """A context in which saves hash replicas in Python, as where tensors lie on devices."""

    def nothing_ready(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda description, *others: function(replace(description, ready=bytes(len(description.ready))), *others)

    functions: dict[str, Any] = {
        name: nothing_ready(getattr(replicas, name)) for name in ("offered_hashes", "replica_sum")
    }
    return mock.patch.multiple(replicas, **functions)


def no_plans_known() -> Any:
    """A context in which saves know no plans of earlier ones."""
    return mock.patch.object(api, "_planners", PerGroup(Planner))


def planned_by(planner: SavePlanner) -> Any:
    """A context in which `save` keeps plans together with this planner, for all groups."""
    return mock.patch.object(api, "_planners", PerGroup(lambda: planner._planner))


def count_plans(planner: SavePlanner | None = None) -> list[int]:
    """A list that grows by the number of ranks with every plan that is made from now on; None: by those of `save`."""
    core = api._planners.of(None) if planner is None else planner._planner
    made: list[int] = []
    original = core.plan_all

    def counted(requests: Sequence[Any]) -> Any:
        planned, fresh = original(requests)
        if fresh:
            made.append(len(requests))
        return planned, fresh

    core.plan_all = counted  # type: ignore[method-assign]
    return made


def finish_before_exit() -> None:
    """What the package does when the process ends."""
    background._finish_before_exit()
