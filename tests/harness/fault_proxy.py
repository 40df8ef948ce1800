"""Stands between a client of S3 and its server, passes requests on, and does harm to those that rules choose.

    with FaultProxy(server.port) as proxy:
        proxy.add(Rule("slow_down", kind="upload_part", skip=2, times=3))
        ... a client whose endpoint is proxy.endpoint ...
        assert proxy.count("upload_part") == 9

Requests pass unchanged (the server checks the signature over the Host header that the client sent: the proxy's). What
came and what was answered is kept in `proxy.requests`, in the order of arrival.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

Kind = Literal[
    "put",
    "get",
    "head",
    "delete",
    "delete_many",
    "list",
    "create_upload",
    "upload_part",
    "complete_upload",
    "abort_upload",
    "other",
]
# What a rule does; `value` is seconds, or an offset in the body (None: its middle).
Action = Literal[
    "delay",  # waits `value` seconds, then passes it on
    "error",  # answers 500 InternalError; the server does not see the request
    "slow_down",  # 503 SlowDown
    "expired",  # 400 ExpiredToken, as S3 answers
    "denied",  # 403 AccessDenied
    "skewed",  # 403 RequestTimeTooSkewed
    "wrong_key",  # 403 SignatureDoesNotMatch
    "not_implemented",  # 501, as stores answer that do not know a header
    "no_bucket",  # 404 NoSuchBucket
    "redirect",  # 301 PermanentRedirect: another region
    "reset",  # resets the connection before the server sees anything
    "reset_middle",  # resets it in the middle of the request's body, or else of the answer's
    "truncate",  # ends the connection in the middle of the answer's body
    "shorten",  # answers with half of the body and a Content-Length that says so
    "flip",  # changes one byte of the answer's body
    "lost_answer",  # the server does as told, and the connection is reset in place of its answer
    "late_error",  # the server does as told, and the client is answered 500 InternalError
    "late",  # the client is answered nothing and is gone; the server does as told `value` seconds later
    "flip_up",  # changes one byte of the request's body
    "stall",  # nothing comes, for ever; the server does not see the request
    "stall_middle",  # the first half of the answer's body comes, then nothing, for ever
]
_ERRORS: dict[str, tuple[str, str]] = {
    "error": ("500 Internal Server Error", "InternalError"),
    "slow_down": ("503 Slow Down", "SlowDown"),
    "expired": ("400 Bad Request", "ExpiredToken"),
    "denied": ("403 Forbidden", "AccessDenied"),
    "skewed": ("403 Forbidden", "RequestTimeTooSkewed"),
    "wrong_key": ("403 Forbidden", "SignatureDoesNotMatch"),
    "not_implemented": ("501 Not Implemented", "NotImplemented"),
    "no_bucket": ("404 Not Found", "NoSuchBucket"),
    "redirect": ("301 Moved Permanently", "PermanentRedirect"),
}
_PIECE = 1 << 18
_IDLE = 120.0  # seconds that a thread waits for bytes of a peer that is silent


@dataclass
class Rule:
    """Applies `action` to requests of `kind` (None: all) whose path and query contain `path` (a regular expression).

    Of the requests that match, the first `skip` are spared, the next `times` are hit (each with `probability`, drawn
    from `seed`).
    """

    action: Action
    kind: Kind | None = None
    path: str = ""
    skip: int = 0
    times: int = 1
    probability: float = 1.0
    seed: int = 0
    value: float | None = None
    conditional: bool = False  #: only requests with If-Match or If-None-Match
    hits: int = 0  #: how many were hit so far
    _seen: int = field(default=0, init=False)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def takes(self, request: Request) -> bool:
        if (self.kind is not None and self.kind != request.kind) or not re.search(self.path, request.target):
            return False
        if self.conditional and not request.conditional:
            return False
        self._seen += 1
        if self._seen <= self.skip or self.hits >= self.times or self._random.random() >= self.probability:
            return False
        self.hits += 1
        return True


@dataclass
class Request:
    """What came. `first`, `last`: the bytes that a GET asked for (None: all). `sent`, `received`: bytes of bodies to
    and from the server; `status`: what the client was answered (0: nothing)."""

    kind: Kind
    method: str
    target: str  #: path and query
    key: str  #: without the bucket
    first: int | None = None
    last: int | None = None
    conditional: bool = False  #: has If-Match or If-None-Match
    status: int = 0
    sent: int = 0
    received: int = 0
    action: Action | None = None
    host: str = ""
    payload: str = ""  #: what the signature says of the body: its SHA-256, or UNSIGNED-PAYLOAD
    at: float = field(default_factory=time.monotonic)


class FaultProxy:
    """Listens on a free port of 127.0.0.1 until it is closed."""

    def __init__(self, server_port: int) -> None:
        self.requests: list[Request] = []
        self._server_port = server_port
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections, also those that stall."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def add(self, *rules: Rule) -> None:
        """From now on. The first rule that takes a request has it."""
        with self._lock:
            self._rules.extend(rules)

    def clear(self) -> None:
        """No rules and no record any more."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def count(self, kind: Kind | None = None, path: str = "") -> int:
        return len(self.of(kind, path))

    def of(self, kind: Kind | None = None, path: str = "") -> list[Request]:
        with self._lock:
            found = list(self.requests)
        return [r for r in found if (kind is None or r.kind == kind) and re.search(path, r.target)]

    def ranges(self, path: str = "") -> dict[str, list[tuple[int, int]]]:
        """Of each object, the ranges of bytes that GETs have got, sorted, as (begin, end)."""
        found: dict[str, list[tuple[int, int]]] = {}
        for request in self.of("get", path):
            if request.status in (200, 206):
                begin = request.first or 0
                found.setdefault(request.key, []).append((begin, begin + request.received))
        return {key: sorted(ranges) for key, ranges in found.items()}

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(_GoneError, OSError), self._watched(client):
            connection = _Connection(client)
            head = connection.head()
            while head is not None:
                with self._watched(socket.create_connection(("127.0.0.1", self._server_port), timeout=_IDLE)) as server:
                    upstream, goes_on = _Connection(server), True
                    while head is not None and goes_on:
                        goes_on = self._exchange(head, connection, upstream)
                        head = connection.head()

    def _exchange(self, head: _Head, client: _Connection, upstream: _Connection) -> bool:
        """One request and its answer. False: the connection to the server cannot be used again."""
        request = _parse(head)
        with self._lock:
            self.requests.append(request)
            rule = next((each for each in self._rules if each.takes(request)), None)
        request.action = rule.action if rule else None
        action, value = request.action, rule.value if rule else None
        if action == "delay":
            self._closed.wait(value or 0)
        if action == "stall":
            self._stall(client)
        if action == "reset":
            client.reset()
        if action in _ERRORS:
            if head.header("expect"):
                client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            for piece in client.body(head.length):
                request.sent += len(piece)
            self._refuse(action, request, client)
            return True

        if action == "late":
            self._deliver_late(head, request, value or 1.0, client, upstream)
        length = head.length
        middle = action == "reset_middle" and length > 0
        if head.header("expect"):
            client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        upstream.send(
            b"\r\n".join(line for line in head.lines if not line.lower().startswith(b"expect:")) + b"\r\n\r\n"
        )
        for piece in client.body(length // 2 if middle else length):
            if action == "flip_up" and request.sent <= length // 2 < request.sent + len(piece):
                piece = _flipped(piece, length // 2 - request.sent)
            upstream.send(piece)
            request.sent += len(piece)
        if middle:
            upstream.reset(raises=False)
            client.reset()
        answer = upstream.head()
        if answer is None:
            raise _GoneError
        status = int(answer.lines[0].split()[1])
        if action in ("lost_answer", "late_error"):
            for _ in upstream.answer_body(answer, request.method, status):
                pass
            if action == "lost_answer":
                client.reset()
            self._refuse("error", request, client)
            return True
        request.status = status
        self._answer(answer, status, request, value, client, upstream)
        return answer.header("connection").lower() != "close"

    def _answer(
        self,
        answer: _Head,
        status: int,
        request: Request,
        value: float | None,
        client: _Connection,
        upstream: _Connection,
    ) -> None:
        action = request.action
        has_body = request.method != "HEAD" and answer.length > 0
        middle = answer.length // 2 if value is None else int(value)
        lines = answer.lines
        if action == "shorten" and has_body:
            lines = [b"Content-Length: %d" % middle if x.lower().startswith(b"content-length:") else x for x in lines]
        client.send(b"\r\n".join(lines) + b"\r\n\r\n")
        position = 0
        for piece in upstream.answer_body(answer, request.method, status):
            if has_body and action in ("truncate", "reset_middle", "stall_middle", "shorten"):
                piece = piece[: max(0, middle - position)]
            if has_body and action == "flip" and position <= middle < position + len(piece):
                piece = _flipped(piece, middle - position)
            client.send(piece)
            position += len(piece)
            request.received += len(piece)
            if has_body and position >= middle:
                if action == "truncate":
                    raise _GoneError
                if action == "reset_middle":
                    client.reset()
                if action == "stall_middle":
                    self._stall(client)

    def _refuse(self, action: str, request: Request, client: _Connection) -> None:
        status, code = _ERRORS[action]
        request.status = int(status.split()[0])
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>injected {code}</Message>'
            f"<Resource>{request.target}</Resource><RequestId>proxy</RequestId></Error>"
        ).encode()
        more = "x-amz-bucket-region: eu-central-1\r\n" if action == "redirect" else ""
        client.send(
            f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\n{more}Content-Length: {len(text)}\r\n\r\n".encode()
            + (b"" if request.method == "HEAD" else text)
        )

    def _deliver_late(
        self, head: _Head, request: Request, seconds: float, client: _Connection, upstream: _Connection
    ) -> None:
        body = b"".join(client.body(head.length))
        with contextlib.suppress(_GoneError):
            client.reset()
        self._closed.wait(seconds)
        upstream.send(b"\r\n".join(head.lines) + b"\r\n\r\n" + body)
        request.sent = len(body)
        if (answer := upstream.head()) is not None:
            request.status = int(answer.lines[0].split()[1])
        raise _GoneError

    def _stall(self, client: _Connection) -> None:
        """Returns never; raises when the client gives up or the proxy is closed."""
        client.socket.settimeout(None)
        while not self._closed.is_set():
            if not client.socket.recv(_PIECE):  # what it still sends goes nowhere
                break
        raise _GoneError

    @contextlib.contextmanager
    def _watched(self, each: socket.socket) -> Iterator[socket.socket]:
        """Ends with the proxy, or with the context."""
        with each:
            with self._lock:
                self._sockets.add(each)
            if self._closed.is_set():
                each.close()
            try:
                yield each
            finally:
                with self._lock:
                    self._sockets.discard(each)


class _GoneError(Exception):
    """The connection to the client is over."""


@dataclass
class _Head:
    lines: list[bytes]

    def header(self, name: str) -> str:
        wanted = name.encode() + b":"
        for line in self.lines[1:]:
            if line.lower().startswith(wanted):
                return line[len(wanted) :].decode("latin-1").strip()
        return ""

    @property
    def length(self) -> int:
        return int(self.header("content-length") or 0)


class _Connection:
    """A socket and what was read from it too far."""

    def __init__(self, own: socket.socket) -> None:
        self.socket = own
        own.settimeout(_IDLE)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ahead = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reset(self, raises: bool = True) -> None:
        """The peer gets "connection reset"."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        if raises:
            raise _GoneError

    def head(self) -> _Head | None:
        """The first line and the headers of what comes; None at the end of the connection."""
        while (end := self._ahead.find(b"\r\n\r\n")) < 0:
            more = self.socket.recv(_PIECE)
            if not more:
                return None
            self._ahead += more
        head, self._ahead = self._ahead[:end], self._ahead[end + 4 :]
        return _Head(head.split(b"\r\n"))

    def body(self, length: int) -> Iterator[bytes]:
        while length > 0:
            piece = self._ahead[:length] or self.socket.recv(min(_PIECE, length))
            self._ahead = self._ahead[len(piece) :]
            if not piece:
                raise _GoneError
            length -= len(piece)
            yield piece

    def answer_body(self, answer: _Head, method: str, status: int) -> Iterator[bytes]:
        if method == "HEAD" or status in (204, 304) or status < 200:
            return
        if "chunked" in answer.header("transfer-encoding").lower():
            yield from self._chunks()
        else:
            yield from self.body(answer.length)

    def _chunks(self) -> Iterator[bytes]:
        """Chunks with their framing, as they came."""
        while True:
            while (end := self._ahead.find(b"\r\n")) < 0:
                more = self.socket.recv(_PIECE)
                if not more:
                    raise _GoneError
                self._ahead += more
            size = int(self._ahead[:end].split(b";")[0], 16)
            yield b"".join(self.body(end + 2 + size + 2))
            if size == 0:
                return


def _parse(head: _Head) -> Request:
    method, target, _ = head.lines[0].decode("latin-1").split(" ", 2)
    url = urlsplit(target)
    query = parse_qs(url.query, keep_blank_values=True)
    _, _, key = unquote(url.path).lstrip("/").partition("/")
    request = Request(_kind(method, query, key), method, target, key, host=head.header("host"))
    request.payload = head.header("x-amz-content-sha256")
    request.conditional = bool(head.header("if-match") or head.header("if-none-match"))
    if found := re.fullmatch(r"bytes=(\d+)-(\d*)", head.header("range")):
        request.first, request.last = int(found[1]), int(found[2]) if found[2] else None
    return request


def _kind(method: str, query: dict[str, list[str]], key: str) -> Kind:
    if "uploadId" in query:
        found: dict[str, Kind] = {"PUT": "upload_part", "POST": "complete_upload", "DELETE": "abort_upload"}
        return found.get(method, "other")
    if "uploads" in query:
        return "create_upload" if method == "POST" else "other"
    if method == "POST":
        return "delete_many" if "delete" in query else "other"
    if method == "GET" and (not key or "list-type" in query):
        return "list"
    plain: dict[str, Kind] = {"PUT": "put", "GET": "get", "HEAD": "head", "DELETE": "delete"}
    return plain.get(method, "other")


def _flipped(piece: bytes, at: int) -> bytes:
    return piece[:at] + bytes([piece[at] ^ 0x10]) + piece[at + 1 :]
