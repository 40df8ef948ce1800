"""Collectives of our own: right values, and an end in bounded time with the right names whatever other ranks do."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness.children import wait_for
from harness.ranks import TIMEOUT as RUN_TIMEOUT
from harness.ranks import on_ranks, run_ranks
from harness.saves import error_of

from vescale_ckpt import CheckpointError, CheckpointTimeoutError, RankFailedError, SaveFailedError, StorageFullError
from vescale_ckpt._ranks import connections
from vescale_ckpt._ranks.exchange import Exchange
from vescale_ckpt._ranks.node import node_of_this_process
from vescale_ckpt._ranks.rendezvous import Rendezvous

TIMEOUT = 2.0  # seconds after which ranks give up where the tests want them to; all that come at once come within it
FOREVER = 10 * RUN_TIMEOUT  # a rank that waited so long would have been killed: what comes, comes of itself


def bytes_of(rank: int, most: int = 5000) -> bytes:
    """Another number of them on each rank, on some none."""
    return random.Random(rank).randbytes(0 if rank % 3 == 2 else rank * most // 3 + 1)


def same_everywhere(errors: list[Any], late: list[int], words: list[str]) -> None:
    """All ranks raised the same CheckpointTimeoutError."""
    for error in errors:
        assert isinstance(error, CheckpointTimeoutError), error
        assert error.late_ranks == late
        assert str(error) == str(errors[0])
        assert all(word in str(error) for word in words), str(error)


def say(event: str, directory: Path) -> None:
    (directory / f"{event} {dist.get_rank()}").touch()


def wait_for_the_others(event: str, directory: Path) -> None:
    """Until all other ranks have said so. Not by a collective: they may be in one."""
    wait_for(*(directory / f"{event} {rank}" for rank in range(dist.get_world_size()) if rank != dist.get_rank()))


def connected() -> Exchange:
    """An exchange whose ranks have met: one that is late afterwards is late for a collective, not for the meeting."""
    exchange = Exchange.of(None, FOREVER)
    exchange.agree([1], "save 0")
    return exchange


def connected_with_pids(directory: Path) -> Exchange:
    """The same, when all ranks have written the numbers of their processes."""
    exchange = connected()
    (directory / f"pid {exchange.rank}").write_text(str(os.getpid()))
    say("ready", directory)
    wait_for_the_others("ready", directory)
    return exchange


def pid_of(rank: int, directory: Path) -> int:
    return int((directory / f"pid {rank}").read_text())


@contextlib.contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """A context with a list of the bytes of each message that this rank sends."""
    sent: list[int] = []
    send = connections.Connections.send

    def counted(links: Any, peer: int, tensor: torch.Tensor, receipt: bool = False) -> None:
        sent.append(tensor.nbytes)
        send(links, peer, tensor, receipt)

    with mock.patch.object(connections.Connections, "send", counted):
        yield sent


# --- Values


def _values(group: Any = None) -> None:
    exchange = Exchange.of(group, FOREVER)
    rank, size = exchange.rank, exchange.size
    assert exchange.is_coordinator == (rank == 0)
    for number in range(3):
        least = [0, 1 - size, 5, 1 << 62, -(1 << 63)]
        assert exchange.agree([rank, -rank, *least[2:]], f"a {number}") == least
        assert exchange.agree([], f"nothing {number}") == []
        parts = exchange.gather(bytes_of(rank), f"g {number}")
        assert parts == ([bytes_of(other) for other in range(size)] if rank == 0 else None)
        assert exchange.scatter(parts, f"s {number}") == bytes_of(rank)
        for data in (b"", b"x", bytes_of(3)):
            assert exchange.broadcast(data if rank == 0 else None, f"b {number}") == data
        exchange.fail_together(None, f"f {number}")
    assert exchange.gather(b"", "nothing") == ([b""] * size if rank == 0 else None)


@on_ranks(8)
def test_values_in_a_deep_tree() -> None:
    with mock.patch.object(connections, "FANOUT", 2):
        group = dist.new_group(range(8), backend="gloo")  # the default group may have its connections already
        _values(group)
        first, end = min(2 * dist.get_rank() + 1, 8), min(2 * dist.get_rank() + 3, 8)
        assert Exchange.of(group)._links.children == range(first, end)  # type: ignore[union-attr]


def test_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    _values()


def test_a_process_alone_raises_its_error_once_and_says_no_rank() -> None:
    ours = StorageFullError("/x", 2, 1)
    with pytest.raises(StorageFullError) as raised:
        Exchange.of().fail_together(ours, "write")
    assert raised.value is ours
    with pytest.raises(SaveFailedError) as failed:
        Exchange.of().together(lambda: [][1], "write")
    assert str(failed.value) == "write: IndexError: list index out of range"
    assert isinstance(failed.value.cause, IndexError)
    shown = "".join(traceback.format_exception(failed.value))
    assert shown.count("Traceback (most recent call last)") == 1 and "lambda: [][1]" in shown


def test_timeout_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Exchange.of().timeout == 1800
    monkeypatch.setenv("VESCALE_CKPT_TIMEOUT", "7")
    assert Exchange.of().timeout == 7
    assert Exchange.of(timeout=0.5).timeout == 0.5


@on_ranks(4)
def test_groups_do_not_meet() -> None:
    """Ranks 1 and 3 alone; then all in groups of both ways to make them, with ours for both at once."""
    rank = dist.get_rank()
    odd = dist.new_group([1, 3], backend="gloo")
    if rank in (1, 3):
        assert Exchange.of(odd, FOREVER).agree([rank], "odd") == [1]
        assert Exchange.of(odd, FOREVER).rank == (rank - 1) // 2
        _values(odd)
    else:
        with pytest.raises(ValueError, match="this rank is not in it"):
            Exchange.of(odd)
    _values()
    again = dist.new_group([1, 3], backend="gloo")
    everyone = dist.new_group(backend="gloo")
    first, second = Exchange.of(None, FOREVER), Exchange.of(everyone, FOREVER)
    assert first._links is Exchange.of(dist.group.WORLD)._links
    assert first._links is not second._links
    if rank in (1, 3):
        assert Exchange.of(again, FOREVER)._links is not Exchange.of(odd)._links
    results: list[int] = []

    def other_thread() -> None:
        results.extend(second.agree([rank + 100 + number], "second")[0] for number in range(50))

    thread = threading.Thread(target=other_thread)
    thread.start()
    mine = [first.agree([rank + number], "first")[0] for number in range(50)]
    for _ in range(20):  # the user's own collectives meanwhile
        dist.barrier()
    thread.join(RUN_TIMEOUT)
    assert mine == list(range(50))
    assert results == list(range(100, 150))


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) >> 10


@on_ranks(4)
def test_memory_of_a_gather_is_the_sum_not_the_largest_for_each_rank() -> None:
    """Most memory taken on the coordinator by a gather of data on one rank of four, in MiB."""
    exchange = connected()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    data = b"\7" * (100 << 20) if exchange.rank == 1 else b"\1"
    parts = exchange.gather(data, "large")
    peak = _resident("VmHWM") - before
    if parts is not None:
        assert [len(part) for part in parts] == [1, 100 << 20, 1, 1]
        assert parts[1].count(7) == 100 << 20
    assert exchange.rank or peak < 250  # 100, and once more while the largest part is turned into bytes


@on_ranks(2)
def test_long_messages_with_several_interfaces() -> None:
    """Torch connects its own groups once for each interface. Ranks of an exchange have one connection."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo"  # `run_ranks` undoes it
    exchange = Exchange.of(dist.new_group(backend="gloo"), 10.0)  # the default group may have its connections already
    data = bytes([exchange.rank]) * (64 << 20)
    for number in range(3):
        parts = exchange.gather(data, f"plan {number}")
        assert parts is None or parts == [data, b"\1" * len(data)]


