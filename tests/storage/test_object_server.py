"""The S3 server and the fault proxy of the tests do what tests of the product rely on; a client's answers to faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from harness.fault_proxy import Action, FaultProxy, Kind, Rule
from harness.object_server import ObjectServer

obstore = pytest.importorskip("obstore", reason="object stores need the package obstore")
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError  # noqa: E402
from obstore.store import from_url  # noqa: E402

MIB = 1 << 20
BODY = os.urandom(3 * 5 * MIB + 1000)
_RETRY = {
    "max_retries": 3,
    "backoff": {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=50), "base": 2},
    "retry_timeout": timedelta(seconds=20),
}


def _store(url: str, timeout: float = 20.0, retries: int = 3) -> Any:
    return from_url(
        url,
        retry_config={**_RETRY, "max_retries": retries},
        # Options given here replace those of the environment, AWS_ALLOW_HTTP among them.
        client_options={
            "allow_http": True,
            "timeout": timedelta(seconds=timeout),
            "connect_timeout": timedelta(seconds=5),
        },
    )


def test_a_put_in_parts_comes_back_and_every_request_is_counted(fault_proxy: FaultProxy, bucket_url: str) -> None:
    store = _store(bucket_url)
    obstore.put(store, "one", BODY, chunk_size=5 * MIB)
    assert bytes(obstore.get(store, "one").bytes()) == BODY
    starts, ends = [0, 5 * MIB, 12 * MIB], [4 * MIB, 6 * MIB, len(BODY)]  # ranges that touch become one request
    got = obstore.get_ranges(store, "one", starts=starts, ends=ends, coalesce=0)
    assert [bytes(each) for each in got] == [BODY[a:b] for a, b in zip(starts, ends, strict=True)]
    assert [item["path"] for item in obstore.list(store).collect()] == ["one"]

    assert fault_proxy.count("create_upload") == fault_proxy.count("complete_upload") == 1
    assert sorted(part.sent for part in fault_proxy.of("upload_part")) == [1000, 5 * MIB, 5 * MIB, 5 * MIB]
    [ranges] = fault_proxy.ranges("one").values()
    assert ranges == sorted([(0, len(BODY)), *zip(starts, ends, strict=True)])
    assert fault_proxy.count("list") == 1
    assert {request.host for request in fault_proxy.of()} == {f"127.0.0.1:{fault_proxy.port}"}


def test_one_of_eight_creates_an_object(bucket_url: str) -> None:
    store = _store(bucket_url)
    for name in ("a", "b"):
        outcomes: list[object] = []
        start = threading.Barrier(8)

        def create(value: int, name: str = name, start: Any = start, outcomes: list[object] = outcomes) -> None:
            start.wait()
            try:
                obstore.put(store, name, b"%d" % value, mode="create")
                outcomes.append(value)
            except AlreadyExistsError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=create, args=(value,)) for value in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [winner] = [each for each in outcomes if isinstance(each, int)]
        assert len(outcomes) == 8 and bytes(obstore.get(store, name).bytes()) == b"%d" % winner


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        *[(action, "upload_part") for action in ("error", "slow_down", "reset", "reset_middle", "lost_answer")],
        *[(action, "get") for action in ("error", "slow_down", "reset", "reset_middle", "truncate", "lost_answer")],
        ("slow_down", "complete_upload"),
        ("delay", "get"),
        ("slow", "upload_part"),
    ],
)
def test_faults_that_a_client_outlives(fault_proxy: FaultProxy, bucket_url: str, action: Action, kind: Kind) -> None:
    store = _store(bucket_url)
    fault_proxy.add(Rule(action, kind=kind, value={"delay": 0.2, "slow": 50e6}.get(action)))
    obstore.put(store, "one", BODY, chunk_size=5 * MIB)
    assert bytes(obstore.get(store, "one").bytes()) == BODY
    assert [request.action for request in fault_proxy.of(kind) if request.action] == [action]


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        ("denied", PermissionDeniedError, "AccessDenied"),
        ("skewed", PermissionDeniedError, "RequestTimeTooSkewed"),
        ("wrong_key", PermissionDeniedError, "SignatureDoesNotMatch"),
        ("expired", GenericError, "ExpiredToken"),
        ("no_bucket", FileNotFoundError, "NoSuchBucket"),
        ("redirect", GenericError, "redirect"),
        ("error", GenericError, "InternalError"),
        ("slow_down", GenericError, "SlowDown"),
        ("reset", GenericError, "onnection"),
    ],
)
def test_faults_that_last_raise_and_are_named(
    fault_proxy: FaultProxy, bucket_url: str, action: Action, error: type[Exception], text: str
) -> None:
    store = _store(bucket_url)
    fault_proxy.add(Rule(action, times=1000))
    with pytest.raises(error, match=text):
        obstore.put(store, "one", b"hello")


def test_faults_that_only_checksums_can_find(fault_proxy: FaultProxy, bucket_url: str) -> None:
    store = _store(bucket_url)
    obstore.put(store, "one", BODY[:9999])
    fault_proxy.add(Rule("flip", kind="get", value=1234), Rule("shorten", kind="get"))
    got = bytes(obstore.get(store, "one").bytes())
    assert [i for i in range(9999) if got[i] != BODY[i]] == [1234]
    assert bytes(obstore.get_range(store, "one", start=10, length=1000)) == BODY[10:510]  # silently too few
    assert bytes(obstore.get(store, "one").bytes()) == BODY[:9999]


@pytest.mark.parametrize(("action", "error"), [("lost_answer", GenericError), ("late_error", AlreadyExistsError)])
def test_a_create_that_raises_may_have_created(
    fault_proxy: FaultProxy, bucket_url: str, action: Action, error: type[Exception]
) -> None:
    """A conditional put is not sent again after a connection broke, but after a 500: then it meets its own object."""
    store = _store(bucket_url)
    fault_proxy.add(Rule(action, kind="put"))
    with pytest.raises(error):
        obstore.put(store, "one", b"mine", mode="create")
    assert bytes(obstore.get(store, "one").bytes()) == b"mine"


@pytest.mark.parametrize("kind", ["upload_part", "complete_upload"])
def test_a_put_that_raises_aborts_its_upload(
    fault_proxy: FaultProxy, bucket_url: str, object_server: ObjectServer, kind: Kind
) -> None:
    boto3 = pytest.importorskip("boto3", reason="uploads that are left are listed by boto3")
    client = boto3.client("s3", endpoint_url=object_server.endpoint)
    store = _store(bucket_url)
    prefix = bucket_url.rsplit("/", 1)[1]
    fault_proxy.add(Rule("denied", kind=kind, path=prefix, times=1000))
    with pytest.raises(PermissionDeniedError):
        obstore.put(store, "one", BODY, chunk_size=5 * MIB)
    assert fault_proxy.count("abort_upload") == 1
    fault_proxy.clear()
    fault_proxy.add(Rule("denied", kind="abort_upload"))

    def pieces() -> Iterator[bytes]:
        yield BODY
        raise ValueError("mine")

    with pytest.raises(PermissionDeniedError, match="uploadId"):  # of the abort: the first error is lost
        obstore.put(store, "two", pieces(), chunk_size=5 * MIB)
    left = client.list_multipart_uploads(Bucket=object_server.bucket, Prefix=prefix).get("Uploads", [])
    assert [upload["Key"] for upload in left] == [f"{prefix}/two"], "the one whose abort was refused"


def test_a_stall_ends_with_the_clients_timeout(fault_proxy: FaultProxy, bucket_url: str) -> None:
    store = _store(bucket_url, timeout=1.0, retries=1)
    obstore.put(store, "one", b"hello" * 100)
    fault_proxy.add(Rule("stall_middle", kind="get", times=1000))
    with pytest.raises(Exception, match=r"(?i)timed? ?out|error decoding|retry"):
        bytes(obstore.get(store, "one").bytes())
    fault_proxy.clear()
    fault_proxy.add(Rule("stall", kind="put", times=1000))
    with pytest.raises(GenericError):
        obstore.put(store, "one", b"other")
    fault_proxy.clear()
    assert bytes(obstore.get(store, "one").bytes()) == b"hello" * 100


_USER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from harness.object_server import running
with running(Path(sys.argv[2])) as server:
    print(server.port, flush=True)
    time.sleep(600)
"""


def test_a_server_is_shared_and_ends_with_its_users_even_if_killed(tmp_path: Path, object_server: ObjectServer) -> None:
    tests = str(Path(__file__).parents[1])
    users = [
        subprocess.Popen([sys.executable, "-c", _USER, tests, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ports = [user.stdout.readline() for user in users if user.stdout]
    assert ports[0] == ports[1] != ""
    users[0].send_signal(signal.SIGKILL)
    users[0].wait()
    time.sleep(1)
    assert (tmp_path / "ready.json").exists()
    users[1].send_signal(signal.SIGKILL)
    users[1].wait()
    deadline = time.monotonic() + 30
    while (tmp_path / "data").exists():
        assert time.monotonic() < deadline, "the server did not end"
        time.sleep(0.1)
    assert not (tmp_path / "ready.json").exists()
    for user in users:
        if user.stdout:
            user.stdout.close()
