"""`HubStore` reads model repositories of the Hugging Face Hub (`hf://org/name`), and commits to them, for `Storage`.

All requests go through `huggingface_hub`, with its token, endpoint, retries and offline mode. Files are read from one
commit, which never changes.
"""

from __future__ import annotations

import errno
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urlsplit

from .. import settings
from .._engine.engine_errors import of_system
from ..errors import CheckpointError
from . import object_store, paths
from .object_clients import ObjectMissingError, ObjectStoreError
from .object_store import Client, ObjectStore

_SHA = re.compile(r"[0-9a-f]{40}")
_MOST_KNOWN = 64
_MOST_WHOLE = 16 << 20  # bytes of a file that a server may send in place of a range
_LOGIN = "log in by `hf auth login`, or set HF_TOKEN"
_NOT_WRITTEN = (
    "is written in whole commits only: save or convert to a folder, then vescale_ckpt.copy(folder, 'hf://...')"
)


def hub() -> Any:
    """Returns the package. Raises `CheckpointError` if it is missing."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.hf_api
        import huggingface_hub.utils
    except ImportError as error:
        raise CheckpointError(
            f"hf:// needs the package huggingface_hub: pip install 'vescale_ckpt[hub]' ({error})"
        ) from None
    return huggingface_hub


@dataclass(frozen=True)
class Files:
    """The files of one commit."""

    sha: str
    modified: datetime
    sizes: dict[str, int]
    hashes: dict[str, str]  #: {path: SHA-256 of a large file, or the id of git's blob}


def _parse(root: str) -> tuple[str, str | None]:
    """Returns the repository and the revision of a root."""
    name, _, revision = root.removeprefix("hf://").partition("@")
    return name, unquote(revision) or None


def is_pinned(url: str) -> bool:
    """Whether a URL names a commit, not a branch or tag that may move."""
    return _SHA.fullmatch(_parse(paths.split(url)[0])[1] or "") is not None


def pinned(url: str) -> str:
    """Returns the URL with the commit in it to which its branch or tag points now. Raises `CheckpointError`."""
    root, key = paths.split(url)
    if is_pinned(url):
        return url
    repository, revision = _parse(root)
    try:
        root = f"hf://{repository}@{_files(repository, revision, url).sha}"
    except OSError as error:
        raise of_system(error, url) from error
    return paths.joined(root, key)


_known: OrderedDict[tuple[str, str], Files] = OrderedDict()  # {(repository, commit): its files, which never change}
_known_lock = threading.Lock()


def _files(repository: str, revision: str | None, url: str) -> Files:
    """Asks for the files of a commit, a branch or a tag. Raises OSError."""
    with _known_lock:
        if (known := _known.get((repository, revision or ""))) is not None:
            return known
    package = hub()
    name = package.constants.DEFAULT_REVISION if revision is None else revision
    with _named(url):
        address = f"{package.constants.ENDPOINT}/api/models/{repository}/revision/{name.replace('/', '%2F')}"
        answer = _request("GET", address, package.utils.build_hf_headers(), params={"blobs": "true"})
        found = package.hf_api.ModelInfo(**answer.json())
        large = {file.rfilename: file.lfs for file in found.siblings if file.lfs is not None}
        files = Files(
            found.sha,
            found.last_modified or datetime.fromtimestamp(0, timezone.utc),
            {file.rfilename: file.size for file in found.siblings},
            {file.rfilename: large[file.rfilename].sha256 if file.rfilename in large else file.blob_id
             for file in found.siblings},
        )  # fmt: skip
    with _known_lock:
        _known[repository, files.sha] = files
        while len(_known) > _MOST_KNOWN:
            _known.popitem(last=False)
    return files


def _request(method: str, address: str, headers: dict[str, str], **options: Any) -> Any:
    seconds = settings.number("object_store_timeout") / 5  # of five repetitions, each
    utils = hub().utils
    answer = utils.http_backoff(method, address, headers=headers, timeout=seconds, **options)
    utils.hf_raise_for_status(answer)
    return answer


class HubClient(Client):
    """One file of a commit, or the files below one folder of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.root, self.key = paths.split(url)
        self.repository, self.revision = _parse(self.root)
        self._address: str | None = None  # where the file's bytes are, after a redirection
        if not is_pinned(url):
            raise CheckpointError(
                f"{url}: expected a commit, hf://{self.repository}@<its 40 digits>, as this call cannot make all ranks "
                "see the same one. vescale_ckpt.load takes branches and tags",
                path=url,
            )

    @cached_property
    def files(self) -> Files:
        return _files(self.repository, self.revision, self.url)

    def head(self) -> dict[str, Any]:
        try:
            return self._properties(self.key)
        except KeyError:
            raise ObjectMissingError(errno.ENOENT, f"{self.url}: there is no such file", self.url) from None

    def _properties(self, key: str) -> dict[str, Any]:
        files = self.files
        return {"path": key, "size": files.sizes[key], "e_tag": files.hashes[key], "last_modified": files.modified}

    def get(self, part: Any = None, etag: str | None = None) -> tuple[dict[str, Any], Callable[[], Any]]:
        found = self.head()
        size = found["size"]
        begin, end = part if isinstance(part, tuple) else (max(0, size - part["suffix"]) if part else 0, size)
        end = min(end, size)
        return found, lambda: self._bytes(begin, end) if begin < end else b""

    def tail(self, length: int) -> tuple[dict[str, Any], bytes]:
        found, content = self.get({"suffix": length})
        return found, content()

    def _bytes(self, begin: int, end: int) -> bytes:
        package = hub()
        here = package.hf_hub_url(self.repository, self.key, revision=self.revision)
        wanted = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with _named(self.url):
            answer = None
            if self._address is not None:  # it has a signature, which expires
                try:
                    answer = _request("GET", self._address, wanted)
                except package.errors.HfHubHTTPError:
                    self._address = None
            if answer is None:
                answer = _request("GET", here, {**package.utils.build_hf_headers(), **wanted})
                if urlsplit(str(answer.url)).netloc != urlsplit(here).netloc:
                    self._address = str(answer.url)
        content: bytes = answer.content
        if answer.status_code == 206:
            return content
        if len(content) > _MOST_WHOLE:  # each of many ranges would bring all of it
            raise ObjectStoreError(
                errno.EOPNOTSUPP, f"{self.url}: the server answers with whole files: is HF_ENDPOINT right?", self.url
            )
        return content[begin:end]

    def listed(self) -> tuple[list[str], list[dict[str, Any]]]:
        start = f"{self.key}/" if self.key else ""
        below = [key for key in self.files.sizes if key.startswith(start)]
        folders = {start + key[len(start) :].partition("/")[0] for key in below if "/" in key[len(start) :]}
        return sorted(folders), [self._properties(key) for key in below if "/" not in key[len(start) :]]

    def all_below(self) -> list[dict[str, Any]]:
        start = f"{self.key}/" if self.key else ""
        return [self._properties(key) for key in self.files.sizes if key.startswith(start)]

    some_below = all_below

    def put(self, content: Any, *, create: bool = False) -> str | None:
        raise ObjectStoreError(errno.EROFS, f"{self.url}: {_NOT_WRITTEN}", self.url)

    def put_parts(self, parts: Iterator[Any], part_bytes: int) -> None:
        self.put(b"")

    def delete(self) -> None:
        self.put(b"")

    def delete_all(self, keys: Any) -> None:
        if keys:
            self.put(b"")