# --- Ranks that are late, dead, or elsewhere


def _late(method: str, late: int, events: Path) -> list[Any]:
    """One rank comes to save 1 after the others have given up; save 2 works."""
    rank = connected().rank

    def save(number: int, timeout: float) -> None:
        exchange = Exchange.of(None, timeout)
        phase = f"save {number}"
        if method == "gather":
            exchange.gather(b"x", phase)
        elif method == "scatter":
            exchange.scatter([b"x"] * exchange.size if rank == 0 else None, phase)
        elif method == "broadcast":
            exchange.broadcast(b"x" if rank == 0 else None, phase)
        elif method == "fail_together":
            exchange.fail_together(None, phase)
        exchange.agree([1], phase)

    if rank == late:
        wait_for_the_others("gave up", events)  # then it learns of it at once
    first = error_of(lambda: save(1, FOREVER if rank == late else TIMEOUT))
    say("gave up", events)
    return [first, error_of(lambda: save(2, FOREVER)), error_of(lambda: save(3, FOREVER))]


@pytest.mark.parametrize(
    ("method", "late"),
    [("agree", 0), ("agree", 3), ("gather", 0), ("gather", 3), ("scatter", 3), ("broadcast", 3), ("fail_together", 3)],
)
def test_late_rank_is_named_and_the_next_save_works(method: str, late: int, tmp_path: Path) -> None:
    answers = run_ranks(4, _late, method, late, tmp_path)
    same_everywhere([answer[0] for answer in answers], [late], [f"rank {late} of 4", "save 1", f"{TIMEOUT:g} s"])
    assert [answer[1:] for answer in answers] == [[None, None]] * 4


