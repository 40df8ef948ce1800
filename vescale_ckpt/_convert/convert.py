"""Converts a checkpoint with all ranks: each makes the same plan and writes its share, and the coordinator commits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args

import torch.distributed as dist

from .. import settings
from .._checkpoint.check_records import Progress
from .._checkpoint.checkpoint import Checkpoint
from .._checkpoint.open_checkpoint import open_checkpoint
from .._checkpoint.recognize import Format
from .._engine.engine_errors import of_system
from .._fingerprint.fingerprint import KEY as FINGERPRINT_KEY
from .._fingerprint.fingerprint import has_fingerprint
from .._ranks.exchange import Exchange, calling
from .._state.key_selection import Rename
from .._storage.open_storage import checkpoint_path
from .._storage.pending import PendingFolder, put_back
from ..errors import CheckpointError, some
from ..settings import checked_bytes, checked_flag, checked_path
from . import dcp_files, formats
from .batches import Buffers
from .output_files import Files, write_file
from .plan import DTypes, Plan, Stack, plan

logger = logging.getLogger(__name__)

Objects = Literal["warn", "drop", "error"]
_KEEPS_OBJECTS = ("dcp", "torch")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ConvertReport:
    """The result of a conversion, over all ranks."""

    seconds: float
    tensors: int
    objects: int
    bytes: int  #: size of the tensors as written
    files: int  #: number of files with tensors
    left_out: list[str] = field(default_factory=list)  #: objects that the format cannot hold


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: Format,
    rename: Rename | None = None,
    keys: str | Iterable[str] | None = None,
    dtype: DTypes | None = None,
    max_shard_size: int | str = "5GB",
    stack: Stack | None = None,
    on_objects: Objects = "warn",
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> ConvertReport:
    """Writes the checkpoint `src` in another format. Collective: all ranks of the group call it and share the work.

    Between DCP and safetensors, memory is bounded (`VESCALE_CKPT_MEMORY_BYTES`, and as much for transfer buffers). Data
    is verified as in a load. The result is durable, and appears under its name only when it is complete. See
    docs/converting.md. If any rank fails, all ranks raise, and `dst` is unchanged.

    Args:
        src: a directory of DCP, a safetensors file or a folder of them, or a file of torch.save. The format is
            detected from the files.
        dst: for "dcp", a directory. For "safetensors", a file if the name ends in `.safetensors`, otherwise a folder of
            shards with `model.safetensors.index.json`. For "torch", a file.
        format: "dcp", "safetensors" or "torch".
        rename: new names: a function, or a mapping of names or of prefixes up to a dot, of which the longest match
            applies (`{"model": ""}`).
        keys: which of the source's keys to convert: names, prefixes up to a dot, or `fnmatch` patterns. An entry that
            starts with `!` excludes (`"!optimizer"`).
        dtype: the dtype for floating-point tensors; or a mapping of (new) names or patterns to dtypes. Rounds to
            nearest even. Other tensors are converted only if a mapping has their exact name. For quantised models, the
            dequantized values are written, without the scales.
        max_shard_size: maximum bytes of tensors per shard, as an int or as text ("5GB"). A larger tensor gets its own
            shard.
        stack: `{"layers.*.w": "layers.w"}` stacks tensors along a new first dimension, in the order of their numbers;
            `{"layers.w": "layers.*.w"}` splits them; `{("q", "k", "v"): "qkv"}` concatenates along the first dimension.
            Names are those after `rename`.
        on_objects: what to do with values that are not tensors if the format is "safetensors": "warn" and omit them,
            "drop" them silently, or raise an "error".
        overwrite: whether an existing `dst` may be replaced.
        process_group: the ranks that convert. None: all ranks, or this process alone if torch.distributed is not
            initialized.
        timeout: seconds to wait for other ranks in each step; None: `VESCALE_CKPT_TIMEOUT`.

    Raises:
        ValueError, TypeError: an argument is invalid (with several ranks, `SaveFailedError` with that error as
            `cause`); raised before anything is written.
        MissingKeysError: `keys` selects nothing.
        CorruptCheckpointError, UntrustedCheckpointError: `src` is damaged or unsafe.
        StorageFullError, CheckpointError: `dst` could not be written.
    """

    def make(source: Checkpoint) -> Plan:
        return plan(source, keys, rename, stack, dtype)

    with calling("convert", process_group):
        return convert_by_plan(src, dst, format, make, max_shard_size, on_objects, overwrite, process_group, timeout)


def convert_by_plan(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    format: Format,
    make: Callable[[Checkpoint], Plan],
    max_shard_size: int | str,
    on_objects: Objects,
    overwrite: bool,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> ConvertReport:
    """The same, with the plan that `make` returns. `progress` is called with the bytes that this rank has written, and
    with its share of all."""
    exchange = Exchange.of(process_group, timeout, purpose="convert")
    checked_path("src", src)
    checked_path("dst", dst)
    started = time.perf_counter()
    with ExitStack() as closing:
        conversion = _Conversion(exchange, src, dst, format, closing)
        conversion.plan(make, max_shard_size, on_objects, overwrite)
        if progress is not None:
            conversion.tell(progress)
        files = conversion.write()
    made = conversion.made
    return ConvertReport(
        seconds=time.perf_counter() - started,
        tensors=len(made.outputs),
        objects=0 if conversion.left_out else len(made.objects),
        bytes=conversion.bytes_of_outputs(),
        files=files,
        left_out=conversion.left_out,
    )


class _Conversion:
    """One conversion of this rank. All ranks take each step, or none: a rank with an error keeps it until the next
    exchange, where all ranks raise."""

    def __init__(
        self,
        exchange: Exchange,
        src: str | os.PathLike[str],
        dst: str | os.PathLike[str],
        format: Format,
        closing: ExitStack,
    ) -> None:
        self._exchange = exchange
        self._src, self._dst = src, dst
        self._path = ""  # set after the arguments were checked
        self._format = format
        self._closing = closing
        self.left_out: list[str] = []

    def plan(
        self, make: Callable[[Checkpoint], Plan], max_shard_size: int | str, on_objects: Objects, overwrite: bool
    ) -> None:
        def prepare() -> int:
            for name, value, known in (("format", self._format, Format), ("on_objects", on_objects, Objects)):
                if value not in get_args(known):
                    raise ValueError(f"{name}: expected one of {', '.join(get_args(known))}, got {value!r}")
            self._overwrite = checked_flag("overwrite", overwrite)
            settings.check()
            self._buffers = Buffers()
            most_bytes = checked_bytes("max_shard_size", max_shard_size)
            source_path, self._path = checkpoint_path(self._src), checkpoint_path(self._dst)
            source = open_checkpoint(source_path)
            self._closing.callback(source.close)
            formats.check_destination(source_path, self._path, self._format, overwrite)
            self.made = make(source)
            self._drop_fingerprint(source)
            self._check_objects(on_objects)
            mine = self._exchange.is_coordinator and not self.left_out  # one rank writes all objects
            self._values = self._objects() if mine else {}
            self._files = formats.files_of(self.made, self._values, self._path, self._format, most_bytes)
            return most_bytes

        def repair() -> None:
            if self._exchange.is_coordinator and formats.is_folder(os.fspath(self._dst), self._format):
                put_back(checkpoint_path(self._dst))

        self._together(repair, "look for what was set aside")
        most_bytes = self._together(prepare, "plan")
        text = f"{self._format} {self._buffers.bytes} {most_bytes} {self.made}".encode()
        if not self._exchange.all_have(text, self._phase("compare")):
            raise CheckpointError("ranks would convert differently: their arguments, settings or files differ")

    def tell(self, progress: Progress) -> None:
        """Calls `progress` whenever bytes were written."""
        done, total = 0, self.bytes_of_outputs() // self._exchange.size

        def written(count: int) -> None:
            nonlocal done
            done += count
            progress(min(done, total), total)

        self._buffers.written = written

    def bytes_of_outputs(self) -> int:
        once = self.made.ties if self._format in ("safetensors", "torch") else {}
        return sum(output.bytes for output in self.made.outputs if output.name not in once)

    def _drop_fingerprint(self, source: Checkpoint) -> None:
        """Leaves out the source's fingerprint, unless it holds for what is written."""
        is_same = source.format == self._format == "dcp" and self.made.changes_nothing
        if is_same or not has_fingerprint(source):
            return
        kept = {name: key for name, key in self.made.objects.items() if key != FINGERPRINT_KEY}
        self.made = replace(self.made, objects=kept)
        if self._exchange.is_coordinator:
            logger.info("%s: the fingerprint is left out, as it does not hold for what is written", self._dst)

    def _check_objects(self, on_objects: Objects) -> None:
        if self._format in _KEEPS_OBJECTS or not self.made.objects:
            return
        self.left_out = sorted(self.made.objects)
        text = f"{self._format} has no place for {len(self.left_out)} values that are no tensors: {some(self.left_out)}"
        if on_objects == "error":
            raise CheckpointError(text)
        if on_objects == "warn" and self._exchange.is_coordinator:
            logger.warning("%s: they are left out", text)

    def _objects(self) -> dict[str, Any]:
        loaded = self.made.view.source.load_objects(self.made.objects.values())
        return {name: loaded[key] for name, key in self.made.objects.items()}

    def write(self) -> int:
        """Writes and commits. Returns how many files hold tensors."""
        in_place = self._together(lambda: formats.goes_into_place(self._path, self._format), "look")
        if in_place or not formats.is_folder(self._path, self._format):
            return self._write(self._path)
        folder, is_coordinator = PendingFolder(self._path), self._exchange.is_coordinator
        if is_coordinator:
            self._closing.callback(folder.discard)
        self._together(lambda: folder.make() if is_coordinator else None, "make a folder")
        message = folder.temporary.encode() if is_coordinator else None
        written = self._write(self._exchange.broadcast(message, self._phase("name the folder")).decode())
        self._together(lambda: folder.commit() if is_coordinator else None, "commit")
        return written

    def _write(self, directory: str) -> int:
        return self._write_dcp(directory) if self._files is None else self._write_files(self._files, directory)

    def _write_files(self, files: Files, directory: str) -> int:
        ranks = formats.rank_of_each(files.files, self._exchange.size)

        def write() -> None:
            for file, rank in zip(files.files, ranks, strict=True):
                if rank == self._exchange.rank:
                    write_file(file, directory, self.made.view, self._buffers)

        self._together(write, "write")
        if files.finish is not None:
            finish = files.finish
            self._together(lambda: finish(directory) if self._exchange.is_coordinator else None, "finish")
        return len(files.files)

    def _write_dcp(self, directory: str) -> int:
        exchange, made = self._exchange, self.made
        pieces = dcp_files.pieces_of_rank(made.outputs, self._buffers.most_bytes, exchange.rank, exchange.size)
        files = self._together(lambda: dcp_files.begin(directory, exchange.rank, self._overwrite), "begin")
        try:
            written = self._together(
                lambda: dcp_files.write(files, pieces, self._values, made.paths, made.view, self._buffers), "write"
            )
            gathered = exchange.gather(written, self._phase("gather"))
        except BaseException:
            files.discard()
            raise
        try:
            self._together(
                lambda: None if gathered is None else dcp_files.commit(files, gathered, self._path, made.structure),
                "commit",
            )
        finally:
            files.end()
        return exchange.size

    def _together(self, step: Callable[[], _Result], name: str) -> _Result:
        """Takes a step on all ranks; raises on all if it fails on one. A single rank raises its own error."""

        def named() -> _Result:
            try:
                return step()
            except OSError as error:
                raise of_system(error, os.fspath(self._dst)) from error

        return named() if self._exchange.size == 1 else self._exchange.together(named, self._phase(name))

    def _phase(self, step: str) -> str:
        return f"converting to {self._dst}: {step}"
