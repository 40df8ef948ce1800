"""`SafetensorsLayout` is Hugging Face's layout: all ranks write their parts into the shared files of one model.

After planning, the coordinator lays out the files and creates them with their final lengths.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from .._checkpoint.safetensors.commit import holds_model
from .._checkpoint.safetensors.export_folder import ExportFolder, file_numbers
from .._checkpoint.safetensors.header_texts import checked_metadata, with_ties
from .._checkpoint.safetensors.model_names import file_names, holds_export, temporary_name
from .._engine import _C
from .._engine.engine_errors import named_errors
from .._engine.options import threads_of
from .._engine.rows import int_table
from .._engine.wrapper_tensors import any_wrapper, is_wrapper, type_name
from .._observe.timeline import phase
from .._plan.global_plan import GlobalPlan
from .._plan.local_plan import LocalPlan
from .._ranks.message import pack, unpack
from .._ranks.node import memory_domain
from .._ranks.shared_directory import separate_directories
from .._ranks.steps import Steps
from .._routes.routed_write import RoutedWrite, plan_writes, routes_from
from .._state.shared_memory import empty_duplicates, shared_names
from .._state.state import State
from .._storage.open_storage import storage_at
from ..errors import CheckpointError
from ..settings import checked_bytes
from .layout import Layout, SaveOptions, Written

logger = logging.getLogger(__name__)

DEFAULT_SHARD_SIZE = "5GB"  #: the default of transformers
LEAST_BYTES = 1 << 20  #: below this sum of a node's short runs, its ranks do not exchange them

SaveFormat = Literal["dcp", "safetensors"]
FORMATS = get_args(SaveFormat)


@dataclass(frozen=True)
class Safetensors:
    """The `format` of a save that writes a model's files: `model.safetensors`, or several files and their index.

    Args:
        max_shard_size: maximum bytes of tensors per file, as an int or as text like "5GB". A larger tensor gets its own
            file.
        metadata: entries for the headers; None: `{"format": "pt"}`.
        fqn_to_index_mapping: the number of the file for each key, counted from 1, as in torch's
            HuggingFaceStorageWriter; replaces `max_shard_size`. Every key needs one. Files without keys are omitted.

    Raises:
        ValueError, TypeError: an argument has a value that no file can hold.
    """

    max_shard_size: int | str = DEFAULT_SHARD_SIZE
    metadata: Mapping[str, str] | None = None
    fqn_to_index_mapping: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        if self.metadata is not None and not isinstance(self.metadata, Mapping):
            raise ValueError(f"metadata: expected a mapping of texts or None, got {type(self.metadata).__name__}")
        _ = self.most_file_bytes, self.file_numbers, self.texts  # each raises

    @cached_property
    def most_file_bytes(self) -> int:
        return checked_bytes("max_shard_size", self.max_shard_size)

    @cached_property
    def file_numbers(self) -> tuple[tuple[str, int], ...]:
        return file_numbers(self.fqn_to_index_mapping)

    @cached_property
    def texts(self) -> tuple[tuple[str, str], ...]:
        return tuple(checked_metadata({"format": "pt"} if self.metadata is None else dict(self.metadata)))


def chosen_format(format: SaveFormat | Safetensors) -> Safetensors | None:
    """Returns the safetensors files that `format` requests; None for DCP's layout. Raises ValueError if it is
    unknown."""
    if isinstance(format, Safetensors):
        return format
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: expected one of {', '.join(FORMATS)}, or a Safetensors")
    return Safetensors() if format == "safetensors" else None


class SafetensorsLayout(Layout):
    """The files of one model in a folder of a file system."""

    _writer: _C.BoxWriter | None = None

    def __init__(self, options: SaveOptions, wanted: Safetensors) -> None:
        super().__init__(options)
        self._wanted = wanted
        self._tied: dict[str, str] = {}  # {name that is not stored: name of the tensor in the same memory}
        # The offsets of the tensors in all files, and the folder. Set only on the coordinator, after planning.
        self._layout: _C.ExportLayout | None = None
        self._folder: ExportFolder | None = None
        self._paths: list[str] = []
        self._boxes = b""  # what this rank writes from its own memory
        self._own_boxes = b""  # the same, without what ranks exchange
        self._routes = b""  # the packed rounds of that exchange; empty: no exchange
        self.blocks = b""  # this rank's contribution to the checksums of the files; set after it has written
        self._rounds: RoutedWrite | None = None  # the exchange between ranks, until it has run

    def begin(self, is_coordinator: bool) -> None:
        path = self.options.path
        storage_at(path).check_mounted(
            "a model in format='safetensors' that is saved",
            "Save it to a disk, vescale_ckpt.save(DIR, state, format='safetensors'), then copy it there: "
            f"vescale_ckpt.copy(DIR, {path!r}), or vescale-ckpt copy DIR {path}",
        )
        storage_at(path).make()
        if not self.options.overwrite and holds_export(path):
            raise holds_model(path)

    # --- With the other ranks

    def values(self, state: dict[str, Any], is_coordinator: bool) -> dict[str, Any]:
        """Moves the keys of the value under the name "" to the top level, where the files of a model have them."""
        inner = state.get("")
        if not isinstance(inner, Mapping):
            return state
        others = {name: value for name, value in state.items() if name != ""}
        if both := sorted(map(str, inner.keys() & others.keys())):
            raise ValueError(f"names that the state has twice, in itself and under '': {', '.join(both[:10])}")
        return {**others, **inner}

    def left_out(self, description: State) -> Collection[str]:
        """Returns the keys of tensors that share memory with an earlier one, which is stored, and of
        `empty_duplicates`."""
        refuse_wrappers(description)
        self._tied = shared_names(description)
        return self._tied.keys() | empty_duplicates(description)

    def place(self, steps: Steps, plan: LocalPlan, planned: GlobalPlan | None) -> None:
        """Determines where in the files each rank writes."""
        exchange = steps.exchange
        texts = [text.encode() for names in self._tied.items() for text in names]
        message = pack(memory_domain().encode(), *texts)
        of_all = exchange.gather(message, steps.phase("gather names"))
        answers = None
        if planned is not None and of_all is not None:
            answers = steps.take(self._make_all, planned, [*map(unpack, of_all)]) or [b""] * exchange.size
        answer = exchange.scatter(answers, steps.phase("scatter files"))
        if not answer:  # the coordinator could not create the files: raise its error on all ranks
            steps.raise_together("make files")
        count, token, locations, self._routes = unpack(answer)
        boxes, self._own_boxes = (
            _C.export_boxes(plan.state.inventory, plan.table, locations, with_brought) for with_brought in (True, False)
        )
        self.write_to(int(count), token.decode(), boxes)

    def _make_all(self, planned: GlobalPlan, of_all: list[list[bytes]]) -> list[bytes]:
        """Creates the files on the coordinator. Returns the answers to all ranks. `of_all`: per rank, its
        `memory_domain` and pairs of names of tied tensors."""
        ties, domains = dict[str, str](), [message[0] for message in of_all]
        for _, *texts in of_all:
            names = [text.decode() for text in texts]
            ties |= zip(names[::2], names[1::2], strict=True)
        made = self.lay_out(planned, ties)
        routes = self._plan_routes(made, planned.catalog, [domains.index(domain) for domain in domains])
        begin = str(len(made.file_bytes)).encode(), self.make_files(made).encode()
        return [pack(*begin, made.record_locations(rank), of_rank) for rank, of_rank in enumerate(routes)]

    def lay_out(self, planned: GlobalPlan, ties: dict[str, str] | None = None) -> _C.ExportLayout:
        """Decides where in the files each tensor is stored. `ties`: {name that is not stored: name of the tensor with
        its value}. Raises `CheckpointError` for values that no safetensors file can hold."""
        wanted, ties = self._wanted, ties or {}
        try:
            texts = with_ties(wanted.texts, ties)
            numbers = list(wanted.file_numbers)
            return _C.ExportLayout(planned.catalog, wanted.most_file_bytes, texts, list(ties.items()), numbers)
        except _C.EngineError as error:
            raise CheckpointError(str(error)) from None

    def make_files(self, made: _C.ExportLayout) -> str:
        """Creates the files with their final lengths. Returns the token in their temporary names."""
        self._layout = made
        self._folder = ExportFolder(self.options.path, made.file_bytes)
        return self._folder.token

    def write_to(self, count: int, token: str, boxes: bytes) -> None:
        """Sets what this rank writes to: the number of files, the suffix of their temporary names, and the locations of
        its boxes (`_C.export_boxes`)."""
        self._paths = [os.path.join(self.options.path, temporary_name(name, token)) for name in file_names(count)]
        self._boxes = boxes

    def _plan_routes(self, made: _C.ExportLayout, catalog: _C.Catalog, nodes: list[int]) -> list[bytes]:
        """Returns each rank's packed routes. Ranks of a node exchange short runs: a column shard has one in each row
        of its tensor. `nodes`: a number per rank, equal for ranks that share memory."""
        made.bring_short_runs(nodes, LEAST_BYTES)
        try:
            return plan_writes(made, catalog, nodes)
        except _C.EngineError as error:
            logger.warning("%s: each rank writes its own bytes: %s", self.options.path, error)
            return [b""] * len(nodes)

    def join_ranks(self, steps: Steps, in_one_table: bool) -> None:
        """Shares memory with the ranks of the node, to exchange short runs."""
        doing = steps.phase("write together")
        if not self._routes or not (routes := routes_from(self._routes)).rounds:
            return
        with phase("write", "share memory"):
            ready = steps.error is None and in_one_table
            self._rounds, error = RoutedWrite.begin(steps.exchange, doing, routes, ready)
        if error is not None:
            logger.warning("%s: each rank writes its own bytes, without the other ranks of its node: %s", doing, error)
        if self._rounds is not None:
            self._boxes = self._own_boxes + routes.own

    def message(self) -> bytes:
        return pack(self.blocks)

    def contents(self, planned: GlobalPlan, messages: Sequence[bytes]) -> list[tuple[bytes, ...]]:
        """Returns the head of each file, for the coordinator to commit."""
        return [tuple(self.heads([unpack(message)[0] for message in messages])), *[()] * (len(messages) - 1)]

    # --- This rank's boxes in the files

    def open(self, body_bytes: Any, part: int | None = None, *, in_background: bool = False) -> None:
        self._in_background = in_background
        options, paths = self.options, self._paths
        # The coordinator created all files.
        if paths and not storage_at(options.path).has(os.path.basename(paths[0])):
            raise separate_directories(options.path, [options.rank])
        with named_errors(str, options.path):
            self._writer = _C.BoxWriter(paths, self._for_engine())
        if self._cancelled:
            self.cancel()

    def write_table(self, table: Any, key_of: Callable[[int], str], rows: Sequence[int]) -> None:
        assert self._writer is not None
        with named_errors(key_of, self.options.path):
            held = _C.HeldRows(table, int_table(rows))
            self._writer.write(held.box_table(self._boxes))
            self._take_rounds(held)

    def _take_rounds(self, held: _C.HeldRows) -> None:
        assert self._writer is not None
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.run(held, threads_of(self.options.thread_count), self._writer.write)

    def write_records(self, records: list[bytes], keys: list[str], rows: Sequence[int], of_tensors: bool) -> None:
        if of_tensors:  # planned by a planner other than ours
            raise _no_wrapper(keys[0], "wrapper subclass")
        raise CheckpointError(f"{keys[0]}: safetensors files hold tensors only, and this is none", key=keys[0])

    def finish(self) -> Written:
        if self._rounds is not None:  # this rank has no tensors, but others wait for its part of the exchange
            if self._writer is None:
                self.open(b"")
            with named_errors(str, self.options.path):
                self._take_rounds(_C.HeldRows(b"", b""))
        files, stats = self._writer, []
        if files is not None:
            with named_errors(str, self.options.path), phase("sync", self.options.path):
                self.blocks = files.finish(self.options.sync_files)
            self._writer, self._done_bytes, stats = None, files.progress(), [files.stats()]
        written = sum(of_all["in_place_bytes"] + of_all["slot_bytes"] for of_all in stats)
        return Written(written, written, stats)

    def discard(self, error: BaseException | None = None) -> None:
        """Closes the files. The coordinator removes them when the save ends."""
        self._writer = None
        rounds, self._rounds = self._rounds, None
        if rounds is not None and isinstance(error, Exception):
            rounds.give_up(error)

    # --- The commit

    def heads(self, blocks: list[bytes]) -> list[bytes]:
        """Returns the head of each file. `blocks`: the contribution of each rank."""
        assert self._layout is not None
        return self._layout.heads(blocks)

    def commit(self, *content: bytes) -> None:
        assert self._layout is not None and self._folder is not None
        self._folder.commit([*content], self._layout.index, self.options.sync_files, self.options.overwrite)

    def end(self) -> None:
        """Removes the files if they were not committed."""
        if self._folder is not None:
            self._folder.discard()
        self._folder = self._layout = None


def refuse_wrappers(description: State) -> None:
    """Raises `CheckpointError` with the key of the first wrapper subclass, if there is any: no safetensors file can
    hold its inner tensors."""
    if not any_wrapper(description.tensors):
        return
    for item, key in enumerate(description.names):
        number = -1 if key in description.objects else description.tensor_index(item)
        if number >= 0 and is_wrapper(tensor := description.tensors[number]):
            raise _no_wrapper(key, type_name(tensor))


def _no_wrapper(key: str, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{key}: safetensors files cannot hold a {kind}, which consists of inner tensors: save its values "
        "(dequantize()), or leave it out",
        key=key,
    )
