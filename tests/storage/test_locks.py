"""Tests the locks of files that this process holds."""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.files import drop_dead_locks, lock, locks_are_held

import vescale_ckpt
from vescale_ckpt import CheckpointError


def test_threads_lock_while_a_save_looks_for_locks_of_failed_ones(tmp_path: Path) -> None:
    files = [tmp_path / str(k) for k in range(200)]
    for file in files:
        file.touch()
    ended, taken = threading.Event(), []

    def lock_and_release() -> None:
        while not ended.is_set():
            held = [lock(file) for file in files]
            taken.append(len(held))
            for one in held:
                assert one is not None
                one.release()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=lock_and_release) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        while len(taken) < 60:
            drop_dead_locks(tmp_path / "of another save")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not locks_are_held()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO, errno.ESTALE], ids=os.strerror)
@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_file_that_cannot_be_opened_to_lock_it_is_not_called_removed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: int, format: str
) -> None:
    tried: list[str] = []
    real = os.open

    def failing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags == os.O_RDONLY | os.O_CLOEXEC and os.fspath(path).startswith(str(checkpoint)):
            tried.append(path)
            raise OSError(error, os.strerror(error), path)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(CheckpointError) as told:
        vescale_ckpt.save(checkpoint, {"weight": torch.ones(3)}, format=format)
    removed = error == errno.ESTALE  # another machine removed the file, and the next attempt takes another name
    assert ("was removed while it was written" in str(told.value)) == removed
    assert os.strerror(error) in str(told.value) and str(checkpoint) in str(told.value)
    assert (len(tried), getattr(told.value, "errno", None)) == ((3, None) if removed else (1, error))