def _late_with_an_exchange_in_hand(events: Path) -> list[Any]:
    exchange = Exchange.of(None, FOREVER)
    if dist.get_rank() == 1:
        wait_for_the_others("gave up", events)
    else:
        exchange.timeout = TIMEOUT
    first = error_of(lambda: exchange.agree([1], "plan"))
    say("gave up", events)
    exchange.timeout = FOREVER  # it does not wait any more
    return [first, error_of(lambda: exchange.agree([1], "commit"))]


def test_exchange_that_has_failed_goes_on_failing(tmp_path: Path) -> None:
    answers = run_ranks(2, _late_with_an_exchange_in_hand, tmp_path)
    same_everywhere([error for answer in answers for error in answer], [1], ["plan", "rank 1 of 2"])


def _late_at_first(events: Path) -> list[Any]:
    group = dist.new_group(backend="gloo")  # nothing of ours is connected on it
    if dist.get_rank() == 2:
        wait_for_the_others("gave up", events)
    first = error_of(lambda: Exchange.of(group, TIMEOUT))
    say("gave up", events)
    return [first, error_of(lambda: Exchange.of(group, FOREVER).agree([1], "save 2"))]


def test_late_for_the_first_connection(tmp_path: Path) -> None:
    answers = run_ranks(4, _late_at_first, tmp_path)
    same_everywhere([first for first, _ in answers], [2], ["connecting", "rank 2 of 4"])
    assert [second for _, second in answers] == [None] * 4


@on_ranks(2)
def test_a_rank_that_skipped_a_save_is_with_the_others_again_after_the_next() -> None:
    rank, results = connected().rank, []
    for number in range(1, 5):
        if rank == 0 or number != 1:
            phase, timeout = f"save {number}", TIMEOUT if number < 3 else FOREVER
            results.append(error_of(lambda: Exchange.of(None, timeout).agree([1], phase)))  # noqa: B023
        dist.barrier()  # as training does
    for error in results[: 1 if rank else 2]:
        assert isinstance(error, CheckpointTimeoutError) and error.late_ranks == [1]
    assert results[1 if rank else 2 :] == [None, None]


