"""Saves to and loads from an S3 server on this machine, against obstore alone, DCP with s3fs, and s3torchconnector.

The ceiling moves the same bytes as one object, with parts as large as ours and as many requests at a time. It checks
nothing, packs nothing and plans nothing. All candidates share two things that a real store has not: the machine's
processors with the server, and a network without delay.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed.checkpoint as dcp

from benchmarks import command, states
from benchmarks.command import Alternate
from benchmarks.harness import saves_and_loads
from benchmarks.harness.by_turns import CEILING, GiB, Sample
from benchmarks.harness.random_states import State
from benchmarks.harness.room import BenchmarkError
from benchmarks.harness.saves_and_loads import Candidate, SavesAndLoads
from benchmarks.harness.usage import tidy
from vescale_ckpt import settings
from vescale_ckpt._engine.options import SLOT_BYTES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

DESCRIPTION = """\
Save to and load from an S3 server (SeaweedFS, started for this run, or --url) with one process. Judge by the ratios:
the server shares this machine."""


class Store:
    """Below a URL, in place of a disk: each save has a folder there of its own."""

    def __init__(self, url: str) -> None:
        self._url = url

    def settle(self) -> None:
        tidy()

    def make(self, name: str) -> str:
        return f"{self._url}/{name}"

    def sync(self, url: str) -> None:
        """Nothing: what a store has confirmed is durable."""

    def prepare(self, url: str) -> None:
        """Nothing: the server's page cache is its own."""

    def remove(self, url: str) -> None:
        import obstore

        root, key = _split(url)
        for page in obstore.list(root, key):
            obstore.delete(root, [found["path"] for found in page])


def raw() -> Candidate:
    """One object, by obstore alone."""
    part, requests = SLOT_BYTES, settings.number("object_store_requests")
    memory: dict[str, memoryview] = {}

    def save(state: State, url: str) -> None:
        import obstore

        if not memory:
            # The state's own bytes: a server that finds bytes easy to compress does so.
            source = torch.cat([tensor.flatten().view(torch.uint8) for tensor in state.values()])
            memory.update(source=memoryview(source.numpy()), target=memoryview(torch.ones_like(source).numpy()))
        source = memory["source"]
        parts = (source[at : at + part] for at in range(0, len(source), part))
        root, key = _split(url)
        obstore.put(root, f"{key}/raw", parts, use_multipart=True, chunk_size=part, max_concurrency=requests)

    def load(into: State, url: str) -> None:
        import obstore

        target = memory["target"]
        root, key = _split(url)

        def fetch(begin: int) -> None:
            end = min(len(target), begin + part)
            target[begin:end] = memoryview(obstore.get_range(root, f"{key}/raw", start=begin, end=end))

        with ThreadPoolExecutor(requests) as pool:
            list(pool.map(fetch, range(0, len(target), part)))

    return Candidate(save, load, keeps_state=False)


def fsspec() -> Candidate:
    """DCP's own writer and reader of fsspec's paths, with s3fs."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    def save(state: State, url: str) -> None:
        dcp.save(state, storage_writer=FsspecWriter(url, sync_files=False), no_dist=True)

    return Candidate(save, lambda into, url: dcp.load(into, storage_reader=FsspecReader(url), no_dist=True))


def connector() -> Candidate:
    """AWS's own, with its client in Rust and C."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    config = S3ClientConfig(force_path_style=True)
    os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"].rstrip("/")
    options: dict[str, Any] = {"region": os.environ.get("AWS_REGION", "us-east-1"), "s3client_config": config}

    def save(state: State, url: str) -> None:
        dcp.save(state, storage_writer=S3StorageWriter(path=url, **options), no_dist=True)

    def load(into: State, url: str) -> None:
        dcp.load(into, storage_reader=S3StorageReader(path=url, **options), no_dist=True)

    return Candidate(save, load)


CANDIDATES: dict[str, Callable[[], Candidate]] = {
    CEILING: raw,
    "vescale": saves_and_loads.ours,
    "dcp-s3fs": fsspec,
    "s3torchconnector": connector,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs what `arguments` ask for and returns the exit status."""
    parser = command.parser("benchmarks object_store", DESCRIPTION)
    add = parser.add_argument
    add("--candidates", type=command.listed(command.one_of(CANDIDATES)), default=list(CANDIDATES), metavar="A,B,…",
        help=f"what to compare (default {','.join(CANDIDATES)})")  # fmt: skip
    add("--state", choices=states.KINDS, default="llama", help="what to save (default %(default)s)")
    add("--gib", type=command.size, default=0.125, metavar="N", help="its size in GiB (default %(default)s)")
    add("--url", metavar="URL", help="a bucket and folder to save below, found by the environment's credentials")
    options = parser.parse_args(arguments)
    rivals = [name for name in options.candidates if name not in (CEILING, "vescale")]
    return command.run(options, partial(_measured, options), baseline=[*rivals, *options.candidates][0])


def _measured(options: argparse.Namespace, directory: Path, alternate: Alternate) -> Iterator[Sample]:
    with _store(options.url, directory) as url:
        made: dict[str, Candidate] = {}
        for name in options.candidates:
            try:
                made[name] = CANDIDATES[name]()
            except ImportError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
        shapes = states.shapes_of(options.state, options.gib)
        both = SavesAndLoads(shapes, Store(url))
        case = f"{options.state}, {len(shapes):,} tensors, {both.bytes / GiB:.3f} GiB"
        yield from alternate(case, {name: partial(both.turn, name, candidate) for name, candidate in made.items()})


@contextlib.contextmanager
def _store(given: str | None, directory: Path) -> Iterator[str]:
    """The URL to save below; a server behind it, where none was given."""
    if given:
        yield given.rstrip("/")
        return
    from harness import object_server

    if reason := object_server.why_not():
        raise BenchmarkError(reason)
    with object_server.running(directory / "server") as server:
        os.environ.update(server.environment(server.endpoint))
        yield f"s3://{server.bucket}/benchmark"
    shutil.rmtree(directory / "server", ignore_errors=True)


def _split(url: str) -> tuple[Any, str]:
    from vescale_ckpt._storage.object_clients import store_at

    parts = urlsplit(url)
    return store_at(f"s3://{parts.netloc}"), parts.path.strip("/")
