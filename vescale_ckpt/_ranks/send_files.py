"""Sends whole files between the folders of ranks for tiers on nodes, each checked before it has its name.

The files of each pair of ranks travel one behind another, in pieces of one round each. In a round a rank sends and
receives at most a few pieces; meanwhile it reads those of the next round, and writes those of the last. In each round
both ranks of a pair tell each other whether the file has failed, and from the next one on none of its bytes are sent.
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
PEERS = 2  #: a rank sends to so many others at a time, and receives from so many. Each piece under way has a buffer,
# and in each direction pieces of two rounds are: 8 buffers of PIECE_BYTES are the most that a rank has.
_PAGE = 4096
_UNCHECKED = 8  # complete files of one rank that wait for their checks; each keeps some descriptors open
_WORD_BYTES = 1000  # what the source of a piece tells with it: the text of its error, or nothing

logger = logging.getLogger(__name__)

FileError = CheckpointError | OSError
Check = Callable[[str, str], None]  #: takes the path of a file and the name that it will have


class FileMessage(NamedTuple):
    """One file that travels from a rank's folder to another rank's folder."""

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
    """Sends files between the folders of ranks. All ranks call it together, with equal `messages`.

    A file gets its name, in place of an older one, when it is complete and durable and `check` has returned. When all
    ranks return, the names are durable, too.

    Args:
        folder: this rank's own.
        check: called with a temporary path in `folder` and the file's name. It raises `CheckpointError` if the bytes
            are not those that were saved.
        bytes_per_second: most that each rank sends; 0: no limit. Equal on all ranks.

    Returns {name: error} of the files that did not arrive on this rank, as their target. They stop no other file, and
    leave nothing. Raises ValueError for messages that make no sense, and otherwise only what ends the exchange. Its
    timeout holds for a round and for the check of one file, not for all together.
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
            # Ranks with other messages are in another collective: they fail, and do not mix their bytes.
            doing = f"files, round {round_} of {transfer.rounds}, plan {number:x}"
            with exchange.peers(doing, phase, transfer.peers) as peers:
                transfer.run(peers, round_)
        # Each check has the time of a collective: ranks wait for it here, and not in the caller's next one.
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


# --- What is sent when


class _Piece(NamedTuple):
    """A part of a file, in one message."""

    message: FileMessage
    offset: int
    bytes: int

    @property
    def is_last(self) -> bool:
        return self.offset + self.bytes == self.message.bytes


class _Stream:
    """The files from one rank to another, a piece in each round from `first` until `end`."""

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
    """Returns the streams. The longest first, each begins as soon as both of its ranks are free for it. All ranks find
    the same."""
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
    """A file of this rank that another rank gets. `read` is called in a thread of its own."""

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
    """A file that this rank gets. `write` is called in a thread of its own, and then `finish` in another one."""

    def __init__(self, message: FileMessage, folder: str, options: _C.Options) -> None:
        self.error: FileError | None = None
        self.is_over = False  #: it has failed, and both ranks know it
        self._message = message
        self._folder = folder
        self._options = options
        self._pending = PendingFile(os.path.join(folder, message.name))
        self._writer: _C.FileWriter | None = None

    def write(self, piece: _Piece, address: int, failure: str) -> None:
        """Writes a piece. `failure`: why the source could not read it; empty if it could."""
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
        """Makes the file durable, checks it, and gives it its name."""
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
        # Otherwise its tracebacks keep this file, and what the check holds.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self.error = error
        self.discard()

    def discard(self) -> None:
        """Removes the file unless it has its name. May be called again."""
        self._writer = None
        self._pending.discard()


# --- One rank's part


_Steps = Iterator[None]  # of a piece: it begins; begins to receive; to send; and has come


class _Transfer:
    """What one rank sends and receives. Of each stream it reads one piece, sends one, and writes one at a time."""

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
        self._paid = 0.0  # when all that was sent is paid for
        options = engine_options(1, direct_io_setting("auto"))
        self._outgoing = {m: _OutgoingFile(m, folder, options) for m in messages if m.source == rank}
        self._incoming = {m: _IncomingFile(m, folder, options) for m in messages if m.target == rank}
        # What two ranks send each other in a round they send in the order of these.
        self._streams = [stream for stream in streams if rank in (stream.source, stream.target)]
        self.peers = {peer for stream in self._streams for peer in (stream.source, stream.target)}
        self._buffers = PageBuffers(piece_bytes)
        self._reading, self._writing, self._checking = (ThreadPoolExecutor(1, "vescale_ckpt") for _ in range(3))
        self._written: list[tuple[torch.Tensor, Future[None]]] = []  # buffers, and when they are written
        self._checked: list[Future[None]] = []
        self._next: list[_Steps] = []

    def run(self, peers: Connections, number: int) -> None:
        """Runs a round of this rank. Its pieces take their steps together."""
        self._peers, pieces = peers, self._next if number else self._begin(0)
        _step(pieces)  # begins to receive
        peers.progress(1)  # a rank that waits for its disk has less
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
        """Sends a piece behind a word about it: the text of an error, or zeros."""
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
        """Receives a piece, answers whether its file has failed here, and has it written."""
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
        """Waits until so many bytes may be sent."""
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
        """Waits until `count` files of this rank are checked, or all that it gets."""
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
        """Removes what has not got its name, after running work has ended."""
        for pool in (self._reading, self._writing, self._checking):
            pool.shutdown(cancel_futures=True)
        for file in self._incoming.values():
            file.discard()


def _step(pieces: list[_Steps]) -> None:
    for piece in pieces:
        next(piece, None)