def _dead(dying: int, method: str, fanout: int = connections.FANOUT, slow: int = -1) -> Any:
    rank = dist.get_rank()
    with mock.patch.object(connections, "FANOUT", fanout):
        exchange = connected()
        if rank == dying:
            time.sleep(0.3)  # most often the others wait by then, and it is the same if they do not
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == slow:
            time.sleep(2)
        if method == "gather":
            return error_of(lambda: (exchange.gather(b"x" * 100_000, "plan"), exchange.agree([1], "commit")))
        return error_of(lambda: exchange.agree([1], "plan"))


@pytest.mark.parametrize(("method", "dying"), [("agree", 0), ("agree", 3), ("gather", 0), ("gather", 1)])
def test_dead_rank_is_named_long_before_the_timeout(dying: int, method: str) -> None:
    answers = run_ranks(4, _dead, dying, method, check=False)
    same_everywhere([a for rank, a in enumerate(answers) if rank != dying], [dying], [f"rank {dying} of 4", "died"])


@pytest.mark.parametrize("dying", [1, 7])
def test_all_learn_of_a_death_through_the_tree(dying: int) -> None:
    answers = run_ranks(8, _dead, dying, "agree", 2, check=False)
    same_everywhere([a for r, a in enumerate(answers) if r != dying], [dying], [f"rank {dying} of 8", "died"])


def test_slow_rank_is_not_blamed_for_a_dead_one() -> None:
    answers = run_ranks(4, _dead, 3, "agree", connections.FANOUT, 1, check=False)
    same_everywhere(answers[:3], [3], ["rank 3 of 4", "died"])


def _dead_before_its_first_connection_with_another(dying: int) -> Any:
    """Rank 0 waits for a first connection with a rank that dies in this collective; the others go on to the next."""
    rank = dist.get_rank()
    with mock.patch.object(connections, "FANOUT", 2):
        exchange = Exchange.of(dist.new_group(range(8), backend="gloo"), FOREVER)
        exchange.agree([1], "save 0")

        def two_collectives() -> None:
            if rank == dying:
                with mock.patch.object(connections.Connections, "_connect", lambda *_: os.kill(os.getpid(), 9)):
                    exchange.peers("messages", "plan", [0]).__enter__()
            with exchange.peers("messages", "plan", [dying] if rank == 0 else []):
                pass
            exchange.agree([1], "commit")

        return error_of(two_collectives)


def test_a_rank_that_waits_for_a_first_connection_learns_of_a_death_that_others_have_seen() -> None:
    answers = run_ranks(8, _dead_before_its_first_connection_with_another, 7, check=False)
    same_everywhere(answers[:7], [7], ["rank 7 of 8", "died"])


def _stops(who: int, where: str, directory: Path) -> Any:
    exchange = connected_with_pids(directory)
    rank = exchange.rank
    begin, send = connections.Connections._begin, connections.Connections.send

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def stop_and_greet(*args: Any) -> Any:
        stop()
        return begin(*args)

    def send_greetings_only(links: connections.Connections, peer: int, tensor: torch.Tensor, **more: Any) -> None:
        if tensor.numel() != connections._GREETING_BYTES:
            stop()
        send(links, peer, tensor, **more)

    def two_collectives() -> None:
        exchange.gather(b"x" * rank, "write")
        exchange.agree([1], "commit")

    if rank != who:
        exchange.timeout = TIMEOUT
        error = error_of(two_collectives)
        os.kill(pid_of(who, directory), signal.SIGCONT)
        return error
    if where == "before":
        stop()
        return error_of(two_collectives)
    name, instead = ("_begin", stop_and_greet) if where == "greeting" else ("send", send_greetings_only)
    with mock.patch.object(connections.Connections, name, instead):
        return error_of(two_collectives)


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("where", ["before", "greeting", "sending"])
def test_a_stopped_rank_is_named_not_who_waits_for_it_too(where: str, who: int, tmp_path: Path) -> None:
    if who == 0 and where == "sending":
        pytest.skip("the coordinator sends nothing in a gather")
    answers = run_ranks(4, _stops, who, where, tmp_path)
    same_everywhere(answers, [who], [f"rank {who} of 4"])


