"""Saves to and loads from an S3 server on this machine, against obstore alone, DCP with s3fs, and s3torchconnector.

The ceiling moves the same bytes as one object, with parts as large as ours and as many requests at a time. It checks
nothing, packs nothing and plans nothing. All candidates share two things that a real store has not: the machine's
processors with the server, and a network without delay (unless --delay gives it one).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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

import vescale_ckpt
from benchmarks import harness, states
from benchmarks.harness import CEILING, GIB, BenchmarkError, Sample, Steps, WrongContentsError
from benchmarks.measure import Usage, measure, tidy
from vescale_ckpt import settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

DESCRIPTION = """\
Save to and load from an S3 server (SeaweedFS, started for this run, or --url) with one process. Judge by the ratios:
the server shares this machine."""


class Candidate:
    """Saves and loads a state below a URL. `check`: whether a load is compared bit for bit."""

    check = True

    def __init__(self, state: states.State) -> None:
        self.state = state

    def save(self, url: str) -> None:
        raise NotImplementedError

    def load(self, targets: states.State, url: str) -> None:
        raise NotImplementedError


class Raw(Candidate):
    """One object, by obstore alone."""

    check = False

    def __init__(self, state: states.State) -> None:
        super().__init__(state)
        # The state's own bytes: a server that finds bytes easy to compress does so.
        self._source = torch.cat([tensor.flatten().view(torch.uint8) for tensor in state.values()])
        self._target = torch.ones_like(self._source)
        self._part = settings.number("slot_bytes")
        self._requests = settings.number("object_store_requests")

    def save(self, url: str) -> None:
        import obstore

        memory = memoryview(self._source.numpy())
        parts = (memory[at : at + self._part] for at in range(0, len(memory), self._part))
        root, key = _split(url)
        obstore.put(
            root, f"{key}/raw", parts, use_multipart=True, chunk_size=self._part, max_concurrency=self._requests
        )

    def load(self, targets: states.State, url: str) -> None:
        import obstore

        memory = memoryview(self._target.numpy())
        root, key = _split(url)

        def fetch(begin: int) -> None:
            end = min(len(memory), begin + self._part)
            memory[begin:end] = memoryview(obstore.get_range(root, f"{key}/raw", start=begin, end=end))

        with ThreadPoolExecutor(self._requests) as pool:
            list(pool.map(fetch, range(0, len(memory), self._part)))


class Ours(Candidate):
    def save(self, url: str) -> None:
        vescale_ckpt.save(url, self.state)

    def load(self, targets: states.State, url: str) -> None:
        vescale_ckpt.load(url, targets)


class Fsspec(Candidate):
    """DCP's own writer and reader of fsspec's paths, with s3fs."""

    def __init__(self, state: states.State) -> None:
        super().__init__(state)
        if importlib.util.find_spec("s3fs") is None:
            raise BenchmarkError("dcp-s3fs needs the package s3fs")

    def save(self, url: str) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        dcp.save(self.state, storage_writer=FsspecWriter(url, sync_files=False), no_dist=True)

    def load(self, targets: states.State, url: str) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        dcp.load(targets, storage_reader=FsspecReader(url), no_dist=True)


class Connector(Candidate):
    """AWS's own, with its client in Rust and C."""

    def __init__(self, state: states.State) -> None:
        super().__init__(state)
        if importlib.util.find_spec("s3torchconnector") is None:
            raise BenchmarkError("s3torchconnector needs the package of that name")

    def _options(self) -> dict[str, Any]:
        from s3torchconnector import S3ClientConfig

        config = S3ClientConfig(force_path_style=True)
        os.environ["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"].rstrip("/")
        return {"region": os.environ.get("AWS_REGION", "us-east-1"), "s3client_config": config}

    def save(self, url: str) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        dcp.save(self.state, storage_writer=S3StorageWriter(path=url, **self._options()), no_dist=True)

    def load(self, targets: states.State, url: str) -> None:
        from s3torchconnector.dcp import S3StorageReader

        dcp.load(targets, storage_reader=S3StorageReader(path=url, **self._options()), no_dist=True)


