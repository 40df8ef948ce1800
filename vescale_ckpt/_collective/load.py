"""Loads a checkpoint, collectively: plan, compare the state with the checkpoint, read, hand the values to the state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, filterfalse
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import settings
from .._checkpoint.loadable import LoadableCheckpoint
from .._checkpoint.native.metadata_file import has_metadata
from .._checkpoint.open_checkpoint import is_by_index, pack_for_ranks
from .._checkpoint.safetensors.headers import ATTEMPTS, ExportedMeanwhileError
from .._engine import _C
from .._engine.gc import gc_paused
from .._engine.torch_types import is_tensor_metadata
from .._load.fill_plan import FillPlan
from .._load.source import Source
from .._observe.timeline import Timeline, phase
from .._ranks.exchange import Exchange, digest
from .._ranks.groups import place_in
from .._routes.broadcast_load import BroadcastLoad
from .._state.advice_on_keys import advice_for_missing
from .._state.application import Application, optimizer_keys, saved_form
from .._state.containers import Containers
from .._state.extra_files import contents_in, is_extra, key_of, names_in
from .._state.flatten import flatten, nest, place
from .._state.key_selection import Rename, Selection, rename_function, rename_keys, renamed_if_known
from .._state.load_targets import allocate_targets, find_shared
from .._state.old_containers import ask_for_whole, saved_as_objects, split
from .._state.per_rank import PerRank, Restoring, set_rank
from .._state.stored_entries import StoredEntries
from .._state.structure import Path, structure_of
from .._storage.open_storage import storage_at
from ..errors import (
    CheckpointError,
    IncompatibleStateError,
    LoadFailedError,
    Mismatch,
    MissingKeysError,
)
from ..reports import JobStats, LoadReport, LoadStats
from ..settings import Broadcast
from .node_files import NodeFiles

_Result = TypeVar("_Result")
_PHASES = {"read metadata": "metadata", "hand over": "hand over"}  # {step: phase of the timeline}; others: "plan"


@dataclass
class _Fit:
    """The differences between the keys and shapes of the state and those of the checkpoint."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)  #: unexpected keys that belong to a module or optimizer

    def error(self, stored: Iterable[str], renamed: bool) -> CheckpointError | None:
        """Returns the error that a strict load raises, or None. `stored`: the keys of the checkpoint."""
        if self.missing or self.surplus:
            unexpected = {*self.unexpected}
            found = [key for key in stored if key not in unexpected]
            hint = advice_for_missing(self.missing, self.unexpected, found, renamed)
            return MissingKeysError(self.missing, self.surplus, self.mismatched, hint)
        if self.mismatched:
            first, *others = self.mismatched
            return IncompatibleStateError(*first, others)
        return None

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> _Fit:
        fields = json.loads(data)
        fields["mismatched"] = [Mismatch(*entry) for entry in fields["mismatched"]]
        return cls(**fields)

    @classmethod
    def of_all(cls, fits: list[_Fit]) -> _Fit:
        """Merges the fits of all ranks. A key is unexpected if no rank expects it."""
        common = set.intersection(*(set(fit.unexpected) for fit in fits))
        surplus = chain.from_iterable(fit.surplus for fit in fits)
        return cls(
            list(dict.fromkeys(chain.from_iterable(fit.missing for fit in fits))),
            [key for key in fits[0].unexpected if key in common],
            list(dict.fromkeys(chain.from_iterable(fit.mismatched for fit in fits))),
            [key for key in dict.fromkeys(surplus) if key in common],
        )


@dataclass(frozen=True)
class _Contents:
    """The part of a checkpoint that one load selects."""

    checkpoint: LoadableCheckpoint
    selection: Selection
    extra: list[str]  #: keys of the extra files, if the caller requested them

    @cached_property
    def stored(self) -> list[str]:
        return list(filterfalse(is_extra, self.checkpoint.keys()))

    def nowhere(self, keys: list[str]) -> list[str]:
        """Returns the names and patterns of the selection that match neither a key of `keys` nor an empty mapping."""
        nowhere = self.selection.without_match(keys)
        structure = structure_of(self.checkpoint.metadata) if nowhere else None
        empty = () if structure is None else structure.empty
        names = (".".join(map(str, path)) for path in empty)
        return self.selection.without_match([*keys, *names]) if empty else nowhere

    def new_value(self, key: str) -> torch.Tensor | None:
        """Returns a new CPU tensor for a stored tensor; None for an object."""
        stored = self.checkpoint.metadata.state_dict_metadata[key]
        if not is_tensor_metadata(stored):
            return None
        self.checkpoint.check_size(key)
        return torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")