def _dies_within_a_message(sends: bool, directory: Path) -> Any:
    exchange = connected()
    rank = exchange.rank
    data = bytes(128 << 20)  # takes much longer than it takes to die
    begin = connections.Connections._begin

    def die_in_the_middle(links: connections.Connections, way: str, peer: int, tensor: torch.Tensor, tag: int) -> Any:
        work = begin(links, way, peer, tensor, tag)
        if tensor.numel() == len(data):
            say("began", directory)
            if rank == 1:
                wait_for(directory / "began 0")
                os.kill(os.getpid(), signal.SIGKILL)
        return work

    with mock.patch.object(connections.Connections, "_begin", die_in_the_middle):
        if sends:
            return error_of(lambda: exchange.gather(data if rank == 1 else b"", "plan"))
        return error_of(lambda: exchange.scatter([b"", data] if rank == 0 else None, "plan"))


@pytest.mark.parametrize("sends", [True, False])
def test_a_rank_that_dies_within_a_long_message_is_named_long_before_the_timeout(sends: bool, tmp_path: Path) -> None:
    """gloo wakes neither who sends the rest of a message to a peer that died nor who received a part of one."""
    answers = run_ranks(2, _dies_within_a_message, sends, tmp_path, check=False)
    same_everywhere(answers[:1], [1], ["rank 1 of 2", "died"])


def _dies_within_one_of_many_messages(directory: Path) -> Any:
    exchange = connected_with_pids(directory)
    rank = exchange.rank
    parts = [torch.zeros(4000, dtype=torch.uint8) for _ in range(3000)]  # more than is under way at once

    def messages() -> None:
        with exchange.peers("messages", "plan", [1 - rank]) as links:
            if rank == 0:
                for part in parts:
                    links.receive(1, part)
                say("began", directory)
                links.wait()
                return
            wait_for_the_others("began", directory)
            reader = pid_of(0, directory)
            os.kill(reader, signal.SIGSTOP)
            # The reader goes on when this process is dead, however long it takes to begin all sends.
            lives = f"grep -q 'State:.[^ZX]' /proc/{os.getpid()}/status"
            wait = f"for i in $(seq 600); do {lives} || break; sleep 0.1; done"
            subprocess.Popen(["sh", "-c", f"{wait}; kill -CONT {reader}"])
            for part in parts:
                links.send(0, part)
            os.kill(os.getpid(), signal.SIGKILL)

    return error_of(messages)


def test_a_rank_that_dies_between_two_packets_of_a_message_is_named_long_before_the_timeout(tmp_path: Path) -> None:
    """On a network a message of some KiB comes in several packets."""
    answers = run_ranks(2, _dies_within_one_of_many_messages, tmp_path, check=False)
    same_everywhere(answers[:1], [1], ["rank 1 of 2", "died"])


