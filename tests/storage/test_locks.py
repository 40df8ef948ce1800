"""Tests the locks of files that this process holds."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from vescale_ckpt._storage import locks


def test_threads_lock_while_a_save_looks_for_locks_of_failed_ones(tmp_path: Path) -> None:
    files = [tmp_path / str(k) for k in range(200)]
    for file in files:
        file.touch()
    ended, taken = threading.Event(), []

    def lock_and_release() -> None:
        while not ended.is_set():
            held = [locks.lock(str(file)) for file in files]
            taken.append(len(held))
            for lock in held:
                assert lock is not None
                lock.release()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=lock_and_release) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        while len(taken) < 60:
            locks.drop_dead_locks(str(tmp_path / "of another save"))
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not list(locks._held)
