"""Overlaps Python work and engine work for reads and writes: the next item is prepared while the engine runs.

The engine does not hold the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Done = TypeVar("Done")

#: Tensors in one item. Small enough that the engine starts soon, large enough that the cost of an item is negligible.
GROUP_TENSORS = 2048


def groups_of(items: Iterable[Item], bytes_of: Callable[[Item], int], most_bytes: int) -> Iterator[list[Item]]:
    """Cuts items into groups of at most `GROUP_TENSORS` items and `most_bytes`. A larger item makes its own group."""
    group, held = list[Item](), 0
    for item in items:
        size = bytes_of(item)
        if group and (held + size > most_bytes or len(group) == GROUP_TENSORS):
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    if group:
        yield group


def overlap(prepared: Iterator[Prepared], work: Callable[[Prepared], Done]) -> Iterator[tuple[Prepared, Done]]:
    """Yields each item and `work(item)`, in order. `work` runs on a thread of its own, one item at a time.

    At most two items are alive at once. An exception of either side is raised here, after running work has ended.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="vescale_ckpt") as pool:
        running: tuple[Prepared, Future[Done]] | None = None
        for item in prepared:
            if running is not None:
                yield running[0], running[1].result()
            running = item, submit(pool, work, item)
        if running is not None:
            yield running[0], running[1].result()


def submit(pool: ThreadPoolExecutor, work: Callable[..., Done], *arguments: Any) -> Future[Done]:
    """Submits work to the pool. At the end of the interpreter, when no thread can start, the caller does it."""
    try:
        return pool.submit(work, *arguments)
    except RuntimeError:  # at its end the interpreter starts no threads, and a last save must still work
        future: Future[Done] = Future()
        future.set_result(work(*arguments))
        return future