@on_ranks(2)
def test_error_in_a_collective_reaches_the_others() -> None:
    exchange = connected()
    if dist.get_rank() == 1:
        with pytest.raises(MemoryError), mock.patch.object(connections.Connections, "send", side_effect=MemoryError):
            exchange.agree([1], "plan")
    else:
        same_everywhere([error_of(lambda: exchange.agree([1], "plan"))], [1], ["rank 1 of 2", "MemoryError"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("gather", "agree"),
        ("agree", "gather"),
        ("agree", "agree on more"),
        ("gather", "other gather"),
        ("scatter", "broadcast"),
        ("broadcast", "gather"),
    ],
)
@on_ranks(4)
def test_ranks_in_different_collectives_learn_where_they_are(first: str, second: str) -> None:
    exchange = connected()
    step = first if dist.get_rank() != 2 else second
    methods: dict[str, Callable[[], Any]] = {
        "gather": lambda: exchange.gather(b"x" * 100_000, "plan"),
        "other gather": lambda: exchange.gather(b"x" * 100_000, "commit"),
        "agree": lambda: exchange.agree([1], "plan"),
        "agree on more": lambda: exchange.agree([1, 2], "plan"),
        "scatter": lambda: exchange.scatter([b"x" * 100_000] * 4 if exchange.rank == 0 else None, "plan"),
        "broadcast": lambda: exchange.broadcast(b"x" * 100_000 if exchange.rank == 0 else None, "plan"),
    }
    error = error_of(methods[step])
    names = {"gather": "(gather)", "other gather": "commit (gather)", "agree on more": "(agree on 2)"}
    assert type(error) is CheckpointError
    assert all(f"({step.split()[0]}" in str(error) or names.get(step, "") in str(error) for step in (first, second))
    assert "rank 2 of 4" in str(error) and "rank 0 of 4" in str(error)


# --- Contents of which some ranks get equal parts


def _contents(whom: list[int]) -> int:
    """Returns the bytes that this rank has sent."""
    exchange = Exchange.of(None, FOREVER)
    data, more = bytes_of(1, 3 << 20), bytes_of(3)
    expected = [(data, b"", more, str(rank).encode()) if rank in whom else () for rank in range(exchange.size)]
    given = expected if exchange.is_coordinator else None
    with sent_bytes() as sent:
        assert exchange.scatter_contents(given, "equal") == expected[exchange.rank]
    # Parts that are equal but not one object, and those of one rank alone, come too.
    other = [(bytes(bytearray(more)), str(rank).encode()) if rank in whom else () for rank in range(exchange.size)]
    assert exchange.scatter_contents(other if exchange.is_coordinator else None, "other") == other[exchange.rank]
    # Some ranks share one part, and the others another.
    pairs = [(data if rank % 2 else more, b"", str(rank).encode()) for rank in range(exchange.size)]
    assert exchange.scatter_contents(pairs if exchange.is_coordinator else None, "pairs") == pairs[exchange.rank]
    alone = [(more,) if rank == whom[-1] else () for rank in range(exchange.size)]
    assert exchange.scatter_contents(alone if exchange.is_coordinator else None, "alone") == alone[exchange.rank]
    nothing = [()] * exchange.size if exchange.is_coordinator else None
    assert exchange.scatter_contents(nothing, "nothing") == ()
    return sum(sent)


def _contents_in_a_deep_tree(whom: list[int]) -> int:
    with mock.patch.object(connections, "FANOUT", 2):
        return _contents(whom)


@pytest.mark.parametrize(
    ("size", "whom", "times"),
    [(1, [0], [0]), (4, [0, 2], [1, 0, 0, 0]), (8, [0, 1, 3, 4, 6, 7], [2, 2, 0, 1, 0, 0, 0, 0]), (3, [1, 2], None)],
)
def test_equal_parts_pass_from_rank_to_rank(size: int, whom: list[int], times: list[int] | None) -> None:
    sent = run_ranks(size, _contents_in_a_deep_tree, whom)
    if times is not None:  # the coordinator gets them
        assert [round(of_rank / (1 << 20)) for of_rank in sent] == times


# --- The store


