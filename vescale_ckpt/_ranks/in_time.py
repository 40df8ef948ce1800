"""Bounds the time of calls that nothing can interrupt."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def in_time(function: Callable[[], _Result], seconds: float, name: str) -> _Result:
    """The result of a function of torch that may exceed its own timeout: a thread of its own calls it.

    Raises TimeoutError after `seconds`; the thread goes on until the function returns.
    """
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        return future.result(seconds)
    except concurrent.futures.TimeoutError as late:  # a class of its own before Python 3.11
        raise TimeoutError(f"{name}: not done within {seconds:.0f} s") from late
