"""Folders and prefixes of object stores by one name: what is there, and what others put there or take away."""

from __future__ import annotations

import socket
from pathlib import Path

from vescale_ckpt._storage.object_store import Client
from vescale_ckpt._storage.open_storage import storage_at


def names(url: str | Path) -> set[str]:
    """Empty also where nothing is."""
    try:
        return set(storage_at(str(url)).names())
    except FileNotFoundError:
        return set()


def data_files(url: str | Path) -> set[str]:
    return {name for name in names(url) if name.endswith(".distcp")}


def read(url: str | Path, name: str) -> bytes:
    return bytes(storage_at(str(url)).read(name))


def write(url: str | Path, name: str, data: bytes) -> None:
    storage_at(str(url)).write(name, data)


def remove(url: str | Path, name: str) -> None:
    storage_at(str(url)).remove(name)


def size(url: str | Path, name: str) -> int:
    return int(storage_at(str(url)).stat(name).size)


def keys(url: str | Path) -> list[str]:
    """The keys of all objects below. `names` has folders, which some servers list without an object."""
    return [found["path"] for found in Client(str(url)).all_below()]


def silent_store() -> tuple[socket.socket, dict[str, str]]:
    """A server that takes connections and says nothing, and the variables by which requests to `s3://` go there."""
    server = socket.create_server(("127.0.0.1", 0), backlog=1000)
    return server, {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
    }