CANDIDATES: dict[str, Callable[[states.State], Candidate]] = {
    CEILING: Raw,
    "vescale": Ours,
    "dcp-s3fs": Fsspec,
    "s3torchconnector": Connector,
}


def main(arguments: list[str] | None = None) -> int:
    parser = harness.command("benchmarks.object_store", DESCRIPTION)
    add = parser.add_argument
    add("--candidates", type=harness.listed(harness.one_of(CANDIDATES)), default=list(CANDIDATES), metavar="A,B,…",
        help=f"what to compare (default {','.join(CANDIDATES)})")  # fmt: skip
    add("--state", type=harness.one_of(states.KINDS), default="llama", help="what to save (default llama)")
    add("--gib", type=harness.size, default=0.125, metavar="N", help="its size in GiB (default %(default)s)")
    add("--url", metavar="URL", help="a bucket and folder to save below, found by the environment's credentials")
    add("--delay", type=float, default=0.0, metavar="S", help="seconds that each request waits (default 0)")
    options = parser.parse_args(arguments)
    return harness.run(options, partial(_measured, options), baseline=_baseline(options.candidates))


def _baseline(candidates: list[str]) -> str:
    rivals = [name for name in candidates if name not in (CEILING, "vescale")]
    return rivals[0] if rivals else candidates[0]


def _measured(options: argparse.Namespace, directory: Path) -> Iterator[Sample]:
    with _store(options, directory) as url:
        shapes = states.shapes_of(options.state, options.gib)
        state = states.build(shapes, options.seed)
        targets = states.targets_for(state)
        made: dict[str, Candidate] = {}
        for name in options.candidates:
            try:
                made[name] = CANDIDATES[name](state)
            except BenchmarkError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
        number = 0

        def turn(name: str, candidate: Candidate) -> Steps:
            nonlocal number
            number += 1
            states.stamp(state, number % 251)
            place = f"{url}/{number}-{name}"
            size = states.bytes_in(shapes)
            tidy()
            save = _of(size, measure(lambda: candidate.save(place)))
            states.poison(targets)
            into = dict(targets)
            tidy()
            load = _of(size, measure(lambda: candidate.load(into, place)))
            if candidate.check and (wrong := states.differences(state, into)):
                raise WrongContentsError(f"{name} loaded something else: {', '.join(wrong[:3])}")
            _remove(place)
            return {"save": save, "load": load}

        case = f"{options.state}, {len(shapes):,} tensors, {states.bytes_in(shapes) / GIB:.3f} GiB"
        turns = {name: partial(turn, name, candidate) for name, candidate in made.items()}
        yield from harness.alternate(case, turns, options.rounds, warmup=options.warmup, seed=options.seed)


def _of(size: int, usage: Usage) -> Usage:
    import dataclasses

    return dataclasses.replace(usage, state_bytes=size)


@contextlib.contextmanager
def _store(options: argparse.Namespace, directory: Path) -> Iterator[str]:
    """The URL to save below; a server behind it, where none was given."""
    if options.url:
        yield options.url.rstrip("/")
        return
    from harness import fault_proxy, object_server

    if reason := object_server.why_not():
        raise BenchmarkError(reason)
    with object_server.running(directory / "server") as server, contextlib.ExitStack() as stack:
        endpoint = server.endpoint
        if options.delay:
            proxy = stack.enter_context(fault_proxy.FaultProxy(server.port))
            proxy.add(fault_proxy.Rule("delay", times=10**9, value=options.delay))
            endpoint = proxy.endpoint
        os.environ.update(server.environment(endpoint))
        yield f"s3://{server.bucket}/benchmark"
    shutil.rmtree(directory / "server", ignore_errors=True)


def _split(url: str) -> tuple[Any, str]:
    from vescale_ckpt._storage.object_clients import store_at

    parts = urlsplit(url)
    return store_at(f"s3://{parts.netloc}"), parts.path.strip("/")


def _remove(url: str) -> None:
    import obstore

    root, key = _split(url)
    for page in obstore.list(root, key):
        obstore.delete(root, [found["path"] for found in page])


if __name__ == "__main__":
    harness.start(main)
