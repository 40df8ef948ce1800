"""Random events in the life of a job on machines, against a simple model of what a restart may find."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterable

from harness.files import flip
from harness.node_jobs import NEVER, NodeJob, start_again

Saved = tuple[int, int]  # a step, and the attempt that saved it

HOLDS = ("send copies", "write a file that comes", "check a file that came")


class Life:
    """A job, killed and started again, and what is known of it.

    After any restart, the values are those of a step that was committed on the line that training went on from last.
    While at most `copies` machines were lost since the newest protected step got its copies, it is not older than that
    one. Losing a copy by damage counts as a lost machine.
    """

    def __init__(self, machines: NodeJob, other: NodeJob | None = None, seed: int = 0, **options: int) -> None:
        """`machines`: processes that no test ends. `other`: a job that is another run."""
        self.random = random.Random(seed)
        self.copies, self.keeps = options.get("copies", 1), options.get("max_to_keep", 2)
        self.events: list[str] = []
        self._machines = machines
        self._count = machines.machines.count
        self._other = other
        self._durable_is_away = False
        self._attempt = 1
        self._line: list[Saved] = []
        self._lines: dict[Saved, list[Saved]] = {}  # each, with the steps that it continues
        self._protected: Saved | None = None
        self._lost = 0  # machines, since that step got its copies
        self._damaged: set[Saved] = set()
        self._held = False
        self.job = start_again(machines, machines, empty=range(self._count))
        self.is_over = False
        self._open()

    def _open(self) -> None:
        self.job.open("shards", self._attempt, copies=self.copies, max_to_keep=self.keeps, durable_interval_steps=NEVER)

    # --- What happens

    def save(self) -> None:
        """Its copies come, unless they do not in this job."""
        step = self._line[-1][0] + 1 if self._line else 1
        self._note("save %d", step)
        self.job.call("save", step)
        self._line.append((step, self._attempt))
        self._lines[self._line[-1]] = [*self._line]
        self.job.call("wait")
        if not self._held:
            self.job.call("settle_copies")
            self._note_copies()

    def no_copies(self) -> None:
        self._note("no copies from now on")
        self.job.call("fail", "send copies")

    def hold_copies(self) -> None:
        """The copies of the next step are on their way for ever."""
        if not self._held:
            step, machine = self.random.choice(HOLDS), self.random.randrange(self._count)
            self._note("machine %d halts before: %s", machine, step)
            self.job.hold(machine, step, "before")
            self._held = True

    def damage(self) -> None:
        """One bit of one file on one machine flips."""
        machine = self.random.randrange(self._count)
        steps = [saved for saved in self._line if (self.job.folder(machine) / f"step-{saved[0]}").exists()]
        if not steps:
            return
        saved = self.random.choice(steps)
        paths = sorted((self.job.folder(machine) / f"step-{saved[0]}").glob("*.distcp"))
        if paths and not self._held:
            path = self.random.choice(paths)
            self._note("machine %d: a bit of %s flips in step %d", machine, path.name, saved[0])
            flip(path, self.random.randrange(8 * path.stat().st_size))
            self._damaged.add(saved)
            self._lost += 1

    def durable_place(self, is_away: bool) -> None:
        self._note("the durable place %s", "goes away" if is_away else "comes back")
        self._durable_is_away = is_away

    def go_back(self) -> None:
        """To an earlier step that is whole; the next save abandons the later ones."""
        whole = self.job.call("losses_survived")[0]
        if steps := [saved for saved in self._line[:-1] if saved[0] in whole and saved not in self._damaged]:
            saved = self.random.choice(steps)
            self._note("go back to %d", saved[0])
            assert {answer[:2] for answer in self.job.call("restore", saved[0])} == {saved}, self.events
            self._restored(saved)
            self.save()

    def restart(self, lost: Iterable[int] = (), foreign: int | None = None, come: bool = True) -> None:
        """The job is killed and started again. Machines of `lost` were replaced by empty ones, and `foreign` by one
        that another run has left. `come`: whether copies are made from now on."""
        lost = {*lost} if foreign is None else {*lost, foreign}
        self._note("restart without %s%s", sorted(lost), "" if foreign is None else f", {foreign} is of another run")
        before = self.job
        for _ in range(10):  # other machines may still send and remove
            with contextlib.suppress(shutil.Error, FileNotFoundError):
                self.job = start_again(before, self._machines, lost)
                break
        assert self.job is not before
        if self._held:
            before.go_on()
        before.call("close")
        self._machines.call("mend", "", "")
        self._held = False
        self._lost += len(lost)
        self._attempt += 1
        if not come:
            self.no_copies()
        if foreign is not None and self._other is not None:
            shutil.copytree(self._other.folder(foreign), self.job.folder(foreign))
            options = {"copies": self.copies}
            answers = self.job.ask("open", "shards", str(self.job.own), str(self.job.durable), 0, options)
            assert all("Move that folder away" in answer.error for answer in answers), self.events
            shutil.rmtree(self.job.folder(foreign))
        away = self.job.durable.with_name(f"{self.job.name} away")
        if self._durable_is_away:
            if self.job.durable.exists():
                shutil.move(self.job.durable, away)
            self.job.durable.write_text("no folder")
        self._open()
        answers = self.job.ask("restore")
        if self._durable_is_away:
            self.job.durable.unlink()
            if away.exists():
                shutil.move(away, self.job.durable)
        is_bound = self._protected is not None and self._lost <= self.copies
        if any(answer.error for answer in answers):
            assert not is_bound and (lost or not self._line), (answers[0].error, self.events)
            self.is_over = bool(self._lines)
            return
        (found,) = {answer.value[:2] for answer in answers}
        self.events.append(f"found {found}")
        assert found in (self._line if self._lost <= self.copies else self._lines), (found, self._line, self.events)
        if is_bound:
            assert self._protected in self._lines[found], (found, self._protected, self.events)
        self._restored(found)

    # --- What is known

    def _restored(self, found: Saved) -> None:
        self._line = [*self._lines[found]]
        if self._protected not in self._line:
            self._protected = None
        if not self._held:
            self.job.call("settle_copies")
            self._note_copies()

    def _note_copies(self) -> None:
        step = self.job.call("copied")[0]
        if self._line[-1][0] == step and self._line[-1] not in self._damaged:
            self._protected, self._lost = self._line[-1], 0
            self.events.append(f"{self._protected} has its copies")

    def _note(self, text: str, *values: object) -> None:
        self.events.append(text % values)

    def end(self) -> None:
        if self._held:
            self.job.go_on()
        self.job.ask("close")
        self._machines.call("mend", "", "")


def another_run(machines: NodeJob) -> NodeJob:
    """What a run has left that saved steps 7 and 8."""
    job = start_again(machines, machines, empty=range(machines.machines.count))
    job.open("shards", 9, copies=1, durable_interval_steps=NEVER)
    job.save(7, 8, settle=False)
    job.call("close")
    return job


def live(life: Life, events: int) -> None:
    """Random events, and a restart at the end."""
    chance = life.random
    count = life._count
    for _ in range(events):
        what = chance.choices(
            ("save", "restart", "lose", "foreign", "no copies", "hold", "damage", "away", "back"),
            (8, 2, 3, 1, 1, 1, 1, 1, 1),
        )[0]
        if what == "save":
            life.save()
        elif what == "restart":
            life.restart(come=chance.random() < 0.7)
        elif what == "lose":
            life.restart(chance.sample(range(count), chance.choice((1, 1, life.copies))))
        elif what == "foreign" and life._lines:
            life.restart(foreign=chance.randrange(count))
        elif what == "no copies":
            life.no_copies()
        elif what == "hold":
            life.hold_copies()
        elif what == "damage":
            life.damage()
        elif what == "away":
            life.durable_place(is_away=not life._durable_is_away)
        elif not life._held:
            life.go_back()
        if life.is_over:
            break
    else:
        life.restart(chance.sample(range(count), 1))
