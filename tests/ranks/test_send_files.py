"""Files sent between the folders of ranks: every byte arrives, or nothing does, and other files go on."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import hashlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from harness import faults
from harness.files import flip, locks_are_held
from harness.ranks import run_ranks

from vescale_ckpt import CheckpointError, CheckpointTimeoutError, CorruptCheckpointError, StorageFullError
from vescale_ckpt._checkpoint.native.commit_metadata import remove_orphans
from vescale_ckpt._engine.page_buffers import PageBuffers
from vescale_ckpt._ranks import send_files as module
from vescale_ckpt._ranks.connections import Connections
from vescale_ckpt._ranks.exchange import Exchange
from vescale_ckpt._ranks.send_files import FileMessage, send_files

MiB = 1 << 20
Errors = dict[str, CheckpointError | OSError]


def content(name: str, length: int) -> bytes:
    return random.Random(os.fsencode(name)).randbytes(length)


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


def put(folder: Path, messages: list[FileMessage]) -> None:
    """Makes each file in the folder of its source."""
    for message in messages:
        path = folder / str(message.source) / message.name
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder / str(message.target)).mkdir(exist_ok=True)
        path.write_bytes(content(message.name, message.bytes))


def check_content(path: str, name: str) -> None:
    """As the check of a checkpoint's records."""
    data = Path(path).read_bytes()
    if data != content(name, len(data)):
        raise CorruptCheckpointError(f"{path} is damaged", key=None, file=path)


def send(
    folder: str,
    messages: list[FileMessage],
    prepare: Callable[[Path, int], None] | None = None,
    piece: int = MiB,
    rate: int = 0,
) -> tuple[Errors, int]:
    """The errors of this rank, and how many buffers it had. `prepare`: gets the rank's folder and number."""
    exchange = Exchange.of(timeout=30)
    mine = Path(folder, str(exchange.rank))
    made: list[PageBuffers] = []

    class Counted(PageBuffers):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            made.append(self)

    gc.collect()
    were_held = locks_are_held()  # by what other tests have left
    dist.barrier()
    if prepare is not None:
        prepare(mine, exchange.rank)
    with mock.patch.object(module, "PageBuffers", Counted), mock.patch.object(module, "PIECE_BYTES", piece):
        errors = send_files(exchange, "send", messages, str(mine), check=check_content, bytes_per_second=rate)
    exchange.agree([], "the exchange can be used again")
    assert were_held or not locks_are_held()
    return errors, sum(buffers.made for buffers in made)


def assert_arrived(folder: Path, messages: list[FileMessage]) -> None:
    """Each target has exactly what it had and its files."""
    for rank in {message.target for message in messages}:
        found = {path.name: digest_of(path.read_bytes()) for path in (folder / str(rank)).iterdir()}
        its = [message for message in messages if rank in (message.source, message.target)]
        assert found == {message.name: digest_of(content(message.name, message.bytes)) for message in its}


LENGTHS = (0, 1, 4095, 4097, 8 * MiB - 1, 8 * MiB, 8 * MiB + 1, 40 * MiB)
PAIRS = [(source, target) for source in range(4) for target in range(4) if source != target]

#: What is sent, in pieces of how many bytes, with how many buffers of a rank at most, and at which rate.
SENDS: dict[str, tuple[list[FileMessage], int, int, int]] = {
    "all lengths": ([FileMessage(f"file {length}", length, 0, 1) for length in LENGTHS], module.PIECE_BYTES, 2, 0),
    "all ways at once, and one file to two ranks": (
        [FileMessage(f"{n} from {a} to {b}", n * 2 * MiB + a, a, b) for a, b in PAIRS for n in range(3)]
        + [FileMessage("to both", 4 * MiB, 3, target) for target in (0, 1)],
        MiB, 8, 0,
    ),
    "more peers than a rank serves at a time": (  # what waits begins when a longer stream of the same rank is through
        [FileMessage(f"gather {other}", other * 2 * MiB, other, 0) for other in (1, 2, 3)]
        + [FileMessage(f"spread {other}", other * 2 * MiB, 0, other) for other in (1, 2, 3)],
        MiB, 8, 0,
    ),
    "more files than may wait for their checks": (
        [FileMessage(f"file {number}", number, 0, 1) for number in range(4 * module._UNCHECKED)], MiB, 8, 0,
    ),
    "short pieces at a low rate": ([FileMessage("file", 250_000, 0, 1)], 8 * MiB, 8, 100_000),
}  # fmt: skip


