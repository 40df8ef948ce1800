"""Tests how a process remembers the saves that run in the background."""

from __future__ import annotations

import sys
import threading

from harness.steps import Notice, background


def test_saves_begin_while_others_end() -> None:
    """Each of several threads saves to a directory of its own."""
    failures: list[BaseException] = []
    before = set(background._notices)

    def begin_and_end() -> None:
        try:
            for _ in range(300):
                notices = [Notice() for _ in range(20)]
                for notice in notices:
                    background._add_save(notice)
                for notice in notices:
                    background._notices.discard(notice)
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=begin_and_end) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == [] and background._notices == before