class CollectiveLoad:
    """This rank's part of one load. Each step is collective: a rank with an error keeps it until the next exchange,
    in which all ranks raise."""

    def __init__(
        self,
        source: Source,
        selection: Selection,
        strict: bool,
        broadcast: Broadcast,
        process_group: dist.ProcessGroup | None,
        timeout: float | None,
        extra_files: dict[str, bytes] | None = None,
        node_files: NodeFiles | None = None,
    ) -> None:
        """`node_files`: where the files are stored, if each node's folder has only a part of them."""
        self._timeline = Timeline("load", source.path, f"loading {source.given_path}", *place_in(process_group))
        with self._timeline.here():
            self._exchange = Exchange.of(process_group, timeout, purpose="load")
            self._timeline.begin()
        source.options = replace(source.options, timeout=self._exchange.timeout)
        self._node_files = node_files
        self._extra_files = extra_files  # to fill
        self._job: JobStats | None = None
        self._source = source
        self._selection = selection
        self._strict = strict
        self._broadcast = broadcast
        self._options = {
            "strict": strict,
            "broadcast_checkpoint": broadcast,
            "verify": source.options.verify,
            "weights_only": source.options.weights_only,
            "stack": source.stack,
        }

    def into(self, state: MutableMapping[str, Any], rename: Rename | None) -> LoadReport:
        return self._while_exported(lambda: self._into(state, rename))

    def _into(self, state: MutableMapping[str, Any], rename: Rename | None) -> LoadReport:
        loading = _TargetState(state, rename_function(rename), rename is None, self._source.options.allow_cast)
        try:
            contents = self._open()
            with set_rank(self._exchange.rank, self._exchange.size):
                plan, fit = self._plan(lambda: loading.plan(contents), rename is not None)
            stats = self._read(plan)
            self._together(lambda: self._hand_over(plan, lambda: loading.hand_over(plan)), "hand over")
        except BaseException:
            loading.application.abandon()
            raise
        return LoadReport(fit.missing, fit.unexpected, fit.mismatched, self._end(stats))

    def _open(self) -> _Contents:
        with phase("metadata"):
            checkpoint = self._checkpoint()
        extra = [] if self._extra_files is None else list(filter(is_extra, checkpoint.keys()))
        return _Contents(checkpoint, self._selection, extra)

    def _hand_over(self, plan: FillPlan, hand_over: Callable[[], _Result]) -> _Result:
        """Fills the caller's `extra_files`, and calls `hand_over` for everything else."""
        found = contents_in(plan.objects)
        plan.objects = {key: value for key, value in plan.objects.items() if not is_extra(key)}
        result = hand_over()
        if self._extra_files is not None:
            self._extra_files.clear()
            self._extra_files.update(found)
        return result

    def _end(self, stats: LoadStats) -> LoadStats:
        timed = self._timeline.with_times(stats, self._job)
        self._timeline.end(timed)
        return timed

    def all(self) -> dict[str, Any]:
        """Loads the whole checkpoint into new tensors and objects, nested as they were saved."""
        return self._while_exported(self._all)

    def _while_exported(self, load: Callable[[], _Result]) -> _Result:
        """Returns what `load` returns. If an export replaces files that a rank is reading, all ranks raise the same
        error, and all of them retry."""
        with self._timeline.here():
            for _ in range(ATTEMPTS - 1):
                with suppress(ExportedMeanwhileError):
                    return load()
            return load()

    def _all(self) -> dict[str, Any]:
        contents = self._open()
        places: list[Any] = []

        def plan_all() -> tuple[FillPlan, _Fit]:
            places[:] = contents.checkpoint.places()  # now, while a lock protects the metadata
            return _plan_all(contents)

        plan, _ = self._plan(plan_all)
        stats = self._read(plan)

        @gc_paused()
        def result() -> dict[str, Any]:
            values = {**plan.state, **plan.objects}
            for key in contents.extra:
                values.pop(key, None)
            paths, structure = places
            if structure is not None:
                structure.empty = {path for path in structure.empty if ".".join(map(str, path)) in self._selection}
            return nest(values, paths, structure)

        loaded = self._together(lambda: self._hand_over(plan, result), "hand over")
        self._end(stats)
        return loaded

    def _checkpoint(self) -> LoadableCheckpoint:
        """Opens the checkpoint. If all ranks see the same metadata file, the coordinator reads it for all. Raises on
        all ranks if any rank sees no checkpoint."""
        exchange, source = self._exchange, self._source
        # An object of a store is the same for all ranks, so only the coordinator requests it, unless the files that it
        # names may have other content under the same names elsewhere.
        asks_once = storage_at(source.path).by_requests
        fingerprint = source.path if asks_once and not exchange.is_coordinator else self._fingerprint()
        if asks_once and fingerprint:
            fingerprint = source.path
        hashed, options = digest(fingerprint.encode()), digest(repr(self._options).encode())
        least, not_most, all_have_it, least_options, not_most_options = exchange.agree(
            (hashed, ~hashed, int(fingerprint != ""), options, ~options), self._phase("metadata")
        )
        if least_options != ~not_most_options:
            raise CheckpointError(f"ranks load {source.path} with different {', '.join(self._options)}")
        shared = b""
        if least == ~not_most and all_have_it and exchange.size > 1:
            packed = b""
            if exchange.is_coordinator:
                with suppress(Exception):  # after an error, each rank reads for itself below, and all raise
                    packed = pack_for_ranks(source.path, source.options.verify)
            shared = exchange.broadcast(packed, self._phase("share metadata"))
            if asks_once and shared and not is_by_index(shared):
                own = self._fingerprint().encode()
                shared = shared if exchange.all_have(own, self._phase("compare metadata")) else b""

        def read() -> LoadableCheckpoint:
            checkpoint = source.unpack(shared) if shared else self._opened_alone()
            settings.check()
            checkpoint.check_places()
            return checkpoint

        checkpoint = self._together(read, "read metadata")
        if (
            not shared
            and all_have_it
            and not exchange.all_have(checkpoint.save_id.encode(), self._phase("compare metadata"))
        ):
            raise CheckpointError(f"ranks see checkpoints of different saves in {source.path}", path=source.path)
        return checkpoint

    def _fingerprint(self) -> str:
        try:
            return self._source.fingerprint()
        except OSError:
            return f"unreadable on rank {self._exchange.rank}"  # reading it raises the error

    def _opened_alone(self) -> LoadableCheckpoint:
        source, rank = self._source, self._exchange.rank
        try:
            return source.open()
        except CheckpointError:
            # Ranks may have saved without collectives. A damaged `.metadata` is not replaced by a rank's older one.
            if has_metadata(source.path, None) or not has_metadata(source.path, rank):
                raise
        return source.open(rank)

    def _plan(self, plan: Callable[[], tuple[FillPlan, _Fit]], renamed: bool = False) -> tuple[FillPlan, _Fit]:
        with gc_paused():
            planned, own = self._together(plan, "plan")
        fit = self._fit_of_all(own)
        if self._strict and (error := fit.error(planned.checkpoint.keys(), renamed)) is not None:
            raise error
        planned.leave_out({*own.missing, *(mismatch.key for mismatch in own.mismatched)})
        return planned, fit

    def _fit_of_all(self, own: _Fit) -> _Fit:
        """Returns the merged fit of all ranks. If it is the same on all ranks, one reduction suffices."""
        packed = own.pack()
        if self._exchange.all_have(packed, self._phase("compare")):
            return own
        gathered = self._exchange.gather(packed, self._phase("gather differences"))
        merged = None if gathered is None else _Fit.of_all([_Fit.unpack(data) for data in gathered]).pack()
        return _Fit.unpack(self._exchange.broadcast(merged, self._phase("share differences")))

    def _read(self, plan: FillPlan) -> LoadStats:
        """Reads; collective. Raises on all ranks if any rank has failed; otherwise shares the job's statistics."""
        source = self._source
        reads = self._together(plan.reads, "plan reading")
        if self._node_files is not None:
            self._node_files.bring(self._exchange, self._phase("bring files"), plan.checkpoint, reads.files)
        broadcast = None
        if self._broadcast is not False and self._exchange.size > 1:
            broadcast = BroadcastLoad(self._exchange, self._broadcast, self._phase("read for each other"), source.path)

        began, alone = _C.bytes_read(), broadcast is None

        @cache  # rarely needed
        def total() -> int:
            return reads.bytes_read_alone(source.options.verify) if alone else 0

        self._timeline.progress = lambda: (_C.bytes_read() - began, total())

        stats, error = None, None
        try:
            stats = source.read(plan.checkpoint, lambda load: plan.fill(load, reads, broadcast))
        except Exception as raised:
            error = raised
        votes = self._timeline.votes(0 if stats is None else stats.bytes)
        agreed = self._exchange.fail_together(error, self._phase("read"), LoadFailedError, *votes)
        self._job = self._timeline.job(agreed)
        assert stats is not None
        return stats

    def _together(self, step: Callable[[], _Result], name: str) -> _Result:
        with phase(_PHASES.get(name, "plan")):
            return self._exchange.together(step, self._phase(name), LoadFailedError)

    def _phase(self, step: str) -> str:
        return f"loading {self._source.given_path}: {step}"


