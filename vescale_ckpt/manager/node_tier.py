"""`NodeTier` finds the steps of a manager whose nodes each have a folder of their own, and gives nodes what they lack.

A step is whole if some living node has its `.metadata`, and each file that this names lies on some living node or in
the durable place: the data of all nodes were durable before any node wrote its metadata (`NodeLayout`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.optim import Optimizer

from .._checkpoint.check_records import file_ends
from .._checkpoint.native import metadata_check, metadata_file, metadata_pickle, step_order
from .._checkpoint.native.file_names import INDEX_NAME, METADATA_NAME, METRICS_NAME, NODE_MARKER, is_data_file
from .._checkpoint.native.native_checkpoint import NativeCheckpoint
from .._checkpoint.native.step_order import FIRST, ORDER_NAME, Branch, SavedOrder, path_of
from .._checkpoint.verify import verify
from .._collective.handle import SaveHandle
from .._collective.node_files import DURABLE, NodeFiles
from .._collective.start_load import start_load
from .._collective.start_save import prepare_save, start_save
from .._dcp.save_planner import SavePlanner
from .._dcp.storage_reader import StorageReader
from .._engine import _C
from .._engine.engine_errors import named_system_errors
from .._ranks.exchange import Exchange
from .._ranks.file_places import Places
from .._ranks.groups import PerGroup
from .._ranks.message import pack, unpack
from .._state.key_selection import Rename, Selection
from .._storage.open_storage import storage_at
from .._write.node_layout import NodeLayout
from .._write.optimizer_gate import Gate, as_gate
from ..errors import CheckpointError, CorruptCheckpointError, some
from ..reports import LoadReport
from .durable_step import DurableStep
from .remote_tier import RemoteTier

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")
_planners = PerGroup(lambda: SavePlanner(placement="local"))
_SMALL_FILES = (INDEX_NAME, ORDER_NAME, METRICS_NAME)  # each node has them beside `.metadata`


@dataclass(frozen=True)
class Part:
    """What a node has of a step."""

    fingerprint: str  #: of its `.metadata`; empty: it has none
    branch: Branch
    files: dict[str, int]  #: {data file: bytes}


@dataclass(frozen=True)
class WholeStep:
    """A step of which every file lies on a living node, or in the durable place."""

    number: int
    path: str
    files: NodeFiles | None = None  #: None: all is in `path`, which all ranks see
    contents: Mapping[str, bytes] = field(default_factory=dict)  #: of the files that each node has


class NodeTier:
    """The steps below `root`, a folder of each node. All ranks call its methods together.

    Args:
        leaders: for each rank the lowest rank of its node.
        durable: the tier that has whole copies of some steps.
    """

    def __init__(self, root: str, leaders: Sequence[int], durable: RemoteTier) -> None:
        self.root = root
        self.leaders = leaders
        self._durable = durable

    def leads(self, rank: int) -> bool:
        """Whether a rank handles the folder of its node. Asks no other rank."""
        return self.leaders[rank] == rank

    def ranks_of(self, leader: int) -> list[int]:
        return [rank for rank, its in enumerate(self.leaders) if its == leader]

    def steps(self, exchange: Exchange, phase: str, only: int | None = None) -> Iterator[WholeStep]:
        """Yields the whole steps, that which was saved last first, or `only` this one: if it lies on the nodes, and
        then if it is durable. Warns of each that is not whole. All ranks take each of them, or end together."""
        parts = self._parts(exchange, phase)
        candidates = iter(()) if parts is None else self._candidates(parts, only)
        while True:
            found = exchange.from_coordinator(lambda: next(candidates, None), phase)
            if found is None:
                return
            step, sources = found
            whole = self._on_nodes(exchange, phase, parts, step, sources) if sources else None
            if whole is not None:
                yield whole
            if not sources and exchange.from_coordinator(partial(self._is_durable, step, bool(parts)), phase):
                yield WholeStep(step, path_of(self._durable.url, step))

    def losses_survived(self, exchange: Exchange, phase: str) -> dict[int, int]:
        """Returns {step: how many nodes may be lost} of the steps that are whole on the nodes."""
        found: dict[int, int] = {}
        for step in self.steps(exchange, phase):
            if step.files is not None and not step.files.needs_durable:
                found.setdefault(step.number, min(map(len, step.files.places.values()), default=0) - 1)
        return dict(sorted(found.items()))

    def _parts(self, exchange: Exchange, phase: str) -> dict[int, dict[int, Part]] | None:
        """{step: {leader: its part}} on the coordinator; None on other ranks."""

        def tell() -> bytes:
            told: list[tuple[Any, ...]] = []
            mine: list[int] = []
            try:
                mine = step_order.all_steps(self.root) if self.leads(exchange.rank) else []
            except (CheckpointError, OSError) as error:
                logger.warning("this node's part of the steps does not count: %s", error)
            for step in mine:
                try:
                    part = part_in(path_of(self.root, step))
                    told.append((step, part.fingerprint, part.branch, part.files))
                except (CheckpointError, OSError) as error:
                    logger.warning("this node's part of step %d does not count: %s", step, error)
            return json.dumps(told).encode()

        gathered = exchange.gather(exchange.together(tell, phase), phase)
        if gathered is None:
            return None
        parts: dict[int, dict[int, Part]] = {}
        for rank, told in enumerate(gathered):
            for step, fingerprint, (number, line), files in json.loads(told):
                branch = Branch(number, tuple((of, last) for of, last in line))
                parts.setdefault(step, {})[rank] = Part(fingerprint, branch, files)
        return parts

    def _candidates(self, parts: dict[int, dict[int, Part]], only: int | None) -> Iterator[tuple[int, list[int]]]:
        """Yields steps, that which was saved last first, and the ranks that have equal metadata of them. A step that
        was saved again may have several, if the nodes were stopped in its commit, or if a node comes back with an older
        one: each counts if it is whole, that of the newest branch first."""
        durable: dict[int, Branch] = {}
        try:
            durable = self._durable.ask(lambda: SavedOrder(self._durable.url).branches, {})
        except (CheckpointError, OSError) as error:
            if not parts:  # this node may be new, and the others may have steps
                raise
            logger.warning(
                "checkpoints in %s do not count now, and those of the nodes do: %s", self._durable.url, error
            )
        branches = dict(durable)
        for step, of_step in parts.items():
            for part in of_step.values():
                if part.fingerprint and part.branch.number >= branches.get(step, FIRST).number:
                    branches[step] = part.branch
        for step in SavedOrder(self.root, known=branches, elsewhere=branches).newest_first():
            if only is not None and step != only:
                continue
            ranks: dict[str, list[int]] = {}
            for rank, part in parts.get(step, {}).items():
                if part.fingerprint:
                    ranks.setdefault(part.fingerprint, []).append(rank)
            found = [
                (max(parts[step][rank].branch.number for rank in same), len(same), same) for same in ranks.values()
            ]
            if step in durable:
                found.append((durable[step].number, 0, []))  # behind those of the nodes, unless it is newer
            for _, _, same in sorted(found, key=lambda one: one[:2], reverse=True):
                yield step, same

    def _on_nodes(
        self, exchange: Exchange, phase: str, parts: dict[int, dict[int, Part]] | None, step: int, sources: list[int]
    ) -> WholeStep | None:
        """The step on the nodes, by the metadata that the ranks `sources` have. None if it is not whole."""
        for source in sources:
            if (contents := self._contents(exchange, phase, step, source)) is not None:
                break
        else:
            return None
        durable = DurableStep(self._durable, step)
        places = exchange.from_coordinator(lambda: self._places(parts, step, contents, durable), phase)
        if places is None:
            return None
        by_rank = {name: {int(rank): size for rank, size in of_file.items()} for name, of_file in places.items()}
        return WholeStep(step, path_of(self.root, step), NodeFiles(self.leaders, by_rank, durable), contents)

    def _is_durable(self, step: int, has_others: bool) -> bool:
        """Whether the durable copy of a step is whole. Raises if nobody knows, and no node has any step."""
        path = path_of(self._durable.url, step)
        with self._durable.patience():
            report = verify(path, quick=True)
        if report.ok:
            return True
        if report.unreadable and not report.damaged and storage_at(path).can_be_away and not has_others:
            raise CheckpointError(
                f"{path} cannot be read, and may be sound: {report.reason}. No older checkpoint is taken instead. Try "
                "again when the store answers, or name a step",
                path=path,
            )
        logger.warning("the durable checkpoint of step %d is passed over: %s", step, report.reason)
        return False

    def _contents(self, exchange: Exchange, phase: str, step: int, source: int) -> dict[str, bytes] | None:
        """The files of a step that each node has, as rank `source` has them. None on all ranks if it cannot read
        them."""
        mine = b""
        if exchange.rank == source:
            try:
                contents = read_small_files(path_of(self.root, step))
                mine = pack(json.dumps([*contents]).encode(), *contents.values())
            except (CheckpointError, OSError) as error:
                logger.warning("the metadata of step %d cannot be read here: %s", step, error)
        gathered = exchange.gather(mine, phase)
        packed = exchange.broadcast(None if gathered is None else gathered[source], phase)
        if not packed:
            return None
        names, *found = unpack(packed)
        return dict(zip(json.loads(names), found, strict=True))

    def _places(
        self,
        parts: dict[int, dict[int, Part]] | None,
        step: int,
        contents: Mapping[str, bytes],
        durable: DurableStep,
    ) -> Places | None:
        """Where each file of a step lies that its metadata names. None, with a warning, if one lies nowhere. A name has
        a random part: what has it, and is long enough, was written for this save."""
        assert parts is not None
        try:
            ends = file_ends_of(path_of(self.root, step), contents)
        except (CheckpointError, _C.EngineError) as error:
            logger.warning("step %d on the nodes is passed over: %s", step, error)
            return None
        places = {
            name: {rank: part.files[name] for rank, part in parts[step].items() if part.files.get(name, -1) >= end}
            for name, end in ends.items()
        }
        lost = [name for name, ranks in places.items() if not ranks]
        if not lost:
            return places
        places |= {name: {DURABLE: size} for name in lost if (size := durable.size_of(name) or -1) >= ends[name]}
        if nowhere := [name for name in lost if not places[name]]:
            logger.warning("step %d is passed over: no node that lives has its files %s", step, some(nowhere))
            return None
        logger.warning(
            "no node that lives has the files %s of step %d: they come from the durable place", some(lost), step
        )
        return places

    def _install(self, step: WholeStep, rank: int) -> None:
        """Gives this rank's node the metadata of a step on the nodes, if it has other or none."""
        if not self.leads(rank):
            return
        metadata = step.contents[METADATA_NAME]
        with named_system_errors(step.path):
            storage = storage_at(step.path)
            storage.make()
            if storage.has(METADATA_NAME) and storage.read(METADATA_NAME) == metadata:
                return
            storage.write(NODE_MARKER, b"")
            for name in _SMALL_FILES:
                if name in step.contents:
                    storage.write(name, step.contents[name])
            storage.commit(METADATA_NAME, metadata, True)
        logger.info("this node has the metadata of step %d again", step.number)

    def is_sound(self, step: WholeStep, exchange: Exchange, phase: str) -> bool:
        """Whether each file has a sound copy. Reads all data, each node its own."""
        if step.files is None:
            return exchange.from_coordinator(lambda: verify(step.path).ok, phase)
        exchange.together(partial(self._install, step, exchange.rank), phase)
        step.files.check_own(exchange, phase, step.path)
        return step.files.bring_lost(exchange, phase, step.path)

    # --- Saves and loads

    def prepare(
        self,
        state: Mapping[str, Any],
        *,
        async_checkpoint: bool,
        process_group: dist.ProcessGroup | None,
        timeout: float | None,
    ) -> None:
        """Plans the next save, as `vescale_ckpt.prepare` does."""
        prepare_save(state, _planners.of(process_group), async_checkpoint, process_group, timeout)

    def save(
        self,
        path: str,
        state: Mapping[str, Any],
        *,
        async_checkpoint: bool,
        process_group: dist.ProcessGroup | None,
        gate: Optimizer | Iterable[Optimizer] | Gate | None,
        timeout: float | None,
        extra_files: Mapping[str, bytes] | None,
    ) -> SaveHandle:
        """Saves into a folder of each node under one path. The arguments are those of `vescale_ckpt.save`."""
        return start_save(
            path, path, state, lambda options: NodeLayout(options, extra_files), _planners.of(process_group),
            async_checkpoint=async_checkpoint, process_group=process_group, timeout=timeout,
            gate=as_gate(gate),
        )  # fmt: skip

    def load(
        self,
        step: WholeStep,
        state: MutableMapping[str, Any],
        exchange: Exchange,
        *,
        process_group: dist.ProcessGroup | None,
        timeout: float | None,
        strict: bool,
        keys: str | Iterable[str] | None,
        rename: Rename | None,
        weights_only: bool,
        extra_files: dict[str, bytes] | None,
    ) -> LoadReport:
        """Loads a step from the nodes, and brings the files that a node lacks. Another copy takes the place of what is
        damaged. The other arguments are those of `vescale_ckpt.load`."""
        assert step.files is not None
        phase = f"loading {step.path}"
        exchange.together(partial(self._install, step, exchange.rank), phase)
        while True:
            reader = StorageReader(step.path, weights_only=weights_only)
            try:
                with start_load(
                    reader, Selection(keys), strict, "auto", process_group, timeout, extra_files, step.files
                ) as loading:
                    return loading.into(state, rename, False)
            except CorruptCheckpointError:
                if not step.files.check_own(exchange, phase, step.path):
                    raise