object_store.clients["hf"] = HubClient


class HubStore(ObjectStore):
    """A repository, or a folder in it."""

    def make(self) -> None:
        raise CheckpointError(f"{self.path}: {_NOT_WRITTEN}", path=self.path)

    def look(self, *, lists: bool = False, fresh: bool = False) -> AbstractContextManager[None]:
        return nullcontext()  # one request has told of all files of a commit

    def drop_caches(self) -> None:
        """Does nothing: the files of a commit do not change."""

    @contextmanager
    def whole_commit(
        self, overwrite: bool, replaces: Callable[[str], bool]
    ) -> Iterator[Callable[[Mapping[str, str]], None]]:
        url, (root, key) = self.path, paths.split(self.path)
        repository, revision = _parse(root)
        if is_pinned(url):
            raise CheckpointError(f"{url}: a commit cannot be written to: name a branch, or none for main", path=url)
        before = _files(repository, revision, url)
        start = f"{key}/" if key else ""
        names = [path[len(start) :] for path in before.sizes if path.startswith(start)]
        old = [name for name in names if "/" not in name and replaces(name)]
        if old and not overwrite:
            raise CheckpointError(
                f"{url} holds {old[0]} already: it is only replaced with overwrite=True (--overwrite)", path=url
            )

        def commit(files: Mapping[str, str]) -> None:
            package = hub()
            adds = [package.CommitOperationAdd(start + name, path) for name, path in files.items()]
            removed = [package.CommitOperationDelete(start + name) for name in old if name not in files]
            try:
                with _named(url):
                    package.HfApi().create_commit(
                        repository,
                        [*adds, *removed],
                        commit_message="Save a model by vescale_ckpt",
                        revision=revision,
                        parent_commit=before.sha,
                    )
            except OSError as error:
                self._explain(error, before, {start + name: path for name, path in files.items()})

        yield commit

    def _explain(self, error: OSError, before: Files, files: Mapping[str, str]) -> None:
        """Raises `error` with what became of the repository. Returns if the commit was made and only its answer was
        lost."""
        url, (repository, revision) = self.path, _parse(paths.split(self.path)[0])
        try:
            now = _files(repository, revision, url)
        except (OSError, CheckpointError) as unknown:
            raise ObjectStoreError(
                error.errno or errno.EIO,
                f"{error}. Whether the commit was made is not known, because the repository cannot be read either "
                f"({unknown})",
                url,
            ) from error
        if now.sha != before.sha and all(now.hashes.get(name) in _hashes(path) for name, path in files.items()):
            return
        state = "is as it was" if now.sha == before.sha else "has got another commit meanwhile, and is not changed"
        raise ObjectStoreError(
            error.errno or errno.EIO,
            f"{error}. The repository {state}. Files that have arrived are not sent again by the next try",
            url,
        ) from error