class _TargetState:
    """A load into a state: flattens the state, plans, and places loaded values in it."""

    def __init__(
        self, state: MutableMapping[str, Any], of: Callable[[str], str], same_names: bool, allow_cast: bool
    ) -> None:
        self._state = state
        self._allow_cast = allow_cast
        self._checkpoint_key = of
        self._same_names = same_names
        self._drops_prefix = False  # whether keys below "" are stored without a prefix
        self.application = Application(state)
        self._paths: dict[str, Path] = {}
        self._state_keys: dict[str, str] = {}  # keys of the state to load, by checkpoint key
        self._new: dict[str, torch.Tensor] = {}  # {checkpoint key: replacement for a tensor without memory}
        self._shared: dict[str, str] = {}  # absent checkpoint keys, each with a key whose tensor has the same memory
        self._per_rank = Restoring()
        self._old_containers: set[str] = set()  # checkpoint keys of containers that may be stored as one object each
        self._split: dict[str, Any] = {}  # {checkpoint key: value} of such containers of optimizers
        self._containers: Containers

    def _split_old_containers(self, contents: _Contents) -> _Contents:
        """Returns the contents with one key per value of optimizer containers that are stored as a single object (torch
        before 2.4). Other such containers are loaded whole."""
        checkpoint = contents.checkpoint
        is_old = checkpoint.index is None and checkpoint.format == "dcp"
        if not is_old or not (objects := saved_as_objects(checkpoint.metadata)):
            return contents
        names = {renamed_if_known(self._checkpoint_key, key) for key in flatten(saved_form(self._state))[0]}
        self._old_containers = set(objects) - names
        optimizers = tuple(renamed_if_known(self._checkpoint_key, key) for key in optimizer_keys(self._state))
        split_up = [key for key in self._old_containers if f"{key}.".startswith(tuple(f"{key}." for key in optimizers))]
        content = checkpoint.without_index().load_objects(split_up) if split_up else {}
        self._old_containers -= content.keys()
        metadata, self._split = split(checkpoint.metadata, content)
        return replace(contents, checkpoint=checkpoint.with_metadata(metadata, None))

    def plan(self, contents: _Contents) -> tuple[FillPlan, _Fit]:
        contents = self._split_old_containers(contents)
        checkpoint, stored = contents.checkpoint, contents.stored
        # An export stores what is under "" by its own name, without the prefix ".". So does another checkpoint if none
        # of its keys starts with ".".
        if self._same_names and "" in self._state:
            self._drops_prefix = checkpoint.format == "safetensors" or not any(key.startswith(".") for key in stored)
        application = self.application
        entries = StoredEntries(
            stored,
            lambda: checkpoint.metadata,
            lambda key: self._name(key, (key.partition(".")[0],)),
            self._same_names,
            lambda key: self._split[key] if key in self._split else checkpoint.load_objects([key])[key],
        )
        application.prepare(entries)
        if self._old_containers:
            application.form = ask_for_whole(application.form, lambda key: entries.key(key) in self._old_containers)
        plan, fit = self._planned(contents, entries)
        mismatched = {self._state_keys[each.key]: each.key for each in fit.mismatched if each.key in self._state_keys}
        if application.replace_targets(mismatched):
            return self._planned(contents, entries)
        return plan, fit

    def _name(self, key: str, path: Path) -> str:
        return key[1:] if self._drops_prefix and path[0] == "" else self._checkpoint_key(key)

    def _planned(self, contents: _Contents, entries: StoredEntries) -> tuple[FillPlan, _Fit]:
        checkpoint, selection = contents.checkpoint, contents.selection
        application, of = self.application, self._name
        flat, self._paths = flatten(application.form)
        by_path = self._drops_prefix  # otherwise the name of a key does not depend on its path
        names = rename_keys(flat, (lambda key: of(key, self._paths[key])) if by_path else self._checkpoint_key)
        by_name = {name: key for key, name in names.items()}
        self._state_keys = {name: by_name[name] for name in selection.of(by_name)}
        values = {name: flat[key] for name, key in self._state_keys.items()}
        containers = Containers(application, entries, selection, of, lambda name: self._paths[by_name[name]])
        self._containers = containers
        containers.find(values.keys(), {name: flat[key] for name, key in by_name.items()})
        values = {name: value for name, value in values.items() if name not in containers.replaced}
        for name, key in self._state_keys.items():
            if key in entries.added:
                checkpoint.check_size(name)
        self._new = allocate_targets(values)
        wanted = self._per_rank.unwrap({**values, **self._new}, lambda: entries.keys)
        wanted.update({key: contents.new_value(key) for key in containers.keys})
        plan = FillPlan(checkpoint, {**wanted, **dict.fromkeys(contents.extra)}, self._allow_cast, self._split)
        missing, mismatched = plan.misfits()
        self._shared = find_shared(missing, values)
        if self._shared:
            plan.leave_out(set(self._shared))
            missing = [name for name in missing if name not in self._shared]
        conflicts = containers.conflicts(missing, values)
        mismatched += dict.fromkeys([*containers.mismatched, *conflicts.values()])
        missing = [name for name in missing if name not in conflicts]
        plan.leave_out(set(conflicts))
        of_ranks = tuple(f"{name}.rank_" for name, value in values.items() if isinstance(value, PerRank))
        expected = wanted.keys() | checkpoint.aliases | plan.made_of()
        unexpected = [
            key for key in contents.stored if key not in expected and key in selection and not key.startswith(of_ranks)
        ]
        closed = application.closed_prefixes(of) if self._same_names else ()
        surplus = [key for key in unexpected if key.startswith(closed)]
        nowhere = contents.nowhere([*contents.stored, *plan.values])
        return plan, _Fit([*missing, *nowhere], unexpected, mismatched, surplus)

    def hand_over(self, plan: FillPlan) -> None:
        loaded = plan.state.keys()
        self._containers.fill(self._state, {**plan.state, **plan.objects})
        for name, value in chain(self._new.items(), plan.objects.items()):
            if name in loaded and name not in self._containers.keys and not self._per_rank.take(name, value):
                self._place(self._paths[self._state_keys[name]], value)
        for name, other in self._shared.items():
            if other in self._new and other in loaded:
                self._place(self._paths[self._state_keys[name]], self._new[other])
        keys = {**self._containers.keys, **self._state_keys}
        self.application.restore({keys[name] for name in loaded if name in keys})

    def _place(self, path: Path, value: Any) -> None:
        place(self.application.form, path, value)
        if not self.application.owns(path):
            place(self._state, path, value)


def _plan_all(contents: _Contents) -> tuple[FillPlan, _Fit]:
    checkpoint, extra = contents.checkpoint, set(contents.extra)
    keys = checkpoint.keys()
    skipped = {*map(key_of, names_in(keys))} - extra
    if contents.selection.names is None:
        skipped |= checkpoint.aliases.keys()
    selected = {*contents.selection.of(keys), *extra} - skipped
    plan = FillPlan.of_new(checkpoint, selected)
    if plan is None:
        plan = FillPlan(checkpoint, {key: contents.new_value(key) for key in keys if key in selected})
    missing, mismatched = plan.misfits()
    return plan, _Fit([*missing, *contents.nowhere(keys)], [], mismatched)
