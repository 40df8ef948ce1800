"""Sends whole files between the folders of ranks, for tiers on nodes. Each file is verified before it gets its name.

The files of each pair of ranks are sent one after another, one piece per round. In a round, a rank sends and receives
at most a few pieces; at the same time it reads those of the next round, and writes those of the previous one. In each
round, both ranks of a pair report whether the file has failed; from the next round on, no more of it is sent.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from .._engine import _C
from .._engine.engine_errors import named_system_errors
from .._engine.options import direct_io_setting, engine_options
from .._engine.page_buffers import PageBuffers
from .._engine.rows import int_table
from .._storage.open_storage import stat_of, storage_at
from .._storage.pending import PendingFile
from ..errors import CheckpointError
from .connections import Connections, tensor_over
from .exchange import Exchange, digest

PIECE_BYTES = 8 << 20
PEERS = 2  #: how many ranks a rank sends to, and receives from, at a time. Each piece in flight has a buffer, and each
# direction has pieces of two rounds in flight: a rank has at most 8 buffers of PIECE_BYTES.
_PAGE = 4096
_UNCHECKED = 8  # complete files of one rank that wait to be verified; each keeps some descriptors open
_WORD_BYTES = 1000  # of the status that precedes a piece: the text of the source's error, or zeros

logger = logging.getLogger(__name__)

FileError = CheckpointError | OSError
Check = Callable[[str, str], None]  #: (path of a file, its final name)


class FileMessage(NamedTuple):
    """One file to send from a rank's folder to another rank's folder."""

    name: str  #: the same in both folders
    bytes: int
    source: int  #: rank
    target: int  #: rank


def send_files(
    exchange: Exchange,
    phase: str,
    messages: Sequence[FileMessage],
    folder: str,
    *,
    check: Check,
    bytes_per_second: int = 0,
) -> dict[str, FileError]:
    """Sends files between the folders of ranks. Collective, with equal `messages` on all ranks.

    A file gets its name, replacing an older one, when it is complete and durable and `check` has returned. When all
    ranks have returned, the names are durable, too. The timeout of the exchange applies to each round and to the check
    of each file, not to the whole call.

    Args:
        folder: this rank's folder.
        check: called with a temporary path in `folder` and the file's name. Raises `CheckpointError` if the bytes are
            not those that were saved.
        bytes_per_second: send limit per rank; 0: no limit. Equal on all ranks.

    Returns {name: error} of the files that were to arrive on this rank and did not; they do not affect other files, and
    leave nothing behind. Raises ValueError for inconsistent messages, and otherwise only errors that end the exchange.
    """
    _check_messages(messages, exchange.size)
    if not messages:
        return {}
    piece_bytes = PIECE_BYTES
    if bytes_per_second:  # a round takes seconds at most
        piece_bytes = min(piece_bytes, max(_PAGE, bytes_per_second // _PAGE * _PAGE))
    transfer = _Transfer(messages, piece_bytes, exchange.rank, folder, check, bytes_per_second)
    number = digest(repr((*map(tuple, messages), bytes_per_second)).encode())
    try:
        for round_ in range(transfer.rounds):
            # Ranks with other messages are in a different collective, so they fail instead of mixing their bytes.
            doing = f"files, round {round_} of {transfer.rounds}, plan {number:x}"
            with exchange.peers(doing, phase, transfer.peers) as peers:
                transfer.run(peers, round_)
        # Ranks wait for each check here, with the time of one collective, not in the caller's next collective.
        for count in range(1, max(Counter(message.target for message in messages).values()) + 1):
            transfer.finish_checks(count)
            exchange.agree([], f"{phase}: check files")
        errors = transfer.end()
        exchange.agree([], f"{phase}: sync folders")
        return errors
    finally:
        transfer.close()


def _check_messages(messages: Sequence[FileMessage], ranks: int) -> None:
    for message in messages:
        folder, name = os.path.split(message.name)
        source, target = message.source, message.target
        are_ranks = 0 <= source < ranks and 0 <= target < ranks and source != target
        if folder or name in ("", os.curdir, os.pardir) or message.bytes < 0 or not are_ranks:
            raise ValueError(f"expected the name of a file, its bytes and two ranks below {ranks}, got {message}")
    if len({(message.target, message.name) for message in messages}) != len(messages):
        raise ValueError("expected each name once for each target, got one twice")


# --- The schedule


class _Piece(NamedTuple):
    """A part of a file, in one message."""

    message: FileMessage
    offset: int
    bytes: int

    @property
    def is_last(self) -> bool:
        return self.offset + self.bytes == self.message.bytes


class _Stream:
    """The files from one rank to another, one piece per round from `first` until `end`."""

    def __init__(self, source: int, target: int, messages: list[FileMessage], piece_bytes: int) -> None:
        self.source, self.target = source, target
        self.first = self.end = 0
        self.rounds = sum(max(1, -(-message.bytes // piece_bytes)) for message in messages)
        self.pieces = (
            _Piece(message, offset, min(piece_bytes, message.bytes - offset))
            for message in messages
            for offset in range(0, max(1, message.bytes), piece_bytes)
        )


def _schedule(messages: Sequence[FileMessage], piece_bytes: int) -> list[_Stream]:
    """Returns the streams, equal on all ranks. Longest first, each starts as soon as both of its ranks are free."""
    pairs: dict[tuple[int, int], list[FileMessage]] = {}
    for message in messages:
        pairs.setdefault((message.source, message.target), []).append(message)
    streams = [_Stream(*pair, of_pair, piece_bytes) for pair, of_pair in pairs.items()]
    waiting, active, now = sorted(streams, key=lambda stream: -stream.rounds), list[_Stream](), 0
    while waiting:
        sending = Counter(stream.source for stream in active)
        receiving = Counter(stream.target for stream in active)
        late = []
        for stream in waiting:
            if sending[stream.source] < PEERS and receiving[stream.target] < PEERS:
                stream.first, stream.end = now, now + stream.rounds
                active.append(stream)
                sending[stream.source] += 1
                receiving[stream.target] += 1
            else:
                late.append(stream)
        waiting, now = late, min(stream.end for stream in active)
        active = [stream for stream in active if stream.end > now]
    return streams


# --- The two ends of a file


class _OutgoingFile:
    """A file that this rank sends. `read` runs on a separate thread."""

    def __init__(self, message: FileMessage, folder: str, options: _C.Options) -> None:
        self.error = ""
        self.is_over = False  #: it has failed, and both ranks know it
        self._path = os.path.join(folder, message.name)
        self._bytes = message.bytes
        self._options = options
        self._identity: tuple[int, ...] = ()

    def read(self, piece: _Piece, address: int) -> None:
        if self.error or self.is_over:
            return
        try:
            with named_system_errors(self._path):
                if piece.offset == 0:
                    self._identity = self._look()
                if piece.bytes:
                    row = int_table((0, piece.offset, piece.bytes, address))
                    _C.read_bytes([self._path], row, self._options)
                if piece.is_last and self._look() != self._identity:
                    raise CheckpointError(f"{self._path} was changed while it was sent")
        except Exception as error:
            self.error = str(error) or type(error).__name__

    def _look(self) -> tuple[int, ...]:
        found = stat_of(self._path)
        if not found.is_file or found.size != self._bytes:
            what = f"one of {found.size:,} bytes" if found.is_file else "no regular file"
            raise CheckpointError(f"{self._path}: expected a file of {self._bytes:,} bytes, got {what}")
        return found.identity


class _IncomingFile:
    """A file that this rank receives. `write` runs on a separate thread, and then `finish` on another one."""

    def __init__(self, message: FileMessage, folder: str, options: _C.Options) -> None:
        self.error: FileError | None = None
        self.is_over = False  #: it has failed, and both ranks know it
        self._message = message
        self._folder = folder
        self._options = options
        self._pending = PendingFile(os.path.join(folder, message.name))
        self._writer: _C.FileWriter | None = None

    def write(self, piece: _Piece, address: int, failure: str) -> None:
        """Writes a piece. `failure`: why the source could not read it; otherwise empty."""
        if self.error is not None:
            return
        length, options = self._message.bytes, self._options
        try:
            if failure:
                source = self._message.source
                raise CheckpointError(f"rank {source} could not send {self._message.name}: {failure}", rank=source)
            with named_system_errors(self._folder, length):
                if piece.offset == 0:
                    self._writer = self._pending.create(lambda path: _C.FileWriter(path, length, options, False))
                if piece.bytes:
                    assert self._writer is not None
                    self._writer.write_bytes(int_table([address, piece.bytes]), piece.offset)
        except Exception as error:
            self._fail(error)

    def finish(self, check: Check) -> None:
        """Makes the file durable, verifies it, and renames it to its name."""
        if self.error is not None:
            return
        assert self._writer is not None
        try:
            with named_system_errors(self._folder, self._message.bytes):
                self._writer.finish_bytes(b"", sync=True)
            check(self._pending.paths[0], self._message.name)
            with named_system_errors(self._folder):
                self._pending.give_names([self._message.name], replace=True)
            self._pending.committed()
            self.discard()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, CheckpointError | OSError):
            logger.error("%s does not arrive", self._message.name, exc_info=error)
            error = CheckpointError(f"{self._message.name}: {type(error).__name__}: {error}")
        # Otherwise its traceback would keep this file and the objects of the check alive.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self.error = error
        self.discard()

    def discard(self) -> None:
        """Removes the file unless it has been renamed. Idempotent."""
        self._writer = None
        self._pending.discard()


# --- One rank's part


_Steps = Iterator[None]  # the steps of a piece: start, start to receive, start to send, arrived


class _Transfer:
    """What one rank sends and receives. At any time, each stream reads one piece, sends one, and writes one."""

    def __init__(
        self,
        messages: Sequence[FileMessage],
        piece_bytes: int,
        rank: int,
        folder: str,
        check: Check,
        bytes_per_second: int,
    ) -> None:
        streams = _schedule(messages, piece_bytes)
        self.rounds = max(stream.end for stream in streams)
        self._check = check
        self._folder = folder
        self._rate = bytes_per_second
        self._paid = 0.0  # the time until which `bytes_per_second` is used up
        options = engine_options(1, direct_io_setting("auto"))
        self._outgoing = {m: _OutgoingFile(m, folder, options) for m in messages if m.source == rank}
        self._incoming = {m: _IncomingFile(m, folder, options) for m in messages if m.target == rank}
        # Determines the order of messages between two ranks in a round.
        self._streams = [stream for stream in streams if rank in (stream.source, stream.target)]
        self.peers = {peer for stream in self._streams for peer in (stream.source, stream.target)}
        self._buffers = PageBuffers(piece_bytes)
        self._reading, self._writing, self._checking = (ThreadPoolExecutor(1, "vescale_ckpt") for _ in range(3))
        self._written: list[tuple[torch.Tensor, Future[None]]] = []  # buffers, and when they are written
        self._checked: list[Future[None]] = []
        self._next: list[_Steps] = []

    def run(self, peers: Connections, number: int) -> None:
        """Runs a round of this rank, all pieces in lockstep."""
        self._peers, pieces = peers, self._next if number else self._begin(0)
        _step(pieces)  # begins to receive
        peers.progress(1)  # a rank that waits for its disk has made less progress
        self._next = self._begin(number + 1)  # reads while this round is sent
        _step(pieces)  # begins to send
        peers.wait()
        self._wait_for_writes()
        _step(pieces)

    def _begin(self, number: int) -> list[_Steps]:
        pieces = [next(stream.pieces) for stream in self._streams if stream.first <= number < stream.end]
        begun = [self._send(piece) if piece.message in self._outgoing else self._receive(piece) for piece in pieces]
        _step(begun)
        return begun

    def _send(self, piece: _Piece) -> _Steps:
        """Sends the status of a piece (the text of an error, or zeros), then the piece."""
        target, file, buffer = piece.message.target, self._outgoing[piece.message], self._buffers.take()
        read = self._reading.submit(file.read, piece, buffer.data_ptr())
        yield
        read.result()
        if not file.is_over:
            answer = bytearray(1)
            self._peers.receive(target, tensor_over(answer))
            yield
            word = file.error.encode(errors="replace")[:_WORD_BYTES]
            self._pace(piece.bytes)
            self._peers.send(target, tensor_over(bytearray(word.ljust(_WORD_BYTES, b"\0"))))
            if piece.bytes:
                self._peers.send(target, buffer[: piece.bytes], receipt=True)
            yield
            file.is_over = bool(word) or any(answer)
        self._buffers.give_back(buffer)

    def _receive(self, piece: _Piece) -> _Steps:
        """Receives a piece, replies whether its file has failed here, and queues the write."""
        source, file = piece.message.source, self._incoming[piece.message]
        yield
        if file.is_over:
            return
        buffer, word = self._buffers.take(), bytearray(_WORD_BYTES)
        self._peers.receive(source, tensor_over(word))
        if piece.bytes:
            self._peers.receive(source, buffer[: piece.bytes], receipt=True)
        yield
        answer = bytearray([file.error is not None])
        self._peers.send(source, tensor_over(answer))
        yield
        failure = word.rstrip(b"\0").decode(errors="replace")
        file.is_over = bool(failure) or any(answer)
        self._written.append((buffer, self._writing.submit(self._write, file, piece, buffer.data_ptr(), failure)))

    def _pace(self, length: int) -> None:
        """Waits until `bytes_per_second` allows sending `length` bytes."""
        if self._rate:
            now = time.monotonic()
            time.sleep(max(0.0, self._paid - now))
            self._paid = max(self._paid, now) + length / self._rate

    def _write(self, file: _IncomingFile, piece: _Piece, address: int, failure: str) -> None:
        file.write(piece, address, failure)
        if piece.is_last:
            if len(self._checked) >= _UNCHECKED:
                self._checked[-_UNCHECKED].result()
            self._checked.append(self._checking.submit(file.finish, self._check))

    def _wait_for_writes(self) -> None:
        while self._written:
            buffer, written = self._written.pop()
            written.result()
            self._buffers.give_back(buffer)

    def finish_checks(self, count: int) -> None:
        """Waits until `count` files of this rank, or all that it receives, are verified."""
        self._wait_for_writes()
        for checked in self._checked[:count]:
            checked.result()

    def end(self) -> dict[str, FileError]:
        errors = {message.name: file.error for message, file in self._incoming.items() if file.error is not None}
        if len(errors) < len(self._incoming):
            try:
                with named_system_errors(self._folder):
                    storage_at(self._folder).sync()
            except CheckpointError as error:
                for message in self._incoming:
                    errors.setdefault(message.name, error)
        return errors

    def close(self) -> None:
        """Removes files that were not renamed, after running work has ended."""
        for pool in (self._reading, self._writing, self._checking):
            pool.shutdown(cancel_futures=True)
        for file in self._incoming.values():
            file.discard()


def _step(pieces: list[_Steps]) -> None:
    for piece in pieces:
        next(piece, None)