def part_in(path: str) -> Part:
    storage = storage_at(path)
    fingerprint = metadata_file.metadata_fingerprint(path)
    branch = step_order.read(path) if fingerprint else FIRST
    files = {name: storage.stat(name).size for name in storage.names() if is_data_file(name)}
    return Part(fingerprint, branch, files)


def read_small_files(path: str) -> dict[str, bytes]:
    """The files that each node has of a step, checked as far as they have checksums."""
    storage, metadata = storage_at(path), metadata_file.metadata_bytes(path, None)
    metadata_check.check(metadata, path)
    contents = {METADATA_NAME: metadata, INDEX_NAME: metadata_file.index_bytes(path)}
    for name in (ORDER_NAME, METRICS_NAME):
        contents[name] = storage.read(name) if storage.has(name) else None
    return {name: content for name, content in contents.items() if content is not None}


def file_ends_of(path: str, contents: Mapping[str, bytes]) -> dict[str, int]:
    """{file that the metadata names: the least length that it must have}."""
    if INDEX_NAME in contents:
        index = _C.Index.from_bytes(contents[INDEX_NAME], path)
        return dict(zip(index.files, index.file_ends(), strict=True))
    return file_ends(NativeCheckpoint.of(path, None, metadata_pickle.loads(contents[METADATA_NAME], path)))