@pytest.mark.parametrize("name", SENDS)
def test_every_file_arrives(tmp_path: Path, name: str) -> None:
    messages, piece, most_buffers, rate = SENDS[name]
    put(tmp_path, messages)
    (tmp_path / str(messages[0].target) / messages[0].name).write_bytes(b"an older one")
    ranks = 1 + max(max(message.source, message.target) for message in messages)
    for errors, buffers in run_ranks(ranks, send, str(tmp_path), messages, None, piece, rate):
        assert errors == {} and buffers <= most_buffers
    assert_arrived(tmp_path, messages)


def test_a_name_that_is_no_text_fails_alone(tmp_path: Path) -> None:
    messages = [FileMessage(os.fsdecode(b"\xff"), 5, 0, 1), FileMessage("file", 5, 0, 1)]
    put(tmp_path, messages)
    (_, _), (errors, _) = run_ranks(2, send, str(tmp_path), messages)
    assert list(errors) == [messages[0].name] and os.listdir(tmp_path / "1") == ["file"]


def test_no_files_are_no_collective() -> None:
    assert send_files(Exchange.of(), "send", [], "/nowhere", check=check_content) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        FileMessage("../other", 1, 0, 1),
        FileMessage("..", 1, 0, 1),
        FileMessage("", 1, 0, 1),
        FileMessage("file", -1, 0, 1),
        FileMessage("file", 1, 1, 1),
        FileMessage("file", 1, 0, 2),
    ],
)
def test_messages_that_make_no_sense(wrong: FileMessage, tmp_path: Path) -> None:
    exchange = mock.Mock(size=2)
    with pytest.raises(ValueError, match="expected"):
        send_files(exchange, "send", [wrong], str(tmp_path), check=check_content)
    with pytest.raises(ValueError, match="got one twice"):
        twice = [FileMessage("file", 1, source, 1) for source in (0, 2)]
        send_files(mock.Mock(size=3), "send", twice, str(tmp_path), check=check_content)


def send_unequal(folder: str, messages: list[FileMessage]) -> str:
    exchange = Exchange.of(timeout=30)
    mine = messages[exchange.rank :]
    with pytest.raises(CheckpointError, match="ranks are in different places") as raised:
        send_files(exchange, "send", mine, str(Path(folder, str(exchange.rank))), check=check_content)
    return str(raised.value)


def test_ranks_with_other_messages_raise_before_bytes_move(tmp_path: Path) -> None:
    messages = [FileMessage(name, 10, 0, 1) for name in ("a", "b")]
    put(tmp_path, messages)
    run_ranks(2, send_unequal, str(tmp_path), messages)
    assert not any((tmp_path / "1").iterdir())


# --- Files that fail alone


BEFORE, VICTIM, AFTER = (FileMessage(name, 3 * MiB - 5, 0, 1) for name in ("before", "victim", "after"))
BACK = FileMessage("back", 5 * MiB, 1, 0)
FILES = [BEFORE, VICTIM, AFTER, BACK]


def only_victim(folder: Path, results: list[tuple[Errors, int]]) -> CheckpointError | OSError:
    """All files but one arrived, and of that one nothing is left. Returns its error."""
    (at_source, _), (at_target, _) = results
    assert at_source == {} and list(at_target) == ["victim"], results
    assert sorted(os.listdir(folder / "1")) == ["after", "back", "before"]
    assert {"after", "back", "before"} <= set(os.listdir(folder / "0")) <= {"after", "back", "before", "victim"}
    for message in (BEFORE, AFTER, BACK):
        path = folder / str(message.target) / message.name
        assert path.read_bytes() == content(message.name, message.bytes)
    return at_target["victim"]


@pytest.mark.parametrize("trouble", ["missing", "shorter", "longer", "a folder", "a FIFO"])
def test_a_source_that_is_not_what_was_told(tmp_path: Path, trouble: str) -> None:
    put(tmp_path, FILES)
    path = tmp_path / "0" / "victim"
    if trouble in ("shorter", "longer"):
        os.truncate(path, VICTIM.bytes + (1 if trouble == "longer" else -1))
    else:
        path.unlink()
    if trouble == "a folder":
        path.mkdir()
    if trouble == "a FIFO":
        os.mkfifo(path)
    error = only_victim(tmp_path, run_ranks(2, send, str(tmp_path), FILES))
    words = {"missing": "No such file", "shorter": "got one of 3,145,722 bytes", "longer": "got one of 3,145,724 bytes"}
    assert isinstance(error, CheckpointError) and error.rank == 0
    assert str(error).startswith("rank 0 could not send victim: ")
    assert words.get(trouble, "got no regular file") in str(error) and str(path) in str(error)


def fail_reads(_: Path, rank: int) -> None:
    """The second and third piece of the victim cannot be read, whatever is tried."""
    read = module._OutgoingFile.read

    def failing(self: module._OutgoingFile, piece: module._Piece, address: int) -> None:
        with faults.fault("read", errno.EIO, 0, 10**9 if piece.message.name == "victim" and piece.offset else 0):
            read(self, piece, address)

    mock.patch.object(module._OutgoingFile, "read", failing).start()


