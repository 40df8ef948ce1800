"""Opens object stores through obstore for `object_store`, and translates their errors.

obstore itself retries requests that may succeed later, with growing pauses, for a bounded time.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from .. import settings
from ..errors import CheckpointError
from . import paths

EXTRA = "object-stores"
_MOST_TEXT = 600  # a store's text is cut after so many characters
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # the first variable that is set counts
_UNSIGNED = "AWS_UNSIGNED_PAYLOAD"
_lock = threading.Lock()
_registered: dict[str, Any] = {}  # {root: store}
_opened: dict[tuple[str, int], tuple[object, Any]] = {}  # {(root, timeout): (process and environment, store)}
_hurry: ContextVar[int | None] = ContextVar("hurry", default=None)
_DECIDING = ("AWS_", "GOOGLE_", "AZURE_", settings.PREFIX + "OBJECT_STORE_")  # prefixes of environment variables


class ObjectStoreError(OSError):
    """An object store refused or failed. Its text says what, and what to do."""

    is_damage = False  #: whether the object has changed

    def __str__(self) -> str:
        return str(self.strerror)


class ObjectMissingError(ObjectStoreError, FileNotFoundError):
    """There is no object of that name."""


class ObjectExistsError(ObjectStoreError, FileExistsError):
    """There is an object of that name already."""


class ObjectChangedError(ObjectStoreError):
    """The object was replaced after it was opened."""

    is_damage = True


def obstore() -> Any:
    """Returns the package. Raises `CheckpointError` if it is missing."""
    try:
        import obstore
    except ImportError as error:
        raise CheckpointError(
            f"paths of object stores need the package obstore: pip install 'vescale_ckpt[{EXTRA}]' ({error})"
        ) from None
    return obstore


def register_store(url: str, store: Any) -> None:
    """Registers `store` for all paths that start with `url`, for credentials and options that the environment does not
    provide. Not collective, but every process calls it before it uses such a path.

    Args:
        url: a scheme and a bucket, `"s3://bucket"`.
        store: an object of `obstore.store`. If it has a prefix, objects are stored below it.

    Raises:
        ValueError: `url` is not a scheme and a bucket.
    """
    if isinstance(url, str):
        paths.check_no_secret(url)
    if not isinstance(url, str) or not paths.is_url(url) or paths.split(url)[1]:
        raise ValueError(f"expected a scheme ({', '.join(paths.SCHEMES)}) and a bucket, as 's3://bucket', got {url!r}")
    obstore()
    with _lock:
        _registered[paths.split(url)[0]] = store


def store_at(root: str) -> Any:
    """Returns the store of a root: the registered one, or else one that is opened once in each process, and again when
    the environment changes. Raises `CheckpointError` if it cannot be set up."""
    # A store that was opened before a fork has threads and connections of the parent.
    decides = os.getpid(), *(item for item in os.environ.items() if item[0].startswith(_DECIDING))
    key = (root, 0 if root == "memory://" else _patience())
    with _lock:
        if root in _registered:
            return _registered[root]
        found = _opened.get(key)
        if found is None or (root != "memory://" and found[0] != decides):
            found = _opened[key] = decides, _open(root)
        return found[1]


@contextmanager
def limit_wait(seconds: int) -> Iterator[None]:
    """A context in which clients that this thread makes give up a request after so many seconds, or the setting's if
    that is less. It is for callers that can go on without the store's answer. Registered stores keep their timeouts."""
    before = _hurry.set(seconds)
    try:
        yield
    finally:
        _hurry.reset(before)


def _patience() -> int:
    seconds, most = settings.number("object_store_timeout"), _hurry.get()
    return seconds if most is None else min(seconds, most)


def reconnect(root: str) -> None:
    """Makes the next user of a root open it again, and so connect again. Registered stores stay open: only the user can
    open them."""
    with _lock:
        if root != "memory://":  # a new memory store would be empty
            for key in [key for key in _opened if key[0] == root]:
                del _opened[key]


def _open(root: str) -> Any:
    obstore()
    from obstore import store as stores

    if root == "memory://":
        return stores.MemoryStore()
    seconds = _patience()
    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=seconds / 2),
            "connect_timeout": timedelta(seconds=min(10.0, seconds / 2)),
        },
        "retry_config": {
            "max_retries": 50,
            "retry_timeout": timedelta(seconds=seconds),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=min(15.0, seconds / 4)),
                "base": 2,
            },
        },
    }
    if root.startswith("s3://"):
        options |= _from_amazon_environment(options["client_options"])
    try:
        return stores.from_url(root, **options)
    except Exception as error:
        raise CheckpointError(f"{root} cannot be set up: {_told(error)}", path=root) from error