def _in_a_world_of_its_own(function: str, *args: Any) -> Any:
    """Runs with a TCP store that rank 0 hosts; the group that was there before is gone afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before = Exchange.of(None, FOREVER)
    before.agree([1], "before")
    store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = int(before.broadcast(None if store is None else str(store.port).encode(), "port"))
    store = store or dist.TCPStore("127.0.0.1", port, size, wait_for_workers=False)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    assert Exchange.of(None, FOREVER)._links is not before._links
    return globals()[function](*args)


def test_new_world_has_a_new_exchange() -> None:
    for _ in range(2):
        run_ranks(2, _in_a_world_of_its_own, "_values")


@pytest.mark.parametrize("size", [2, 4])
def test_death_of_the_rank_that_hosts_the_store(size: int) -> None:
    answers = run_ranks(size, _in_a_world_of_its_own, "_dead", 0, "agree", check=False)
    for error in answers[1:]:
        assert isinstance(error, CheckpointTimeoutError), error
        assert error.late_ranks == [0]
        assert f"rank 0 of {size}" in str(error) and "the store" in str(error)


def _stopped_while_the_host_leaves(directory: Path) -> Any:
    """Rank 2 stops. Rank 0, which hosts the store, ends as soon as it has its error; the others look later."""
    exchange = connected_with_pids(directory)
    rank = exchange.rank
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("out of step with the others for the tests to come")
    exchange.timeout = TIMEOUT
    failure = Rendezvous.failure

    def later(*args: Any, **options: Any) -> Any:
        time.sleep(3.0)  # longer than it takes to find out who is silent
        return failure(*args, **options)

    with mock.patch.object(Rendezvous, "failure", failure if rank == 0 else later):
        error = error_of(lambda: exchange.agree([1], "plan"))
    if rank == 0:
        os._exit(0)
    os.kill(pid_of(2, directory), signal.SIGCONT)
    return error


def test_a_stopped_rank_is_named_also_if_the_host_of_the_store_has_left(tmp_path: Path) -> None:
    answers = run_ranks(4, _in_a_world_of_its_own, "_stopped_while_the_host_leaves", tmp_path, check=False)
    same_everywhere([answers[1], answers[3]], [2], ["rank 2 of 4"])


def _stopped(directory: Path) -> Any:
    """Rank 0, and with it the store, hangs: alive, but silent."""
    exchange = connected_with_pids(directory)
    if exchange.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("out of step with rank 1 for the tests to come")
    exchange.timeout = TIMEOUT
    try:
        return error_of(lambda: exchange.agree([1], "plan")), error_of(lambda: Exchange.of(None, TIMEOUT))
    finally:
        os.kill(pid_of(0, directory), signal.SIGCONT)


def test_rank_that_hangs_with_the_store(tmp_path: Path) -> None:
    first, again = run_ranks(2, _in_a_world_of_its_own, "_stopped", tmp_path, check=False)[1]
    same_everywhere([first], [0], ["rank 0 of 2", "the store"])
    assert isinstance(again, CheckpointTimeoutError) and "the store" in str(again)


# --- Errors


class _Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("cannot travel")
        self.lock = threading.Lock()


class _UnpicklesBadly(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("arrives never")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: ValueError("no such thing"),
    "ours": lambda: StorageFullError("/x", 2, 1),
    "unpicklable": _Unpicklable,
    "unpickles badly": lambda: _UnpicklesBadly(1, 2),
}


@pytest.mark.parametrize("failing", [[0], [1, 3]])
@pytest.mark.parametrize("name", ERRORS)
@on_ranks(4)
def test_error_of_a_rank_is_raised_by_all(name: str, failing: list[int]) -> None:
    exchange = Exchange.of(None, FOREVER)
    original = ERRORS[name]()
    error: Any = error_of(lambda: exchange.fail_together(original if exchange.rank in failing else None, "write"))
    assert exchange.rank not in failing or error.__cause__ is original
    assert exchange.agree([exchange.rank], "goes on") == [0]
    assert error.rank == failing[0]
    assert list(error.failures) == failing
    assert all(f"rank {rank}: {type(original).__name__}: {original}" in str(error) for rank in failing)
    if name == "ours":
        assert type(error) is StorageFullError and error.free == 1
    else:
        assert type(error) is SaveFailedError
        assert str(error).startswith("write: ")
        if name == "plain":
            assert isinstance(error.cause, ValueError) and str(error.cause) == "no such thing"
        else:
            assert error.cause == f"{type(original).__name__}: {original}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@on_ranks(4)
def test_lowest_rank_decides_and_long_texts_are_cut() -> None:
    exchange = Exchange.of(None, FOREVER)
    errors = [None, OSError("x" * 10_000), StorageFullError("/x", 2, 1), None]
    error = error_of(lambda: exchange.fail_together(errors[exchange.rank], "read", RankFailedError))
    assert type(error) is RankFailedError and isinstance(error.cause, OSError)
    assert "rank 2: StorageFullError: no room" in str(error)
    assert len(str(error)) < 3000


@on_ranks(2)
def test_interrupt_stays_an_interrupt_on_its_own_rank() -> None:
    exchange = Exchange.of(None, FOREVER)
    with pytest.raises(KeyboardInterrupt if exchange.rank == 1 else SaveFailedError):
        exchange.fail_together(KeyboardInterrupt() if exchange.rank == 1 else None, "write")


# --- The end of a process


_PROGRAM = """
import gc, os, sys, torch.distributed as dist
from vescale_ckpt._ranks.exchange import Exchange