def change_while_reading(folder: Path, rank: int) -> None:
    """Another file takes the victim's name between two pieces."""
    read = module._OutgoingFile.read

    def changing(self: module._OutgoingFile, piece: module._Piece, address: int) -> None:
        if piece.message.name == "victim" and piece.is_last:
            (folder / "new").write_bytes(bytes(VICTIM.bytes))
            (folder / "new").rename(folder / "victim")
        read(self, piece, address)

    mock.patch.object(module._OutgoingFile, "read", changing).start()


@pytest.mark.parametrize(
    ("prepare", "words"), [(fail_reads, "Input/output error"), (change_while_reading, "was changed while it was sent")]
)
def test_a_source_that_fails_in_the_middle(tmp_path: Path, prepare: Callable[[Path, int], None], words: str) -> None:
    put(tmp_path, FILES)
    error = only_victim(tmp_path, run_ranks(2, send, str(tmp_path), FILES, prepare))
    assert words in str(error) and str(error).startswith("rank 0 could not send victim: ")


def fail_calls(call: str, number: int, offset: int, _: Path, rank: int) -> None:
    """Calls of the system for the victim fail at its target, from this offset on, and no others."""
    if rank != 1:
        return
    one_at_a_time = threading.Lock()  # of the threads that read, write and check

    def within(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def failing(self: Any, *arguments: Any) -> None:
            is_early = name == "write" and arguments[0].offset < offset
            with one_at_a_time:
                if isinstance(self, module._IncomingFile) and self._message.name == "victim" and not is_early:
                    faults.inject(call, number, 0, 10**9)
                method(self, *arguments)
                faults.clear()

        mock.patch.object(kind, name, failing).start()

    within(module._IncomingFile, "write")
    within(module._IncomingFile, "finish")
    within(module._OutgoingFile, "read")


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("open", errno.EROFS, CheckpointError),
        ("open", errno.ENOSPC, StorageFullError),
        ("allocate", errno.ENOSPC, StorageFullError),
        ("write", errno.ENOSPC, StorageFullError),
        ("write in the middle", errno.ENOSPC, StorageFullError),
        ("write", errno.EDQUOT, StorageFullError),
        ("write", errno.EIO, CheckpointError),
        ("sync", errno.EIO, CheckpointError),
        ("close", errno.EIO, CheckpointError),
        ("rename", errno.EACCES, CheckpointError),
    ],
)
def test_a_target_that_cannot_write(tmp_path: Path, call: str, number: int, kind: type[CheckpointError]) -> None:
    put(tmp_path, FILES)
    call, in_middle, _ = call.partition(" ")
    fail = functools.partial(fail_calls, call, number, 2 * MiB if in_middle else 0)
    error = only_victim(tmp_path, run_ranks(2, send, str(tmp_path), FILES, fail))
    assert type(error) is kind and os.strerror(number) in str(error)
    assert str(tmp_path / "1") in str(error)
    assert not isinstance(error, StorageFullError) or error.needed == VICTIM.bytes


def test_a_folder_whose_names_cannot_be_made_durable(tmp_path: Path) -> None:
    """The files have their names, but a loss of power may take them."""
    put(tmp_path, FILES)
    (at_source, _), (at_target, _) = run_ranks(2, send, str(tmp_path), FILES, fail_sync_of_folder)
    assert at_source == {} and set(at_target) == {"before", "victim", "after"}
    assert all("sync" in str(error) for error in at_target.values())


def fail_sync_of_folder(folder: Path, rank: int) -> None:
    end = module._Transfer.end

    def failing(self: module._Transfer) -> Errors:
        with faults.fault("sync_directory", errno.EIO) if rank == 1 else contextlib.nullcontext():
            return end(self)

    mock.patch.object(module._Transfer, "end", failing).start()


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_bit_is_found_and_nothing_stays(tmp_path: Path, place: str) -> None:
    put(tmp_path, FILES)
    (tmp_path / "1" / "victim").write_bytes(b"an older one")
    flip(tmp_path / "0" / "victim", {"first": 0, "middle": 4 * VICTIM.bytes, "last": 8 * VICTIM.bytes - 1}[place])
    (_, _), (errors, _) = run_ranks(2, send, str(tmp_path), FILES)
    assert isinstance(errors["victim"], CorruptCheckpointError) and list(errors) == ["victim"]
    assert (tmp_path / "1" / "victim").read_bytes() == b"an older one"
    (tmp_path / "1" / "victim").unlink()
    assert sorted(os.listdir(tmp_path / "1")) == ["after", "back", "before"]


