"""SIGKILL while an asynchronous save goes on and training changes the state: a checkpoint is there, the old or the new.

`VESCALE_CKPT_TEST_KILLS` sets how many processes are killed.
"""

from __future__ import annotations

import functools
import os
import random
import time
from pathlib import Path
from typing import NoReturn

from background import change_all
from damage import fork, only_named_files, save, state
from kills import Shared, kill, wait_until
from test_kill import old_or_new

import vescale_ckpt

KILLS = int(os.environ.get("VESCALE_CKPT_TEST_KILLS", "50"))


def train_for_ever(directory: Path, committed: Shared) -> NoReturn:
    k = committed[0]
    while True:
        k += 1
        values = state(k)
        handle = vescale_ckpt.save(directory, values, async_checkpoint=True)

        def done(handle: vescale_ckpt.SaveHandle, k: int = k) -> None:
            if handle.exception() is None:
                committed[0] = k

        handle.add_done_callback(done)
        change_all(values)


def test_a_killed_process_leaves_the_old_checkpoint_or_the_new_one(checkpoint: Path) -> None:
    rng = random.Random(1)
    save(checkpoint, state(0))
    last, committed = 0, Shared(1)
    left_something = 0
    for number in range(KILLS):
        committed[0] = last
        pid = fork(functools.partial(train_for_ever, checkpoint, committed))
        wait_until(committed, last, "the first save of a child")
        time.sleep(rng.random() * 0.02)
        kill(pid)

        last = old_or_new(checkpoint, committed[0])
        left_something += not only_named_files(checkpoint)
        if number % 8 == 0:
            last += 1
            save(checkpoint, state(last))
            assert only_named_files(checkpoint)
    assert left_something > KILLS // 20, "hardly any process was killed while it saved"
