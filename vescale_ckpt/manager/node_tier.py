"""`NodeTier` finds the steps of a manager whose nodes each have a folder of their own, and gives nodes what they lack.

A step is whole if some living node has its `.metadata`, and each file that this names lies on some living node or in
the durable place: the data of all nodes were durable before any node wrote its metadata (`NodeLayout`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from .._checkpoint.check_records import file_ends
from .._checkpoint.native import metadata_check, metadata_file, metadata_pickle
from .._checkpoint.native.file_names import INDEX_NAME, METADATA_NAME, METRICS_NAME, NODE_MARKER
from .._checkpoint.native.native_checkpoint import NativeCheckpoint
from .._checkpoint.native.step_order import ORDER_NAME, SavedOrder, path_of
from .._checkpoint.newest import in_doubt
from .._checkpoint.record_reader import ReadOptions
from .._checkpoint.verify import verify
from .._collective.load import CollectiveLoad
from .._collective.node_files import DURABLE, NodeFiles, Places
from .._engine import _C
from .._engine.engine_errors import named_system_errors
from .._load.source import Source
from .._ranks.exchange import Exchange
from .._ranks.message import pack, unpack
from .._state.key_selection import Rename, Selection
from .._storage.open_storage import storage_at
from .._storage.paths import check_relative
from ..errors import CheckpointError, CorruptCheckpointError, some
from ..reports import LoadReport
from . import run_id
from .node_table import NodeTable, Part, branch_of, parts_in
from .retention import Retention
from .run_id import Run
from .schedule import Ranks
from .tier import DurablePlace, DurableStep

logger = logging.getLogger(__name__)


_SMALL_FILES = (INDEX_NAME, ORDER_NAME, METRICS_NAME)  # each node has them beside `.metadata`


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
        durable: the place that has whole copies of some steps.
    """

    def __init__(self, root: str, leaders: Sequence[int], durable: DurablePlace) -> None:
        self.root = root
        self.leaders = leaders
        self.table = NodeTable()  #: on the coordinator
        self.run: Run | None = None  #: the run that the nodes continue
        self._durable = durable
        self._metric: str | None = None  # name of the metric in the table
        self._finds_whole = False  # whether `look` always finds out which steps are whole

    def leads(self, rank: int) -> bool:
        """Whether a rank handles the folder of its node. Needs no exchange."""
        return self.leaders[rank] == rank

    def begin(self, exchange: Exchange, retention: Retention) -> None:
        """Gathers what all nodes have. Raises on all ranks if a folder is of another run. Unless retention keeps all
        steps, each `look` finds out which ones are whole."""
        phase = f"looking for the steps in {self.root} of all nodes"
        self._metric, self._finds_whole = retention.best, not retention.keeps_all
        runs = self.look(exchange, phase)

        def choose() -> Run:
            with_steps = {rank for groups in map(self.table.groups, self.table.parts) for rank in chain(*groups)}
            return self._durable.choose_run({rank: runs[rank] for rank in sorted(with_steps)})

        self.run = Run(*exchange.from_coordinator(choose, phase))

    def write_run(self) -> None:
        """Writes the id of the run into this node's folder, before a step is saved or installed there."""
        if self.run is not None:
            with named_system_errors(self.root):
                run_id.write(self.root, self.run)

    def look(self, exchange: Exchange, phase: str, finds_whole: bool = False) -> list[Run | None]:
        """Makes the table anew, from one gather. Returns on the coordinator the id that each rank's folder has.
        `finds_whole`: whether nodes read metadata, to find out which steps are whole."""

        def own() -> bytes:
            leads, run = self.leads(exchange.rank), None
            with suppress(CheckpointError, OSError):  # `parts_in` warns
                run = run_id.read(self.root) if leads else None
            found = parts_in(self.root, self._metric) if leads else {}
            return json.dumps({"run": run, "parts": [(step, *part) for step, part in found.items()]}).encode()

        parts: dict[int, dict[int, Part]] = {}
        runs: list[Run | None] = []
        gathered = exchange.gather(exchange.together(own, phase), phase)
        for rank, of_node in enumerate(map(json.loads, gathered or ())):
            runs.append(None if of_node["run"] is None else Run(*of_node["run"]))
            for step, fingerprint, branch, *others in of_node["parts"]:
                parts.setdefault(step, {})[rank] = Part(fingerprint, branch_of(branch), *others)

        def ask() -> bool:
            self.table = NodeTable(parts)
            self._durable.nodes_have_steps = bool(self.table.rows)
            self._durable.look()
            self.table.durable = self._durable.branches
            return self._durable.nodes_have_steps

        self._durable.nodes_have_steps = exchange.from_coordinator(ask, phase)
        if finds_whole or self._finds_whole:
            self._note_ends(exchange, phase)
        return runs

    def _note_ends(self, exchange: Exchange, phase: str) -> None:
        """Notes which steps are whole. One node reads the metadata of each."""
        table = self.table
        wanted = exchange.from_coordinator(lambda: [(step, table.groups(step)[0][0]) for step in table.rows], phase)
        found: dict[int, dict[str, int]] = {}
        for step in (step for step, rank in wanted if rank == exchange.rank):
            path = path_of(self.root, step)
            try:
                found[step] = file_ends_of(path, read_small_files(path))
            except (CheckpointError, _C.EngineError, OSError) as error:
                logger.warning("the metadata of step %d cannot be read here: %s", step, error)
        for of_node in exchange.gather(json.dumps([*found.items()]).encode(), phase) or ():
            for step, ends in json.loads(of_node):
                table.note_ends(step, ends)

    def steps(self, exchange: Exchange, phase: str, only: int | None = None) -> Iterator[WholeStep]:
        """Yields the whole steps, that which was saved last first, or `only` this one: if it lies on the nodes, and
        then if it is durable. Warns of each that is not whole. All ranks take each of them, or end together."""
        self.look(exchange, phase)
        candidates = self._candidates(only)
        while True:
            found = exchange.from_coordinator(lambda: next(candidates, None), phase)
            if found is None:
                return
            step, sources = found
            whole = self._on_nodes(exchange, phase, step, sources) if sources else None
            if whole is not None:
                yield whole
            if not sources and exchange.from_coordinator(partial(self._is_durable, step), phase):
                yield WholeStep(step, path_of(self._durable.url, step))

    def losses_survived(self, exchange: Exchange, phase: str) -> dict[int, int]:
        """Returns {step: how many nodes may be lost} of the steps that are whole on the nodes."""
        self.look(exchange, phase, finds_whole=True)
        rows = sorted(self.table.rows.items())
        whole = exchange.from_coordinator(lambda: [(of, row.survives) for of, row in rows if row.survives >= 0], phase)
        return dict(whole)

    def _candidates(self, only: int | None) -> Iterator[tuple[int, list[int]]]:
        """Yields steps, that which was saved last first, and the ranks that have equal metadata of them; none for the
        durable copy."""
        if self._durable.error is not None and not self.table.rows:
            raise self._durable.error
        for step in SavedOrder.of(self.table.branches).newest_first():
            if only in (None, step):
                yield from ((step, same) for same in self.table.candidates(step))

    def _on_nodes(self, exchange: Exchange, phase: str, step: int, sources: list[int]) -> WholeStep | None:
        """The step on the nodes, by the metadata that the ranks `sources` have. None if it is not whole."""
        contents = next(filter(None, (self._contents(exchange, phase, step, source) for source in sources)), None)
        if contents is None:
            return None
        durable = DurableStep(self._durable, step)
        places = exchange.from_coordinator(lambda: self._places(step, contents, durable), phase)
        if places is None:
            return None
        by_rank = {name: {int(rank): size for rank, size in of_file.items()} for name, of_file in places.items()}
        return WholeStep(step, path_of(self.root, step), NodeFiles(self.leaders, by_rank, durable), contents)

    def _is_durable(self, step: int) -> bool:
        """Whether the durable copy of a step is whole. Raises if nobody knows, and no node has any step."""
        path = path_of(self._durable.url, step)
        with self._durable.patience():
            report = verify(path, quick=True)
        if report.ok:
            return True
        if not self.table.rows and (doubt := in_doubt(path, report)) is not None:
            raise doubt
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
        packed = exchange.share(mine, phase)[source]
        if not packed:
            return None
        names, *found = unpack(packed)
        return dict(zip(json.loads(names), found, strict=True))

    def _places(self, step: int, contents: Mapping[str, bytes], durable: DurableStep) -> Places | None:
        """Where each file of a step lies that its metadata names. None, with a warning, if one lies nowhere."""
        try:
            ends = file_ends_of(path_of(self.root, step), contents)
        except (CheckpointError, _C.EngineError) as error:
            logger.warning("step %d on the nodes is passed over: %s", step, error)
            return None
        places = self.table.places(step, ends)
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
            self.write_run()
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

    def load(
        self,
        step: WholeStep,
        state: MutableMapping[str, Any],
        exchange: Exchange,
        ranks: Ranks,
        *,
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
            source = Source(step.path, ReadOptions(weights_only=weights_only))
            try:
                loading = CollectiveLoad(
                    source, Selection(keys), strict, "auto", ranks.process_group, ranks.timeout, extra_files, step.files
                )
                return loading.into(state, rename)
            except CorruptCheckpointError:
                if not step.files.check_own(exchange, phase, step.path):
                    raise


def read_small_files(path: str) -> dict[str, bytes]:
    """The files that each node has of a step, checked as far as they have checksums."""
    storage, metadata = storage_at(path), metadata_file.metadata_bytes(path, None)
    metadata_check.check(metadata, path)
    contents = {METADATA_NAME: metadata, INDEX_NAME: metadata_file.index_bytes(path)}
    for name in (ORDER_NAME, METRICS_NAME):
        contents[name] = storage.read(name) if storage.has(name) else None
    return {name: content for name, content in contents.items() if content is not None}


def file_ends_of(path: str, contents: Mapping[str, bytes]) -> dict[str, int]:
    """{file that the metadata names: the least length that it must have}. Raises `UntrustedCheckpointError` for a name
    outside of the checkpoint's directory."""
    if INDEX_NAME in contents:
        index = _C.Index.from_bytes(contents[INDEX_NAME], path)
        return {check_relative(name, path): end for name, end in zip(index.files, index.file_ends(), strict=True)}
    return file_ends(NativeCheckpoint.of(path, None, metadata_pickle.loads(contents[METADATA_NAME], path)))
