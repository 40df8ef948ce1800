"""Stands in for the Hugging Face Hub: repositories in memory behind the requests that `huggingface_hub` makes.

`with HubServer() as hub:` listens on 127.0.0.1. Files that end in `.safetensors` are large ones (LFS): their bytes come
from another address of the server, behind a redirection, as those of the hub do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, quote, unquote, urlsplit

TOKEN = "hf_test_token"


@dataclass
class Repository:
    """Its commits, each with the contents of all files, and its branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]]


class HubServer:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}  #: contents of large files that have arrived, by SHA-256
        self.lock = threading.Lock()
        self._servers: list[ThreadingHTTPServer] = []

    def __enter__(self) -> HubServer:
        for _ in range(2):  # the hub, and where its large files are
            server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            self._servers.append(server)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def files_endpoint(self) -> str:
        return f"http://localhost:{self._servers[1].server_port}"  # another host, which must not get the token

    def repository(self, name: str, files: dict[str, bytes] | None = None) -> Repository:
        made = self.repositories[name] = Repository()
        made.commit(files or {"README.md": b"# a model\n"})
        return made


@contextmanager
def use(endpoint: str, cache: str) -> Iterator[None]:
    """A context in which `huggingface_hub` talks to a server. The protocol of Xet, which needs another one, is off."""
    from huggingface_hub import constants

    values = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": cache,
        "HF_TOKEN_PATH": "/nonexistent/token",
    }
    with mock.patch.multiple(constants, **values), mock.patch.dict("os.environ", {"HF_TOKEN": TOKEN}):
        yield


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            self.body = self._chunks()
        split = urlsplit(self.path)
        parts = [unquote(part) for part in split.path.strip("/").split("/")]
        with self.hub.lock:
            self._route(parts, parse_qs(split.query))

    def _chunks(self) -> bytes:
        found = b""
        while length := int(self.rfile.readline(), 16):
            found += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _route(self, parts: list[str], query: dict[str, list[str]]) -> None:
        if parts[0] == "lfs":
            return self._large(parts[1])
        if parts[:2] == ["api", "validate-yaml"]:
            return self.answer(200, {"errors": [], "warnings": []})
        is_api = parts[:2] == ["api", "models"]
        name, rest = ("/".join(parts[2:4]), parts[4:]) if is_api else ("/".join(parts[:2]), parts[2:])
        if not rest:
            return self.answer(404, {"error": "not found"})
        repository = self.hub.repositories.get(name.removesuffix(".git"))
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        writes = rest[0] in ("preupload", "commit", "info")
        if repository is None:
            return self.answer(401, {"error": "Invalid username or password."}, {"X-Error-Code": "RepoNotFound"})
        if writes and not has_token:
            return self.answer(403, {"error": "Forbidden"})
        if rest[0] == "info":
            return self._batch()
        revision = rest[1]
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            return self.answer(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[sha]
        if rest[0] == "revision":
            return self.answer(200, _info(name, sha, files))
        if rest[0] == "tree":
            return self.answer(200, [_entry(path, content) for path, content in files.items()])
        if rest[0] == "resolve":
            return self._file(files, "/".join(rest[2:]), sha)
        if rest[0] == "preupload":
            return self._preupload(files)
        assert rest[0] == "commit", self.path
        return self._commit(name, repository, revision, sha)

    def _file(self, files: dict[str, bytes], path: str, sha: str) -> None:
        if path not in files:
            return self.answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        content = files[path]
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_hash(path, content)}"', "Accept-Ranges": "bytes"}
        if is_large(path):
            self.hub.large[_hash(path, content)] = content
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": headers["ETag"]}
            headers["Location"] = f"{self.hub.files_endpoint}/lfs/{_hash(path, content)}?signature=of-the-test"
            return self.answer(302, b"", headers)
        return self._ranged(content, headers)

    def _large(self, oid: str) -> None:
        if self.command == "PUT":
            assert hashlib.sha256(self.body).hexdigest() == oid
            self.hub.large[oid] = self.body
            return self.answer(200, b"")
        if self.headers.get("Authorization") is not None:
            return self.answer(400, {"error": "the token went to a foreign address"})
        return self._ranged(self.hub.large[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def _ranged(self, content: bytes, headers: dict[str, str]) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if found is None:
            return self.answer(200, content, headers)
        begin, end = int(found[1]), min(int(found[2]) + 1, len(content))
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        return self.answer(206, content[begin:end], headers)

    def _preupload(self, files: dict[str, bytes]) -> None:
        def of(path: str) -> dict[str, Any]:
            there = {"oid": _hash(path, files[path])} if path in files else {}
            return {
                "path": path, "uploadMode": "lfs" if is_large(path) else "regular", "shouldIgnore": False, **there
            }  # fmt: skip

        self.answer(200, {"files": [of(file["path"]) for file in json.loads(self.body)["files"]]})

    def _batch(self) -> None:
        def of(wanted: dict[str, Any]) -> dict[str, Any]:
            action = {"upload": {"href": f"{self.hub.files_endpoint}/lfs/{quote(wanted['oid'])}", "header": {}}}
            return {**wanted, **({} if wanted["oid"] in self.hub.large else {"actions": action})}

        objects = [of(wanted) for wanted in json.loads(self.body)["objects"]]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repository: Repository, branch: str, parent: str) -> None:
        lines = [json.loads(line) for line in self.body.splitlines()]
        files = dict(repository.commits[parent])
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit", parent) != parent:
                return self.answer(412, {"error": "A commit has happened since. Please refresh and try again."})
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.commit(files, branch)
        return self.answer(
            200, {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}"}
        )

    def answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body)


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".distcp"))


@lru_cache
def _hash(path: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if is_large(path) else _blob(content)


@lru_cache
def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _blob(content)}
    if is_large(path):
        found["lfs"] = {"oid": _hash(path, content), "size": len(content), "pointerSize": 130}
    return found


def _info(name: str, sha: str, files: dict[str, bytes]) -> dict[str, Any]:
    def of(path: str, content: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": _blob(content)}
        if is_large(path):
            found["lfs"] = {"sha256": _hash(path, content), "size": len(content), "pointerSize": 130}
        return found

    return {
        "id": name, "modelId": name, "sha": sha, "lastModified": "2026-11-01T12:00:00.000Z", "private": False,
        "tags": [], "downloads": 0, "siblings": [of(path, content) for path, content in files.items()],
    }  # fmt: skip