def run(rank, how):
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + how, rank=rank, world_size=2)
    for number in range(10):
        Exchange.of(None, 60).agree([rank], "save")
    if how == "destroy":
        dist.destroy_process_group()

gc.freeze()  # half of what ending costs
pids = []
for how, rank in (("destroy", 0), ("destroy", 1), ("leave", 0), ("leave", 1)):
    pids.append(os.fork())
    if pids[-1] == 0:
        run(rank, how)
        break  # and end as interpreters do
else:
    print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
"""


def test_processes_end_well(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "store")],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.communicate(timeout=RUN_TIMEOUT)[0].split("\n")[0] == "[0, 0, 0, 0]"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)


_ENDS_IN_A_CALL = """
import threading, time
from datetime import timedelta
import torch.distributed as dist
from vescale_ckpt._ranks.store_thread import StoreThread

store = dist.TCPStore("127.0.0.1", 0, 1, True)
within = threading.Event()

def connect():
    within.set()
    store.clone().wait(["never set"], timedelta(seconds=0.5))  # as a store that answers late

class EndsLate:
    def __del__(self):
        time.sleep(1)

threading.late = EndsLate()  # freed while the interpreter ends
thread = StoreThread(connect)
thread.note("key", str, None)
within.wait()
"""


def test_a_process_that_ends_while_the_store_is_asked_ends_well() -> None:
    ended = subprocess.run([sys.executable, "-c", _ENDS_IN_A_CALL], capture_output=True, text=True, timeout=RUN_TIMEOUT)
    assert ended.returncode == 0, ended.stderr


# --- Nodes


def test_node(monkeypatch: pytest.MonkeyPatch) -> None:
    here = node_of_this_process()
    assert 0 <= here < 1 << 63
    assert run_ranks(2, node_of_this_process) == [here, here]
    monkeypatch.setenv("VESCALE_CKPT_NODE", "3")
    assert node_of_this_process() == 3


def _distinct() -> tuple[list[list[bytes]] | None, int, int]:
    """What is gathered, how many objects that is, and the bytes that this rank sent."""
    parts = [b"same" * 5000, f"of {dist.get_rank() // 2}".encode() * 5000, b"", b"same" * 5000]
    with sent_bytes() as sent:
        gathered = Exchange.of(timeout=FOREVER).gather_distinct(parts, "tables")
    objects = 0 if gathered is None else len({id(part) for row in gathered for part in row})
    return gathered, objects, sum(sent)


def test_what_is_equal_on_ranks_travels_once() -> None:
    (gathered, objects, _), *others = run_ranks(4, _distinct)
    assert gathered == [[b"same" * 5000, f"of {rank // 2}".encode() * 5000, b"", b"same" * 5000] for rank in range(4)]
    assert objects == 4
    assert [of_rank[0] for of_rank in others] == [None] * 3
    assert [of_rank[2] > 20000 for of_rank in others] == [False, True, False]
    assert sum(of_rank[2] for of_rank in others) < 23000