def _from_amazon_environment(client_options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that users of boto3 set in the environment and obstore does not read there."""
    options: dict[str, Any] = {"config": {}}
    endpoint = _endpoint()
    if endpoint is not None:
        options["config"]["endpoint"] = endpoint
    if endpoint is not None and not endpoint.startswith("https://"):
        client_options["allow_http"] = True
    elif _UNSIGNED not in os.environ:
        # TLS protects the bytes. Hashing them for the signature, too, would be half of a save's work.
        options["config"]["unsigned_payload"] = "true"
    if "AWS_ACCESS_KEY_ID" not in os.environ and (provider := _boto3_credentials()) is not None:
        options["credential_provider"] = provider
    return options


def _endpoint() -> str | None:
    """Returns the store's URL from the environment; None for Amazon's own. Raises `CheckpointError` with the variable's
    name if its value is no URL."""
    for variable in _ENDPOINTS:
        if text := os.environ.get(variable):
            if re.fullmatch(r"https?://[^/?#@\s]+(/[^?#@\s]*)?", text) is None:
                shown = "its value" if "@" in text else repr(text)  # it may hold a password
                raise CheckpointError(
                    f"{variable}: expected the URL of a store, as http://host:port or https://host, got {shown}"
                )
            return text
    return None


def _boto3_credentials() -> Any:
    """Returns credentials of profiles and of single sign-on, which only boto3 reads. None if boto3 is missing or finds
    none."""
    try:
        from boto3 import Session
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider(Session())
    except (ImportError, ValueError):
        return None


# --- Errors

_DENIED = "check the credentials (AWS_ACCESS_KEY_ID, ... or the machine's role) and what they may do there"
_LIMITS = re.compile(r"retry_timeout: \S+")  # every error's text has these limits
# Each row is a pattern in the store's text, the errno of the error, and its meaning.
_MEANINGS: tuple[tuple[str, int, str], ...] = (
    (r"NoSuchBucket|ContainerNotFound|bucket does not exist", errno.ENXIO, "there is no such bucket"),
    (
        r"ExpiredToken|TokenRefreshRequired|token.{0,20}expired|expired.{0,20}token",
        errno.EACCES,
        "the credentials have expired: get new ones (a session token holds for hours only), or register a store whose "
        "credential provider renews them",
    ),
    (
        r"RequestTimeTooSkewed|RequestExpired|difference between the request time",
        errno.EACCES,
        "this machine's clock is wrong by minutes, so the store refuses its signatures: set the clock (NTP)",
    ),
    (
        r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|TemporaryRedirect|"
        r"redirect without LOCATION|status code: 301",
        errno.EINVAL,
        "the bucket is in another region: set AWS_REGION to the bucket's own",
    ),
    (r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken", errno.EACCES, f"access was denied: {_DENIED}"),
    (
        r"SlowDown|TooManyRequests|Throttl|status code: (503|429)",
        errno.EBUSY,
        "the store throttles requests, and went on to do so while this was tried again: make fewer "
        "(VESCALE_CKPT_OBJECT_STORE_REQUESTS), or try later",
    ),
    (r"status code: 40[13]", errno.EACCES, f"access was denied: {_DENIED}"),
    (r"NoSuchUpload", errno.EIO, "the upload was aborted by somebody else"),
    (
        r"dns error|failed to lookup|Name or service not known",
        errno.EHOSTUNREACH,
        "the store's host name cannot be resolved: is there a network, and is the endpoint right (AWS_ENDPOINT_URL)?",
    ),
    (
        r"instance metadata|169\.254\.169\.254|CredentialsNotLoaded|no credentials|missing credential",
        errno.EACCES,
        "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role",
    ),
    (
        r"tcp connect error|error trying to connect|[Cc]onnection refused|unreachable|client error \(Connect\)",
        errno.EHOSTUNREACH,
        "the store cannot be reached: is there a network, and is the endpoint right (AWS_ENDPOINT_URL)?",
    ),
    (
        r"timed out|[Tt]imeout|deadline",
        errno.ETIMEDOUT,
        "the store did not answer in time (VESCALE_CKPT_OBJECT_STORE_TIMEOUT)",
    ),
    (r"status code: 501|NotImplemented", errno.EOPNOTSUPP, "the store does not know such a request"),
    (r"status code: 5\d\d", errno.EIO, "the store failed, and went on to do so while this was tried again"),
)


def is_panic(error: BaseException) -> bool:
    """Whether obstore ended in a panic of its Rust code, which is no `Exception`."""
    return type(error).__name__ == "PanicException"


def named(error: BaseException, url: str) -> OSError:
    """Returns the error of this package for an error that obstore raised for a URL."""
    name, told = type(error).__name__, _told(error)
    full = _LIMITS.sub("", str(error))  # only the debug part gives the reason for a broken connection
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return error
    if name == "AlreadyExistsError":
        return ObjectExistsError(errno.EEXIST, f"{url} exists already", url)
    if name in ("PreconditionError", "NotModifiedError"):
        return ObjectChangedError(errno.EIO, f"{url} was replaced while it was read: {told}", url)
    for pattern, number, meaning in _MEANINGS[:5]:
        if re.search(pattern, full):
            return ObjectStoreError(number, f"{url}: {meaning} ({told})", url)
    if isinstance(error, FileNotFoundError):
        return ObjectMissingError(errno.ENOENT, f"{url}: there is no such object", url)
    if name in ("PermissionDeniedError", "UnauthenticatedError"):
        return ObjectStoreError(errno.EACCES, f"{url}: access was denied: {_DENIED} ({told})", url)
    for pattern, number, meaning in _MEANINGS[5:]:
        if re.search(pattern, full):
            return ObjectStoreError(number, f"{url}: {meaning} ({told})", url)
    return ObjectStoreError(errno.EIO, f"{url}: {told}", url)


def refuses(error: BaseException) -> bool:
    """Whether the store's answer says that the request is at fault, for instance that it lacks valid credentials."""
    return re.search(r"status code: 4\d\d", str(error)) is not None


def _told(error: BaseException) -> str:
    """Returns the store's text in one line, without the debug text that obstore adds."""
    text = " ".join(str(error).partition("\n\nDebug source:")[0].split())
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + " ..."