def _hashes(path: str) -> tuple[str, str]:
    """The hashes by which the hub may know a file."""
    sha256, blob = hashlib.sha256(), hashlib.sha1()
    with open(path, "rb") as file:
        blob.update(b"blob %d\0" % file.seek(0, 2))
        file.seek(0)
        while block := file.read(1 << 20):
            sha256.update(block)
            blob.update(block)
    return sha256.hexdigest(), blob.hexdigest()


# --- Errors


@contextmanager
def _named(url: str) -> Iterator[None]:
    """Turns errors of the package into those of storages."""
    try:
        yield
    except (ObjectStoreError, CheckpointError):
        raise
    except Exception as error:
        raise _translated(error, url) from error


def _translated(error: Exception, url: str) -> OSError:
    package = hub()
    errors = package.errors
    repository, revision = _parse(paths.split(url)[0])
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # uploads raise RuntimeError from it
        cause = cause.__cause__
    told = " ".join(str(cause or error).split())[:600]
    status = getattr(getattr(cause, "response", None), "status_code", None)

    def named(number: int, meaning: str) -> OSError:
        return ObjectStoreError(number, f"{url}: {meaning} ({told})", url)

    if isinstance(cause, errors.GatedRepoError):
        page = f"{package.constants.ENDPOINT}/{repository}"
        return named(errno.EACCES, f"{repository} is gated: accept its conditions at {page}, then {_LOGIN}")
    if isinstance(cause, errors.RepositoryNotFoundError):
        return named(
            errno.ENXIO,
            f"there is no repository {repository}, or it is private: check the name, create it by `hf repo create`, or "
            f"{_LOGIN}",
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return named(errno.ENXIO, f"{repository} has no branch, tag or commit {revision or 'main'}")
    if isinstance(cause, errors.EntryNotFoundError):
        return ObjectMissingError(errno.ENOENT, f"{url}: there is no such file", url)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return named(errno.EHOSTUNREACH, "HF_HUB_OFFLINE is set, so the hub is not asked")
    if status in (401, 403):
        return named(errno.EACCES, f"access to {repository} was denied: {_LOGIN}, with a token that may do this")
    if status in (409, 412):
        return named(errno.EBUSY, f"the hub refused a commit to {repository}, as others commit to it: try again")
    if status == 429:
        return named(errno.EBUSY, "the hub throttles requests, and went on to do so: try later, or with a token")
    if status is not None:
        return named(errno.EIO, f"the hub refused or failed (HTTP {status})")
    if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2"):
        told = f"{type(error).__name__}: {told}"
        if "Timeout" in type(error).__name__ and "Connect" not in type(error).__name__:
            return named(errno.ETIMEDOUT, "the hub did not answer in time (VESCALE_CKPT_OBJECT_STORE_TIMEOUT)")
        return named(errno.EHOSTUNREACH, "the hub cannot be reached: is there a network, and is HF_ENDPOINT right?")
    return named(getattr(cause, "errno", None) or errno.EIO, f"{type(error).__name__}")
