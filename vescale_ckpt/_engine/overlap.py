"""Preparing the next piece of work in Python while the engine, which needs no GIL, works on the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Prepared = TypeVar("Prepared")
Done = TypeVar("Done")

#: Tensors in one piece of work. Small enough that the engine starts soon, large enough that pieces cost nothing.
GROUP_TENSORS = 2048


def overlap(prepared: Iterator[Prepared], work: Callable[[Prepared], Done]) -> Iterator[tuple[Prepared, Done]]:
    """Yields each item and `work(item)`, in order; `work` runs on a thread of its own, one item at a time.

    At most two items are alive at once. What either side raises is raised here, after running work has ended.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="vescale_ckpt") as pool:
        running: tuple[Prepared, Future[Done]] | None = None
        for item in prepared:
            if running is not None:
                yield running[0], running[1].result()
            running = item, _submit(pool, work, item)
        if running is not None:
            yield running[0], running[1].result()


def _submit(pool: ThreadPoolExecutor, work: Callable[[Prepared], Done], item: Prepared) -> Future[Done]:
    try:
        return pool.submit(work, item)
    except RuntimeError:  # the interpreter is ending and starts no threads: a last save still has to be made
        future: Future[Done] = Future()
        future.set_result(work(item))
        return future