@pytest.mark.parametrize("raised", [OSError(errno.EIO, "Input/output error"), ZeroDivisionError("no number")])
def test_a_check_that_fails_otherwise(tmp_path: Path, raised: Exception) -> None:
    put(tmp_path, FILES)
    error = only_victim(tmp_path, run_ranks(2, send, str(tmp_path), FILES, functools.partial(fail_check, raised)))
    assert type(error) is (OSError if isinstance(raised, OSError) else CheckpointError) and str(raised) in str(error)


def fail_check(raised: Exception, _: Path, rank: int) -> None:
    def failing(path: str, name: str) -> None:
        check_content(path, name)
        if name == "victim":
            raise raised

    finish = module._IncomingFile.finish
    mock.patch.object(module._IncomingFile, "finish", lambda self, check: finish(self, failing)).start()


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    put(tmp_path, FILES)
    (at_source, _), (at_target, _) = run_ranks(2, send, str(tmp_path), FILES, remove_folder)
    assert set(at_source) == {"back"} and set(at_target) == {"before", "victim", "after"}
    assert "rank 1 could not send back" in str(at_source["back"])
    assert not (tmp_path / "1").exists()


def remove_folder(folder: Path, rank: int) -> None:
    if rank == 1:
        shutil.rmtree(folder)


# --- Ranks that end


DATA = FileMessage("__0_0123abcd.distcp", 8 * MiB, 0, 1)


def send_until_one_dies(folder: str, dies: int) -> tuple[str, list[int], float]:
    """The rank dies in the fourth round. Returns what the others see."""
    exchange = Exchange.of(timeout=5)
    mine, run = Path(folder, str(exchange.rank)), module._Transfer.run

    def dying(self: module._Transfer, peers: Connections, number: int) -> None:
        if number == 4 and exchange.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        run(self, peers, number)

    messages = [DATA, FileMessage("back", 8 * MiB, 1, 2), FileMessage("third", 8 * MiB, 2, 0)]
    began = time.monotonic()
    mock.patch.object(module, "PIECE_BYTES", MiB).start()
    with mock.patch.object(module._Transfer, "run", dying), pytest.raises(CheckpointTimeoutError) as raised:
        send_files(exchange, "send", messages, str(mine), check=check_content)
    return str(raised.value), raised.value.late_ranks, time.monotonic() - began


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies(tmp_path: Path, dies: int) -> None:
    put(tmp_path, [DATA, FileMessage("back", 8 * MiB, 1, 2), FileMessage("third", 8 * MiB, 2, 0)])
    answers = run_ranks(3, send_until_one_dies, str(tmp_path), dies, check=False)
    for rank, answer in enumerate(answers):
        if rank != dies:
            text, late, seconds = answer
            assert late == [dies] and f"rank {dies} of 3" in text and seconds < 60
            assert [name for name in os.listdir(tmp_path / str(rank)) if ".tmp." in name] == []
    # What the dead rank has begun, the next clean-up of a save removes.
    begun = [name for name in os.listdir(tmp_path / "1") if name.startswith(DATA.name)]
    assert len(begun) == (dies == 1)
    assert remove_orphans(str(tmp_path / "1")) == begun
    assert not any(name.startswith(DATA.name) for name in os.listdir(tmp_path / "1"))


def test_a_clean_up_leaves_what_is_being_received(tmp_path: Path) -> None:
    put(tmp_path, [DATA])
    (_, _), (errors, _) = run_ranks(2, send, str(tmp_path), [DATA], clean_up_in_every_round)
    assert errors == {}
    assert_arrived(tmp_path, [DATA])


def clean_up_in_every_round(folder: Path, rank: int) -> None:
    run = module._Transfer.run

    def cleaning(self: module._Transfer, peers: Connections, number: int) -> None:
        if rank == 1:
            removed = remove_orphans(str(folder))
            assert not removed or number == 1  # it was not locked yet, and is made again under another name
        run(self, peers, number)

    mock.patch.object(module._Transfer, "run", cleaning).start()


# --- What it costs


def test_a_limit_of_the_rate() -> None:
    """By a clock that only sleeping moves."""
    now = [100.0]
    clock = mock.Mock(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    messages = [FileMessage("file", 10 * MiB, 0, 1)]
    transfer = module._Transfer(messages, 1 << 20, 0, "/nowhere", check_content, 2 * MiB)
    with mock.patch.object(module, "time", clock):
        for _ in range(11):
            transfer._pace(MiB)
        assert now[0] == pytest.approx(105.0)  # 10 MiB before the last piece
        now[0] += 1000
        transfer._pace(MiB)
        transfer._pace(MiB)
        assert now[0] == pytest.approx(1105.5)  # a lull is not caught up with
    transfer.close()
